"""Sends messages to workers, and announcements also to workers that become ready later."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from farstep.errors import typed_shortage
from farstep.head.members import membership
from farstep.head.members.supervisor import Supervisor
from farstep.head.members.worker_records import WorkerRecord
from farstep.rollout.progress import CANCEL
from farstep.wire import messages as m


class Outbox:
    """The messages from the head to all workers of a run. Callers must hold the event loop's lock.

    Args:
        records: All workers and acting servers.
        supervisor: Lets a released worker continue, and restarts a worker that cannot be sent a message.
        shares_memory: Whether workers share memory with the head, so that they can receive file descriptors.
    """

    def __init__(self, records: Sequence[WorkerRecord], supervisor: Supervisor, shares_memory: bool) -> None:
        self._records, self._supervisor, self._shares_memory = records, supervisor, shares_memory
        self.base_sent = 0
        """Bytes of bases that were sent: to every worker, or once if workers share memory with the head."""
        self._announcements: list[tuple[int, m.FromHead, Sequence[Any], Sequence[int]]] = []
        """What a worker gets before its first ticket (agent, parameters, layout): numbers in the order of announcement,
        messages, frames and descriptors."""
        self._num_announced = 0
        self.before_parameters: Callable[[], None] = lambda: None
        """Called before `Parameters` are sent to a worker or an acting server."""
        self.is_served = any(record.is_server for record in records)
        """Whether acting servers act for workers."""

    def send(
        self, record: WorkerRecord, message: m.FromHead, frames: Sequence[Any] = (), fds: Sequence[int] = ()
    ) -> int:
        """Send a message to one worker and return its size in bytes; 0 if it could not be sent.

        A released worker is resumed. `Newest` and `Probe` do not resume it; it reads them before its next ticket.
        """
        if record.link is None:
            return 0
        if not isinstance(message, (m.Newest, m.Probe)):
            self._supervisor.act_on(membership.Acquire(record.worker))
        asks = isinstance(message, (m.SendAgent, m.Call, m.ReturnTickets)) and not record.is_server
        record.owes_reply = record.owes_reply or asks
        encoded = [m.encode(message), *frames]
        try:
            with typed_shortage(f"{record.role} {record.worker} could not be sent a message"):
                record.link.send(encoded, fds if self._shares_memory else ())
        except OSError as error:
            self._supervisor.send_failed(record, error)
            return 0
        nbytes = sum(memoryview(frame).nbytes for frame in encoded)
        if isinstance(message, m.SendBase):
            self.base_sent += nbytes
        return nbytes

    def send_cancel(self, upto: int) -> None:
        """Cancel all tickets up to this id on all workers. Acting servers then stop waiting for their chunks."""
        for record in self._records:
            if record.link is not None:
                record.words[CANCEL] = upto
                if not self._supervisor.membership.is_suspended(record.worker):
                    self.send(record, m.Cancel(upto))

    def send_stop(self) -> None:
        """Cancel all tickets, and tell all workers to stop."""
        for record in self._records:
            if record.link is not None:
                record.words[CANCEL] = 2**62
                with contextlib.suppress(OSError):
                    record.link.send([m.encode(m.Stop())])

    def announce(self, message: m.FromHead, frames: Sequence[Any] = (), fds: Sequence[int] = ()) -> None:
        """Send a message to all ready workers now, and to other workers when they become ready or are unparked.

        The message replaces an earlier announcement of the same type.
        """
        self.retract(type(message))
        self._num_announced += 1
        self._announcements.append((self._num_announced, message, frames, fds))
        for record in self._records:
            if record.ready:
                self.send_announcements(record)

    def send_announcements(self, record: WorkerRecord) -> None:
        """Send the announcements that a worker did not get yet."""
        for number, message, frames, fds in self._announcements:
            if number > record.announced:
                record.announced = number
                if self.is_served and not record.is_server:  # the agent and its weights go to the acting servers only
                    if isinstance(message, (m.SendBase, m.Parameters)):
                        continue
                    frames = [b""] if isinstance(message, m.SendAgent) else frames
                if isinstance(message, m.Parameters):
                    self.before_parameters()
                if not record.is_server or not isinstance(message, m.SetLayout):
                    self.send(record, message, frames, fds)

    def retract(self, *kinds: type) -> None:
        """Stop sending announcements of these types to workers that become ready."""
        self._announcements = [entry for entry in self._announcements if not isinstance(entry[1], kinds)]
