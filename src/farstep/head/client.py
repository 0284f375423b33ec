"""The callbacks that a `Server` needs from its client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from farstep.core import Received
from farstep.errors import WorkerError
from farstep.head.members.worker_records import WorkerRecord
from farstep.head.tickets.records import IssuedTicket
from farstep.wire import messages as m


class Client(Protocol):
    """The owner of a server: builds ticket messages and handles messages from workers."""

    def make_ticket(self, issued: IssuedTicket) -> tuple[m.Ticket, Sequence[Any]]:
        """Return the message for an issued ticket, and its further frames."""
        ...

    def on_message(self, record: WorkerRecord, message: m.FromWorker, received: Received) -> None:
        """Handle a valid message from a ready worker; raise `WireError` to replace the worker."""
        ...

    def on_error(self, record: WorkerRecord, failure: m.Failure, error: WorkerError) -> None:
        """Handle an exception that a request of the client (agent, call, step) caused on a worker. The worker still
        runs."""
        ...

    def on_parked(self, record: WorkerRecord) -> None:
        """Handle that the process of a worker was suspended. It has no tickets."""
        ...

    def on_lost(self, record: WorkerRecord) -> None:
        """Handle the loss of a worker. It will not answer the messages that were sent to it."""
        ...

    def version(self) -> int:
        """The current version of the policy."""
        ...
