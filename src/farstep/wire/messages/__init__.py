"""The messages between head and worker.

A message has a header frame (a structure of `from_worker.py` or `from_head.py`, in MessagePack) and further frames with
raw bytes. A session in the usual order:

    worker                          head
    Hello ───────────────────────►
                    ◄────────────── Welcome (or Refuse)       what to host
    Ready ───────────────────────►                            environments are built
                    ◄────────────── SendAgent                 the policy
    AgentReady ──────────────────►                            its outputs
                    ◄────────────── Parameters, SetLayout     where to pull weights, where to write rollouts
                    ◄────────────── Ticket, Ticket, ...       at any time: Cancel
    Chunk, Chunk, ... ───────────►                            or Failure
                    ◄────────────── Probe                     after a publish, if the sync rule measures divergence
                    ◄────────────── Call                      answered by Reply or Failure
                    ◄────────────── ReturnTickets             before the worker is parked
    Idle ────────────────────────►                            its process is suspended
                    ◄────────────── Unparked                  its process continues
                    ◄────────────── Continued                 after a suspension between two rollouts
                    ◄────────────── Stop

A worker that shares no memory with the head sends and receives more:

    Progress ────────────────────►                            once a second
                    ◄────────────── Newest                    after a publish
    WeightRequest ───────────────►
                    ◄────────────── Weights
    Part, Part, ... ─────────────►                            stages of a chunk ahead of its `Chunk`
                    ◄────────────── Taken                     acknowledges rows of an unfinished chunk
    RequestSend ─────────────────►                            if workers send in turn (`TransferTrigger.max_senders`)
                    ◄────────────── GrantSend

If an acting server on the head's machine acts for workers over the network:

    server                          head
    Ready ───────────────────────►                            where it listens
                    ◄────────────── AdmitClient, DropClient   which workers may connect, and with which keys
    ClientAdmitted ──────────────►                            the worker may connect
    RejectClient ────────────────►                            a worker has sent it an invalid message
    worker                          head
                    ◄────────────── UseServer                 where the server listens, and the keys for it
                    ◄────────────── ForgetServer              the server is lost

With shared memory, `make_vec` steps without messages once the workers have their doorbells:

                    ◄────────────── SetDoorbells              where to find the board of steps (`rollout/step_board.py`)
    StepInfos ───────────────────►                            infos that do not fit in the board

Decoding checks all types; an invalid message raises `WireError`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from farstep.core import BytesLike
from farstep.wire.messages.from_head import (
    AdmitClient,
    Call,
    Cancel,
    Continued,
    DropClient,
    ForgetServer,
    FromHead,
    GpuParameters,
    GrantSend,
    Newest,
    Parameters,
    Probe,
    Refuse,
    Reset,
    ReturnTickets,
    SendAgent,
    SendBase,
    SetDoorbells,
    SetLayout,
    Stop,
    Taken,
    Ticket,
    Unparked,
    UseServer,
    Weights,
    Welcome,
)
from farstep.wire.messages.from_worker import (
    AgentReady,
    Chunk,
    ClientAdmitted,
    Failure,
    FromWorker,
    Hello,
    Idle,
    Listening,
    Part,
    Progress,
    Ready,
    RejectClient,
    Reply,
    RequestSend,
    StepInfos,
    Times,
    WeightRequest,
)
from farstep.wire.messages.headers import decoded

__all__ = [
    "PROTOCOL",
    "AdmitClient",
    "AgentReady",
    "Call",
    "Cancel",
    "Chunk",
    "ClientAdmitted",
    "Continued",
    "DropClient",
    "Failure",
    "ForgetServer",
    "FromHead",
    "FromWorker",
    "GpuParameters",
    "GrantSend",
    "Hello",
    "Idle",
    "Listening",
    "Newest",
    "Parameters",
    "Part",
    "Probe",
    "Progress",
    "Ready",
    "Refuse",
    "RejectClient",
    "Reply",
    "RequestSend",
    "Reset",
    "ReturnTickets",
    "SendAgent",
    "SendBase",
    "SetDoorbells",
    "SetLayout",
    "StepInfos",
    "Stop",
    "Taken",
    "Ticket",
    "Times",
    "Unparked",
    "UseServer",
    "WeightRequest",
    "Weights",
    "Welcome",
    "decode_from_head",
    "decode_from_worker",
    "encode",
]

PROTOCOL = 15
"""Version of the protocol; head and worker must use the same. Increment it with every incompatible change."""

_encoder = msgspec.msgpack.Encoder()
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_from_head: msgspec.msgpack.Decoder[FromHead] = msgspec.msgpack.Decoder(FromHead)


def encode(message: FromWorker | FromHead) -> bytes:
    """The header frame of a message."""
    return _encoder.encode(message)


def decode_from_worker(frames: Sequence[BytesLike]) -> FromWorker:
    """Decode the first of a worker's frames. Raise `WireError` if it is not a valid message."""
    return decoded(_from_worker, frames)


def decode_from_head(frames: Sequence[BytesLike]) -> FromHead:
    """Decode the first of the head's frames. Raise `WireError` if it is not a valid message."""
    return decoded(_from_head, frames)
