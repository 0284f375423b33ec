"""Records: an issued ticket, an accepted chunk, and the plan of how a workflow consumes chunks."""

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
    """Id of the ticket; ids increase in the order of issue."""
    worker: int
    round: int
    """Index of the ticket's round; -1 in a session without rounds."""
    lane: int
    """Where the chunk is written; -1 if the chunk was copied, so that another chunk can use its lane."""
    min_version: int
    """Oldest version that the worker may act with."""


@dataclass(frozen=True)
class AcceptedChunk:
    """A complete chunk from the worker that held its ticket."""

    ticket: IssuedTicket
    version: int
    """The version from which the staleness of the chunk is counted."""
    info: Any
    """Data that the client stores with the chunk; a `Collector` stores a `ChunkInfo`."""


@dataclass(frozen=True)
class FeedPlan:
    """How many chunks a workflow consumes at a time, and how far workers may run ahead of it."""

    max_staleness: int | None = None
    """Maximum number of versions that a row may be behind when it is consumed; None: unlimited."""
    windows: int | None = 1
    """Number of windows that form a batch; None: one of each present worker."""
    chunks: int = 1
    """Chunks per window."""
    invited: Mapping[int, int] | None = None
    """Number of chunks that each worker may roll before the next `invite`; None: workers need no invitation."""
    per_worker: int = 1
    """Maximum number of windows of one worker in a batch."""
