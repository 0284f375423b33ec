"""Helpers for launchers whose workers all connect to one ZeroMQ hub."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from farstep.core import BytesLike, Received
from farstep.wire.channels.zmq import Hub


class HubLink:
    """Sends messages to one worker through the hub. `drain` receives the messages of all workers."""

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
    """Call `receive` with each message that has arrived and its sender's number.

    Returns:
        True if a message arrived or more are waiting.
    """
    arrived = False
    for peer, received in hub.drain():
        arrived = True
        receive(peer.worker, received)
    return arrived or hub.has_more


def admit(hub: Hub, peer: int, incarnation: int) -> dict[str, Any]:
    """Issue keys for a peer. Return the entries of its bootstrap with the keys."""
    pair = hub.admit(peer, incarnation)
    return {
        "server_key": hub.keys.public.decode(),
        "public": pair.public.decode(),
        "secret": pair.secret.decode(),
    }


def admit_worker(hub: Hub, worker: int, incarnation: int, run: str, envs: int) -> dict[str, Any]:
    """Issue keys for a worker. Return the entries of its bootstrap that do not depend on the launcher."""
    return {
        "worker": worker,
        "incarnation": incarnation,
        "run": run,
        "envs": envs,
        "bulk_port": hub.bulk_port,
        "lease_s": hub.lease_s,
        **admit(hub, worker, incarnation),
    }
