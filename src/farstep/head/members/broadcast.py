"""Calls a function on all workers at once, outside of tickets, and collects their answers."""

from __future__ import annotations

from typing import Any

import cloudpickle

from farstep.core import Received
from farstep.errors import WireError, WorkerError
from farstep.head.members.worker_records import WorkerRecord
from farstep.head.server import Server
from farstep.wire import messages as m
from farstep.wire.codec import unpack


class Broadcast:
    """Calls on all workers, one call at a time.

    Args:
        server: The workers.
        without_lost: True: a call returns None for a lost worker. False: a call waits until the loss ends the run, then
            raises the error of the run.
    """

    def __init__(self, server: Server, *, without_lost: bool) -> None:
        self._server, self._without_lost = server, without_lost
        self._answers: dict[int, Any] = {}
        self._request = 0

    def call(self, name: str, *arguments: tuple[Any, ...] | None) -> list[Any]:
        """Return each worker's result, in order. Parked workers run for the duration of the call.

        Args:
            name: The function.
            arguments: One tuple for all workers, or one per worker; None for a worker that is not called and whose
                result is None.
        """
        with self._server.slots.all_unparked():
            return self._call(name, *arguments)

    def _call(self, name: str, *arguments: tuple[Any, ...] | None) -> list[Any]:
        server = self._server
        parts = arguments if len(arguments) == len(server.records) else arguments * len(server.records)
        with server.locked():
            server.raise_failure()
            self._answers = {}
            self._request += 1
            for record, args in zip(server.records, parts, strict=True):
                if args is None:
                    self._answers[record.worker] = None
                elif record.ready:
                    server.outbox.send(record, m.Call(self._request, name), [cloudpickle.dumps((args, {}))])
                else:
                    self.lost(record)
        server.wait(lambda: True if len(self._answers) >= len(server.records) else None)
        for answer in self._answers.values():
            if isinstance(answer, WorkerError):
                raise answer
        return [self._answers[worker] for worker in sorted(self._answers)]

    def replied(self, record: WorkerRecord, reply: m.Reply, received: Received) -> None:
        """Store a worker's answer. Ignore answers to earlier calls."""
        if reply.request > self._request:
            raise WireError(f"a reply to call {reply.request}; the latest call is {self._request}.")
        if reply.request != self._request:
            return
        if record.worker in self._answers:
            raise WireError(f"a second reply to call {reply.request}.")
        self._answers[record.worker] = unpack(received.frames[1])

    def failed(self, record: WorkerRecord, failure: m.Failure, error: WorkerError) -> None:
        """Make the current call raise the error if the failure belongs to this call."""
        if failure.request == self._request:
            self._answers[record.worker] = error

    def lost(self, record: WorkerRecord) -> None:
        """Stop waiting for a lost worker, if calls tolerate its loss."""
        if self._without_lost:
            self._answers.setdefault(record.worker, None)
