"""Something asked of every worker at once, outside of tickets, and what they answered."""

from __future__ import annotations

from typing import Any

import cloudpickle

from farstep.core import Received
from farstep.errors import WireError, WorkerError
from farstep.head.server import Server
from farstep.head.worker_records import Seat
from farstep.wire import messages as m
from farstep.wire.codec import unpack


class Calls:
    """One call at a time.

    Args:
        server: the workers.
        without_lost: Whether a call returns None for a lost worker; otherwise it waits until the loss ends the run and
            raises that failure.
    """

    def __init__(self, server: Server, *, without_lost: bool) -> None:
        self._server, self._without_lost = server, without_lost
        self._answers: dict[int, Any] = {}
        self._request = 0

    def call(self, name: str, *arguments: tuple[Any, ...]) -> list[Any]:
        """Return each worker's result, in order; `arguments` is one tuple for all workers, or one per worker."""
        server = self._server
        parts = arguments if len(arguments) == len(server.seats) else arguments * len(server.seats)
        with server.locked():
            server.raise_failure()
            self._answers = {}
            self._request += 1
            for seat, args in zip(server.seats, parts, strict=True):
                if seat.ready:
                    server.send(seat, m.Call(self._request, name), [cloudpickle.dumps((args, {}))])
                else:
                    self.lost(seat)
        server.wait(lambda: True if len(self._answers) >= len(server.seats) else None)
        for answer in self._answers.values():
            if isinstance(answer, WorkerError):
                raise answer
        return [self._answers[worker] for worker in sorted(self._answers)]

    def replied(self, seat: Seat, reply: m.Reply, received: Received) -> None:
        if reply.request > self._request:
            raise WireError(f"a reply to call {reply.request}; the current call is {self._request}.")
        if reply.request != self._request:
            return
        if seat.worker in self._answers:
            raise WireError(f"a second reply to call {reply.request}.")
        self._answers[seat.worker] = unpack(received.frames[1])

    def failed(self, seat: Seat, failure: m.Failure, error: WorkerError) -> None:
        if failure.request == self._request:
            self._answers[seat.worker] = error

    def lost(self, seat: Seat) -> None:
        if self._without_lost:
            self._answers.setdefault(seat.worker, None)
