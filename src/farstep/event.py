"""Events of a run: what happened, when and where. `head/events.py` emits them."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from farstep.errors import ConfigError, unknown_name

EventKind = Literal[
    "joined",
    "lost",
    "restarted",
    "stuck",
    "parked",
    "scaled",
    "requeued",
    "resubmitted",
    "announced",
    "checkpointed",
    "loaded",
    "evaluated",
    "warned",
]
EVENT_KINDS: tuple[EventKind, ...] = get_args(EventKind)
RUN_FAILED, RUN_STOPPING, RUN_RESUMED = "the run failed: ", ": stopping after this update", "resumed from checkpoint "
"""Parts of texts by which the page of a run folder finds out how a run ended; a signal's name precedes the second."""


def check_kind(kind: EventKind) -> None:
    """Raise `ConfigError` if a kind is unknown."""
    if kind not in EVENT_KINDS:
        raise ConfigError(unknown_name("kind of event", str(kind), EVENT_KINDS))


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run.

    Attributes:
        time: Unix time in seconds; times strictly increase within a run.
        kind: What happened: `joined`, `lost`, `restarted`, `stuck`, `parked`, `scaled`, `requeued`, `resubmitted`,
            `announced`, `checkpointed`, `loaded`, `evaluated` or `warned`.
        text: The event in one sentence, as logged.
        worker: Index of the worker; None if the event concerns no worker, or several.
        node: Name of the host; empty if the event concerns no host.
        traceback: For a failure, the traceback, the stacks or the last output of the process that failed; otherwise
            empty.
    """

    time: float
    kind: EventKind
    text: str
    worker: int | None = None
    node: str = ""
    traceback: str = ""


class Emit(Protocol):
    """Records an event. It never raises, and may be called from any thread."""

    def __call__(
        self, kind: EventKind, text: str, *, worker: int | None = None, node: str = "", traceback: str = ""
    ) -> None: ...


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an exception of this process, for `Event.traceback`."""
    return "".join(traceback.format_exception(error))
