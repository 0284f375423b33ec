"""Samplers whose items are single rows."""

from __future__ import annotations

from dataclasses import dataclass

from farstep.buffer.samplers.sampler import Sampler, check_number
from farstep.buffer.selectors import HeapSelector, OrderSelector, PrioritySelector, Selector, UniformSelector
from farstep.buffer.storage.table import Table


@dataclass(frozen=True)
class Uniform(Sampler):
    """Single rows, all equally likely, with replacement."""

    def selector(self, table: Table) -> Selector:
        return UniformSelector(table)


@dataclass(frozen=True)
class FIFO(Sampler):
    """The oldest rows, oldest first; each is sampled once."""

    once = True

    def selector(self, table: Table) -> Selector:
        return OrderSelector(table, newest=False)


@dataclass(frozen=True)
class LIFO(Sampler):
    """The newest rows, newest first; each is sampled once."""

    once = True

    def selector(self, table: Table) -> Selector:
        return OrderSelector(table, newest=True)


@dataclass(frozen=True)
class FullBatch(FIFO):
    """All rows of the buffer, oldest first; each is sampled once.

    `sample(batch_size)` waits for at least `batch_size` rows and returns all of them.
    """


@dataclass(frozen=True)
class Prioritized(Sampler):
    """Single rows in proportion to their priority, with replacement (Schaul et al. 2016, proportional variant).

        P(i) = priority_i ** alpha / sum_k priority_k ** alpha
        weight_i = (N * P(i)) ** -beta / max_j (N * P(j)) ** -beta      N: rows in the buffer; j: rows in the batch

    A new row gets the highest priority so far, initially 1. If all priorities are 0, all rows are equally likely.

    Args:
        alpha: Exponent of the priorities, at least 0; with 0, priorities have no effect. Default: 0.6.
        beta: Exponent of the importance weights in `SampleInfo.weights`, at least 0; see `Buffer.set_beta`. Default:
            0.4.

    Raises:
        ConfigError: `alpha` or `beta` is not a finite number of at least 0.
    """

    alpha: float = 0.6
    beta: float = 0.4

    uses_priorities = True

    def __post_init__(self) -> None:
        check_number("alpha", self.alpha)
        check_number("beta", self.beta)

    def selector(self, table: Table) -> Selector:
        return PrioritySelector(table, self.alpha)


@dataclass(frozen=True)
class MinHeap(Sampler):
    """The rows of lowest priority, lowest first; new rows have priority 1."""

    uses_priorities = True

    def selector(self, table: Table) -> Selector:
        return HeapSelector(table, highest=False)


@dataclass(frozen=True)
class MaxHeap(Sampler):
    """The rows of highest priority, highest first; new rows have priority 1."""

    uses_priorities = True

    def selector(self, table: Table) -> Selector:
        return HeapSelector(table, highest=True)
