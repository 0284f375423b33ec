"""Pooled capacity: the oldest rows are evicted first, whichever environment slot they are from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farstep import Batch, Buffer
from farstep.batch import FinalObs
from farstep.buffer import DPER, LIFO, NStep, Prioritized, Sequence, Uniform
from farstep.errors import ConfigError
from farstep.schema import ArraySpec

SLOT = 10_000
SCHEMA = {name: ArraySpec((), "<f8") for name in ("obs", "reward")} | {
    name: ArraySpec((), "|b1") for name in ("terminated", "truncated")
}


class Envs:
    """Environments that count: the observations of slot i are from 10,000 i on.

    Episodes end at random, or have the length that `lengths` has for their slot.
    """

    def __init__(self, seed: int = 0, lengths: dict[int, int] | None = None) -> None:
        self._rng, self._lengths = np.random.default_rng(seed), lengths or {}
        self._steps: dict[int, int] = {}
        self._next: dict[int, int] = {}
        self.inserted: list[int] = []
        """The observations of all steps, in the order of insertion."""

    def chunk(self, slots: list[int], steps: int = 2) -> Batch:
        """Return the next steps of some slots. After an end, 5 numbers are skipped."""
        obs = np.empty((steps, len(slots)))
        ended = self._rng.random((steps, len(slots))) < 0.3
        for column, slot in enumerate(slots):
            at = self._next.get(slot, SLOT * slot)
            for t in range(steps):
                self._steps[slot] = self._steps.get(slot, 0) + 1
                if slot in self._lengths:
                    ended[t, column] = self._steps[slot] % self._lengths[slot] == 0
                obs[t, column] = at
                at += 6 if ended[t, column] else 1
            self._next[slot] = at
        continues = obs[0] % SLOT != 0
        rows, columns = np.nonzero(ended)
        last = np.array([self._next[slot] for slot in slots], float)
        final = FinalObs(rows, columns, obs[rows, columns] + 1)
        episodes = {"slot": np.array(slots)[columns], "return": 0 * rows, "length": 0 * rows}
        arrays = {"obs": obs, "reward": obs, "terminated": np.zeros_like(ended), "truncated": ended}
        for run in np.split(obs, np.flatnonzero(np.diff(slots) != 1) + 1, axis=1):  # adjacent slots, step by step
            self.inserted += run.reshape(-1).astype(int).tolist()
        return Batch(arrays, {"obs": "obs"}, last, final, episodes, np.array(slots), continues)


def held(buffer: Buffer) -> set[int]:
    """The observations of all rows that can be sampled."""
    rows, _ = buffer.sample(40 * buffer.capacity, timeout_s=0)
    np.testing.assert_array_equal(rows["next_obs"], np.asarray(rows["obs"]) + 1)
    return set(np.asarray(rows["obs"]).astype(int).tolist())


def test_rows_of_a_slow_slot_do_not_outlive_those_of_a_fast_one() -> None:
    envs = Envs()
    with Buffer(12, NStep(1, 0.9, by=Uniform()), pooled=True, seed=1) as buffer:
        buffer.bind(SCHEMA, 3, {"obs": "obs"})
        for slots in ([0, 1], [0], [0], [0], [0]):
            buffer.insert(envs.chunk(slots))
        assert held(buffer) == set(envs.inserted[-12:])
        for _ in range(6):
            buffer.insert(envs.chunk([0]))
        assert held(buffer) == set(envs.inserted[-12:]) and max(held(buffer)) < SLOT


def test_absent_slots_take_no_capacity_and_new_slots_can_be_added() -> None:
    envs = Envs()
    with Buffer(10, NStep(1, 0.9, by=Uniform()), pooled=True, seed=1) as buffer:
        buffer.bind(SCHEMA, 8, {"obs": "obs"})
        assert buffer.capacity == 10, "not rounded to a multiple of 8"
        for _ in range(7):
            buffer.insert(envs.chunk([3]))
        assert len(buffer) == 10 and held(buffer) == set(envs.inserted[-10:])
        for _ in range(3):
            buffer.insert(envs.chunk([20]))
        assert held(buffer) == set(envs.inserted[-10:])
        assert {observation // SLOT for observation in held(buffer)} == {3, 20}


@pytest.mark.parametrize("by", [Uniform(), Prioritized()], ids=repr)
def test_items_are_the_newest_rows_of_all_slots(by: Any) -> None:
    envs, rng = Envs(1), np.random.default_rng(2)
    with Buffer(23, NStep(1, 0.9, by=by), pooled=True, seed=1) as buffer:
        for _ in range(60):
            first = int(rng.integers(6))
            slots = sorted({first, first + 1, int(rng.integers(6))})
            buffer.insert(envs.chunk(slots[: int(rng.integers(1, 4))], int(rng.integers(1, 4))))
            assert len(buffer) == min(23, len(envs.inserted))
        assert buffer.limiter.deletes == buffer.removed["evicted"] == len(envs.inserted) - 23
        assert held(buffer) == set(envs.inserted[-23:])


@pytest.mark.parametrize("sampler", [NStep(2, 0.9), Sequence(3), DPER()], ids=repr)
def test_restored_pooled_buffer_continues_like_the_saved_one(sampler: Any, tmp_path: Path) -> None:
    envs = Envs(3)
    with Buffer(30, sampler, pooled=True, seed=1) as buffer:
        for i in range(30):
            buffer.insert(envs.chunk([i % 3, 3 + i % 2]))
        buffer.checkpoint(tmp_path)
        with Buffer.restore(tmp_path) as restored:
            assert restored.is_pooled and len(restored) == len(buffer)
            for i in range(8):
                chunk = envs.chunk([i % 3, 3 + i])  # also new slots
                np.testing.assert_array_equal(buffer.insert(chunk), restored.insert(chunk))
                (mine, said), (theirs, told) = buffer.sample(4, timeout_s=0), restored.sample(4, timeout_s=0)
                np.testing.assert_array_equal(said.keys, told.keys)
                for name in mine:
                    np.testing.assert_array_equal(mine[name], theirs[name])
            assert buffer.limiter == restored.limiter


def test_options_that_cannot_be_pooled_are_refused() -> None:
    with pytest.raises(ConfigError, match="pooled is 1; expected True or False"):
        Buffer(10, Uniform(), pooled=1)  # type: ignore[arg-type]
    with Buffer(10, NStep(1, 0.9), pooled=True) as buffer, pytest.raises(ConfigError, match="does not fit"):
        buffer.insert(Envs().chunk([0, 1, 2], steps=4))
    with (
        Buffer(10, Uniform(), pooled=True, spec={"x": ((), "f4")}) as buffer,
        pytest.raises(ConfigError, match="pooled"),
    ):
        buffer.keep_in_place()
    with Buffer(10, LIFO(), pooled=True) as buffer:
        assert not buffer.is_pooled, "its slots share the capacity anyway"


@pytest.mark.parametrize("by", [Uniform(), Prioritized()], ids=repr)
@pytest.mark.parametrize("pooled", [True, False])
def test_rows_of_short_episodes_are_sampled_as_often_as_others(by: Any, pooled: bool) -> None:
    envs = Envs(lengths={0: 2, 1: 50})
    with Buffer(200, NStep(3, 0.9, by=by), pooled=pooled, seed=1) as buffer:
        for _ in range(50):
            buffer.insert(envs.chunk([0, 1], steps=5))
        obs = np.asarray(buffer.sample(40_000, timeout_s=0)[0]["obs"])
    _, counts = np.unique(obs, return_counts=True)
    assert len(counts) == 200, "every row begins a transition, however short its episode is"
    assert abs((obs < SLOT).mean() - 0.5) < 0.01
    assert counts.max() < 2 * counts.min(), "200 of each are expected"
