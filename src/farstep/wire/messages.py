"""The messages between head and worker.

A message has a header frame (one of the structures below, in MessagePack) and further frames with raw bytes. A session
in the usual order:

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
                    ◄────────────── Resumed                   its process continues
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

With shared memory, `make_vec` steps without messages once the workers have their doorbells:

                    ◄────────────── SetDoorbells              where to find the board of steps (`rollout/step_board.py`)
    StepInfos ───────────────────►                            infos that do not fit in the board

Decoding checks all types; an invalid message raises `WireError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec

from farstep.core import BytesLike
from farstep.errors import WireError
from farstep.schema import Schema
from farstep.wire.codec import Limits

PROTOCOL = 11
"""Version of the protocol; head and worker must use the same. Increment it with every incompatible change."""
Word = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Line = Annotated[str, msgspec.Meta(max_length=1024, pattern=r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029]*\Z")]
"""Text that is safe in one line of a log: without line breaks and terminal control characters."""
Lines = Annotated[dict[Line, Line], msgspec.Meta(max_length=64)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class Hello(msgspec.Struct, tag="hello"):
    """Worker to head, first message after connecting.

    The head answers `Welcome`. If run, worker, incarnation or versions are not as expected, it answers `Refuse`.
    """

    worker: int
    incarnation: int
    run: Line
    host: Line
    pid: int
    versions: Lines
    cores: Line = ""
    """The cores that the process may use, e.g. `0-3,8`."""


class Ready(msgspec.Struct, tag="ready"):
    """Worker to head, when its environments are built. `codec.pack` encodes the spaces.

    The head checks that all workers have equal spaces. Then it sends the agent and tickets to the worker.
    """

    observation_space: bytes
    action_space: bytes
    frame_stack: Count = 0
    """Frames per stacked observation, if a wrapper of the environments says so; otherwise 0."""


class AgentReady(msgspec.Struct, tag="agent-ready"):
    """Worker to head, after `SendAgent`: the worker has loaded the agent and called it once on its own observations.

    The head checks that all workers report the same arrays, and derives `SetLayout` from them. A worker that cannot use
    the agent sends `Failure` with `agent` instead.
    """

    agent: int
    schema: Schema
    """The arrays that `act` returns, per environment."""
    structure: bytes
    """How these arrays are nested, encoded by `codec.pack`."""
    state: Schema = {}
    """The arrays of the recurrent state, per environment; empty if the agent is not recurrent."""
    state_structure: bytes = b""
    inference: str = ""
    """How the worker calls the agent, e.g. with a recorded fast path."""
    description: Schema = {}
    """The arrays that describe the policy on one observation; empty unless the sync rule measures divergence."""


class Times(msgspec.Struct, array_like=True, frozen=True):
    """How a worker spent its time, in seconds, since it began to send its last `Chunk` message."""

    env: Seconds = 0.0
    """Stepping and resetting environments, and recording their rows."""
    inference: Seconds = 0.0
    """Acting, and evaluating probes."""
    tickets: Seconds = 0.0
    """Waiting for a ticket."""
    send: Seconds = 0.0
    """Compressing and sending chunks, and waiting for a `GrantSend`."""
    weights: Seconds = 0.0
    """Waiting for weights and loading them."""


class Chunk(msgspec.Struct, tag="chunk"):
    """Worker to head: the chunk of a ticket is complete. Only `Worker._chunk` creates this message.

    The first frame has a record of `batch.ENDS` for each episode that ended (empty if a `Part` had them). With shared
    memory, the rows are already in the worker's columns; otherwise each further frame has one array of `keys`. If the
    worker no longer holds the ticket, the head drops the chunk. Otherwise the head checks all shapes, copies the arrays
    into the worker's columns and accepts the chunk.
    """

    ticket: int
    version: int
    """The version that acted in all rows, or the oldest of several; -1 if the agent has no parameters, 0 if the head
    acts."""
    resume: bytes
    """One int64 per slot: the episode with which a replacement of this worker continues."""
    index: int = 0
    """Counts the chunks that this worker has started. A gap means that rows between two chunks were lost."""
    infos: bool = False
    """Whether the last frame has the environments' infos, encoded by `codec.pack`."""
    inference: str = ""
    """How the worker calls the agent; empty if unchanged since the last chunk."""
    passed: int = -1
    """The version that counts for staleness: the newest version whose probe the weights passed, at least `version`."""
    divergence: float | None = None
    """Running divergence (KL, in nats) between the worker's and the learner's policy; None if the rule measures
    none."""
    unmeasured: str = ""
    """Why the divergence could not be measured; sent once per reason."""
    syncs: int = 0
    """Weight pulls since the last chunk."""
    synced_bytes: int = 0
    """Bytes of the pulls since the last chunk."""
    times: Times = Times()
    keys: list[str] = []
    """The arrays in the frames, in order; empty with shared memory."""
    codecs: list[str] = []
    """Codec of each array (see `compression.py`), "" for none; an empty list if no array is compressed."""
    first: int = 0
    """Index of the first row in arrays with one row per step; `Part`s have sent the rows before it."""
    clock: Count = 0
    """Rows since the staggered schedule started, modulo the horizon; 0 without a schedule."""
    stagger_steps: Count = 0
    """Number of steps since the last chunk that only moved environments to their offsets in the staggered schedule."""


