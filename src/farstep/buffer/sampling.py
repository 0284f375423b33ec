"""Choosing: which items a batch is made of, and what is known of them.

The sampler's selector draws. What cannot be handed out (nothing longer can begin there, or the item was sampled as
often as it may be) is drawn again; where hardly any draw succeeds, it is drawn among those items that can be.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from farstep.buffer.samplers import EpisodeSelector, FullBatch, Sampler
from farstep.buffer.storage.contents import Contents
from farstep.buffer.storage.table import occurrences
from farstep.core import Array

_ROUNDS = 8  # of draws for what was refused, each of twice as many, before all items are looked at
_COST = 4  # a look at random costs as much as so many in order


@dataclass(frozen=True)
class SampleInfo:
    """What is known of sampled items, an entry each."""

    keys: Array
    """Names of the items, for `update_priorities` and `delete`."""
    probabilities: Array
    """Of a draw among all items: of a composed sampler (`NStep`, `Sequence`) that of `by`, whether or not something can
    begin at each of them. 1 where items come in order."""
    times_sampled: Array
    """How often the item was sampled, this time included."""
    size: int
    """Items in the buffer."""
    beta: float
    """Exponent of `weights`."""
    recorded: Array | None = None
    """The array `version` of the rows, if they have one."""

    @cached_property
    def versions(self) -> Array:
        """The policy's version, if rows have one; else -1."""
        return np.full(len(self.keys), -1) if self.recorded is None else self.recorded

    @cached_property
    def weights(self) -> Array:
        """Importance weights, at most 1; all 1 unless the sampler is prioritised."""
        if not self.beta:
            return np.ones(len(self.keys))
        weights = (self.size * self.probabilities) ** -self.beta
        weights /= weights.max()
        return weights


class Chooser:
    """Chooses for a sampler, each item at most `max_times_sampled` times (0: as often as it is drawn)."""

    def __init__(self, sampler: Sampler, max_times_sampled: int) -> None:
        self._sampler, self._max_times_sampled = sampler, max_times_sampled

    def least_rows(self, count: int) -> int:
        """Fewest rows that a batch of `count` items can have."""
        return count * self._sampler.item_rows[0]

    def most(self, capacity: int, contents: Contents | None) -> float:
        """How many items there can be for one batch."""
        if contents is not None and contents.selector.distinct:
            return capacity
        return capacity * self._max_times_sampled or math.inf

    def choose(self, contents: Contents, count: int, is_allowed: Callable[[int], bool]) -> tuple[Array, Array] | None:
        """Cells of the items to hand out, and their probabilities; None while that cannot be."""
        if isinstance(self._sampler, FullBatch):
            count = max(count, contents.size)
        if not contents.size or not is_allowed(self.least_rows(count)):
            return None
        selector = contents.selector
        if selector.distinct:
            return self._first_ones(contents, count)
        if self._max_times_sampled or isinstance(selector, EpisodeSelector):
            items = contents.items
            if not len(items) or self._left(contents, items) < count:
                return None
        cells, probabilities = selector.select(count, contents.rng)
        refused = self._refused(contents, cells)
        if refused is None or not len(refused) or self._drawn_again(contents, cells, probabilities, refused):
            return cells, probabilities
        return self._search(contents, count)

    def _drawn_again(self, contents: Contents, cells: Array, probabilities: Array, refused: Array) -> bool:
        """Put others in the place of refused entries; False if that would take longer than to look at all items."""
        looked, rng = 0, contents.rng
        for more in range(1, _ROUNDS + 1):
            drawn = len(refused) << more
            looked += drawn
            if (looked - 64) * self._sampler.reach * _COST > contents.store.table.cells:
                return False
            others, chances = contents.selector.select(drawn, rng)
            if (usable := self._sampler.usable(contents.store, others)) is not None:
                others, chances = others[usable], chances[usable]
            chosen = rng.permutation(len(others))[: len(refused)]  # draws may come in order
            places = refused[: len(chosen)]
            cells[places], probabilities[places] = others[chosen], chances[chosen]
            left = self._refused(contents, cells)
            if left is None or not len(left):
                return True
            refused = left
        return False

    def _first_ones(self, contents: Contents, count: int) -> tuple[Array, Array] | None:
        """Of items that come in order, the first that can be handed out."""
        looked = count
        while True:
            cells, probabilities = contents.selector.select(looked, contents.rng)
            enough = len(cells) == looked
            if (usable := self._sampler.usable(contents.store, cells)) is not None:
                cells, probabilities = cells[usable], probabilities[usable]
            if len(cells) >= count:
                return cells[:count], probabilities[:count]
            if not enough:
                return None
            looked *= 2

    def _refused(self, contents: Contents, cells: Array) -> Array | None:
        """Entries of a draw that cannot be handed out: nothing can begin there, or the item was sampled so often."""
        usable = self._sampler.usable(contents.store, cells)
        if self._max_times_sampled:
            allowed = occurrences(cells) < self._max_times_sampled - contents.store.table.times.take(cells)
            usable = allowed if usable is None else usable & allowed
        return None if usable is None else np.flatnonzero(~usable)

    def _search(self, contents: Contents, count: int) -> tuple[Array, Array] | None:
        """Draw among the items that can be handed out, where hardly any draw finds one."""
        selector, items = contents.selector, self.usable_items(contents)
        if not len(items) or self._left(contents, items) < count:
            return None
        cells, probabilities = selector.among(items, count, contents.rng)
        while (refused := self._refused(contents, cells)) is not None and len(refused):
            items = np.setdiff1d(items, cells[refused])  # they are in the batch as often as they may be
            cells[refused], probabilities[refused] = selector.among(items, len(refused), contents.rng)
        return cells, probabilities

    def usable_items(self, contents: Contents) -> Array:
        """The cells of all items that something can begin at."""
        items = contents.items
        usable = self._sampler.all_usable(contents.store)
        return items if usable is None else items[usable[items]]

    def _left(self, contents: Contents, items: Array) -> float:
        """How often these items may still be sampled."""
        if not self._max_times_sampled:
            return math.inf
        return self._max_times_sampled * len(items) - int(contents.store.table.times[items].sum())

    def taken(self, contents: Contents, cells: Array, probabilities: Array) -> SampleInfo:
        """Count that these items were sampled, and say what is known of them."""
        store, table = contents.store, contents.store.table
        keys = table.keys.take(cells)
        times = table.count(cells)
        recorded = store.take("version", cells) if "version" in store.schema else None
        return SampleInfo(keys, probabilities, times, table.size, self._sampler.beta, recorded)
