"""Helpers for launchers whose workers all connect to one ZeroMQ hub."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from typing import Any

from farstep.core import BytesLike, Received
from farstep.event import Emit
from farstep.wire.channels.zmq import Hub

_FILES_PER_PEER, _OTHER_FILES = 8, 1024
"""Descriptors for each peer, and for all else."""


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


def raise_file_limit(peers: int, emit: Emit) -> None:
    """Raise the soft limit on open files for a hub with this number of peers. Warn if the hard limit is too low.

    Args:
        peers: Number of workers, or of nodes whose daemons relay for their workers.
        emit: Receives the warning.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES_PER_PEER * peers + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else min(needed, hard), hard)
        )
    if hard != resource.RLIM_INFINITY and hard < needed:
        emit("warned", f"this process may open {hard} files; {needed} may be needed: raise the limit (ulimit -n)")
