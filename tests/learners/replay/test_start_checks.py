"""The memory of the replay buffer is checked before a run creates its folder."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

import farstep
from farstep.buffer import Buffer
from farstep.buffer.bound_arrays import internals_of
from farstep.cli.options.algorithms import agent_for
from farstep.learners.aride import ArideConfig
from farstep.learners.dqn import ApexConfig, DQNConfig
from farstep.learners.networks.nets import NetConfig
from farstep.learners.replay.config import EpisodeReplayConfig, LoopConfig, ReplayConfig
from farstep.learners.replay.learner import ReplayLearner
from farstep.learners.replay.loop import make_buffer
from farstep.learners.replay.start_checks import check_launched, row_schema
from farstep.learners.sac import SACConfig
from farstep.workflow.workflow import Workflow
from tests.learning.tasks import LEARNERS, make_env

pytestmark = pytest.mark.slow  # real processes

IMAGE = (3, 16, 16)


class Images(gymnasium.Env[Any, Any]):
    """Stacks of three frames, and an info."""

    observation_space = gymnasium.spaces.Box(0, 255, IMAGE, np.uint8)
    action_space = gymnasium.spaces.Discrete(3, start=1)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(IMAGE, np.uint8), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(IMAGE, np.uint8), 0.0, False, False, {"invalid_action": False}


def make_learner(env: farstep.ClusterEnv, config: Any) -> ReplayLearner[Any]:
    learner: ReplayLearner[Any] = LEARNERS[type(config)](agent_for(config, *env.launch()), config, 1)
    return learner


LOOP: dict[str, Any] = {"buffer_size": 65_536, "learning_starts": 64}
CONFIGS: dict[str, tuple[Any, Any]] = {
    "dqn": ("CartPole-v1", DQNConfig(replay=ReplayConfig(**LOOP))),
    "alternating": ("CartPole-v1", DQNConfig(replay=ReplayConfig(**LOOP, concurrent=False))),
    "apex": ("CartPole-v1", ApexConfig(replay=ReplayConfig(**LOOP))),
    "frames": (Images, DQNConfig(replay=ReplayConfig(**LOOP, frame_stack=3))),
    "sac": ("Pendulum-v1", SACConfig(replay=ReplayConfig(**LOOP))),
    "aride": (
        Images,
        ArideConfig(net=NetConfig(recurrent="gru"), invalid_penalty=1.0, replay=EpisodeReplayConfig(**LOOP)),
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_memory_is_that_of_the_buffer_of_the_run(name: str) -> None:
    """Every array of a row and the index count; observations at the ends of episodes come on top."""
    task, config = CONFIGS[name]
    replay: LoopConfig = config.replay
    infos = getattr(config, "info_keys", ())
    with make_env(task, 2, launcher="in-process", info_keys=infos) as env:
        learner = make_learner(env, config)
        state = torch.random.get_rng_state()
        schema = row_schema(env, learner.agent)
        assert torch.equal(torch.random.get_rng_state(), state)
        with make_buffer(replay, learner.sampler, env, 1) as own:
            Workflow(env, learner.agent, own, steps=4).bind()
            assert own.schema == schema
            # In-process workers alternate with the learner, so their rows are pooled only here.
            pooled, stack = replay.concurrent, own.options.frame_stack
            with Buffer(replay.buffer_size, learner.sampler, pooled=pooled, frame_stack=stack) as buffer:
                tracemalloc.start()
                try:
                    buffer.bind(schema, 2, internals_of(own).structures)
                    index, _ = tracemalloc.get_traced_memory()
                finally:
                    tracemalloc.stop()
                taken = (internals_of(buffer).store.blocks.memory.nbytes + index) / buffer.capacity
                log = 16 if pooled else 0  # is allocated when rows are inserted
                assert abs(buffer.options.row_bytes(schema) - taken - log) < 4


def test_a_buffer_that_does_not_fit_is_refused_with_the_bytes_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    config = DQNConfig(replay=ReplayConfig(**LOOP))
    with make_env("CartPole-v1", 2, launcher="in-process") as env:
        learner = make_learner(env, config)
        with make_buffer(config.replay, learner.sampler, env, 1) as buffer:
            needed = 65_536 * buffer.options.row_bytes(row_schema(env, learner.agent))
        limit: list[float] = [needed]
        monkeypatch.setattr("farstep.learners.replay.start_checks.available_memory", lambda: limit[0])
        check_launched(config.replay, env, learner, None)
        limit[0] = needed - 1
        with pytest.raises(farstep.ConfigError, match=rf"needs .* GiB \({needed // 65_536} bytes per row\)"):
            check_launched(config.replay, env, learner, None)


@pytest.mark.parametrize("name", ["dqn", "alternating", "apex"])
def test_the_announced_checkpoint_is_as_large_as_that_of_the_full_buffer(name: str, tmp_path: Path) -> None:
    task, config = CONFIGS[name]
    with make_env(task, 2, launcher="in-process") as env:
        learner = make_learner(env, config)
        with Buffer(512, learner.sampler, pooled=config.replay.concurrent) as buffer:
            Workflow(env, learner.agent, buffer, steps=4).bind()
            announced = buffer.checkpoint_bytes
            for _ in range(12):
                buffer.insert(env.collect(learner.agent, steps=32))
            assert len(buffer) > 500
            folder = buffer.checkpoint(tmp_path)
            written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            tails = sum(rows.nbytes for rows in internals_of(buffer).store.sparse.values())
    assert announced < written + tails and written < announced + tails + 16_384  # headers of files
