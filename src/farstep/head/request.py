"""What the current call on a `ClusterEnv` requests from the workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from farstep.head.chunks.incoming_chunks import EarlyPart
from farstep.head.members.worker_records import ResetRequest
from farstep.head.tickets.records import FeedPlan

OnPart = Callable[[EarlyPart], None]
"""Called for each complete stage of each worker's chunk, in the thread that runs the event loop. It must neither block
nor raise."""


@dataclass(frozen=True)
class Request:
    """One call of `collect`, `step`, `reset`, `parts` or `stream`, or one feed of a workflow."""

    steps: int = 0
    """Rows per chunk; 0 for a reset."""
    num_chunks: int | None = None
    """Chunks in a batch, in order of arrival; None: `rollouts` chunks of every worker."""
    rollouts: int = 1
    """Chunks per worker in a batch, if `num_chunks` is None."""
    infos: bool = False
    """Whether chunks carry the environments' infos."""
    reset: ResetRequest | None = None
    incarnations: tuple[int, ...] = ()
    """Incarnation of each worker when the request was made."""
    parked: frozenset[int] = frozenset()
    """Workers that were parked, or about to be, when the request was made."""
    on_part: OnPart | None = None
    feed: FeedPlan | None = None
    """Set if a workflow takes chunks one by one."""
