"""The parts of a buffer that users do not see: its lock, its stored rows, and the counting of rows."""

from __future__ import annotations

from collections.abc import Mapping

from farstep.buffer.gate import Gate
from farstep.buffer.limiter import RateLimiter
from farstep.buffer.storage.contents import Contents
from farstep.buffer.storage.store import Store
from farstep.errors import ConfigError
from farstep.schema import Structure


class Internals:
    """State of one buffer, for `Buffer` itself, workflows and learners; `internals_of` returns it.

    Hold `gate.lock` while you access `contents` or `store`, or call a method.

    Args:
        limiter: The limiter that counts the rows.
    """

    def __init__(self, limiter: RateLimiter) -> None:
        self.gate = Gate()
        """The lock of the buffer, and what a workflow tells it."""
        self.structures: Mapping[str, Structure] = {}
        """How arrays of observations and actions are nested, by name."""
        self.allocated: Contents | None = None
        """The stored items; None before the arrays are allocated, and after the buffer was closed."""
        self.removed: dict[str, int] = {"evicted": 0, "sampled": 0, "deleted": 0}
        """Rows removed so far, by cause."""
        self._limiter = limiter

    @property
    def contents(self) -> Contents:
        """The stored items.

        Raises:
            ClosedError: The buffer is closed.
            ConfigError: The buffer has no arrays yet.
        """
        self.gate.check_open()
        if self.allocated is None:
            raise ConfigError("this buffer has no arrays yet: insert rows first, or give it a spec.")
        return self.allocated

    @property
    def store(self) -> Store:
        """The stored rows; raises like `contents`."""
        return self.contents.store

    def count_inserted(self, inserted: int, evicted: int) -> None:
        """Count new rows and the rows that they evicted, and wake waiting threads."""
        self._limiter.insert(inserted)
        if evicted:
            self.count_removed("evicted", evicted)
        self.gate.notify()

    def count_removed(self, cause: str, count: int) -> None:
        """Count removed rows; `cause` is a key of `removed`."""
        self.removed[cause] += count
        self._limiter.delete(count)
