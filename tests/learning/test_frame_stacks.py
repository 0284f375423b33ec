"""Replay learners store stacked images once per frame, and learn the same as from whole observations."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import farstep
from farstep.buffer import FrameStack
from farstep.errors import ConfigError
from tests.learning.tasks import Rows, make_env, make_training
from tests.learning.test_replay_learning import CONFIGS

pytestmark = pytest.mark.timeout(600)
_ONCE = "each of 3 stacked frames is stored once"


class MovingDot(gymnasium.Env[Any, Any]):
    """A dot moves over an image of 8 x 8 pixels; the reward is 1 for the action that names its direction."""

    observation_space = spaces.Box(0, 255, (8, 8), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._place, self._direction = int(self.np_random.integers(64)), int(self.np_random.integers(2))
        self._left = int(self.np_random.integers(2, 15))
        return self._image(), {}

    def _image(self) -> Any:
        image = np.zeros(64, np.uint8)
        image[self._place] = 255
        return image.reshape(8, 8)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(action == self._direction)
        self._place = (self._place + 2 * self._direction - 1) % 64
        self._left -= 1
        return self._image(), reward, self._left == 0 and reward > 0, self._left == 0 and not reward, {}


def stacked(padding: str = "reset", last: bool = False) -> gymnasium.Env[Any, Any]:
    env: Any = gymnasium.wrappers.FrameStackObservation(MovingDot(), 3, padding_type=padding)
    if last:
        space = spaces.Box(0, 255, (8, 8, 3), np.uint8)
        env = gymnasium.wrappers.TransformObservation(env, lambda image: np.moveaxis(image, 0, -1), space)
    return env


def train(
    make: Any, learner: str, folder: Path, launcher: str = "in-process", steps: int = 160, **options: Any
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor], list[str]]:
    """Train for a few steps; return metrics, weights and events."""
    config: Any = CONFIGS[learner]
    options = {"buffer_size": 96, "learning_starts": 64, "batch_size": 8, **options}
    config = replace(config, replay=replace(config.replay, **options))
    rows = Rows()
    with make_env(make, 4, launcher=launcher) as env:
        training, agent = make_training(env, config, steps, sink=rows, checkpoints=folder)
        training.run()
        return rows.rows, agent.state_dict(), [event.text for event in env.events()]


@pytest.mark.parametrize(
    ("learner", "padding", "last"),
    [("dqn", "reset", False), ("apex", "zero", True), ("sac", "reset", True), ("aride", "zero", False)],
)
def test_learning_is_identical_with_whole_observations(learner: str, padding: str, last: bool, tmp_path: Path) -> None:
    make = partial(stacked, padding, last)
    rows, weights, events = train(make, learner, tmp_path / "frames")
    expected_rows, expected_weights, expected_events = train(make, learner, tmp_path / "whole", frame_stack=0)
    assert any(_ONCE in text for text in events) and not any(_ONCE in text for text in expected_events)
    assert rows[-1]["update"] == expected_rows[-1]["update"] > 3
    for name, tensor in expected_weights.items():
        assert torch.equal(weights[name], tensor), name


def test_concurrent_run_resumes_with_the_frames_that_it_saved(tmp_path: Path) -> None:
    """A buffer continues as it was saved, although the resumed run would store whole observations."""
    train(stacked, "dqn", tmp_path, launcher="local")
    config: Any = CONFIGS["dqn"]
    options = {"buffer_size": 96, "learning_starts": 64, "batch_size": 8, "frame_stack": 0}
    config = replace(config, replay=replace(config.replay, **options))
    with make_env(stacked, 4) as env:
        training, _ = make_training(env, config, 320, sink=Rows(), checkpoints=tmp_path)
        training.resume()
        training.run()
        events = [event.text for event in env.events()]
    assert any("restored 96 rows" in text for text in events) and any(_ONCE in text for text in events)


class Alternating:
    """Takes the actions 0 and 1 in turn."""

    def act(self, obs: Any) -> dict[str, Any]:
        return {"action": np.arange(len(obs)) % 2}

    def get_parameters(self) -> dict[str, Any]:
        return {"unused": np.zeros(1)}

    def set_parameters(self, parameters: Any) -> None:
        pass


def test_batches_of_a_workflow_have_whole_stacks() -> None:
    """Windows that start within a chunk, and a ring that wraps."""
    found: dict[bool, list[Any]] = {}
    for is_stacked in (False, True):
        batches = found[is_stacked] = []
        stack = FrameStack(3) if is_stacked else None
        with (
            make_env(partial(stacked, "zero"), 4, launcher="in-process") as env,
            farstep.Buffer(4 * 20, farstep.FullBatch(), max_times_sampled=0, frame_stack=stack) as buffer,
        ):
            flow = farstep.Workflow(env, Alternating(), buffer, steps=4)

            def take(message: Any, flow: Any = flow, batches: Any = batches) -> None:
                batch = flow.batch(message).copy()
                batches.append((batch["obs"], batch.last_obs, batch.final_obs.obs, batch["reward"]))

            flow.on(farstep.DataKeyTrigger(n="all", size=6), take)
            flow.run(total_steps=4 * 60)
    assert len(found[True]) == len(found[False]) == 10
    for each, expected in zip(found[True], found[False], strict=True):
        for array, other in zip(each, expected, strict=True):
            np.testing.assert_array_equal(array, other)
    for (_, last, *_), (after, *_) in pairwise(found[True]):
        np.testing.assert_array_equal(last, after[0])


def test_number_of_frames_that_fits_no_image_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--frame-stack is 7"):
        train(stacked, "dqn", tmp_path, frame_stack=7)


def test_observations_without_a_known_stack_are_stored_whole(tmp_path: Path) -> None:
    _, _, events = train(partial(gymnasium.wrappers.AddRenderObservation, _Rendered()), "dqn", tmp_path, steps=64)
    assert not any("stored once" in text for text in events)


class _Rendered(MovingDot):
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - as Gymnasium declares it
    render_mode = "rgb_array"

    def render(self) -> Any:
        return np.repeat(self._image()[..., None], 3, axis=-1)
