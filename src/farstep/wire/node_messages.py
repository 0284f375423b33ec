"""The messages between the head and the node daemon on each node of a cluster.

    node daemon                     head
    NodeHello ───────────────────►
                    ◄────────────── StartWorker, ...          at any time: KillWorker, DumpStacks, SetSuspended
    Printed, WorkerEnded, ... ───►
    NodeBeat ────────────────────►                            heartbeat, once a second
                    ◄────────────── NodeBeat                  heartbeat, once a second
                    ◄────────────── Leave

When the engine (SLURM, Kubernetes, ...) reclaims a node, it sends SIGTERM to the daemon. The daemon then sends
`Leaving`, and exits on `Leave` or at the end of its grace period. All daemons of a job share one key, so each message
of a daemon carries the daemon's random name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from farstep.core import BytesLike
from farstep.errors import WireError
from farstep.wire.messages.headers import Count, Line, Lines, Word, decoded

BEAT_S = 1.0
"""Seconds between two heartbeats."""
OUTPUT_BYTES = 64 * 1024
"""Maximum number of bytes of a worker's output per message."""
MOST_WORKERS = 1 << 14
"""Maximum number of workers per node."""
NAME_BYTES = 16
Name = Annotated[str, msgspec.Meta(pattern=rf"\A[0-9a-f]{{{NAME_BYTES}}}\Z")]
"""The random name of a node. Its daemon chooses it, and only this daemon and the head know it."""


class NodeHello(msgspec.Struct, tag="node-hello"):
    """Node daemon to head, repeated until the first answer: the daemon can start workers.

    The head answers `NodeBeat` and starts workers on the node. If it needs no node, if versions differ, or if
    workers cannot be pinned, it answers `Leave`.
    """

    node: Name
    run: Line
    host: Line
    pid: int
    cpus: int
    versions: Lines
    place: Line = ""
    """Name of the node's task in the engine, e.g. a job and task id, or a pod."""
    address: Line = ""
    """The address at which the daemon reached the head."""
    setup_failed: Line = ""
    """The last `setup` command that failed on the node; empty if all succeeded."""
    replaces: Name | None = None
    """The name of the killed daemon that this daemon replaces on the same node."""
    cannot_pin: Line = ""
    """Why workers cannot be pinned to cores as requested (`cpu_affinity`); empty if they can."""
    cannot_park: Line = ""
    """Why parked workers cannot be written to disk as requested (`park_method`); empty if they can."""


class NodeBeat(msgspec.Struct, tag="node-beat"):
    """Heartbeat in both directions. A daemon's heartbeat lists its running workers (id, incarnation).

    Other messages may get lost, so the head compares the list with its own. It kills unknown workers, resends a lost
    `StartWorker` or `SetSuspended`, and treats workers that are missing from the list as ended.
    """

    node: Name
    workers: Annotated[list[tuple[int, int]], msgspec.Meta(max_length=MOST_WORKERS)] = []
    suspended: Annotated[list[tuple[int, int]], msgspec.Meta(max_length=MOST_WORKERS)] = []
    """Those of `workers` that are suspended. A suspended worker sends no heartbeats; this list replaces them."""
    progress: Annotated[list[list[Word]], msgspec.Meta(max_length=MOST_WORKERS)] = []
    """The progress words of each of `workers`, if the daemon relays for them: they send no heartbeats themselves."""
    on_disk: Annotated[dict[int, Count], msgspec.Meta(max_length=MOST_WORKERS)] = {}
    """The size in bytes of each worker that is on disk."""
    returning: Annotated[list[tuple[int, int]], msgspec.Meta(max_length=MOST_WORKERS)] = []
    """Those of `workers` that are no longer parked, but still wait for criu. The head applies no time limit to them."""


class Leaving(msgspec.Struct, tag="leaving"):
    """Node daemon to head: the engine reclaims the node. The head drains its workers, then sends `Leave`."""

    node: Name
    reason: Line


class Printed(msgspec.Struct, tag="printed"):
    """Node daemon to head: output that a worker wrote to stdout or stderr. The head logs it."""

    node: Name
    worker: Count
    incarnation: Count
    data: Annotated[bytes, msgspec.Meta(max_length=OUTPUT_BYTES)]


class NotOnDisk(msgspec.Struct, tag="not-on-disk"):
    """Node daemon to head: a parked worker could not be written to disk, so that it is suspended in memory."""

    node: Name
    worker: Count
    incarnation: Count
    reason: Line


class WorkerEnded(msgspec.Struct, tag="worker-ended"):
    """Node daemon to head: the process of a worker exited. The head restarts it within the restart budget."""

    node: Name
    worker: Count
    incarnation: Count
    status: int
    note: Line
    words: list[Word] = []
    """The worker's last progress words (see `rollout/progress.py`); they are newer than its last `Progress` message."""
    blameless: bool = False
    """Whether it was never forked, or could not be restored from disk. Its replacement then does not use the restart
    budget."""


class RelayKeys(msgspec.Struct):
    """The keys with which a node daemon opens the bulk connection of its workers, and the head's port for it."""

    public: bytes
    secret: bytes
    bulk_port: str


class StartWorker(msgspec.Struct, tag="start-worker"):
    """Head to node daemon: start a worker process."""

    worker: int
    incarnation: int
    bootstrap: bytes
    """JSON (see `worker/connection/bootstrap.py`)."""
    relay: RelayKeys | None = None
    """Set if the daemon is to relay the worker's messages (see `channels/relay.py`); the same for all its workers."""


class KillWorker(msgspec.Struct, tag="kill-worker"):
    """Head to node daemon: kill a worker and all processes that it started."""

    worker: int
    incarnation: int


class SetSuspended(msgspec.Struct, tag="set-suspended"):
    """Head to node daemon: suspend a worker and all processes that it started, or resume them."""

    worker: int
    incarnation: int
    suspended: bool
    parked: bool = False
    """Whether the worker is parked, so that it may be written to disk, and not only released until the next rollout."""


class DumpStacks(msgspec.Struct, tag="dump-stacks"):
    """Head to node daemon: make a worker write its Python stacks to its output."""

    worker: int
    incarnation: int


class Leave(msgspec.Struct, tag="leave"):
    """Head to node daemon: kill all workers and exit."""

    reason: str
    come_again: bool = False
    """Whether to rejoin under a new name, because the head declared this node lost and freed its block of workers."""


FromNode = NodeHello | NodeBeat | Leaving | Printed | NotOnDisk | WorkerEnded
ToNode = StartWorker | KillWorker | SetSuspended | DumpStacks | NodeBeat | Leave

_from_node: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)
_to_node: msgspec.msgpack.Decoder[ToNode] = msgspec.msgpack.Decoder(ToNode)
_encoder = msgspec.msgpack.Encoder()


def encode(message: FromNode | ToNode) -> bytes:
    return _encoder.encode(message)


def decode_from_node(frames: Sequence[BytesLike]) -> FromNode:
    return decoded(_from_node, frames)


def decode_to_node(frames: Sequence[BytesLike]) -> ToNode:
    return decoded(_to_node, frames)


class _Versions(msgspec.Struct):
    versions: Lines


_versions = msgspec.msgpack.Decoder(_Versions)


def versions_in(frames: Sequence[BytesLike]) -> dict[str, str]:
    """The versions in a `NodeHello` of another farstep version, even if its other fields cannot be decoded."""
    try:
        return decoded(_versions, frames).versions
    except WireError:
        return {}
