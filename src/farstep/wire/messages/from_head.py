"""Messages from head to worker; the package's docstring shows their order."""

from __future__ import annotations

import msgspec

from farstep.schema import Schema
from farstep.wire.messages.headers import Count, Seconds


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
    served: bool = False
    """Whether an acting server acts for the worker, and has got the agent instead."""
    on_cpu: bool = False
    """Whether a worker acts on the CPU although it has a GPU."""


class GpuParameters(msgspec.Struct):
    """Memory on a GPU in which the head also stores parameters."""

    gpu: str
    """UUID of the GPU."""
    handle: bytes
    """CUDA IPC handle of the memory."""


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
    on_gpu: GpuParameters | None = None
    """Where acting servers on the learner's GPU find versions; None: only in main memory."""


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
    polls: bool = False
    """Whether the worker may poll the board before it sleeps."""


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


class Unparked(msgspec.Struct, tag="unparked"):
    """Head to worker, the first message after it was parked.

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
    """Head to worker or acting server, after a publish, if the sync rule measures divergence.

    Each further frame has one array: the new policy's distribution parameters on observations that the worker has sent.
    The worker evaluates its own policy on the same observations and passes the divergence to its sync rule. An acting
    server gets the observations in one more frame, encoded by `codec.pack`: index, version and arrays of each chunk.
    """

    agent: int
    version: int
    indices: list[int]
    """The chunks from which the observations were taken (see `rollout/probe_rows.py`); empty if the head had none."""
    keys: list[str]
    """The names of the arrays in the frames."""


class AdmitClient(msgspec.Struct, tag="admit-client"):
    """Head to an acting server that listens on the network: accept this worker, with a key pair for the two processes.

    The server refuses a `Join` of the worker that differs from these values.
    """

    worker: Count
    incarnation: Count
    first: Count
    """The worker's first slot."""
    num_envs: Count
    obs: bytes
    """How observations are nested, encoded by `codec.pack`."""
    obs_schema: Schema
    action_schema: Schema
    public: bytes
    secret: bytes


class DropClient(msgspec.Struct, tag="drop-client"):
    """Head to an acting server that listens on the network: a worker is lost, and its key is no longer valid."""

    worker: Count


class UseServer(msgspec.Struct, tag="use-server"):
    """Head to worker: how to reach its acting server over the network.

    The worker joins the server. When the server was restarted, it gets the message again, and joins the new one.
    """

    endpoint: str
    """The port on the machine of the head; the whole address of a server elsewhere, or with the transport `ipc`."""
    bulk_port: str
    server_key: bytes
    public: bytes
    secret: bytes
    connect_s: float
    """Seconds without a connection after which the worker reports that it cannot reach the server."""


class ForgetServer(msgspec.Struct, tag="forget-server"):
    """Head to worker: its acting server is lost; `UseServer` follows when it was restarted."""


class Call(msgspec.Struct, tag="call"):
    """Head to worker: call a method of its host. The next frame has the pickled arguments.

    The worker answers `Reply`, or `Failure` with `request`.
    """

    request: int
    name: str
    """A method of the host (`worker/hosting/`), or `save` or `resume` (`worker/saving.py`)."""


class Stop(msgspec.Struct, tag="stop"):
    """Head to worker, at the end of a run or before its node leaves: close the environments and exit."""


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
    | Unparked
    | Continued
    | Taken
    | GrantSend
    | Newest
    | Weights
    | Probe
    | AdmitClient
    | DropClient
    | UseServer
    | ForgetServer
    | Call
    | Stop
)
