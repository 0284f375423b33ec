"""How a trigger's message reaches its consumer: by a call, into a thread, into another process.

    Dispatcher ─ passer(message) ─ ... ─ take() ─ the consumer works ─ done(message) ─ ... ─ passer.finished()

A passer returns True once the consumer is done, False if `finished` will say so later. All waits are bounded.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from typing import Literal, Protocol, cast

import msgspec
import zmq

from farstep.errors import ClosedError, ConfigError, DeliveryError, WireError, printable
from farstep.wire.channels.dealer import DealerLink
from farstep.wire.channels.zmq import MAIN, Hub
from farstep.wire.codec import Limits, pack, unpack
from farstep.wire.keys import KeyPair
from farstep.wire.messages import decoded
from farstep.workflow.dispatch import Message

_PING_S = 0.5  # a receiver that has died is noticed when something is sent to it
_SEND_S = 2.0
_CLOSE_MS = 1000
_MESSAGE, _PING, _BYE = b"M", b"P", b"B"


class Direct:
    """Calls the consumer at once; whatever it returns, it is done then."""

    def __init__(self, call: Callable[[Message], object]) -> None:
        if not callable(call):
            raise ConfigError(f"Direct got {call!r}; expected a function of the message.")
        self._call = call

    def __call__(self, message: Message) -> bool:
        self._call(message)
        return True


class Updates(Protocol):
    """Keeps track of the messages whose consumers may be changing the agent (see `consumers.Guard`)."""

    def begin(self, message: Message) -> None:
        """The calling thread starts to handle a message."""
        ...

    def end(self, message: Message, raised: bool) -> None:
        """The message was handled, or handling it raised."""
        ...


class LocalQueue:
    """Hands messages to threads of this process, each to one, in order."""

    def __init__(self, maxsize: int = 1) -> None:
        if not isinstance(maxsize, int) or maxsize < 1:
            raise ConfigError(f"LocalQueue.maxsize is {maxsize!r}; expected a number of messages, at least 1.")
        self.maxsize = maxsize
        self._waiting: deque[Message] = deque()
        self._working = 0
        self._finished: list[str] = []
        self.failed: set[str] = set()
        """Of those that are done, which were not handled."""
        self._errors: deque[BaseException] = deque()
        self._closed = False
        self._changed = threading.Condition()
        self.updates: Updates | None = None
        """Notified when a thread takes a message, and when the message is done."""

    @property
    def full(self) -> bool:
        return len(self._waiting) >= self.maxsize

    def __call__(self, message: Message) -> bool:
        with self._changed:
            if self._closed:
                raise ClosedError("the queue is closed; nobody takes messages any more.")
            if self.full:
                raise DeliveryError(
                    f"the queue holds {self.maxsize} messages that nobody has taken; wait until it is not `full`, "
                    "as a Dispatcher does, or give it a larger maxsize."
                )
            self._waiting.append(message)
            self._changed.notify_all()
        return False

    def take(self, timeout_s: float) -> Message | None:
        """For the consumer: the next message, or None after `timeout_s`; `ClosedError` when none will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed, timeout_s)
            if not self._waiting:
                if self._closed:
                    raise ClosedError("the queue is closed; no message will come.")
                return None
            self._working += 1
            message = self._waiting.popleft()
        if self.updates is not None:
            self.updates.begin(message)
        return message

    def done(self, message: Message, error: BaseException | None = None) -> None:
        """For the consumer: a message was handled, or handling it raised `error`."""
        if self.updates is not None:
            self.updates.end(message, error is not None)
        with self._changed:
            self._working -= 1
            self._finished.append(_id_of(message))
            if error is not None:
                self.failed.add(_id_of(message))
                self._errors.append(error)
            self._changed.notify_all()

    def finished(self, timeout_s: float = 0.0) -> list[str]:
        """The triggers whose messages are done, waiting for one if any is not; raises what a consumer raised."""

        def settled() -> bool:
            return bool(self._finished or self._errors or self._closed or not (self._waiting or self._working))

        with self._changed:
            self._changed.wait_for(settled, timeout_s)
            if self._errors:
                raise self._errors.popleft()
            done, self._finished = self._finished, []
            return done

    def close(self, drop: bool = False) -> list[Message]:
        """No more messages; consumers still get those that wait, unless these are dropped: then they count as done."""
        with self._changed:
            self._closed = True
            dropped = list(self._waiting) if drop else []
            if drop:
                self._waiting.clear()
                self._finished += [_id_of(message) for message in dropped]
            self._changed.notify_all()
            return dropped

    def reopen(self) -> None:
        """Take messages again, after a `close`."""
        with self._changed:
            self._closed = False


