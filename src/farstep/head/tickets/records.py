"""What tickets are about: a ticket that was issued, a chunk that was accepted, and what a workflow consumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class IssuedTicket:
    """Permission for one worker to roll one chunk into one lane."""

    seq: int
    """The ticket's id; later tickets have larger ones."""
    worker: int
    batch: int
    """Index of its round; -1 in a session without rounds."""
    lane: int
    min_version: int
    """Oldest version that the worker may act with."""


@dataclass(frozen=True)
class AcceptedChunk:
    """A chunk that arrived whole from the worker that held its ticket."""

    ticket: IssuedTicket
    version: int
    """The version that its staleness is counted from."""
    info: Any
    """What the client stores with it; a `ChunkInfo` for a `Collector`."""


@dataclass(frozen=True)
class FeedPlan:
    """What a workflow consumes together, and how far workers may run ahead of it."""

    max_staleness: int | None = None
    """Versions that a row may be behind when it is consumed; None: unlimited."""
    actors: int | None = 1
    """Workers whose windows make a batch; None: all that are present."""
    chunks: int = 1
    """Chunks per window."""
    invited: Mapping[int, int] | None = None
    """Per worker, chunks that it may roll before the next `invite`; None: workers roll without invitation."""
