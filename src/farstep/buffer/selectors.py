"""Selectors choose items to sample, or to evict from a full buffer. They use only cells and do not read rows.

The buffer notifies its selectors of every item that is `inserted`, `removed` or `updated` with a new priority.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from typing import Protocol, TypeAlias

import numpy as np

from farstep.buffer.storage.table import Table
from farstep.buffer.sum_tree import SumTree
from farstep.checkpoint.checks import check_finite, check_like, require
from farstep.core import Array

_CHUNK = 256  # number of log entries that are checked at a time
_MAX_WEIGHT = 1e290  # small enough that no sum of weights overflows

Cells: TypeAlias = Array | slice
"""Cell numbers, or a range of them."""


class Selector(Protocol):
    """Chooses among the items of one table."""

    distinct: bool
    """Whether `select` never returns the same item twice."""
    listens: bool
    """Whether `inserted` must be called for new items."""

    def inserted(self, cells: Cells, keys: Array) -> None:
        """Handle the insertion of items into these cells."""
        ...

    def removed(self, cells: Array) -> None:
        """Handle the removal of the items of these cells."""
        ...

    def updated(self, cells: Array, priorities: Array) -> None:
        """Handle new priorities of the items of these cells."""
        ...

    def select(self, n: int, rng: np.random.Generator) -> tuple[Array, Array]:
        """Choose items.

        Args:
            n: Number of items.
            rng: Source of randomness.

        Returns:
            The cells of the items, and the probability of each item in one draw. A selector with `distinct` may return
            fewer than `n` items.
        """
        ...

    def displaced(self, n: int, rng: np.random.Generator) -> Array:
        """Choose the items to evict for `n` insertions into a full table, one item after each insertion.

        The first new item is already in its cell, so the table has one item too many. Every further new item goes into
        the cell that the previous eviction freed. New items may be evicted themselves.

        Args:
            n: Number of insertions.
            rng: Source of randomness.

        Returns:
            The cells of the evicted items, in order: at least one. If there are fewer than `n` cells, the caller
            inserts this number of items, then calls again for the rest.
        """
        ...

    def state(self) -> Mapping[str, Array]:
        """Return the selector's own state, for a checkpoint; the table is saved separately."""
        ...

    def restore(self, state: Mapping[str, Array]) -> None:
        """Apply what `state` returned, after the table was restored.

        Raises:
            Refused: The state does not match the table.
        """
        ...

    def among(self, cells: Array, n: int, rng: np.random.Generator) -> tuple[Array, Array]:
        """Like `select`, but choose only among `cells`. The probabilities still refer to a draw among all items."""
        ...


class Idle:
    """Base class of selectors. By default, it ignores all notifications and has no state."""

    distinct = False
    listens = True

    def inserted(self, cells: Cells, keys: Array) -> None:
        pass

    def removed(self, cells: Array) -> None:
        pass

    def updated(self, cells: Array, priorities: Array) -> None:
        pass

    def state(self) -> Mapping[str, Array]:
        return {}

    def restore(self, state: Mapping[str, Array]) -> None:
        pass

    def select(self, n: int, rng: np.random.Generator) -> tuple[Array, Array]:
        raise NotImplementedError

    def displaced(self, n: int, rng: np.random.Generator) -> Array:
        return self.select(1, rng)[0]

    def among(self, cells: Array, n: int, rng: np.random.Generator) -> tuple[Array, Array]:
        raise NotImplementedError


class UniformSelector(Idle):
    """All items equally likely, with replacement."""

    listens = False

    def __init__(self, table: Table) -> None:
        self._table = table

    def select(self, n: int, rng: np.random.Generator) -> tuple[Array, Array]:
        return self._table.draw(n, rng), np.full(n, 1 / max(1, self._table.size))

    def displaced(self, n: int, rng: np.random.Generator) -> Array:
        return self._table.draw(n, rng)

    def among(self, cells: Array, n: int, rng: np.random.Generator) -> tuple[Array, Array]:
        return cells[rng.integers(len(cells), size=n)], np.full(n, 1 / self._table.size)