class Part(msgspec.Struct, tag="part"):
    """Worker without shared memory to head: some arrays of a chunk, before its `Chunk` message.

    The frames are as in `Chunk`; the first frame is empty unless this part completes stage 0. The head copies the
    arrays into the worker's columns. It acknowledges a part with `stage` -1 by `Taken`. It passes a complete stage to
    callers that subscribed to parts.
    """

    ticket: int
    index: int
    """The chunk's index (see `Chunk.index`)."""
    stage: int
    """The stage (see `TransferTrigger.keys`) that this part completes; -1 for rows of an unfinished chunk."""
    first: int
    """Index of the first row in arrays with one row per step."""
    keys: list[str]
    passed: int = -1
    """As `Chunk.passed`; -1 for an unfinished chunk."""
    codecs: list[str] = []
    """As `Chunk.codecs`."""


class Reply(msgspec.Struct, tag="reply"):
    """Worker to head: the result of a `Call`. The next frame has it, encoded by `codec.pack`."""

    request: int


class Idle(msgspec.Struct, tag="idle"):
    """Worker to head, the answer to `ReturnTickets`: the worker has no ticket any more.

    Messages arrive in order, so the worker has not started the tickets that are open at the head now. The head takes
    them back, and may have the worker's process suspended.
    """


class Failure(msgspec.Struct, tag="failure"):
    """Worker to head: the environment, the agent or a sync rule raised.

    With `request`, the call that sent the request raises the error; with `agent`, the call that sent the agent. A
    failed ticket is retried or returned. Any other failure ends the worker. The head then replaces the worker or, if a
    retry would fail again, ends the run.
    """

    message: str
    traceback: str
    phase: str
    """What the worker was doing: the label of a `rollout.progress.Phase`."""
    kind: str = ""
    """The class of the exception, if Python or farstep defines it; otherwise empty."""
    slot: int | None = None
    seed: int | None = None
    episode_step: int | None = None
    version: int | None = None
    ticket: int | None = None
    """The ticket that failed; the worker continues with the next episodes."""
    again: bool = False
    """Whether the worker retries the ticket, before any later ticket."""
    request: int | None = None
    """The `Call` that raised; the worker continues as before."""
    agent: int | None = None
    """The agent that the worker cannot use; the worker waits for another agent."""
    step: bool = False
    """Whether a step that a doorbell requested raised; the worker waits for the next one."""


class StepInfos(msgspec.Struct, tag="step-infos"):
    """Worker to head, before it rings the doorbell: infos of a step. The next frame has them, encoded by
    `codec.pack`."""


class RequestSend(msgspec.Struct, tag="request-send"):
    """Worker without shared memory to head: request to send the last stage of a chunk, if the number of senders is
    limited.

    The head queues the request and answers `GrantSend` when fewer than `TransferTrigger.max_senders` workers send.
    """

    ticket: int
    index: int


class WeightRequest(msgspec.Struct, tag="weight-request"):
    """Worker without shared memory to head, when it pulls weights. The head answers `Weights`."""

    agent: int
    held: int = -1
    """The version that the worker keeps, as the base of a delta; -1 if it keeps none."""


class Progress(msgspec.Struct, tag="progress"):
    """Worker without shared memory to head, once a second from a separate thread and connection.

    The head copies the words to its progress board, as if the worker were local (see `rollout/progress.py`).
    """

    words: list[Word]


