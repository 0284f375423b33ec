"""Messages from worker to head; the package's docstring shows their order."""

from __future__ import annotations

import msgspec

from farstep.schema import Schema
from farstep.wire.messages.headers import Count, Endpoint, Line, Lines, Seconds, Word


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


class Listening(msgspec.Struct):
    """Part of `Ready`: where an acting server accepts workers over the network (see `UseServer`)."""

    endpoint: Endpoint
    bulk_port: Line
    key: bytes
    """Its public key."""


class Ready(msgspec.Struct, tag="ready"):
    """Worker to head, when its environments are built. `codec.pack` encodes the spaces.

    The head checks that all workers have equal spaces. Then it sends the agent and tickets to the worker.
    """

    observation_space: bytes
    action_space: bytes
    frame_stack: Count = 0
    """Frames per stacked observation, if a wrapper of the environments stacks them; otherwise 0."""
    listening: Listening | None = None
    """Only of an acting server that listens on the network."""


class ClientAdmitted(msgspec.Struct, tag="client-admitted"):
    """Acting server to head, the answer to `AdmitClient`.

    The head sends `UseServer` to the worker only now, because ZeroMQ does not retry a connection whose key was refused.
    """

    worker: Count
    incarnation: Count


class RejectClient(msgspec.Struct, tag="reject-client"):
    """Acting server to head: a worker has sent it an invalid message over the network. The head replaces the worker."""

    worker: Count
    reason: str


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
    out_of_bounds: str = ""
    """Which observation is outside the bounds of its space; empty if none is, and after the first rows."""
    bad_reward: str = ""
    """Which reward is NaN or infinite; sent once."""
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


FromWorker = (
    Hello
    | Ready
    | ClientAdmitted
    | RejectClient
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
