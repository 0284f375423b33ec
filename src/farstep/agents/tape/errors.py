"""Errors of recording.

Exception
├── Untraceable   the whole call stays eager; shown to the user
└── Unsupported   one operation is left to torch; internal
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from farstep.errors import described


class Untraceable(Exception):
    """A function cannot be replayed. The message is one clause; users see it after 'eager: '."""


class Unsupported(Exception):
    """A lowering does not support an operation with these arguments, so torch runs it."""


@contextmanager
def untraceable_if_failing(what: str) -> Iterator[None]:
    """Context manager: convert errors to `Untraceable`. The eager call did not raise them."""
    try:
        yield
    except Untraceable:
        raise
    except Exception as error:
        reason = described(error).strip().partition("\n")[0]
        raise Untraceable(f"{what} fails with {reason}") from error
