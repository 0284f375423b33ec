"""Reads messages from the head, between tickets and while a ticket runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from farstep.core import BytesLike, Link, Received
from farstep.rollout.progress import CANCEL, COUNT
from farstep.wire import messages as m

_TURN_S = 1.0
"""Seconds between two updates of the progress counter while the worker waits for its turn to send."""


class TicketCancelled(Exception):
    """The running ticket was cancelled, its agent was replaced, or the worker has to stop."""


class Inbox:
    """Reads messages from the link, and defers those that must wait until the running ticket ends.

    While a ticket runs, the worker reacts only to `Cancel`, `Stop`, `Taken`, `UseServer`, `ForgetServer` and the reply
    that it waits for. After the ticket, it handles all other messages in the order of their arrival.
    """

    def __init__(self, link: Link, words: memoryview) -> None:
        self._link, self._words = link, words
        self._deferred: deque[Received] = deque()
        self.on_taken: Callable[[m.Taken], None] = lambda taken: None
        self.on_server: Callable[[m.UseServer | m.ForgetServer], None] = lambda message: None

    def receive(self, timeout_s: float | None) -> Received | None:
        """The next message between tickets, deferred messages first; None after `timeout_s`."""
        return self._deferred.popleft() if self._deferred else self._link.receive(timeout_s)

    def poll(self) -> None:
        """Read all messages that have arrived while a ticket runs. Raise `TicketCancelled` on `Stop`.

        On `Cancel`, write the progress word for cancelled tickets. With shared memory, the head writes this word
        itself.
        """
        while (received := self._link.receive(0.0)) is not None:
            self._react_or_defer(m.decode_from_head(received.frames), received)

    def wait_for_weights(self, agent: int) -> tuple[int, int, Sequence[BytesLike]]:
        """The reply to a `WeightRequest`: version, base version and frames.

        Raises:
            TicketCancelled: The head no longer has parameters of this agent, or the worker has to stop.
        """
        while True:  # no deadline needed: the head limits the time of phase LOAD
            received = self._link.receive(None)
            if received is None:
                continue
            message = m.decode_from_head(received.frames)
            if isinstance(message, m.Weights) and message.agent == agent:
                if len(received.frames) < 2:
                    raise TicketCancelled
                return message.version, message.base, received.frames[1:]
            self._react_or_defer(message, received)

    def wait_for_turn(self, ticket: m.Ticket, index: int) -> None:
        """Wait until the head grants the `RequestSend` for chunk `index`.

        Raises:
            TicketCancelled: The head cancelled the ticket, or the worker has to stop.
        """
        while self._words[CANCEL] < ticket.seq:
            received = self._link.receive(_TURN_S)
            if received is None:
                self._words[COUNT] += 1  # shows the head that this worker is not stuck
                continue
            message = m.decode_from_head(received.frames)
            if isinstance(message, m.GrantSend):
                if message.index == index:
                    return
                continue
            self._react_or_defer(message, received)
        raise TicketCancelled

    def _react_or_defer(self, message: m.FromHead, received: Received) -> None:
        if isinstance(message, m.Taken):
            self.on_taken(message)
            return
        if isinstance(message, m.UseServer | m.ForgetServer):
            self.on_server(message)
            return
        if isinstance(message, m.Cancel):
            self._words[CANCEL] = message.upto
        self._deferred.append(received)
        if isinstance(message, m.Stop):
            raise TicketCancelled