class OrderSelector(Idle):
    """The oldest items first, or the newest first. Priorities have no effect."""

    distinct = True

    def __init__(self, table: Table, newest: bool) -> None:
        self._table, self._newest = table, newest
        self._log: Array = np.zeros(16, np.int64)
        """Keys in the order of insertion, from `_first` to `_stop`; may include keys of removed items."""
        self._first = self._stop = 0

    def inserted(self, cells: Cells, keys: Array) -> None:
        if self._stop + len(keys) > len(self._log):
            kept = self._log[self._first : self._stop]
            kept = kept[self._table.keys[kept % self._table.cells] == kept]
            self._log = np.zeros(2 * (len(kept) + len(keys)), np.int64)
            self._log[: len(kept)] = kept
            self._first, self._stop = 0, len(kept)
        self._log[self._stop : self._stop + len(keys)] = keys
        self._stop += len(keys)

    def select(self, n: int, rng: np.random.Generator) -> tuple[Array, Array]:
        found: list[Array] = []
        missing, look = n, max(n, _CHUNK)
        first, stop = self._first, self._stop
        while missing and first < stop:
            if self._newest:
                keys = self._log[max(first, stop - look) : stop][::-1]
                stop -= len(keys)
            else:
                keys = self._log[first : min(stop, first + look)]
                first += len(keys)
            cells = self._table.find(keys)[:missing]
            missing -= len(cells)
            if len(cells):
                found.append(cells)
            elif not found:  # this end of the log has only removed items: skip them from now on
                self._first, self._stop = first, stop
        cells = np.concatenate(found) if found else np.zeros(0, np.int64)
        return cells, np.ones(len(cells))

    def displaced(self, n: int, rng: np.random.Generator) -> Array:
        # The newest item is always the one just inserted, so each new item is evicted right after its insertion.
        return np.resize(self.select(1, rng)[0], n) if self._newest else self.select(n, rng)[0]

    def state(self) -> Mapping[str, Array]:
        return {"log": self._log[self._first : self._stop]}

    def restore(self, state: Mapping[str, Array]) -> None:
        check_like(state, self.state())
        log, table = state["log"], self._table
        require(table.was_issued(log).all(), "log has a key that no item ever had")
        items = np.sort(table.find(log))
        require(np.array_equal(items, np.flatnonzero(table.keys >= 0)), "log does not name every item once")
        self._log = log.copy()
        self._first, self._stop = 0, len(self._log)


class PrioritySelector(Idle):
    """Items in proportion to priority ** alpha, with replacement. If all priorities are 0, all are equally likely."""

    def __init__(self, table: Table, alpha: float) -> None:
        self._table, self._alpha = table, alpha
        self._tree = SumTree(table.cells)
        self._set_highest(1.0)

    def _set_highest(self, highest: float) -> None:
        """Set the highest priority so far. New items get it, so that each is likely to be sampled at least once."""
        self._highest, self._new_weight = highest, self._weights(np.float64(highest))

    def inserted(self, cells: Cells, keys: Array) -> None:
        self._tree.set(cells, self._new_weight)

    def removed(self, cells: Array) -> None:
        self._tree.set(cells, 0.0)

    def updated(self, cells: Array, priorities: Array) -> None:
        if len(cells):
            if (highest := float(priorities.max())) > self._highest:
                self._set_highest(highest)
            self._tree.set(cells, self._weights(priorities))

    def _weights(self, priorities: Array | np.float64) -> Array:
        with np.errstate(over="ignore"):
            return np.where(priorities > 0, np.minimum(priorities**self._alpha, _MAX_WEIGHT), 0.0)

    def select(self, n: int, rng: np.random.Generator) -> tuple[Array, Array]:
        total = self._tree.total
        if not total > 0:
            return self._table.draw(n, rng), np.full(n, 1 / max(1, self._table.size))
        cells, probabilities = self._tree.draw(n, rng)
        probabilities /= total
        return cells, probabilities

    def displaced(self, n: int, rng: np.random.Generator) -> Array:
        tree, new = self._tree, float(self._new_weight)
        weight_left, candidates = tree.total, self._independent_draws(n, rng)
        path: list[int] = []
        cells: list[int] = []  # cells whose original item was evicted; each holds a new item of weight `new`
        refilled: set[int] = set()  # the same cells
        for chance in rng.random(n).tolist():
            of_new = len(cells) * new
            place = chance * (of_new + weight_left)
            if place < of_new or not weight_left > 0:
                path.append(cells[min(int(place / new), len(cells) - 1)])
                continue
            # Candidates were drawn with the original weights, so skip cells that have been refilled.
            found = next((each for each in candidates if each[0] not in refilled), None)
            if found is None:
                tree.set(np.array(cells), 0.0)
                weight_left = tree.total
                candidates = self._independent_draws(n - len(path) if weight_left > 0 else 0, rng)
                found = next(candidates, (cells[-1], 0.0))  # the remaining weight is only a rounding error
            path.append(found[0])
            cells.append(found[0])
            refilled.add(found[0])
            weight_left -= found[1]
        return np.array(path, np.int64)

    def _independent_draws(self, n: int, rng: np.random.Generator) -> Iterator[tuple[int, float]]:
        if not n:
            return iter(())
        cells, weights = self._tree.draw(n, rng, stratified=False)
        return zip(cells.tolist(), weights.tolist(), strict=True)

    def among(self, cells: Array, n: int, rng: np.random.Generator) -> tuple[Array, Array]:
        weights = self._tree.weights[cells]
        sums = np.cumsum(weights)
        if not sums[-1] > 0:  # all of them have priority 0
            return cells[rng.integers(len(cells), size=n)], np.full(n, 1 / self._table.size)
        chosen = np.minimum(np.searchsorted(sums, rng.random(n) * sums[-1], side="right"), len(cells) - 1)
        return cells[chosen], weights[chosen] / self._tree.total

    @property
    def weights(self) -> Array:
        """priority ** alpha of each cell."""
        return self._tree.weights

    def state(self) -> Mapping[str, Array]:
        return {"weights": self.weights[: self._table.cells], "highest": np.array(self._highest)}

    def restore(self, state: Mapping[str, Array]) -> None:
        check_like(state, self.state())
        weights, highest = state["weights"], float(state["highest"])
        check_finite("weights", weights)
        require(((weights >= 0) & (weights <= _MAX_WEIGHT)).all(), f"weights is not within 0 and {_MAX_WEIGHT:g}")
        require(not weights[self._table.keys < 0].any(), "weights has a value above 0 for a cell without an item")
        require(1.0 <= highest < np.inf, f"highest is {highest}, a finite number of at least 1 expected")
        self._tree.set(slice(0, self._table.cells), weights)
        self._set_highest(highest)