class _Report(msgspec.Struct, array_like=True):
    """What a receiver says."""

    session: str
    kind: Literal["hello", "done", "bye"]
    trigger_id: str = ""
    error: str = ""


_report: msgspec.msgpack.Decoder[_Report] = msgspec.msgpack.Decoder(_Report)


class ZmqPasser:
    """Hands messages to one other process, which makes a `ZmqReceiver` of `invitation`.

    Listens at `endpoint`: `ipc://...`, `tcp://127.0.0.1:*` (any free port) or None (a socket without a file). The
    invitation holds a key and nobody is admitted without it: hand it over in private, not on a command line. One
    thread uses a passer. A receiver may take as long as it needs, but it must be there within `connect_s` when a
    message is passed, and stay until the message is done: else `finished` raises `DeliveryError`.
    """

    def __init__(self, endpoint: str | None = None, *, connect_s: float = 30.0) -> None:
        self.connect_s = connect_s
        self._session, self._ended = "", False
        self._unsent: deque[tuple[float, str, bytes]] = deque()
        """Messages that no receiver was there for, each with the time until when one must be."""
        self._outstanding: list[str] = []
        """Messages that are not done, those included."""
        self._finished: list[str] = []
        self.failed: set[str] = set()
        """Of those that are done, which were not handled."""
        self._pinged = 0.0
        try:
            self._hub = Hub(_checked(endpoint), most_bytes=Limits.HEADER_BYTES)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen at {endpoint}: {error}. Is it in use? endpoint=None is free.") from error
        pair = self._hub.admit(0, 0)
        self._poll = select.poll()
        for fd in self._hub.filenos():
            self._poll.register(fd, select.POLLIN)
        self.invitation = {
            "address": self._hub.address,
            "server_key": self._hub.keys.public.decode(),
            "public": pair.public.decode(),
            "secret": pair.secret.decode(),
        }

    def __call__(self, message: Message) -> bool:
        self._check_open()
        payload = pack(message)
        self._serve(0)
        self._unsent.append((time.monotonic() + self.connect_s, _id_of(message), payload))
        self._outstanding.append(_id_of(message))
        self._send_waiting()
        return False

    def _send_waiting(self) -> None:
        """Send what waits for a receiver, if there is one."""
        while self._unsent and self._session and self._sent([_MESSAGE, self._unsent[0][2]]):
            self._unsent.popleft()

    def _check_waiting(self) -> None:
        """Nothing waits for longer than it may."""
        if self._unsent and time.monotonic() >= self._unsent[0][0]:
            _, name, _ = self._unsent.popleft()
            self._outstanding.remove(name)
            self._finished.append(name)
            self.failed.add(name)
            found = "the receiver is gone" if self._ended else "no receiver has connected"
            raise DeliveryError(
                f"a message of trigger {_trigger_of(name)!r} cannot be passed at {self._hub.address}: {found}, none "
                f"came within {self.connect_s:g} s. Start one there: ZmqReceiver(invitation)."
            )

    def _check_open(self) -> None:
        if self._hub.is_closed:
            raise ClosedError("this passer is closed; make a new one, and a receiver with its invitation.")

    def finished(self, timeout_s: float = 0.0) -> list[str]:
        """The triggers whose messages are done, waiting for one if any is not; raises what went wrong there."""
        self._check_open()
        deadline = time.monotonic() + timeout_s
        self._serve(0)
        while self._outstanding and not self._finished:
            self._check_alive()
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._serve(min([left, _PING_S, *(until - time.monotonic() for until, _, _ in self._unsent)]))
        done, self._finished = self._finished, []
        return done

    def _serve(self, timeout_s: float) -> None:
        """Take in what receivers said; if nothing, wait for something."""
        if not self._drain() and timeout_s > 0:
            self._poll.poll(timeout_s * 1000)
            self._drain()
        self._send_waiting()
        self._check_waiting()

    def _drain(self) -> bool:
        said = False
        for _, received in self._hub.drain():
            said = True
            try:
                report = decoded(_report, received.frames)
            except WireError as error:
                raise WireError(f"the receiver at {self._hub.address} sent what is no report: {error}") from error
            self._note(report)
        return said

    def _note(self, report: _Report) -> None:
        if report.kind == "hello":
            self._session = report.session
            self._lose("was replaced by another one")
        elif report.session == self._session and report.kind == "bye":
            self._session = ""
            self._lose("has closed")
        elif report.session == self._session and report.trigger_id in self._outstanding:
            self._outstanding.remove(report.trigger_id)
            self._finished.append(report.trigger_id)
            if report.error:
                self.failed.add(report.trigger_id)
                raise DeliveryError(
                    f"a message of trigger {_trigger_of(report.trigger_id)!r} failed there:\n\n{report.error}"
                )

    def _check_alive(self) -> None:
        now = time.monotonic()
        if not self._session:
            self._lose("has ended")
            return
        if now - self._pinged < _PING_S:
            return
        self._pinged = now
        if not self._sent([_PING]):
            self._serve(0)  # what it said before it ended
            self._lose("has ended")

    def _sent(self, frames: list[bytes]) -> bool:
        """Send to the receiver; if it is gone, the next one counts from its hello on, not from its connection."""
        if self._hub.send(0, frames):
            return True
        self._ended, self._session = bool(self._session) or self._ended, ""
        return False

    def _lose(self, how: str) -> None:
        unsent = {name for _, name, _ in self._unsent}
        if lost := [name for name in self._outstanding if name not in unsent]:
            self._outstanding = [name for name in self._outstanding if name in unsent]
            self._finished += lost  # nobody waits for them any more
            self.failed.update(lost)
            raise DeliveryError(
                f"the receiver at {self._hub.address} {how} before it was done with messages of "
                f"{', '.join(map(_trigger_of, lost))}; "
                "look at its own output for the reason, and pass them again to a new one if they matter."
            )

    def close(self) -> None:
        if self._session:
            self._hub.send(0, [_BYE])
        self._hub.close(linger_ms=_CLOSE_MS)


