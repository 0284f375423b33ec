"""Why a call is not replayed, or an operation not written as NumPy.

Exception
├── Untraceable   the whole call stays eager; shown to the user
└── Unsupported   one operation is left to torch; seen by nobody
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from farstep.errors import described


class Untraceable(Exception):
    """Why a function cannot be replayed: one clause, shown to the user after 'eager inference: '."""


class Unsupported(Exception):
    """This operation, with these arguments, is left to torch."""


@contextmanager
def untraceable_if_failing(what: str) -> Iterator[None]:
    """Take an error where eager calls had none as a reason to stay eager."""
    try:
        yield
    except Untraceable:
        raise
    except Exception as error:
        reason = described(error).strip().partition("\n")[0]
        raise Untraceable(f"{what} fails with {reason}") from error
