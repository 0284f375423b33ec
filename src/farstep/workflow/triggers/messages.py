"""The messages of triggers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Message = Mapping[str, Any]


class LazyMessage(Mapping[str, Any]):
    """A message that computes the list of all actors' steps only when a consumer reads it.

    Computing this list takes time in proportion to the number of actors, and consumers that sample rarely read it.
    """

    COLUMNS = ("actor_ids", "start", "versions")
    """The entries that are computed on first access."""

    def __init__(self, entries: Message, columns: Callable[[], Message]) -> None:
        """Make a message.

        Args:
            entries: All other entries.
            columns: Returns the entries of `COLUMNS`; every call must return the same entries.
        """
        self._entries, self._columns = entries, columns

    def __getitem__(self, name: str) -> Any:
        return self._columns()[name] if name in self.COLUMNS else self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self.COLUMNS or name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter((*self.COLUMNS, *self._entries))

    def __len__(self) -> int:
        return len(self.COLUMNS) + len(self._entries)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (dict(self),)  # copies and pickles are plain dictionaries with all entries

    def extended(self, **more: object) -> LazyMessage:
        return LazyMessage({**self._entries, **more}, self._columns)


def extended(message: Message, **more: object) -> Message:
    """Return a copy of the message with further entries."""
    return message.extended(**more) if isinstance(message, LazyMessage) else {**message, **more}
