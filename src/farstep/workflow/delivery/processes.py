"""Delivery to a consumer in another process, over ZeroMQ."""

from __future__ import annotations

import contextlib
import os
import select
import time
import traceback
from collections import deque
from collections.abc import Mapping
from typing import Literal, cast

import msgspec
import zmq

from farstep.errors import ClosedError, ConfigError, DeliveryError, WireError, printable
from farstep.wire.channels.dealer import DealerLink
from farstep.wire.channels.zmq import MAIN, Hub
from farstep.wire.codec import Limits, pack, unpack
from farstep.wire.keys import KeyPair
from farstep.wire.messages.headers import decoded
from farstep.workflow.delivery.message_ids import id_of, trigger_of
from farstep.workflow.triggers.messages import Message

_PING_S = 0.5  # only sending to a receiver detects that it is dead
_SEND_S = 2.0
_CLOSE_MS = 1000
_MESSAGE, _PING, _BYE = b"M", b"P", b"B"


class _Report(msgspec.Struct, array_like=True):
    """A message from the receiver to the sender."""

    session: str
    kind: Literal["hello", "done", "bye"]
    trigger_id: str = ""
    error: str = ""


_report: msgspec.msgpack.Decoder[_Report] = msgspec.msgpack.Decoder(_Report)


class ZmqSender:
    """Sends messages to one consumer in another process of this host. That process uses a `ZmqReceiver`.

    Give `sender.invitation` to the other process. It contains the only key that is admitted, so use a private channel
    such as a pipe, not a command line. Use a sender in only one thread. The receiver may take any time to handle a
    message, but it must connect within `connect_s` seconds and stay connected until the message is done. Otherwise
    `finished` raises `DeliveryError`.

    Args:
        endpoint: Where to listen: `ipc://...`, or `tcp://127.0.0.1:*` for any free port; default: an abstract socket
            without a file.
        connect_s: Seconds that a message waits for a receiver; default: 30.

    Raises:
        ConfigError: `endpoint` is invalid or in use.

    Example:
        sender = ZmqSender()
        flow.on(DataKeyTrigger(n="all", size=32), sender)
        print(json.dumps(sender.invitation), file=process.stdin, flush=True)
    """

    def __init__(self, endpoint: str | None = None, *, connect_s: float = 30.0) -> None:
        self.connect_s = connect_s
        self._session, self._ended = "", False
        self._unsent: deque[tuple[float, str, bytes]] = deque()
        """Messages that wait for a receiver: deadline, id, content."""
        self._outstanding: list[str] = []
        """Ids of messages that are not done, including unsent ones."""
        self._finished: list[str] = []
        self.failed: set[str] = set()
        """Ids of done messages that were not handled."""
        self._pinged = 0.0
        try:
            self._hub = Hub(_checked(endpoint), most_bytes=Limits.HEADER_BYTES)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"cannot listen at {endpoint}: {error}. If the address is in use, choose another, or endpoint=None."
            ) from error
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
        """Address and keys for `ZmqReceiver`; secret."""

    def __call__(self, message: Message) -> bool:
        """Send a message, or keep it until a receiver connects.

        Args:
            message: The message: plain data and arrays.

        Returns:
            Always False: `finished` reports later that the message is done.

        Raises:
            WireError: The message has values that cannot be sent.
            ClosedError: The sender is closed.
        """
        self._check_open()
        payload = pack(message)
        self._serve(0)
        self._unsent.append((time.monotonic() + self.connect_s, id_of(message), payload))
        self._outstanding.append(id_of(message))
        self._send_unsent()
        return False

    def _send_unsent(self) -> None:
        """If a receiver is connected, send the messages that waited for it."""
        while self._unsent and self._session and self._sent([_MESSAGE, self._unsent[0][2]]):
            self._unsent.popleft()

    def _check_unsent(self) -> None:
        """Raise `DeliveryError` if a message has waited for a receiver longer than `connect_s`."""
        if self._unsent and time.monotonic() >= self._unsent[0][0]:
            _, name, _ = self._unsent.popleft()
            self._outstanding.remove(name)
            self._finished.append(name)
            self.failed.add(name)
            found = "the receiver has ended, and no other one" if self._ended else "no receiver"
            raise DeliveryError(
                f"a message of trigger {trigger_of(name)!r} cannot be sent from {self._hub.address}: {found} has "
                f"connected within {self.connect_s:g} s. Start one in another process: ZmqReceiver(invitation)."
            )

    def _check_open(self) -> None:
        if self._hub.is_closed:
            raise ClosedError("this sender is closed; create a new one, and a receiver with its invitation.")

    def finished(self, timeout_s: float = 0.0) -> list[str]:
        """Return the messages that were done since the last call.

        Args:
            timeout_s: Seconds to wait if messages are outstanding and none is done; default 0.

        Returns:
            The ids of the done messages: `message_id`, or `trigger_id` for a message without an id.

        Raises:
            DeliveryError: A consumer raised (with its traceback), or the receiver ended before a message was done.
            WireError: The receiver sent invalid data.
            ClosedError: The sender is closed.
        """
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
        """Process the receiver's reports; if there are none, wait up to `timeout_s` seconds for one."""
        if not self._drain() and timeout_s > 0:
            self._poll.poll(timeout_s * 1000)
            self._drain()
        self._send_unsent()
        self._check_unsent()

    def _drain(self) -> bool:
        """Process all reports that have arrived; return whether there were any."""
        found = False
        for _, received in self._hub.drain():
            found = True
            try:
                report = decoded(_report, received.frames)
            except WireError as error:
                raise WireError(f"the receiver at {self._hub.address} sent an invalid report: {error}") from error
            self._process(report)
        return found

    def _process(self, report: _Report) -> None:
        if report.kind == "hello":
            self._session = report.session
            self._fail_sent("was replaced by another one")
        elif report.session == self._session and report.kind == "bye":
            self._session = ""
            self._fail_sent("has closed")
        elif report.session == self._session and report.trigger_id in self._outstanding:
            self._outstanding.remove(report.trigger_id)
            self._finished.append(report.trigger_id)
            if report.error:
                self.failed.add(report.trigger_id)
                raise DeliveryError(
                    f"the consumer of trigger {trigger_of(report.trigger_id)!r} in another process raised:\n\n"
                    f"{report.error}"
                )

    def _check_alive(self) -> None:
        """Ping the receiver every `_PING_S` seconds. Raise `DeliveryError` if it ended with messages outstanding."""
        now = time.monotonic()
        if not self._session:
            self._fail_sent("has ended")
            return
        if now - self._pinged < _PING_S:
            return
        self._pinged = now
        if not self._sent([_PING]):
            self._serve(0)  # process reports that it sent before it ended
            self._fail_sent("has ended")

    def _sent(self, frames: list[bytes]) -> bool:
        """Send to the receiver. Return False if this fails; the sender then waits for the hello of another receiver."""
        if self._hub.send(0, frames):
            return True
        self._ended, self._session = bool(self._session) or self._ended, ""
        return False

    def _fail_sent(self, how: str) -> None:
        """Mark all sent messages as done and failed, and raise `DeliveryError` if there are any."""
        unsent = {name for _, name, _ in self._unsent}
        if lost := [name for name in self._outstanding if name not in unsent]:
            self._outstanding = [name for name in self._outstanding if name in unsent]
            self._finished += lost
            self.failed.update(lost)
            raise DeliveryError(
                f"the receiver at {self._hub.address} {how} before it was done with messages of "
                f"{', '.join(map(trigger_of, lost))}; see its output for the reason. If these messages matter, send "
                "them again to a new receiver."
            )

    def close(self) -> None:
        """Close the connection; the receiver's `take` then raises `ClosedError`. Idempotent."""
        if self._session:
            self._hub.send(0, [_BYE])
        self._hub.close(linger_ms=_CLOSE_MS)


