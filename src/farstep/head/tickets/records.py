"""Records of tickets: an issued ticket, an accepted chunk, and the plan by which a workflow consumes chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

DropCause = Literal["stale", "cancelled", "worker_lost", "worker_left", "environment_failed"]
"""Why a ticket or a chunk is dropped; `ClusterEnv.stats` counts them by cause."""


@dataclass(frozen=True)
class IssuedTicket:
    """Permission for one worker to roll one chunk into one lane."""

    seq: int
    """The ticket's id; later tickets have larger ones."""
    worker: int
    round: int
    """Index of its round; -1 in a session without rounds."""
    lane: int
    min_version: int
    """Oldest version that the worker may act with."""


@dataclass(frozen=True)
class AcceptedChunk:
    """A complete chunk that arrived from the worker that held its ticket."""

    ticket: IssuedTicket
    version: int
    """The version that its staleness is counted from."""
    info: Any
    """What the client stores with it; a `ChunkInfo` for a `Collector`."""


@dataclass(frozen=True)
class FeedPlan:
    """How many chunks a workflow consumes at a time, and how far workers may run ahead of it."""

    max_staleness: int | None = None
    """Versions that a row may be behind when it is consumed; None: unlimited."""
    actors: int | None = 1
    """Number of workers whose windows form a batch; None: all present workers."""
    chunks: int = 1
    """Chunks per window."""
    invited: Mapping[int, int] | None = None
    """Per worker, chunks that it may roll before the next `invite`; None: workers roll without invitation."""
