"""Tracks running and complete episodes in the columns of a store, for samplers of whole episodes."""

from __future__ import annotations

import numpy as np

from farstep.buffer.storage.store import Store
from farstep.core import Array


class Episodes:
    """Stores where the running episode of each column began, and finds the episodes that an insertion completes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.begun: Array = np.full(store.num_slots, -1, np.int64)
        """For each slot, the key of the first row of the running episode; -1 if no episode is running, or if the
        first row is unknown."""

    def completed(self, keys: Array, columns: slice, continues: Array | None) -> Array:
        """Update the running episodes after an insertion, and find the episodes that it completed.

        Args:
            keys: Keys `[T, n]` of the inserted rows.
            columns: Their columns.
            continues: For each column, whether the first inserted row follows the previous newest row; None: all do.

        Returns:
            The cell (index in the store) of the first row of each completed episode whose rows are all stored.
        """
        store = self._store
        cells, begun = keys % store.table.cells, self.begun[columns]
        if continues is not None:
            begun = np.where(continues, begun, -1)
        starts, ends = store.flat.get("episode_start"), store.ended(cells)
        if starts is not None:
            begins = starts[cells].astype(bool)
        else:  # an episode starts after each end
            assert ends is not None
            begins = np.vstack([begun < 0, ends[:-1]])
        whole = []
        if ends is None:  # the row before a start is an end, and a start in the first row ends the running episode
            ends = np.vstack([begins[1:], np.zeros_like(begins[:1])])
            whole.append(begun[begins[0]])
        # Prepend a row for the episode that was already running. An end completes the episode that began at the latest
        # start, which may be in the same row. If another end lies between them, the start is unknown.
        begins, all_keys = np.vstack([begun >= 0, begins]), np.vstack([begun, keys])
        ends = np.vstack([np.zeros_like(begins[:1]), ends])
        at = np.arange(len(begins))[:, None]
        start = np.maximum.accumulate(np.where(begins, at, -1))
        ended = np.maximum.accumulate(np.where(ends, at, -1))
        before = np.vstack([np.full_like(ended[:1], -1), ended[:-1]])
        t, k = np.nonzero(ends & (start > before))
        whole.append(all_keys[start[t, k], k])
        is_running = start[-1] > ended[-1]
        self.begun[columns] = np.where(is_running, np.take_along_axis(all_keys, start[-1:], 0)[0], -1)
        # The first row of a long episode may already be overwritten.
        return store.table.find(np.concatenate(whole))