class ZmqReceiver:
    """The consumer's end of a `ZmqSender`, in another process.

    The consumer calls `take`, handles the message and calls `done`.

    Args:
        invitation: `ZmqSender.invitation`, unchanged.

    Raises:
        ConfigError: The invitation lacks an entry.
        DeliveryError: The sender does not admit this invitation, or does not respond.
    """

    def __init__(self, invitation: Mapping[str, str]) -> None:
        known = ("address", "server_key", "public", "secret")
        if not isinstance(invitation, Mapping) or not all(isinstance(invitation.get(key), str) for key in known):
            what = sorted(map(str, invitation)) if isinstance(invitation, Mapping) else invitation
            raise ConfigError(
                f"ZmqReceiver got {what}; expected a sender's invitation, with {', '.join(known)}: pass "
                "sender.invitation unchanged, e.g. as JSON on the process's standard input."
            )
        pair = KeyPair(invitation["public"].encode(), invitation["secret"].encode())
        self._session, self._closed, self._address = os.urandom(8).hex(), False, invitation["address"]
        server_key = invitation["server_key"].encode()
        self._link: DealerLink | None = DealerLink(self._address, server_key, pair, MAIN, _SEND_S)
        self._report("hello")

    def take(self, timeout_s: float) -> Message | None:
        """Take the next message.

        Args:
            timeout_s: Seconds to wait for a message.

        Returns:
            The message, or None after `timeout_s` seconds.

        Raises:
            ClosedError: The sender or this receiver is closed.
        """
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
        raise ClosedError("the sender is closed; no more messages will arrive.")

    def done(self, message: Message, error: BaseException | None = None) -> None:
        """Report that a message was handled.

        Args:
            message: The message that `take` returned.
            error: The exception that handling the message raised, sent with its traceback; None (default) if it
                succeeded.

        Raises:
            DeliveryError: The sender does not respond.
            ClosedError: This receiver is closed.
        """
        self._check_open()
        text = "" if error is None else printable("".join(traceback.format_exception(error)))
        self._report("done", id_of(message), text)

    def _report(self, kind: Literal["hello", "done", "bye"], trigger_id: str = "", error: str = "") -> None:
        assert self._link is not None
        try:
            self._link.send([msgspec.msgpack.encode(_Report(self._session, kind, trigger_id, error))])
        except zmq.Again:
            raise DeliveryError(
                f"the sender at {self._address} does not accept reports: it does not admit this invitation, or hangs."
            ) from None

    def _check_open(self) -> None:
        if self._link is None:
            raise ClosedError("this receiver is closed; create another one from the sender's invitation.")

    def close(self) -> None:
        """Disconnect from the sender. Idempotent."""
        if self._link is None:
            return
        if not self._closed:
            with contextlib.suppress(zmq.ZMQError, DeliveryError):
                self._report("bye")
        self._link.close()
        self._link = None


def _checked(endpoint: str | None) -> str:
    if endpoint is None:
        return f"ipc://@farstep-{os.getpid()}-{os.urandom(8).hex()}"
    if not isinstance(endpoint, str) or not endpoint.startswith(("ipc://", "tcp://127.0.0.1:")):
        raise ConfigError(f"ZmqSender.endpoint is {endpoint!r}; expected ipc://..., tcp://127.0.0.1:* or None.")
    return endpoint
