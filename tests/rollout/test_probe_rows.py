"""The rows of probes: the same on both sides, spread over the chunk, and bounded."""

from __future__ import annotations

import numpy as np
import pytest

from farstep.rollout.probe_rows import ProbeRows, RecentProbeRows, joined, row_positions


@pytest.mark.parametrize(("steps", "num_envs"), [(1, 1), (1, 64), (128, 1), (5, 3), (128, 32), (1024, 1024)])
@pytest.mark.parametrize("order", [1, 2, 1000, 10**9])
def test_rows_are_inside_the_chunk(order: int, steps: int, num_envs: int) -> None:
    time, column = row_positions(order, steps, num_envs, rows=64)
    assert len(time) == len(column) == min(16, steps * num_envs)
    assert time.min() >= 0 and time.max() < steps and column.min() >= 0 and column.max() < num_envs


def test_rows_of_a_few_chunks_are_spread_over_time_and_columns() -> None:
    chunks = [row_positions(order, 128, 32, rows=64) for order in range(10, 14)]
    time, column = (np.concatenate(part) for part in zip(*chunks, strict=True))
    assert len(set(zip(time.tolist(), column.tolist(), strict=True))) == 64
    assert (np.histogram(time, bins=8, range=(0, 128))[0] >= 5).all()
    assert (np.histogram(column, bins=8, range=(0, 32))[0] >= 5).all()


def pick(order: int, rows: int) -> ProbeRows:
    return ProbeRows(order, order, {"obs": np.full((rows, 2), order)})


def test_the_latest_chunks_are_remembered() -> None:
    picks = RecentProbeRows(limit=64)
    for order in range(10):
        picks.add(pick(order, 16))
    assert [p.index for p in picks.all()] == [6, 7, 8, 9]
    assert picks.find([9, 3, 6]) == [] and picks.find([9, 6]) == [picks.all()[-1], picks.all()[0]]
    assert joined(picks.all())["obs"].shape == (64, 2)
    picks.add(pick(10, 100))  # larger than the limit, and still there
    assert [p.index for p in picks.all()] == [10]
    picks.clear()
    assert picks.all() == ()


def test_single_steps_fill_a_probe_too() -> None:
    picks = RecentProbeRows(limit=64)
    for order in range(100):
        picks.add(pick(order, len(row_positions(order, 1, 8, rows=64)[0])))
    assert sum(p.rows for p in picks.all()) == 64
