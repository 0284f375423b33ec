"""What head and worker say to each other, as typed structures.

The order of a conversation:

    worker  Hello ─────────────►            head  Welcome (or Refuse)
            Ready (spaces) ────►                  Ship (agent), Parameters, Lay (where to write)
            AgentReady ────────►                  Ticket, Ticket, ... Cancel
            Chunk, Chunk, ... ─►                  Call ─► Reply;  Stop

After a publish the head may send a `Probe`. Workers without shared memory also ask for weights (`WeightRequest` to
`Weights`) after a `Newest`, send `Progress`, and may send arrays of a chunk, or some rows of them, ahead of it (`Part`;
rows of a chunk that is still being rolled are answered with `Taken`, and one such part is under way at a time). Where
they send in turn, they ask (`RequestSend`) and wait for `GrantSend` before a chunk's last stage.
Decoding validates types; a message that does not fit is a `WireError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec

from farstep.core import BytesLike
from farstep.errors import WireError
from farstep.schema import Schema
from farstep.wire.codec import Limits

PROTOCOL = 7
Word = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Line = Annotated[str, msgspec.Meta(max_length=1024, pattern=r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029]*\Z")]
"""What ends up in a log as part of a line: nothing in it can begin another one, or move a terminal's cursor."""
Lines = Annotated[dict[Line, Line], msgspec.Meta(max_length=64)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Hello(msgspec.Struct, tag="hello"):
    """A worker introduces itself; compared field by field with the head's own versions."""

    worker: int
    incarnation: int
    run: Line
    host: Line
    pid: int
    versions: Lines


class Ready(msgspec.Struct, tag="ready"):
    """All environments of the worker are built."""

    observation_space: bytes
    action_space: bytes


class AgentReady(msgspec.Struct, tag="agent-ready"):
    """The agent was received and tried on the worker's own observations."""

    agent: int
    schema: Schema
    structure: bytes
    state: Schema = {}
    state_structure: bytes = b""
    inference: str = ""
    description: Schema = {}
    """What `distribution` or `log_prob` says of an observation, where the sync rule measures divergences."""


class Chunk(msgspec.Struct, tag="chunk"):
    """A ticket's work is done. The first frame has records of `batch.ENDS`, one per episode that ended; rows are in the
    worker's columns, or in further frames."""

    ticket: int
    version: int
    resume: bytes
    """int64 per slot: the episode to go on with if this worker is replaced."""
    index: int = 0
    """Counts the chunks this worker began; a gap says that rows between two chunks were never handed over."""
    infos: bool = False
    """The last frame has the environments' infos."""
    inference: str = ""
    """How the agent is called, if that changed since the last chunk."""
    passed: int = -1
    """What it counts as for its age: the newest version whose probe its weights passed, else `version`."""
    divergence: float | None = None
    """The running divergence of its weights from the learner's, where the sync rule measures one."""
    unmeasured: str = ""
    """Why a divergence came to no number, the first time that it did."""
    syncs: int = 0
    synced_bytes: int = 0
    tickets_s: float = 0.0
    weights_s: float = 0.0
    keys: list[str] = []
    """The arrays in the frames, in order; empty with shared memory."""
    codecs: list[str] = []
    """What each of them is compressed with (see `compression.py`); empty: none is."""
    first: int = 0
    """The row that those with a row per step begin with: rows before it came as `Part`s."""
    clock: Count = 0
    """Rows since environments were staggered, modulo the horizon."""
    stagger_steps: Count = 0
    """Steps that brought environments to their places, and that no chunk has reported yet."""


class Part(msgspec.Struct, tag="part"):
    """Some arrays of a chunk ahead of it, in frames as those of `Chunk`; the first frame is empty unless this completes
    the first stage."""

    ticket: int
    index: int
    stage: int
    """The stage (see `TransferTrigger`) that is complete with this; -1: some rows only, while the chunk is rolled."""
    first: int
    keys: list[str]
    passed: int = -1
    """As the chunk's, once it is rolled."""
    codecs: list[str] = []


class Reply(msgspec.Struct, tag="reply"):
    """The answer to a `Call`, in the frame that follows."""

    request: int


class Failure(msgspec.Struct, tag="failure"):
    """Something raised on the worker."""

    message: str
    traceback: str
    phase: str
    kind: str = ""
    """The exception's class, if it is one of Python's own."""
    slot: int | None = None
    seed: int | None = None
    episode_step: int | None = None
    version: int | None = None
    ticket: int | None = None
    """The ticket that was given up; the worker goes on with the next episodes."""
    again: bool = False
    """The worker does the ticket once more, before any later one."""
    request: int | None = None
    """The call that raised; the worker is as before."""
    agent: int | None = None
    """The agent that could not be used; the worker waits for another."""


class RequestSend(msgspec.Struct, tag="request-send"):
    """A chunk is rolled; may its last stage be sent now, or do others come first?"""

    ticket: int
    index: int


class WeightRequest(msgspec.Struct, tag="weight-request"):
    """A worker without shared memory wants the newest parameters of the agent it has."""

    agent: int
    held: int = -1
    """The version it has now."""


class Progress(msgspec.Struct, tag="progress"):
    """Where a worker without shared memory is; sent by a thread of its own."""

    words: list[Word]


class Welcome(msgspec.Struct, tag="welcome"):
    """What a worker is to host; the program follows in a frame, pickled by the head for an authenticated worker."""

    first_slot: int
    seeds: list[int]
    episodes: list[int]
    path: list[str]
    preload: list[str]
    clock: Count = 0
    """Of the worker that it replaces (see `Chunk.clock`)."""


class Refuse(msgspec.Struct, tag="refuse"):
    """The worker does not fit; it logs the reason and ends."""

    reason: str


class SendAgent(msgspec.Struct, tag="send-agent"):
    """An agent, pickled, in the frame that follows."""

    agent: int


class Parameters(msgspec.Struct, tag="parameters"):
    """Where the parameters of an agent are: in the memory that comes along, or sent on request."""

    agent: int
    nbytes: int
    buffers: int
    digest: str
    """Of names, shapes and dtypes, which must be the same on both sides."""


class SetLayout(msgspec.Struct, tag="set-layout"):
    """Where rollouts go; with shared memory its descriptor comes along."""

    lanes: int
    steps: int
    slots: int
    rows: Schema
    chunks: Schema


class Reset(msgspec.Struct):
    """Reset the masked slots (all without a mask) before the ticket's steps."""

    seeds: list[int | None] | None = None
    mask: bytes | None = None
    options: bytes | None = None


class Ticket(msgspec.Struct, tag="ticket"):
    """Permission to roll one chunk into a lane."""

    seq: int
    lane: int
    steps: int
    min_version: int = 0
    reset: Reset | None = None
    infos: bool = False


class Cancel(msgspec.Struct, tag="cancel"):
    """Tickets up to this one are no longer wanted."""

    upto: int


class Newest(msgspec.Struct, tag="newest"):
    """A version was published."""

    version: int


class Weights(msgspec.Struct, tag="weights"):
    """A version's parameters, in the frames that follow; without any, that agent is no longer wanted."""

    agent: int
    version: int
    base: int = -1
    """The version that they are to be added to; -1: they are whole."""


class GrantSend(msgspec.Struct, tag="grant-send"):
    """The worker's turn to send a chunk for which it asked (`RequestSend`)."""

    index: int


class Taken(msgspec.Struct, tag="taken"):
    """Rows of the chunk with that order have arrived: more of them may follow."""

    index: int


class Probe(msgspec.Struct, tag="probe"):
    """What a new version says of observations that the worker has sent: an array in each of the frames that follow."""

    agent: int
    version: int
    indices: list[int]
    """Chunks that the observations are from (see `rollout/probe_rows.py`); empty if there was nothing to compare."""
    keys: list[str]


class Call(msgspec.Struct, tag="call"):
    """Do `name` on the worker's environments, with the arguments in the frame that follows, pickled by the head."""

    request: int
    name: str


class Stop(msgspec.Struct, tag="stop"):
    """Close the environments and end."""


FromWorker = Hello | Ready | AgentReady | Part | Chunk | Reply | Failure | RequestSend | WeightRequest | Progress
FromHead = (
    Welcome
    | Refuse
    | SendAgent
    | Parameters
    | SetLayout
    | Ticket
    | Cancel
    | Taken
    | GrantSend
    | Newest
    | Weights
    | Probe
    | Call
    | Stop
)

_encoder = msgspec.msgpack.Encoder()
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_from_head: msgspec.msgpack.Decoder[FromHead] = msgspec.msgpack.Decoder(FromHead)
M = TypeVar("M")


def encode(message: FromWorker | FromHead) -> bytes:
    """A message as its header frame."""
    return _encoder.encode(message)


def decode_from_worker(frames: Sequence[BytesLike]) -> FromWorker:
    """The message of a worker's header frame."""
    return decoded(_from_worker, frames)


def decode_from_head(frames: Sequence[BytesLike]) -> FromHead:
    """The message of the head's header frame."""
    return decoded(_from_head, frames)


def decoded(decoder: msgspec.msgpack.Decoder[M], frames: Sequence[BytesLike]) -> M:
    """The message of a header frame, if it is one."""
    if not frames:
        raise WireError("a message without frames.")
    if len(frames[0]) > Limits.HEADER_BYTES:
        raise WireError(f"a header of {len(frames[0])} bytes; at most {Limits.HEADER_BYTES} are accepted.")
    try:
        return decoder.decode(frames[0])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a farstep message: {error}") from error
