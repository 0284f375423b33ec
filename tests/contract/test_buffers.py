"""Every sampler and remover keeps the contract of `farstep.testing.check_buffer`."""

from __future__ import annotations

import pytest

from farstep.buffer import (
    DPER,
    FIFO,
    LIFO,
    Buffer,
    FullBatch,
    MaxHeap,
    MinHeap,
    NStep,
    Prioritized,
    Sampler,
    Sequence,
    Uniform,
)
from farstep.buffer.selectors import Idle, Selector
from farstep.testing import check_buffer

PLAIN = [FIFO(), LIFO(), Uniform(), Prioritized(), MinHeap(), MaxHeap()]


class EveryOther(Sampler):
    """A sampler as a user writes one: the items in even cells if there are some, one after the other."""

    def selector(self, table):
        class Even(Idle):
            def select(self, n, rng):
                cells = table.keys.nonzero()[0][table.keys >= 0]
                even = cells[cells % 2 == 0]
                chosen = even if len(even) else cells
                return chosen[rng.integers(len(chosen), size=n)], 1 / len(chosen) + 0 * rng.random(n)

        selector: Selector = Even()
        return selector


@pytest.mark.parametrize(
    "sampler",
    [
        *PLAIN,
        FullBatch(),
        Prioritized(alpha=1, beta=1),
        DPER(),
        DPER(beta=0.5),
        NStep(n=1),
        NStep(),
        NStep(n=5, by=Prioritized()),
        NStep(by=FIFO()),
        NStep(by=MaxHeap()),
        Sequence(),
        Sequence(length=3, by=Prioritized()),
        Sequence(length=6, pad=True),
        Sequence(length=4, by=FIFO()),
        Sequence(by=LIFO()),
        Sequence(by=MinHeap()),
        EveryOther(),
    ],
    ids=lambda sampler: "a user's own" if isinstance(sampler, EveryOther) else repr(sampler),
)
def test_samplers(sampler: Sampler) -> None:
    check_buffer(lambda capacity, **options: Buffer(capacity, sampler, **options))


@pytest.mark.parametrize(
    ("sampler", "remover"),
    [
        (FIFO(), LIFO()),
        (LIFO(), Prioritized()),
        (Uniform(), Uniform()),
        (FullBatch(), Uniform()),
        (Prioritized(), Prioritized()),
        (Prioritized(), MaxHeap()),
        (MaxHeap(), MinHeap()),
    ],
    ids=repr,
)
def test_removers(sampler: Sampler, remover: Sampler) -> None:
    check_buffer(lambda capacity, **options: Buffer(capacity, sampler, remover=remover, **options))
