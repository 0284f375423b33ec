"""What the head and the agent on a node say to each other.

    agent  NodeHello ───────────────►          head  StartWorker, KillWorker, DumpStacks, ... Leave
           Printed, WorkerEnded, ... ►
           NodeBeat, once a second ──►               NodeBeat, once a second

An agent that is told to go by its engine (SIGTERM) says `Leaving` and goes when it is told `Leave`, or when its time
is up. Every message of an agent has its name, which it made up itself: all agents of a job share a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from farstep.core import BytesLike
from farstep.errors import WireError
from farstep.wire.messages import Count, Line, Lines, Word, decoded

BEAT_S = 1.0
OUTPUT_BYTES = 64 * 1024
"""Of one worker's output, at most so much is sent at a time."""
MOST_WORKERS = 1 << 14
"""Of one node."""
NAME_BYTES = 16
Name = Annotated[str, msgspec.Meta(pattern=rf"\A[0-9a-f]{{{NAME_BYTES}}}\Z")]
"""Of a node: drawn by its agent, and known to that and to the head alone."""


class NodeHello(msgspec.Struct, tag="node-hello"):
    """An agent is there and can start workers."""

    node: Name
    run: Line
    host: Line
    pid: int
    cpus: int
    versions: Lines
    place: Line = ""
    """What the engine calls it: a job and its task, a pod."""
    address: Line = ""
    """Which of the head's addresses it reached."""
    setup_failed: Line = ""
    """What of the `setup` failed on the node, if something did."""
    replaces: Name | None = None
    """The killed daemon of the same node that this one replaces."""


class NodeBeat(msgspec.Struct, tag="node-beat"):
    """Still there, with these workers (number and incarnation): said again and again, as anything may get lost."""

    node: Name
    workers: Annotated[list[tuple[int, int]], msgspec.Meta(max_length=MOST_WORKERS)] = []


class Leaving(msgspec.Struct, tag="leaving"):
    """The engine takes the node back; what its workers have is to be fetched soon."""

    node: Name
    reason: Line


class Printed(msgspec.Struct, tag="printed"):
    """What a worker wrote to its output."""

    node: Name
    worker: Count
    incarnation: Count
    data: Annotated[bytes, msgspec.Meta(max_length=OUTPUT_BYTES)]


class WorkerEnded(msgspec.Struct, tag="worker-ended"):
    """A worker's process is over."""

    node: Name
    worker: Count
    incarnation: Count
    status: int
    note: Line
    words: list[Word] = []
    """Where it was (see `worker.progress`): its own last word of that may be a second old."""


class StartWorker(msgspec.Struct, tag="start-worker"):
    """Start a process with this bootstrap, as JSON."""

    worker: int
    incarnation: int
    bootstrap: bytes


class KillWorker(msgspec.Struct, tag="kill-worker"):
    worker: int
    incarnation: int


class DumpStacks(msgspec.Struct, tag="dump-stacks"):
    worker: int
    incarnation: int


class Leave(msgspec.Struct, tag="leave"):
    """End all workers and yourself."""

    reason: str
    come_again: bool = False
    """As another node: this one was taken for lost, and another takes its place."""


FromNode = NodeHello | NodeBeat | Leaving | Printed | WorkerEnded
ToNode = StartWorker | KillWorker | DumpStacks | NodeBeat | Leave

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
    """The versions in a message, even if the rest cannot be decoded: a hello from another version of farstep."""
    try:
        return decoded(_versions, frames).versions
    except WireError:
        return {}