class Welcome(msgspec.Struct, tag="welcome"):
    """Head to worker, the answer to `Hello`. The next frame has the pickled `rollout.program.Program`.

    The worker builds its environments, sends `Ready`, then imports the modules in `preload`.
    """

    first_slot: int
    seeds: list[int]
    """The root seed of each slot."""
    episodes: list[int]
    """The episode with which each slot starts."""
    path: list[str]
    """Entries to put in front of `sys.path`."""
    preload: list[str]
    """Modules to import early, such as torch."""
    clock: Count = 0
    """The last `Chunk.clock` of the worker that this one replaces."""


class Refuse(msgspec.Struct, tag="refuse"):
    """Head to worker, the answer to a `Hello` that does not match. The worker logs the reason and exits."""

    reason: str


class SendBase(msgspec.Struct, tag="send-base"):
    """Head to worker, before the first agent with this base: tensors that never change.

    The next frame has them; workers that share memory with the head get a descriptor instead, and map `nbytes` bytes.
    The worker keeps the base until it gets another base, or an agent without one.
    """

    content_hash: str
    nbytes: int = 0


class SendAgent(msgspec.Struct, tag="send-agent"):
    """Head to worker, when the user passes a new agent. The next frame has the pickled agent.

    The worker loads the agent, calls it once, and answers `AgentReady`, or `Failure` with `agent`.
    """

    agent: int
    base: str = ""
    """Content hash of the agent's base; empty if it has none."""


class Parameters(msgspec.Struct, tag="parameters"):
    """Head to worker, after `AgentReady`: where to pull parameters from.

    With shared memory, the message carries a file descriptor, which the worker maps. Without shared memory, the worker
    sends a `WeightRequest` whenever it pulls.
    """

    agent: int
    nbytes: int
    """Size of one set of parameters."""
    buffers: int
    """Number of sets for which the shared memory has room."""
    digest: str
    """A hash of names, shapes and dtypes. If the worker's own hash differs, it rejects the agent."""


class SetLayout(msgspec.Struct, tag="set-layout"):
    """Head to worker, before the first ticket and whenever the arrays change: the layout of rollouts
    (`rollout/blocks.py`).

    With shared memory, the message carries a file descriptor, and the worker writes its columns there. Without shared
    memory, the worker allocates memory for one chunk.
    """

    lanes: int
    steps: int
    slots: int
    rows: Schema
    """Arrays with one row per step."""
    chunks: Schema
    """Arrays with one entry per chunk."""


class SetDoorbells(msgspec.Struct, tag="set-doorbells"):
    """Head to worker, once, after the first `SetLayout` of `make_vec` with shared memory.

    The message carries four descriptors: the board's memory, the worker's doorbell, the head's doorbell, and the
    pipe that tells which worker finishes last (`rollout/step_board.py`).
    """

    worker: Count
    workers: Count
    slots: Count
    """Number of environments of all workers."""
    spins: bool = False
    """Whether the worker polls the board for some microseconds before it sleeps."""


class Reset(msgspec.Struct):
    """Part of a `Ticket`: reset slots before the first step."""

    seeds: list[int | None] | None = None
    """One root seed per slot of the worker; None: keep the seeds."""
    mask: bytes | None = None
    """One bool per slot of the worker; None: reset all."""
    options: bytes | None = None
    """The `options` of `reset`, pickled."""


class Ticket(msgspec.Struct, tag="ticket"):
    """Head to worker: permission to roll one chunk. If the head acts (`make_vec`), further frames have the actions.

    The worker processes tickets in the order of arrival. It answers each ticket with `Chunk` or `Failure`, unless the
    ticket is cancelled.
    """

    seq: int
    """Id of the ticket; ids increase in the order of issue."""
    lane: int
    """Where in shared memory to write the chunk."""
    steps: int
    """Number of rows of the chunk; 0: only reset."""
    min_version: int = 0
    """The oldest version that the worker's weights may count as (see `Chunk.passed`). If they are older, it pulls."""
    reset: Reset | None = None
    infos: bool = False
    """Whether to send the environments' infos with the chunk."""
    one_version: bool = False
    """Whether one version must act in all rows. Only a worker that acts through an acting server can mix versions."""


