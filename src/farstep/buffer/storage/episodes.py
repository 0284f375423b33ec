"""Episodes: which are under way in the columns of a store, and which are complete, for samplers of whole ones."""

from __future__ import annotations

import numpy as np

from farstep.buffer.storage.store import Store
from farstep.core import Array


class Episodes:
    """The first rows of the episodes under way."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.begun: Array = np.full(store.columns, -1, np.int64)
        """Per column, the key of the row that the episode under way began with; -1 where nobody knows."""

    def completed(self, keys: Array, columns: slice, continues: Array | None) -> Array:
        """Rows with these keys `[T, n]` were put into columns: the first cells of episodes that ended with one of them.

        Only whole episodes count. `continues`: per column, the first row follows the newest one.
        """
        store = self._store
        cells, begun = keys % store.table.cells, self.begun[columns]
        if continues is not None:
            begun = np.where(continues, begun, -1)
        starts, ends = store.flat.get("episode_start"), store.ended(cells)
        if starts is not None:
            begins = starts[cells].astype(bool)
        else:  # whatever follows an end
            assert ends is not None
            begins = np.vstack([begun < 0, ends[:-1]])
        whole = []
        if ends is None:  # an episode ended before each start
            ends = np.vstack([begins[1:], np.zeros_like(begins[:1])])
            whole.append(begun[begins[0]])
        # Row 0 stands for what was there before; an end belongs to the newest start, unless that has ended before.
        begins, all_keys = np.vstack([begun >= 0, begins]), np.vstack([begun, keys])
        ends = np.vstack([np.zeros_like(begins[:1]), ends])
        at = np.arange(len(begins))[:, None]
        start = np.maximum.accumulate(np.where(begins, at, -1))
        ended = np.maximum.accumulate(np.where(ends, at, -1))
        before = np.vstack([np.full_like(ended[:1], -1), ended[:-1]])
        t, k = np.nonzero(ends & (start > before))
        whole.append(all_keys[start[t, k], k])
        under_way = start[-1] > ended[-1]
        self.begun[columns] = np.where(under_way, np.take_along_axis(all_keys, start[-1:], 0)[0], -1)
        # Of an episode longer than the buffer, or than what came after it, the first row is gone again.
        return store.table.find(np.concatenate(whole))
