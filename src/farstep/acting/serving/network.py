"""Listens for the workers that an acting server reaches over the network."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from farstep.acting import messages as am
from farstep.acting.serving.requests import check_join
from farstep.core import BytesLike, Received
from farstep.errors import WireError
from farstep.wire import messages as m
from farstep.wire.channels.zmq import Hub
from farstep.wire.keys import KeyPair

_SERVICE_S = 1.0


class NetworkListener:
    """Accepts the workers that the head has named, each with the key pair that the head has issued for it.

    Args:
        addresses: The addresses to listen on.
        lease_s: The lease in seconds; it determines the heartbeat interval.
        encrypted: Whether bulk data is encrypted.
        is_on_head: Whether these are the addresses at which workers reach the head.
    """

    def __init__(self, addresses: Sequence[str], lease_s: float, encrypted: bool, is_on_head: bool = True) -> None:
        self._is_on_head = is_on_head
        self._hub = Hub(addresses, lease_s, reliable=True, encrypted=encrypted)
        self._admitted: dict[int, m.AdmitClient] = {}
        self._next_service = 0.0

    @property
    def listening(self) -> m.Listening:
        """What workers need to know to connect."""
        address, key = self._hub.address, self._hub.keys.public
        endpoint = address.rpartition(":")[2] if self._is_on_head and not address.startswith("ipc:") else address
        return m.Listening(endpoint, self._hub.bulk_port, key)

    def filenos(self) -> list[int]:
        return self._hub.filenos()

    def admit(self, message: m.AdmitClient) -> None:
        self._admitted[message.worker] = message
        self._hub.admit(message.worker, message.incarnation, KeyPair(message.public, message.secret))

    def drop(self, worker: int) -> None:
        """Revoke the key of a worker."""
        self._admitted.pop(worker, None)
        self._hub.expel(worker)

    def messages(self) -> Iterator[tuple[int, Received]]:
        """The messages that have arrived, each with its worker."""
        if (now := time.monotonic()) >= self._next_service:
            self._next_service = now + _SERVICE_S
            self._hub.service()
        for peer, received in self._hub.drain():
            yield peer.worker, received

    def check(self, worker: int, message: am.FromClient, received: Received) -> None:
        """Raise `WireError` unless a worker may send this message."""
        admitted = self._admitted.get(worker)
        if admitted is None or received.heartbeat:
            raise WireError(f"{type(message).__name__} of a worker that was not admitted.")
        has_frame = isinstance(message, (am.Join, am.Act, am.Restore, am.Prioritize))
        if len(received.frames) != 1 + has_frame:
            raise WireError(f"{type(message).__name__} with {len(received.frames)} frames.")
        if isinstance(message, am.Join):
            check_join(message, admitted)

    def link(self, worker: int) -> PeerLink:
        return PeerLink(self._hub, worker)

    def close(self) -> None:
        self._hub.close()


class PeerLink:
    """Sends messages to one worker. `NetworkListener.messages` receives those of all workers."""

    def __init__(self, hub: Hub, worker: int) -> None:
        self._hub, self._worker = hub, worker

    def send(self, frames: Sequence[BytesLike], fds: Sequence[int] = ()) -> None:
        self._hub.send(self._worker, frames)

    def close(self) -> None:
        self._hub.expel(self._worker)
