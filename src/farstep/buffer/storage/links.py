"""A doubly linked list of rows. It keeps the order of rows although free cells are reused in any order.

A ring needs no links, because the next row is in the next cell. When a row that is not the oldest is first removed, the
store switches to links. A row whose item was removed is kept while the sequence of an earlier item includes it.
"""

from __future__ import annotations

import numpy as np

from farstep.buffer.storage.table import Table
from farstep.checkpoint.checks import require
from farstep.core import Array


class Links:
    """For each cell of a table, the cells of the previous and the next row; `cut` marks rows without a next row."""

    def __init__(self, table: Table, cut: Array) -> None:
        self._table, self._cut = table, cut
        self.after: Array = np.arange(table.cells)
        """For each cell, the cell of the next row; the cell itself if its row is cut."""
        self.before: Array = np.arange(table.cells)
        """For each cell, the cell of the previous row; the cell itself if its row follows no other."""

    def join(self, cells: Array, after: Array) -> None:
        """Link the rows of `after` as the next rows of the rows of `cells`."""
        self.after[cells], self.before[after] = after, cells
        self._cut[cells] = False

    def release(self, cells: Array) -> None:
        """Remove rows from the list, and cut the rows before them."""
        before, after = self.before[cells], self.after[cells]
        self.after[before], self.before[after] = before, after
        self._cut[before] = True
        self.after[cells] = self.before[cells] = cells
        self._cut[cells] = True

    def rows_after(self) -> Array:
        """Return for each cell the number of rows after it up to and including the next cut row."""
        at, count = self.after, (~self._cut).astype(np.int32)
        while not self._cut[at].all():
            count = count + count[at]
            at = at[at]
        return count

    def ahead(self, steps: Array) -> Array:
        """Return for each cell the cell `steps` rows later."""
        cells = np.arange(self._table.cells)
        for step in range(int(steps.max(initial=0))):
            cells = np.where(step < steps, self.after[cells], cells)
        return cells

    def rows_kept_for(self, items: Array) -> Array:
        """Return for each of these items the number of rows without an item directly after it."""
        counts, places, at = np.zeros(len(items), np.int64), np.arange(len(items)), items
        while len(places):
            at, places = self._next_without_item(at, places)
            counts[places] += 1
        return counts

    def unneeded_after(self, removed: Array, span: int) -> Array:
        """Find the rows that no item needs after a removal.

        Args:
            removed: Cells whose items were removed.
            span: Number of rows that each item needs, its own row included.

        Returns:
            The cells of these rows, in ascending order.
        """
        is_removed = np.zeros(self._table.cells, bool)
        is_removed[removed] = True
        at, is_short = removed, span < len(removed)
        if not is_short:  # start at the first row of each run of removed rows, and walk through the run
            before = self.before[removed]
            at = removed[(before == removed) | ~is_removed[before]]
        found, since = [], self._distance_to_item(at, span)
        while len(at):
            found.append(at[since >= span])
            at, since = self._next_without_item(at, since + 1)
            if is_short:
                at, since = at[~is_removed[at]], since[~is_removed[at]]
        return np.unique(np.concatenate(found)) if len(found) > 1 else found[0]

    def unneeded(self, span: int) -> Array:
        """Return, in ascending order, all cells without an item whose row no other item needs."""
        is_free = self._table.keys < 0
        at = np.flatnonzero(~is_free)
        for _ in range(1, span):
            at, _ = self._next_without_item(at, at)
            if not len(at):
                break
            is_free[at] = False
        return np.flatnonzero(is_free)

    def _next_without_item(self, cells: Array, values: Array) -> tuple[Array, Array]:
        """Return the next rows of `cells` that exist and have no item, and the matching entries of `values`."""
        after = self.after[cells]
        more = (after != cells) & (self._table.keys[after] < 0)
        return after[more], values[more]

    def _distance_to_item(self, cells: Array, span: int) -> Array:
        """Return for each cell the number of rows back to the nearest item, at most `span`."""
        since, places, at = np.full(len(cells), span), np.arange(len(cells)), cells
        for distance in range(1, span):
            before = self.before[at]
            moved = before != at
            places, at = places[moved], before[moved]
            has_item = self._table.keys[at] >= 0
            since[places[has_item]] = distance
            places, at = places[~has_item], at[~has_item]
            if not len(places):
                break
        return since

    def restore(self, after: Array) -> None:
        """Restore the links of a checkpoint. `cut` must already be restored.

        Raises:
            Refused: `after` has invalid links, or does not agree with `cut`.
        """
        cells = np.arange(self._table.cells)
        require(((after >= 0) & (after < len(cells))).all(), "after names a cell that does not exist")
        require(np.array_equal(after == cells, self._cut), "after and cut do not agree")
        linked = np.flatnonzero(~self._cut)
        require(len(np.unique(after[linked])) == len(linked), "after has the same next row for two rows")
        at = after
        for _ in range(len(cells).bit_length()):
            at = at[at]
        require(self._cut[at].all(), "after has a cycle")
        self.join(linked, after[linked])