class HeapSelector(Idle):
    """Items of lowest (or highest) priority first. Among equal priorities, the least recently inserted or updated
    first."""

    distinct = True

    def __init__(self, table: Table, highest: bool) -> None:
        self._table, self._sign = table, -1.0 if highest else 1.0
        self._heap: list[tuple[float, int, int]] = []
        self._stamp: Array = np.full(table.cells, -1, np.int64)
        """For each cell, the number of its current heap entry; -1: no item. Entries with other numbers are outdated."""
        self._count = 0
        self.priorities: Array = np.ones(table.cells)

    def inserted(self, cells: Cells, keys: Array) -> None:
        self._push(keys % self._table.cells, np.ones(len(keys)))

    def removed(self, cells: Array) -> None:
        self._stamp[cells] = -1

    def updated(self, cells: Array, priorities: Array) -> None:
        self._push(cells, priorities)

    def _push(self, cells: Array, priorities: Array) -> None:
        self.priorities[cells] = priorities
        stamps = range(self._count, self._count + len(cells))
        self._stamp[cells] = stamps
        self._count = stamps.stop
        for entry in zip((self._sign * priorities).tolist(), stamps, cells.tolist(), strict=True):
            heapq.heappush(self._heap, entry)
        if len(self._heap) > 64 + 4 * self._table.size:
            self._heap = [entry for entry in self._heap if self._stamp[entry[2]] == entry[1]]
            heapq.heapify(self._heap)

    def select(self, n: int, rng: np.random.Generator) -> tuple[Array, Array]:
        found = self._popped(n)
        for entry in found:
            heapq.heappush(self._heap, entry)
        return np.array([cell for _, _, cell in found], np.int64), np.ones(len(found))

    def displaced(self, n: int, rng: np.random.Generator) -> Array:
        # Every popped item is evicted. Further new items have the same priority as the newest item and rank directly
        # after it.
        found = self._popped(n, self._count - 1)
        cells = np.array([cell for _, _, cell in found], np.int64)
        return np.resize(cells, n) if found[-1][1] == self._count - 1 else cells

    def _popped(self, n: int, last: int = -1) -> list[tuple[float, int, int]]:
        """Return the next `n` entries of the heap, or the entries up to the stamp `last`."""
        found: list[tuple[float, int, int]] = []
        heap, stamp = self._heap, self._stamp
        while heap and len(found) < n:
            entry = heapq.heappop(heap)
            if stamp[entry[2]] == entry[1]:
                found.append(entry)
                if entry[1] == last:
                    break
        return found

    def state(self) -> Mapping[str, Array]:
        cells = np.flatnonzero(self._stamp >= 0)
        order = np.lexsort((self._stamp[cells], self._sign * self.priorities[cells]))
        return {"cells": cells[order], "stamp": self._stamp, "of": self.priorities}

    def restore(self, state: Mapping[str, Array]) -> None:
        check_like(state, self.state())
        items, stamp = np.flatnonzero(self._table.keys >= 0), state["stamp"]
        require(np.array_equal(np.sort(state["cells"]), items), "cells does not name every item once")
        require(np.array_equal(np.flatnonzero(stamp != -1), items), "stamp and the items do not agree")
        in_range = ((stamp >= -1) & (stamp <= 2**62)).all()
        require(in_range and len(np.unique(stamp[items])) == len(items), "stamp does not give each item its own number")
        check_finite("of", state["of"])
        require((state["of"] >= 0).all(), "of has a negative priority")
        self._stamp[:], self.priorities[:] = stamp, state["of"]
        cells = state["cells"].tolist()
        self._heap = [(self._sign * float(self.priorities[c]), int(self._stamp[c]), c) for c in cells]
        self._count = int(self._stamp.max(initial=-1)) + 1
        heapq.heapify(self._heap)
