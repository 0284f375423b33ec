"""The workers that are connected to an acting server, over an abstract Unix socket or over the network."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from farstep.acting import messages as am
from farstep.acting.mailbox import EPISODES, ROOTS, Mailbox, MailboxLayout
from farstep.acting.serving.arena import Arena, arena_with_free_mailbox
from farstep.acting.serving.batch_actor import BatchActor, Group
from farstep.acting.serving.requests import answer_frames
from farstep.core import Link, Received
from farstep.errors import WireError
from farstep.wire import messages as m
from farstep.wire.channels.doorbell import Doorbell
from farstep.wire.channels.local import LocalLink, is_own_process

if TYPE_CHECKING:
    from farstep.acting.serving.network import NetworkListener, PeerLink


@dataclass(eq=False)
class Client:
    """A worker that is connected to this server."""

    link: LocalLink | PeerLink
    is_authenticated: bool = False
    """Whether it has sent a `Join` with the right proof; other messages before that are refused."""
    groups: list[Group] = field(default_factory=list)
    mailbox: Mailbox | None = None
    arena: Arena | None = None
    """Where the mailbox is."""
    mailbox_index: int = 0
    """Which of the arena's mailboxes it is."""
    arenas: list[Arena] = field(default_factory=list)
    """All arenas of the server; they contain `arena` until its last worker leaves."""
    doorbell: Doorbell | None = None
    """None if the worker is reached over the network."""
    failure: am.Failed | None = None
    """Why its last failed request failed."""
    waiting: tuple[am.Join, Received] | None = None
    """A `Join` for an agent that has not arrived yet."""

    def attach(self, layout: MailboxLayout, arenas: list[Arena], join: am.Join, actor: BatchActor) -> Arena:
        """Allocate a mailbox in one of the arenas, and start to act for the worker's groups. Return the arena."""
        self.arenas, self.arena = arenas, arena_with_free_mailbox(layout, arenas)
        self.mailbox_index = self.arena.allocate(self, join.first)
        self.mailbox = self.arena.mailbox(self.mailbox_index)
        self.mailbox.arrays[ROOTS][:], self.mailbox.arrays[EPISODES][:] = join.roots, join.episodes
        self.groups = [actor.new_group(self.mailbox, i, join.first) for i in range(len(join.groups))]
        return self.arena

    def notify(self, group: int) -> None:
        """Tell the worker that a request of one of its groups was answered."""
        assert self.mailbox is not None
        if self.doorbell is not None:
            self.doorbell.ring()
        else:
            self.link.send(answer_frames(self.mailbox, group))

    def forget_groups(self) -> None:
        if self.arena is not None and self.arena.free(self.mailbox_index):
            self.arenas.remove(self.arena)
        if self.doorbell is not None:
            self.doorbell.close()
        self.groups, self.mailbox, self.arena, self.doorbell = [], None, None, None

    def close(self) -> None:
        self.forget_groups()
        self.link.close()


class Clients:
    """Accepts workers, and passes their messages on.

    Args:
        head: Connection to the head.
        address: Name of the abstract socket to listen on.
        network: Accepts workers over the network; None: workers are on this host.
        answer: Handles a message of a worker. Raises `WireError` if it is invalid.
    """

    def __init__(
        self,
        head: Link,
        address: str,
        network: NetworkListener | None,
        answer: Callable[[Client, am.FromClient, Received], None],
    ) -> None:
        self._head, self._network, self._answer = head, network, answer
        self.doorbell = Doorbell.create()
        """Workers of this host ring it after a request."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + address)
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self._clients: dict[int, Client] = {}
        """Connected workers by the descriptor of their socket; over the network, by -1 - their number."""
        others = [] if network is None else network.filenos()
        self._poll = self.doorbell.poll_with([self._listener.fileno(), head.fileno(), *others])

    def __iter__(self) -> Iterator[Client]:
        return iter(self._clients.values())

    @property
    def listening(self) -> m.Listening | None:
        """How workers connect over the network; None if they do not."""
        return None if self._network is None else self._network.listening

    def close(self) -> None:
        """Close all connections."""
        for client in self:
            client.close()
        self._listener.close()
        self.doorbell.close()
        if self._network is not None:
            self._network.close()

    def wait(self, timeout_s: float) -> None:
        """Wait for a doorbell or a message, also of the head, and handle the messages of workers of this host."""
        for fd, _ in self._poll.poll(timeout_s * 1000):
            if fd == self.doorbell.fd:
                self.doorbell.clear()
            elif fd == self._listener.fileno():
                self._accept()
            elif (client := self._clients.get(fd)) is not None:
                self._read(client)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            sock, _ = self._listener.accept()
            if not is_own_process(sock):
                sock.close()
                return
            sock.setblocking(False)
            client = Client(LocalLink(sock))
            self._clients[sock.fileno()] = client
            self._poll.register(sock.fileno(), select.POLLIN)

    def read_network(self) -> bool:
        """Handle what workers have sent over the network. Return whether there was anything."""
        if (network := self._network) is None:
            return False
        arrived = False
        for worker, received in network.messages():
            arrived = True
            client = self._clients.get(-1 - worker)
            if client is None:
                continue
            try:
                message = am.decode_from_client(received.frames)
                network.check(worker, message, received)
                self._answer(client, message, received)
            except WireError as error:
                self.drop(worker)
                self._head.send([m.encode(m.RejectClient(worker, str(error)[:1000]))])
        return arrived

    def admit(self, message: m.AdmitClient) -> None:
        """Accept a worker over the network, and tell the head."""
        if self._network is not None:
            self.drop(message.worker)
            self._network.admit(message)
            self._clients[-1 - message.worker] = Client(self._network.link(message.worker))
            self._head.send([m.encode(m.ClientAdmitted(message.worker, message.incarnation))])

    def drop(self, worker: int) -> None:
        """Stop acting for a worker that was reached over the network."""
        if (client := self._clients.pop(-1 - worker, None)) is not None and self._network is not None:
            self._network.drop(worker)
            client.close()

    def _read(self, client: Client) -> None:
        assert isinstance(client.link, LocalLink)
        fd = client.link.fileno()
        try:
            while (received := client.link.receive()) is not None:
                self._answer(client, am.decode_from_client(received.frames), received)
        except (EOFError, OSError, WireError):  # the worker ended, or sent an invalid message
            self._poll.unregister(fd)
            del self._clients[fd]
            client.close()
