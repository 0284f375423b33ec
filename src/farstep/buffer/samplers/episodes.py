"""The sampler whose items are whole episodes, and their priorities."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from farstep.buffer.samplers.consecutive_rows import path, sequences
from farstep.buffer.samplers.sampler import Sampler, check_number
from farstep.buffer.selectors import Cells, PrioritySelector, Selector
from farstep.buffer.storage.store import ENDINGS, Store
from farstep.buffer.storage.table import Table
from farstep.core import Array
from farstep.errors import ConfigError
from farstep.schema import Schema

_MIN_PRIORITY = 1e-6
"""The lowest priority of an episode."""


@dataclass(frozen=True)
class DPER(Sampler):
    """Whole episodes in proportion to their priority, with replacement (trajectory replay of DistRL).

        P(i) = priority_i ** alpha / sum_k priority_k ** alpha

    A batch has arrays `[batch, longest, ...]`, where `longest` is the length of its longest episode. Shorter episodes
    are padded with copies of their last row; the array `valid` is False at these copies. Keys identify episodes. A new
    episode gets the highest priority so far, initially 1. Compute priorities with `trajectory_priority`.

    Args:
        alpha: Exponent of the priorities, at least 0. Default: 0.5.
        beta: Exponent of the importance weights, as in `Prioritized`; with 0, all weights are 1. Default: 0.

    Raises:
        ConfigError: An option is out of range, or the rows do not mark the ends of episodes.
    """

    alpha: float = 0.5
    beta: float = 0.0

    needs_order = uses_priorities = True

    def __post_init__(self) -> None:
        check_number("alpha", self.alpha)
        check_number("beta", self.beta)

    def selector(self, table: Table) -> Selector:
        return EpisodeSelector(table, self.alpha)

    def check(self, schema: Schema) -> None:
        if not any(name in schema for name in (*ENDINGS, "episode_start")):
            raise ConfigError(f"DPER samples whole episodes, but the rows have none of {', '.join(ENDINGS)}.")

    def span(self, store: Store) -> int:
        return store.table.cells

    def rows(self, store: Store, cells: Array) -> dict[str, Array]:
        length, at = 1, cells
        while not store.flat_cut.take(at).all():
            at = np.where(store.flat_cut.take(at), at, store.following(at))
            length += 1
        return sequences(store, *path(store, cells, length))


class EpisodeSelector(PrioritySelector):
    """Draws the first rows of complete episodes in proportion to priority; all other rows have weight 0."""

    def inserted(self, cells: Cells, keys: Array) -> None:
        self._tree.set(cells, 0.0)

    def completed(self, cells: Array) -> None:
        """Make the complete episodes that start at these cells available."""
        super().inserted(cells, cells)

    def updated(self, cells: Array, priorities: Array) -> None:
        """Set the priorities of episodes, at least `_MIN_PRIORITY`. Ignore cells at which no episode starts."""
        first = self.weights[cells] > 0
        super().updated(cells[first], np.maximum(priorities[first], _MIN_PRIORITY))

    def _weights(self, priorities: Array | np.float64) -> Array:
        return np.maximum(super()._weights(priorities), np.finfo(float).tiny)

    @property
    def episodes(self) -> Array:
        """The cells of the first rows of all complete episodes."""
        return np.flatnonzero(self.weights[: self._table.cells])


def trajectory_priority(
    td_errors: Array, ratios: Array, logprobs: Array, *, w1: float = 50.0, w2: float = 1.0, w3: float = 0.01
) -> float:
    """Compute the priority of one episode for `DPER` (DistRL, section 5.3, with the defaults of its code).

        priority = max(1e-6, w1 * mean(|td_error|) + w2 * mean(min(ratio, 10)) - w3 * mean(logprob))

    Args:
        td_errors: TD error of each step.
        ratios: For each step, the action's probability under the learner's policy, divided by its probability under the
            policy that acted.
        logprobs: For each step, the log-probability of the action.
        w1: Weight of the TD errors. Default: 50.
        w2: Weight of the ratios. Default: 1.
        w3: Weight of the surprisal, `-logprob`. Default: 0.01.

    Returns:
        The priority.
    """
    mean = w1 * np.abs(td_errors).mean() + w2 * np.minimum(ratios, 10.0).mean() - w3 * np.mean(logprobs)
    return float(max(mean, _MIN_PRIORITY))
