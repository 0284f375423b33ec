"""The state of a workflow; its loop and its consumers share it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from farstep.buffer.replay import Buffer
from farstep.core import Agent
from farstep.head.collector import Collector
from farstep.head.feed import Feed
from farstep.head.tickets.records import DropCause
from farstep.workflow.rows.retention import RowRetention, windows_of
from farstep.workflow.triggers import DataKeyTrigger
from farstep.workflow.triggers.ledger import Ledger
from farstep.workflow.triggers.messages import Message


class RunState:
    """Counters, retained rows and the source of chunks of a workflow; implements `consumers.Flow`.

    Args:
        agent: The agent that consumers train.
        buffer: The workflow's buffer.
        max_staleness: Maximum age in versions of rows that consumers get; None: any age.
        consuming: The triggers whose messages consume rows; more may be added to this list.
        freed: Called with worker, number of chunks and cause when rows are no longer needed (see `RowRetention`).
    """

    def __init__(
        self,
        agent: Agent,
        buffer: Buffer,
        max_staleness: int | None,
        consuming: Sequence[DataKeyTrigger],
        freed: Callable[[int, int, DropCause | None], None],
    ) -> None:
        self.agent, self.buffer = agent, buffer
        self.ledger = Ledger(now=time.monotonic())
        self.retention = RowRetention(buffer, self.ledger, consuming, freed)
        self.collector: Collector | None = None
        """Set by the first run."""
        self.feed: Feed | None = None
        """The source of chunks; None between runs."""
        self.stopped = False
        """Whether the run is ending, so that no trigger fires."""
        self._max_staleness = max_staleness

    def is_stale(self, message: Message) -> bool:
        """Return whether a message names rows that are more than `max_staleness` versions old."""
        if self._max_staleness is None or self.collector is None:
            return False
        current = self.collector.version()
        oldest = min((span[0] for part in windows_of(message) for span in part["versions"]), default=current)
        return current - oldest > self._max_staleness

    def wake(self) -> None:
        """Make the loop check its triggers now. Any thread may call this."""
        if (feed := self.feed) is not None:
            feed.wake()

    def handling(self) -> AbstractContextManager[None]:
        """Context manager: a consumer thread handles a message; this time counts as the learner's."""
        return nullcontext() if self.collector is None else self.collector.counters.learner.handling()

    def void_lost(self) -> None:
        """Discard the parts of incomplete chunks that were dropped."""
        if self.feed is not None:
            self.retention.partial_chunks.void(self.feed.voided())
