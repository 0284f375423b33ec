"""How a worker reaches its acting server: on the same host by shared memory and doorbells, or over the network."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Protocol

from farstep.acting import messages as am
from farstep.acting.mailbox import (
    ANSWER,
    HELD,
    IS_FIRST,
    REQUEST,
    SERVER_WORDS,
    STARTS,
    TOTALS,
    USED,
    WORKER_WORDS,
    Mailbox,
    MailboxLayout,
)
from farstep.core import Link, Received
from farstep.errors import WireError
from farstep.wire import messages as m
from farstep.wire.channels.doorbell import Doorbell
from farstep.wire.channels.local import LocalLink, is_own_process
from farstep.wire.channels.memory import SharedMemory

if TYPE_CHECKING:
    from farstep.wire.channels.dealer import DealerLink

_ANSWERED = (SERVER_WORDS, TOTALS)
OWN_ADDRESS = "own"
"""In a bootstrap: an acting server listens at the address from which its node connects to the head."""


class Exchange(Protocol):
    """Transfers what the worker and the server write into their mailbox."""

    mailbox: Mailbox

    def post(self, group: int) -> None:
        """Hand over the request that the worker has written."""

    def update(self) -> None:
        """Hand over `HELD` and `USED`."""

    def remind(self) -> None:
        """Wake a server that may have missed a request."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for an answer of the server. Return False after `timeout_s`; raise `EOFError` if the server ended."""

    def check(self) -> None:
        """Raise `EOFError` if the server ended, and `WireError` if it sent an unexpected message."""

    def take(self, message: am.Acted, received: Received) -> None:
        """Write an answer that has arrived into the mailbox."""

    def close(self) -> None: ...


class ServerAddress(Protocol):
    """Connects a worker to its acting server."""

    secret: str

    def connect(self) -> Link | None:
        """Return a connection, or None if the server is still starting."""

    def disconnect(self, link: Link) -> None:
        """End the use of the connection."""

    def is_current(self) -> bool:
        """Whether the server of the last connection is still the current one, as far as this worker knows."""

    def connection_error(self, waited_s: float) -> str:
        """Return why the server cannot be reached, and what to do. Empty if it can be reached, or if `waited_s`
        seconds are within the time limit."""

    def exchange(self, received: Received, layout: MailboxLayout, index: int) -> Exchange:
        """Exchange requests with the server that sent this `Joined` over the last connection."""


class LocalServer:
    """An acting server on the same host.

    Args:
        address: Name of its abstract socket.
        secret: The secret that it must have.
    """

    def __init__(self, address: str, secret: str) -> None:
        self._address, self.secret = address, secret

    def connect(self) -> LocalLink | None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.connect("\0" + self._address)
            if is_own_process(sock):
                self._link = LocalLink(sock)
                return self._link
        except (ConnectionRefusedError, BlockingIOError):
            pass  # it is starting
        except BaseException:
            sock.close()
            raise
        sock.close()
        return None

    def disconnect(self, link: Link) -> None:
        link.close()

    def is_current(self) -> bool:
        return True

    def connection_error(self, waited_s: float) -> str:
        return ""

    def exchange(self, received: Received, layout: MailboxLayout, index: int) -> Exchange:
        if len(received.fds) != 3:
            raise WireError(f"the acting server sent {len(received.fds)} descriptors; expected 3.")
        memory, server, own = received.fds
        mailbox = Mailbox(SharedMemory(memory, layout.nbytes), layout, index)
        return SharedExchange(self._link, mailbox, Doorbell(server), Doorbell(own))


class SharedExchange:
    """Both sides map the same mailbox, and ring each other's doorbells."""

    def __init__(self, link: LocalLink, mailbox: Mailbox, server: Doorbell, own: Doorbell) -> None:
        self._link, self.mailbox, self._server, self._own = link, mailbox, server, own
        self._poll = own.poll_with([link.fileno()])

    def post(self, group: int) -> None:
        self._server.ring()

    def update(self) -> None:
        self._server.ring()

    def remind(self) -> None:
        self._server.ring()

    def wait(self, timeout_s: float) -> bool:
        ready = [fd for fd, _ in self._poll.poll(timeout_s * 1000)]
        if self._own.fd in ready:
            self._own.clear()
        return bool(ready)

    def check(self) -> None:
        received = self._link.receive(0.0)
        if received is not None:
            message = am.decode_from_server(received.frames)
            raise WireError(f"the acting server sent {type(message).__name__} without a request.")

    def take(self, message: am.Acted, received: Received) -> None:
        raise WireError("the acting server sent an answer that belongs into the mailbox.")

    def close(self) -> None:
        self.mailbox.close()
        self._server.close()
        self._own.close()