class ZmqReceiver:
    """The consumer's end of a `ZmqPasser`, in another process."""

    def __init__(self, invitation: Mapping[str, str]) -> None:
        known = ("address", "server_key", "public", "secret")
        if not isinstance(invitation, Mapping) or not all(isinstance(invitation.get(key), str) for key in known):
            what = sorted(map(str, invitation)) if isinstance(invitation, Mapping) else invitation
            raise ConfigError(
                f"ZmqReceiver got {what}; expected a passer's invitation, with {', '.join(known)}: hand over "
                "passer.invitation as it is, e.g. as JSON on the process's standard input."
            )
        pair = KeyPair(invitation["public"].encode(), invitation["secret"].encode())
        self._session, self._closed, self._address = os.urandom(8).hex(), False, invitation["address"]
        server_key = invitation["server_key"].encode()
        self._link: DealerLink | None = DealerLink(self._address, server_key, pair, MAIN, _SEND_S)
        self._say("hello")

    def take(self, timeout_s: float) -> Message | None:
        """The next message, or None after `timeout_s`; `ClosedError` once the passer was closed."""
        self._check_open()
        deadline = time.monotonic() + timeout_s
        while not self._closed:
            assert self._link is not None
            received = self._link.receive(max(0.0, deadline - time.monotonic()))
            if received is None:
                return None
            kind = bytes(received.frames[0])
            if kind == _MESSAGE:
                return cast(Message, unpack(received.frames[1]))
            self._closed = kind == _BYE
        raise ClosedError("the passer is closed; no message will come.")

    def done(self, message: Message, error: BaseException | None = None) -> None:
        """A message was handled, or handling it raised `error`."""
        self._check_open()
        text = "" if error is None else printable("".join(traceback.format_exception(error)))
        self._say("done", _id_of(message), text)

    def _say(self, kind: Literal["hello", "done", "bye"], trigger_id: str = "", error: str = "") -> None:
        assert self._link is not None
        try:
            self._link.send([msgspec.msgpack.encode(_Report(self._session, kind, trigger_id, error))])
        except zmq.Again:
            raise DeliveryError(
                f"the passer at {self._address} takes no reports: it does not admit this invitation, or it is stuck."
            ) from None

    def _check_open(self) -> None:
        if self._link is None:
            raise ClosedError("this receiver is closed; make another one of the passer's invitation.")

    def close(self) -> None:
        if self._link is None:
            return
        if not self._closed:
            with contextlib.suppress(zmq.ZMQError, DeliveryError):
                self._say("bye")
        self._link.close()
        self._link = None


def _id_of(message: Message) -> str:
    """What a message is reported as when it is done: itself, where its trigger may have several under way."""
    return str(message.get("message_id") or message.get("trigger_id", ""))


def _trigger_of(name: str) -> str:
    """The trigger of a message that goes by this name."""
    return name.rpartition("/")[0] or name


def _checked(endpoint: str | None) -> str:
    if endpoint is None:
        return f"ipc://@farstep-{os.getpid()}-{os.urandom(8).hex()}"
    if not isinstance(endpoint, str) or not endpoint.startswith(("ipc://", "tcp://127.0.0.1:")):
        raise ConfigError(f"ZmqPasser.endpoint is {endpoint!r}; expected ipc://..., tcp://127.0.0.1:* or None.")
    return endpoint
