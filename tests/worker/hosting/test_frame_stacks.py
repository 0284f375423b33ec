"""Workers find out whether the observations of their environments are stacked frames."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest

from farstep.worker.hosting.frame_stacks import stacked_frames


def cart_pole(stack: int | None) -> gymnasium.Env[Any, Any]:
    env = gymnasium.make("CartPole-v1")
    if stack:
        env = gymnasium.wrappers.FrameStackObservation(env, stack)
    return gymnasium.wrappers.TimeLimit(env, 10)


@pytest.mark.parametrize("stack", [None, 2, 4])
def test_stack_size_is_found_below_other_wrappers(stack: int | None) -> None:
    env = cart_pole(stack)
    assert stacked_frames(env) == (stack or 0)
    env.close()


def test_stack_size_is_found_in_a_vector_environment() -> None:
    envs = gymnasium.vector.SyncVectorEnv([lambda: cart_pole(3)] * 2)
    assert stacked_frames(envs) == 3
    envs.close()


@pytest.mark.slow
def test_stack_size_is_found_in_an_envpool() -> None:
    envpool = pytest.importorskip("envpool")
    envs = envpool.make("Pong-v5", env_type="gymnasium", num_envs=1)
    assert stacked_frames(envs) == envs.observation_space.shape[0] == 4
    envs.close()