class RemoteServer:
    """An acting server on the machine of the head or on another node, reached over the network.

    Args:
        head_address: The address at which this worker reaches the head.
        secret: The secret that the server must have.
        lease_s: The lease in seconds; it determines the heartbeat interval.
        encrypted: Whether bulk data is encrypted.
    """

    def __init__(self, head_address: str, secret: str, lease_s: float, encrypted: bool) -> None:
        self._head_address, self.secret = head_address, secret
        self._lease_s, self._encrypted = lease_s, encrypted
        self._newest: m.UseServer | None = None
        self._connected: m.UseServer | None = None
        """The server of `_link`. Its keys are valid for one connection only, which all agents use."""
        self._link: DealerLink | None = None

    def use(self, message: m.UseServer) -> None:
        """Connect to this server from now on."""
        self._newest = message

    def forget(self) -> None:
        """Connect to no server until the next call of `use`."""
        self._newest = None

    def connect(self) -> Link | None:
        use = self._newest
        if use is None:
            return None
        if self._link is not None:
            if self.is_current():
                return self._link
            self._link.close(linger_ms=0)
        from farstep.wire.channels.dealer import DealerLink
        from farstep.wire.channels.zmq import MAIN, bulk_address
        from farstep.wire.keys import KeyPair

        address = use.endpoint if "://" in use.endpoint else bulk_address(self._head_address, use.endpoint)
        pair = KeyPair(use.public, use.secret)
        self._connected = use
        self._link = DealerLink(
            *(address, use.server_key, pair, MAIN),
            lease_s=self._lease_s,
            bulk=use.bulk_port,
            encrypted=self._encrypted,
        )
        return self._link

    def disconnect(self, link: Link) -> None:
        """Nothing: the next agent uses the same connection."""

    def is_current(self) -> bool:
        return self._connected is self._newest

    def connection_error(self, waited_s: float) -> str:
        if self._link is None or self._connected is None or waited_s < (limit_s := self._connected.connect_s):
            return ""
        if not (address := self._link.unreached_address(limit_s)):
            return ""
        return (
            f"no connection to the acting server at {address} within connect_s={limit_s:g} s. Allow this worker's host "
            "to connect to that machine on all ports that its operating system chooses (see "
            "/proc/sys/net/ipv4/ip_local_port_range there), or use where='node' in inference."
        )

    def exchange(self, received: Received, layout: MailboxLayout, index: int) -> Exchange:
        assert self._link is not None
        return RemoteExchange(self._link, Mailbox.create(layout))


class RemoteExchange:
    """The worker has a mailbox of its own, and sends and receives its contents."""

    def __init__(self, link: Link, mailbox: Mailbox) -> None:
        self._link, self.mailbox = link, mailbox

    def post(self, group: int) -> None:
        mailbox = self.mailbox
        any_starts = bool(mailbox.arrays[STARTS][mailbox.ranges[group]].any())
        words = mailbox.group_words[group][WORKER_WORDS].tolist()
        payload = mailbox.packed(mailbox.layout.request(any_starts), group)
        self._link.send([am.encode(am.Act(group, words, mailbox.words[HELD])), payload])

    def update(self) -> None:
        mailbox = self.mailbox
        self._link.send([am.encode(am.Update(mailbox.words[HELD], [words[USED] for words in mailbox.group_words]))])

    def remind(self) -> None:
        """Nothing: the connection repeats what was lost."""

    def wait(self, timeout_s: float) -> bool:
        received = self._link.receive(timeout_s)
        if received is None:
            return False
        message = am.decode_from_server(received.frames)
        if not isinstance(message, am.Acted):
            raise WireError(f"the acting server sent {type(message).__name__} without a request.")
        self.take(message, received)
        return True

    def check(self) -> None:
        """Nothing: the head says when the server was replaced."""

    def take(self, message: am.Acted, received: Received) -> None:
        mailbox = self.mailbox
        counts = (len(message.words), len(message.totals))
        if message.group >= len(mailbox.ranges) or counts != tuple(part.stop - part.start for part in _ANSWERED):
            raise WireError(f"an answer for group {message.group} with {counts} words.")
        words = mailbox.group_words[message.group]
        for i, word in enumerate(message.totals, TOTALS.start):
            mailbox.words[i] = word
        if message.words[0] == words[REQUEST]:  # otherwise it answers a request of a cancelled chunk
            mailbox.fill(mailbox.layout.answer(bool(words[IS_FIRST])), message.group, received.frames[1])
            for i, word in enumerate(message.words, ANSWER):
                words[i] = word

    def close(self) -> None:
        self.mailbox.close()
