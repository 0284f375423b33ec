"""Inserts rows and batches into the arrays of a buffer, as fast as the limiter allows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import ArrayLike

from farstep.batch import Batch
from farstep.buffer.bound_arrays import BoundArrays, internals_of
from farstep.buffer.gate import check_timeout
from farstep.buffer.storage.contents import Contents
from farstep.buffer.storage.rows import arrays_of, as_arrays, count_plain, schema_of
from farstep.core import Array
from farstep.errors import ConfigError


class Inserter:
    """Inserts into one buffer. The first rows define the arrays of a buffer that has none."""

    def __init__(self, buffer: BoundArrays) -> None:
        self._buffer, self._internals = buffer, internals_of(buffer)
        self._gate = self._internals.gate

    def insert(self, rows: Mapping[str, ArrayLike] | Batch, timeout_s: float | None) -> Array:
        """Insert rows, waiting for the limiter; see `Buffer.insert`."""
        buffer = self._buffer
        if buffer.is_bound and (contents := self._internals.contents).is_plain:
            store = contents.store
            count = count_plain(rows, store.kinds)
            with self._gate.lock:
                if 0 < count <= store.rows and buffer.limiter.has_room(count) and not self._gate.is_closed:
                    keys, evicted = contents.put_rows(rows, count)  # type: ignore[arg-type]  # checked by count_plain
                    self._internals.count_inserted(count, evicted)
                    return keys
        check_timeout(timeout_s)
        if isinstance(rows, Batch):
            return self._insert_batch(rows, timeout_s)
        return self._insert_rows(self._checked(rows), timeout_s)

    def _insert_rows(self, values: Mapping[str, Array], timeout_s: float | None) -> Array:
        """Insert rows `[n, ...]`, a few at a time if the limiter requires it."""
        buffer, total = self._buffer, len(next(iter(values.values())))
        found: list[Array] = []
        done = 0
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while done < total:
            with self._gate.lock:
                if not (count := buffer.limiter.room(total - done)):
                    left = None if deadline is None else deadline - time.monotonic()
                    self._wait(buffer.limiter.can_insert, left, f"{done} of {total} rows were inserted")
                    continue
                contents = self._internals.contents
                count = min(count, contents.store.rows)
                found.append(self._put(contents, {name: value[done : done + count] for name, value in values.items()}))
                done += count
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _checked(self, rows: Mapping[str, ArrayLike]) -> dict[str, Array]:
        """Return rows as arrays that match the schema. The first rows define the schema."""
        values, buffer = as_arrays(rows), self._buffer
        with self._gate.lock:
            if not (buffer.is_bound or self._gate.is_closed):
                buffer.bind(schema_of(values))
        self._internals.contents.check(values)
        return values

    def _put(self, contents: Contents, values: Mapping[str, Array]) -> Array:
        """Store rows `[n, ...]` that the limiter has admitted, and return their keys."""
        if contents.is_cyclic:
            keys, inserted, evicted = contents.put({name: value[:, None] for name, value in values.items()})
        else:
            keys, inserted, evicted = contents.put_anywhere(values, len(next(iter(values.values()))))
        self._internals.count_inserted(inserted, evicted)
        return keys.reshape(-1)

    def _insert_batch(self, batch: Batch, timeout_s: float | None) -> Array:
        buffer, limiter = self._buffer, self._buffer.limiter
        with self._gate.lock:
            if not (buffer.is_bound or self._gate.is_closed):
                # Unordered rows have no next row, so each row stores its next observation.
                schema = schema_of(arrays_of(batch, with_next=not buffer.is_cyclic), leading=2)
                buffer.bind(schema, int(batch.slots.max()) + 1 if buffer.is_cyclic else 1, batch.structures)
        contents = self._internals.contents
        store, values = contents.store, contents.rows_of(batch)
        if not buffer.is_cyclic:
            return self.insert({n: values[n].reshape(-1, *spec.shape) for n, spec in store.schema.items()}, timeout_s)
        steps, width = batch.shape
        if limiter.never_inserts(steps * width):
            raise ConfigError(
                f"this limiter ({limiter}) can never admit a batch of {steps * width} rows at once. Raise its "
                "max_diff or insert smaller batches."
            )
        contents.warn_if_shared(batch)
        with self._gate.lock:
            self._wait(lambda: limiter.can_insert(steps * width), timeout_s, "no row was inserted")
            keys, inserted, evicted = contents.put_batch(batch, values)
            self._internals.count_inserted(inserted, evicted)
            return keys.reshape(-1)

    def _wait(self, ready: Callable[[], bool], timeout_s: float | None, progress: str) -> None:
        """Wait until `ready()` is True; `progress` says in an error message what was done so far."""
        buffer = self._buffer

        def explain(is_deadlock: bool) -> str:
            return (
                f"{progress}, and the buffer holds {len(buffer)} items ({buffer.limiter}). Keep sampling, or widen the "
                "limiter with buffer.limit(...)."
            )

        self._gate.wait("insert", ready, timeout_s, explain)
