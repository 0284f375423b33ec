"""Links between rows that follow each other in cells of any order, so that a cell is reused as soon as it is free.

A ring of cells needs none: there a row is followed by the next cell. After the first removal of a row that is not the
oldest, a store keeps links instead. A row whose item was removed stays while an item before it needs it: a sequence
that begins earlier goes on through it.
"""

from __future__ import annotations

import numpy as np

from farstep.buffer.checking import require
from farstep.buffer.table import Table
from farstep.core import Array


class Links:
    """Per cell of a table, the cells of the rows before and after it; `cut` says after which rows nothing follows."""

    def __init__(self, table: Table, cut: Array) -> None:
        self._table, self._cut = table, cut
        self.after: Array = np.arange(table.cells)
        """The cell of the row that follows; the cell itself if the row is cut."""
        self._before: Array = np.arange(table.cells)

    def join(self, cells: Array, after: Array) -> None:
        """The rows of `after` follow those of `cells`."""
        self.after[cells], self._before[after] = after, cells
        self._cut[cells] = False

    def release(self, cells: Array) -> None:
        """These rows are gone."""
        before, after = self._before[cells], self.after[cells]
        self.after[before], self._before[after] = before, after
        self._cut[before] = True
        self.after[cells] = self._before[cells] = cells
        self._cut[cells] = True

    def rows_after(self) -> Array:
        """For each cell, how many rows follow it before one that is cut, that one included."""
        at, count = self.after, (~self._cut).astype(np.int32)
        while not self._cut[at].all():
            count = count + count[at]
            at = at[at]
        return count

    def ahead(self, steps: Array) -> Array:
        """For each cell, the one that many rows on."""
        cells = np.arange(self._table.cells)
        for step in range(int(steps.max(initial=0))):
            cells = np.where(step < steps, self.after[cells], cells)
        return cells

    def rows_kept_for(self, items: Array) -> Array:
        """How many rows without an item of their own directly follow each of these items."""
        counts, places, at = np.zeros(len(items), np.int64), np.arange(len(items)), items
        while len(places):
            at, places = self._next_without_item(at, places)
            counts[places] += 1
        return counts

    def unneeded_after(self, removed: Array, span: int) -> Array:
        """Rows that nothing needs any more, now that the items of these cells are removed; each item needs `span` rows
        from its own on."""
        is_removed = np.zeros(self._table.cells, bool)
        is_removed[removed] = True
        at, is_short = removed, span < len(removed)
        if not is_short:  # look back only from the first of a run of removed rows, and go through all of it
            before = self._before[removed]
            at = removed[(before == removed) | ~is_removed[before]]
        found, since = [], self._since_item(at, span)
        while len(at):
            found.append(at[since >= span])
            at, since = self._next_without_item(at, since + 1)
            if is_short:
                at, since = at[~is_removed[at]], since[~is_removed[at]]
        return np.unique(np.concatenate(found)) if len(found) > 1 else found[0]

    def unneeded(self, span: int) -> Array:
        """All cells without an item whose row is needed by no item either."""
        is_free = self._table.keys < 0
        at = np.flatnonzero(~is_free)
        for _ in range(1, span):
            at, _ = self._next_without_item(at, at)
            if not len(at):
                break
            is_free[at] = False
        return np.flatnonzero(is_free)

    def _next_without_item(self, cells: Array, values: Array) -> tuple[Array, Array]:
        """The rows after these, and the entries of `values` for them, if there are any and they have no item."""
        after = self.after[cells]
        more = (after != cells) & (self._table.keys[after] < 0)
        return after[more], values[more]

    def _since_item(self, cells: Array, span: int) -> Array:
        """How many rows before each the nearest item is, at most `span`."""
        since, places, at = np.full(len(cells), span), np.arange(len(cells)), cells
        for distance in range(1, span):
            before = self._before[at]
            moved = before != at
            places, at = places[moved], before[moved]
            has_item = self._table.keys[at] >= 0
            since[places[has_item]] = distance
            places, at = places[~has_item], at[~has_item]
            if not len(places):
                break
        return since

    def restore(self, after: Array) -> None:
        """Apply the links of a checkpoint to a store whose `cut` is restored."""
        cells = np.arange(self._table.cells)
        require(((after >= 0) & (after < len(cells))).all(), "after has a cell that there is not")
        require(np.array_equal(after == cells, self._cut), "after and cut do not agree")
        linked = np.flatnonzero(~self._cut)
        require(len(np.unique(after[linked])) == len(linked), "after lets two rows be followed by the same one")
        at = after
        for _ in range(len(cells).bit_length()):
            at = at[at]
        require(self._cut[at].all(), "after leads around in a circle")
        self.join(linked, after[linked])
