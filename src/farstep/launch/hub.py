"""What launchers share whose workers talk over ZeroMQ: all of them to one hub."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from farstep.core import BytesLike, Received
from farstep.wire.channels.zmq import Hub


class HubLink:
    """A worker's share of the hub, which is read for all of them together."""

    def __init__(self, hub: Hub, worker: int) -> None:
        self._hub, self._worker = hub, worker

    def fileno(self) -> int:
        return -1

    def send(self, frames: Sequence[BytesLike], fds: Sequence[int] = ()) -> None:
        self._hub.send(self._worker, frames)

    def receive(self, timeout_s: float | None = None) -> Received | None:
        return None

    def flush(self) -> bool:
        return True

    def close(self) -> None:
        self._hub.expel(self._worker)


def drain(hub: Hub, receive: Callable[[int, Received], None]) -> bool:
    """Hand over what has arrived, with the number of who sent it; whether that was something, or more waits."""
    arrived = False
    for peer, received in hub.drain():
        arrived = True
        receive(peer.worker, received)
    return arrived or hub.has_more


def admit(hub: Hub, peer: int, incarnation: int) -> dict[str, Any]:
    """Let a peer in that shows the keys which are made here; what to tell it of them."""
    pair = hub.admit(peer, incarnation)
    return {
        "server_key": hub.keys.public.decode(),
        "public": pair.public.decode(),
        "secret": pair.secret.decode(),
    }


def admit_worker(hub: Hub, worker: int, incarnation: int, run: str, envs: int) -> dict[str, Any]:
    """The part of a worker's bootstrap that does not depend on where it runs."""
    return {
        "worker": worker,
        "incarnation": incarnation,
        "run": run,
        "envs": envs,
        "bulk_port": hub.bulk_port,
        "lease_s": hub.lease_s,
        **admit(hub, worker, incarnation),
    }
