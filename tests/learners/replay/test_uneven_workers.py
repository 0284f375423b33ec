"""Uneven workers: a replay learner gets every episode, short or long, from fast and slow workers alike."""

from __future__ import annotations

import math
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import farstep
from farstep.buffer import DPER, Buffer, NStep, Sampler
from farstep.buffer.bound_arrays import internals_of
from farstep.learners.loop.training import Limits, Training
from farstep.learners.replay.config import EpisodeReplayConfig, LoopConfig, ReplayConfig
from tests.learners.replay.test_loop import TwinLearner

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("torch_in_workers")]  # real processes, or learning

SHORT, LONG = 2, 25
ENV, EPISODE, STEP, LENGTH, IS_SLOW = range(5)
"""What an observation shows."""


class Mixed(gymnasium.Env[Any, Any]):
    """Half of the episodes are short. The environments of one worker, the first to make one, are slow."""

    observation_space = gymnasium.spaces.Box(0, 2**24, (5,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, folder: Path) -> None:
        slow = folder / "slow"
        try:
            os.close(os.open(folder / "taken", os.O_CREAT | os.O_EXCL))
            slow.write_text(str(os.getpid()))
        except FileExistsError:
            pass
        self._is_slow = slow.exists() and slow.read_text() == str(os.getpid())
        self._number, self._episode = -1, -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if self._number < 0:
            self._number = int(self.np_random.integers(2**24))
        self._episode, self._step = self._episode + 1, 0
        self._length = int(self.np_random.choice([SHORT, LONG]))
        return self._obs(), {}

    def _obs(self) -> Any:
        return np.array([self._number, self._episode, self._step, self._length, self._is_slow], np.float64)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._is_slow:
            time.sleep(0.002)  # the task is slow; nothing waits for it
        self._step += 1
        return self._obs(), 1.0, self._step == self._length, False, {}


class Learner(TwinLearner):
    """Samples as the learner of the test does."""

    def __init__(self, config: LoopConfig, sampler: Sampler) -> None:
        super().__init__(config)  # type: ignore[arg-type]
        self._sampler = sampler

    @property
    def sampler(self) -> Sampler:
        return self._sampler


OPTIONS: dict[str, Any] = {"buffer_size": 4_000, "learning_starts": 64, "num_steps": 4, "publish_every": 4}
CASES: dict[str, tuple[LoopConfig, Sampler]] = {
    "rows": (ReplayConfig(**OPTIONS, batch_size=16, updates_per_step=0.1), NStep(3, 0.9)),
    "episodes": (EpisodeReplayConfig(**OPTIONS, batch_size=4, samples_per_step=2.0), DPER(0.0, 0.0)),
}


@pytest.mark.parametrize("items", CASES)
def test_short_episodes_are_not_favored(items: str, tmp_path: Path) -> None:
    config, sampler = CASES[items]
    env_config = {"type": "factory", "env_name": partial(Mixed, tmp_path), "envs_per_node": 4, "seed": 3}
    with farstep.ClusterEnv(env_config, farstep.LocalConfig(workers_per_node=2)) as env:
        Training(Learner(config, sampler), env, Limits(total_steps=2_000), checkpoints=tmp_path / "run").run()
    with Buffer.restore(tmp_path / "run" / "buffer", sampler) as buffer:
        buffer.limit(min_diff=-math.inf, max_diff=math.inf)
        store = internals_of(buffer).store
        rows = np.asarray(store.flat["obs"])[store.table.keys >= 0]
        assert len(rows) >= 2_000 and len(np.unique(rows[:, ENV])) == 4 and set(rows[:, IS_SLOW]) == {0, 1}
        complete = 0
        for number in np.unique(rows[:, ENV]):
            own = rows[rows[:, ENV] == number]
            episodes, first, lengths = np.unique(own[:, EPISODE], return_index=True, return_counts=True)
            np.testing.assert_array_equal(episodes, np.arange(len(episodes)))  # none is missing
            expected = own[first, LENGTH]
            np.testing.assert_array_equal(lengths[:-1], expected[:-1])  # only the last may be in progress
            complete += len(episodes) - int(lengths[-1] < expected[-1])

        batch, _ = buffer.sample(20_000, timeout_s=0)
        sampled = np.asarray(batch["obs"])
        if items == "episodes":
            assert len(buffer.keys()) == complete
            sampled, keys = sampled[:, 0], buffer.keys()
            rows = np.asarray(buffer.read(keys)[0]["obs"])[:, 0]
        is_short = (rows[:, LENGTH] == SHORT).mean()
        assert 0 < is_short < 1
        assert abs((sampled[:, LENGTH] == SHORT).mean() - is_short) < 5 * math.sqrt(is_short * (1 - is_short) / 20_000)
        for slow in (0, 1):
            share = (rows[:, IS_SLOW] == slow).mean()
            assert abs((sampled[:, IS_SLOW] == slow).mean() - share) < 5 * math.sqrt(share * (1 - share) / 20_000)