class Cancel(msgspec.Struct, tag="cancel"):
    """Head to worker, when a call ends or is interrupted: drop unfinished tickets, including the running ticket.

    With shared memory, the head also writes the id into the worker's progress words, so that the worker sees it while a
    ticket runs.
    """

    upto: int
    """The id of the last cancelled ticket."""


class ReturnTickets(msgspec.Struct, tag="return-tickets"):
    """Head to worker, before the worker is parked: forget all tickets that are not started, and answer `Idle`.

    The worker finishes the chunk that it is rolling first.
    """


class Resumed(msgspec.Struct, tag="resumed"):
    """Head to worker, the first message after its process was suspended.

    The worker discards its running divergence, because it has missed probes, and does not count the time for which it
    was suspended. Staggered environments re-enter at the step of their episodes that is due now.
    """

    clock: Count = 0
    """The last `Chunk.clock` of a worker that was not suspended."""


class Continued(msgspec.Struct, tag="continued"):
    """Head to worker, after its process was suspended between two rollouts. It has missed nothing.

    The worker does not count the time for which it was suspended.
    """

    suspended_s: Seconds = 0.0


class Newest(msgspec.Struct, tag="newest"):
    """Head to workers without shared memory, after a publish: the newest version, for the sync rule."""

    version: int


class Weights(msgspec.Struct, tag="weights"):
    """Head to worker, the answer to `WeightRequest`. The next frames have the newest parameters.

    The worker loads them before it rolls. If there are no frames, the agent has been replaced, and the worker drops the
    ticket.
    """

    agent: int
    version: int
    base: int = -1
    """The base version of the delta in the frames (`delta.py`); -1 if the frames have the full parameters."""


class GrantSend(msgspec.Struct, tag="grant-send"):
    """Head to worker, the answer to `RequestSend`: the worker may now send the rest of the chunk."""

    index: int


class Taken(msgspec.Struct, tag="taken"):
    """Head to worker, the acknowledgement of a `Part` with `stage` -1: the worker may send more rows of the chunk."""

    index: int


class Probe(msgspec.Struct, tag="probe"):
    """Head to worker, after a publish, if the sync rule measures divergence.

    Each further frame has one array: the new policy's distribution parameters on observations that the worker has sent.
    The worker evaluates its own policy on the same observations and passes the divergence to its sync rule.
    """

    agent: int
    version: int
    indices: list[int]
    """The chunks from which the observations were taken (see `rollout/probe_rows.py`); empty if the head had none."""
    keys: list[str]
    """The names of the arrays in the frames."""


class Call(msgspec.Struct, tag="call"):
    """Head to worker: call a method of its host. The next frame has the pickled arguments.

    The worker answers `Reply`, or `Failure` with `request`.
    """

    request: int
    name: str
    """A method of the host (`worker/hosting/`), or `save` or `resume` (`worker/saving.py`)."""


class Stop(msgspec.Struct, tag="stop"):
    """Head to worker, at the end of a run or before its node leaves: close the environments and exit."""


FromWorker = (
    Hello
    | Ready
    | AgentReady
    | Part
    | Chunk
    | Reply
    | Idle
    | Failure
    | StepInfos
    | RequestSend
    | WeightRequest
    | Progress
)
FromHead = (
    Welcome
    | Refuse
    | SendBase
    | SendAgent
    | Parameters
    | SetLayout
    | SetDoorbells
    | Ticket
    | Cancel
    | ReturnTickets
    | Resumed
    | Continued
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
    """The header frame of a message."""
    return _encoder.encode(message)


def decode_from_worker(frames: Sequence[BytesLike]) -> FromWorker:
    """Decode the first of a worker's frames. Raise `WireError` if it is not a valid message."""
    return decoded(_from_worker, frames)


def decode_from_head(frames: Sequence[BytesLike]) -> FromHead:
    """Decode the first of the head's frames. Raise `WireError` if it is not a valid message."""
    return decoded(_from_head, frames)


def decoded(decoder: msgspec.msgpack.Decoder[M], frames: Sequence[BytesLike]) -> M:
    """Decode the first frame with `decoder`. Raise `WireError` if it is not a valid message."""
    if not frames:
        raise WireError("a message without frames.")
    if len(frames[0]) > Limits.HEADER_BYTES:
        raise WireError(f"a header of {len(frames[0])} bytes; at most {Limits.HEADER_BYTES} are accepted.")
    try:
        return decoder.decode(frames[0])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a farstep message: {error}") from error
