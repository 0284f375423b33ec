"""Draws the items of a batch.

The sampler's selector draws. Unusable items are rejected and drawn again: no sequence can start there, or the item was
already sampled `max_times_sampled` times. If only few items are usable, they are enumerated, and items are drawn from
this list.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from farstep.buffer.options import BufferOptions
from farstep.buffer.samplers import EpisodeSelector, FullBatch
from farstep.buffer.storage.contents import Contents
from farstep.buffer.storage.table import occurrences
from farstep.config.field_docs import show_fields
from farstep.core import Array
from farstep.errors import ConfigError

_ROUNDS = 8  # rounds of redrawing rejected items (each with twice as many draws) before all items are enumerated
_COST = 4  # checking one random cell costs as much as checking this many cells in order


@show_fields
@dataclass(frozen=True)
class SampleInfo:
    """Keys, probabilities and counts of the items of a batch; each array has one entry per item."""

    keys: Array
    """Keys of the items, for `update_priorities` and `delete`."""
    probabilities: Array
    """Probability of the item in one draw among all items of the buffer. For `NStep` and `Sequence`, this is the
    probability under `by`, whose draws include rows at which no item can start. For samplers with a fixed order, it is
    1."""
    times_sampled: Array
    """How often the item has been sampled, including this time."""
    size: int
    """Number of items in the buffer."""
    beta: float
    """Exponent of `weights`."""
    recorded: Array | None = None
    """The array `version` of the rows, if they have one."""

    @cached_property
    def versions(self) -> Array:
        """Version that acted in the first row of each item; -1 if rows have no array `version`."""
        return np.full(len(self.keys), -1) if self.recorded is None else self.recorded

    @cached_property
    def weights(self) -> Array:
        """Importance weights `(size * probability) ** -beta`, divided by the largest weight of the batch; 1 if `beta`
        is 0."""
        if not self.beta:
            return np.ones(len(self.keys))
        weights = (self.size * self.probabilities) ** -self.beta
        weights /= weights.max()
        return weights


class Chooser:
    """Draws the items of batches according to the options of a buffer.

    Each item is drawn at most `max_times_sampled` times (0: no limit).
    """

    def __init__(self, options: BufferOptions) -> None:
        self._options, self._limiter = options, options.limiter
        self._sampler, self._max_times_sampled = options.sampler, options.max_times_sampled

    def _least_rows(self, count: int) -> int:
        """Return the minimum number of rows that a batch of `count` items can have."""
        return count * self._sampler.item_rows[0]

    def _most(self, contents: Contents | None) -> float:
        """Return the maximum number of items that one batch can have."""
        capacity = self._options.capacity
        if contents is not None and contents.selector.distinct:
            return capacity
        return capacity * self._max_times_sampled or math.inf

    def choose(self, contents: Contents | None, count: int) -> tuple[Array, Array] | None:
        """Draw items.

        Args:
            contents: The items of the buffer; None before the buffer has arrays.
            count: Number of items to draw.

        Returns:
            Cells and probabilities of the items. None if there are too few items, or the limiter does not allow them.

        Raises:
            ConfigError: A batch of that size can never be sampled.
        """
        rows = self._least_rows(count)
        if rows > self._limiter.most_samples() or count > self._most(contents):
            raise ConfigError(
                f"{count} items with {rows} rows can never be sampled at once from this buffer (capacity "
                f"{self._options.capacity}, max_times_sampled {self._max_times_sampled}; {self._limiter}). Lower "
                "batch_size, or raise capacity, max_times_sampled or the limiter's max_diff."
            )
        return None if contents is None else self._draw(contents, count)

    def missing(self, contents: Contents | None, count: int, is_deadlock: bool) -> str:
        """Return an error message: why the batch cannot be sampled, and what to do.

        Args:
            contents: The items of the buffer; None before the buffer has arrays.
            count: Number of items to draw.
            is_deadlock: Whether only the calling thread inserts, so that it must not wait.
        """
        limiter, rows = self._limiter, self._least_rows(count)
        size = 0 if contents is None else contents.size
        wanted = f"the batch needs {count} items of {self._sampler!r}"
        wanted += f" ({rows} rows in total)" if rows > count else ""
        deadlock = "the sampling thread is the only one that inserts, so waiting would deadlock"
        if contents is None or not size or not limiter.can_sample(rows):
            if not is_deadlock:
                return (
                    f"{wanted}; the buffer holds {size} items ({limiter}). Keep inserting, or widen the limiter with "
                    "buffer.limit(...)."
                )
            return (
                f"{wanted}, and the buffer cannot provide them ({size} items; {limiter}); {deadlock}. Remedies: "
                f"call the consumer only when the limiter allows this many samples (flow.on(..., samples={rows})), "
                "sample fewer items, raise the size of the trigger, widen the limiter, or sample in a separate thread "
                "(flow.on(..., thread=True))."
            )
        usable = len(self.usable_items(contents))
        often = f", at most {self._max_times_sampled} times each" if self._max_times_sampled else ""
        found = f"{wanted}; {usable} of the {size} items in the buffer can be sampled{often}"
        if self._sampler.needs_order and usable < size:
            found += ": the others are too close to the end of an episode or to the newest row"
        remedy = f"but {deadlock}: sample later" if is_deadlock else "so insert more rows"
        return f"{found}. The limiter allows the batch ({limiter}), {remedy}, or sample fewer or shorter items."

    def _draw(self, contents: Contents, count: int) -> tuple[Array, Array] | None:
        if isinstance(self._sampler, FullBatch):
            count = max(count, contents.size)
        if not contents.size or not self._limiter.can_sample(self._least_rows(count)):
            return None
        selector = contents.selector
        if selector.distinct:
            return self._first_usable(contents, count)
        if self._max_times_sampled or isinstance(selector, EpisodeSelector):
            items = contents.items
            if not len(items) or self._uses_left(contents, items) < count:
                return None
        cells, probabilities = selector.select(count, contents.rng)
        rejected = self._rejected(contents, cells)
        if rejected is None or not len(rejected) or self._redraw(contents, cells, probabilities, rejected):
            return cells, probabilities
        return self._search(contents, count)

    def _redraw(self, contents: Contents, cells: Array, probabilities: Array, rejected: Array) -> bool:
        """Replace rejected entries by further draws. Return False if enumerating all items would be faster."""
        checked, rng = 0, contents.rng
        for more in range(1, _ROUNDS + 1):
            drawn = len(rejected) << more
            checked += drawn
            if (checked - 64) * self._sampler.reach * _COST > contents.store.table.cells:
                return False
            others, chances = contents.selector.select(drawn, rng)
            if (usable := self._sampler.usable(contents.store, others)) is not None:
                others, chances = others[usable], chances[usable]
            chosen = rng.permutation(len(others))[: len(rejected)]  # shuffle, because stratified draws are sorted
            places = rejected[: len(chosen)]
            cells[places], probabilities[places] = others[chosen], chances[chosen]
            left = self._rejected(contents, cells)
            if left is None or not len(left):
                return True
            rejected = left
        return False

    def _first_usable(self, contents: Contents, count: int) -> tuple[Array, Array] | None:
        """Return the first `count` usable items of a selector with a fixed order."""
        looked = count
        while True:
            cells, probabilities = contents.selector.select(looked, contents.rng)
            may_have_more = len(cells) == looked
            if (usable := self._sampler.usable(contents.store, cells)) is not None:
                cells, probabilities = cells[usable], probabilities[usable]
            if len(cells) >= count:
                return cells[:count], probabilities[:count]
            if not may_have_more:
                return None
            looked *= 2

    def _rejected(self, contents: Contents, cells: Array) -> Array | None:
        """Return the entries of a draw whose item is unusable or would be sampled too often; None if no check is
        needed."""
        usable = self._sampler.usable(contents.store, cells)
        if self._max_times_sampled:
            allowed = occurrences(cells) < self._max_times_sampled - contents.store.table.times.take(cells)
            usable = allowed if usable is None else usable & allowed
        return None if usable is None else np.flatnonzero(~usable)

    def _search(self, contents: Contents, count: int) -> tuple[Array, Array] | None:
        """Enumerate the usable items and draw from them."""
        selector, items = contents.selector, self.usable_items(contents)
        if not len(items) or self._uses_left(contents, items) < count:
            return None
        cells, probabilities = selector.among(items, count, contents.rng)
        while (rejected := self._rejected(contents, cells)) is not None and len(rejected):
            items = np.setdiff1d(
                items, cells[rejected]
            )  # the batch already has these as often as max_times_sampled allows
            cells[rejected], probabilities[rejected] = selector.among(items, len(rejected), contents.rng)
        return cells, probabilities

    def usable_items(self, contents: Contents) -> Array:
        """Return the cells of all usable items."""
        items = contents.items
        usable = self._sampler.all_usable(contents.store)
        return items if usable is None else items[usable[items]]

    def can_sample(self, contents: Contents, cells: Array) -> Array:
        """Return for each of these cells, which hold rows, whether an item that can be sampled starts there."""
        if isinstance(contents.selector, EpisodeSelector):
            return contents.selector.weights[cells] > 0
        usable = self._sampler.usable(contents.store, cells)
        return np.ones(len(cells), bool) if usable is None else usable

    def _uses_left(self, contents: Contents, items: Array) -> float:
        """Return the total number of samples that these items can still provide."""
        if not self._max_times_sampled:
            return math.inf
        return self._max_times_sampled * len(items) - int(contents.store.table.times[items].sum())

    def taken(self, contents: Contents, cells: Array, probabilities: Array) -> SampleInfo:
        """Count one more sample of each of these items, and return their keys, probabilities and counts."""
        store, table = contents.store, contents.store.table
        keys = table.keys.take(cells)
        times = table.count(cells)
        recorded = store.take("version", cells) if "version" in store.schema else None
        return SampleInfo(keys, probabilities, times, table.size, self._sampler.beta, recorded)
