"""Steps environments with the caller's own actions, for `make_vec`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farstep.config.launch import LaunchConfig
from farstep.core import Array, BytesLike, Received
from farstep.errors import WireError, WorkerError
from farstep.head.chunks.incoming_chunks import IncomingChunk, decode_ends
from farstep.head.chunks.rollouts import Rollouts, base_rows
from farstep.head.events import EventLog
from farstep.head.members.broadcast import Broadcast
from farstep.head.members.worker_records import ResetRequest, WorkerRecord
from farstep.head.server import Server
from farstep.head.stats.worker_times import WorkerTimes
from farstep.head.tickets.records import AcceptedChunk, IssuedTicket
from farstep.rollout.program import Program
from farstep.schema import ArraySpec, Schema, space_schema
from farstep.wire import messages as m
from farstep.wire.codec import unpack

Info = tuple[int, Mapping[str, Any] | None, Mapping[str, Any]]
"""Slot, final info of an episode that ended (otherwise None), and info of the step or reset."""


class Stepper:
    """Sends actions to all workers and receives one row. It is the client of a `Server`.

    A worker that dies is not restarted: the next call raises. After an exception in an environment, the workers keep
    running, and the caller can continue with `reset`.
    """

    def __init__(self, config: LaunchConfig, program: Program, envs_per_node: int, events: EventLog) -> None:
        self.server = Server(config, program, envs_per_node, 0, 0, self, events)
        self.times = WorkerTimes(len(self.server.records))
        self._steps = 0
        self._reset: ResetRequest | None = None
        self._error: WorkerError | None = None
        self._broadcast = Broadcast(self.server, without_lost=False)
        self._rollouts: Rollouts | None = None

    def start(self) -> tuple[Any, Any]:
        """Start the workers and return the observation and action space of one environment."""
        observation_space, action_space = self.server.start()
        obs, self._obs_schema = space_schema(observation_space, "obs")
        _, actions = space_schema(action_space, "action")
        self._rollouts = Rollouts(self.server.records, obs, self._obs_schema)
        self._set_layout(actions)
        return observation_space, action_space

    def close(self) -> None:
        try:
            self.server.close()
        finally:
            if self._rollouts is not None:
                self._rollouts.close()

    @property
    def blocks(self) -> Mapping[str, Array]:
        """Arrays `[1, 2, N, ...]`: row 0 is the step, row 1 the observation after it."""
        assert self._rollouts is not None
        return self._rollouts.blocks

    def _set_layout(self, actions: Schema) -> None:
        """Allocate blocks for actions of this schema, and announce them to workers."""
        rollouts = self._rollouts
        assert rollouts is not None
        self._action_schema = actions
        if message := rollouts.fit(1, 1, {**base_rows(self._obs_schema, "<f8"), **actions}, {}):
            assert rollouts.memory is not None
            with self.server.locked():
                self.server.outbox.announce(message, fds=[rollouts.memory.fd])

    def step(self, actions: Mapping[str, Array]) -> list[Info]:
        """Step every environment."""
        schema = {name: ArraySpec.of(array) for name, array in actions.items()}
        if schema != self._action_schema:  # environments get actions in the caller's dtype
            self._set_layout(schema)
        for name, array in actions.items():
            self.blocks[name][0, 0] = array
        return self._roll(1, None)

    def reset(self, request: ResetRequest) -> list[Info]:
        return self._roll(0, request)

    def _roll(self, steps: int, reset: ResetRequest | None) -> list[Info]:
        """Issue one ticket to every worker and wait for all chunks."""
        server = self.server
        with server.locked():
            server.raise_failure()
            if server.tickets.is_open:  # left open by a call that was interrupted
                server.cancel()
            self._steps, self._reset, self._error = steps, reset, None
            server.tickets.open(None, None, 1)
            server.grant()
            try:
                accepted = server.wait(self._arrived)
            finally:
                if server.tickets.is_open:
                    server.cancel()
        return [info for a in accepted for info in a.info]

    def _arrived(self) -> list[AcceptedChunk] | None:
        if self._error is not None:
            raise self._error
        return self.server.tickets.take(0)

    def call(self, name: str, *arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Call a function on every worker. Return the values in the order of slots.

        Args:
            name: The function.
            arguments: One tuple of arguments for all workers, or one tuple per worker.
        """
        return tuple(value for answer in self._broadcast.call(name, *arguments) for value in answer or ())

    # ---- callbacks of the server (see `client.Client`) ----

    def version(self) -> int:
        return 0  # the caller acts, so workers have no policy

    def make_ticket(self, issued: IssuedTicket) -> tuple[m.Ticket, list[Any]]:
        record = self.server.records[issued.worker]
        frames: list[Any] = []
        reset = None if self._reset is None else self._reset.part(record)
        if reset is None and not self.server.shares_memory:
            frames = [self.blocks[name][0, 0, record.columns].tobytes() for name in self._action_schema]
        return m.Ticket(issued.seq, issued.lane, self._steps, 0, reset, infos=True), frames

    def on_message(self, record: WorkerRecord, message: m.FromWorker, received: Received) -> None:
        match message:
            case m.Chunk():
                issued = self.server.tickets.outstanding(message.ticket)
                if issued is not None and issued.worker == record.worker:  # otherwise the ticket has been cancelled
                    self._take(record, message, received)
            case m.Reply():
                self._broadcast.replied(record, message, received)
            case _:
                raise WireError(f"{type(message).__name__} from a worker of make_vec, which has no agent.")

    def _take(self, record: WorkerRecord, chunk: m.Chunk, received: Received) -> None:
        self.times.add(record.worker, chunk.times)
        ends, *frames = received.frames[1:]
        infos = _infos(frames.pop(), record) if chunk.infos and frames else []
        if self.server.shares_memory and (frames or chunk.keys):
            raise WireError("a chunk with arrays from a worker with shared memory.")
        if not self.server.shares_memory:
            assert self._rollouts is not None and self._rollouts.layout is not None
            incoming = IncomingChunk(self._rollouts.rows(record, 0), self._steps)
            incoming.ends = decode_ends(ends, record, self._steps)
            incoming.add(chunk.keys, frames, codecs=chunk.codecs)
            incoming.complete([self._rollouts.layout.names()])
        self.server.tickets.accept(record.worker, chunk.ticket, 0, infos)

    def on_parked(self, record: WorkerRecord) -> None:
        """Never called: `make_vec` refuses to scale."""

    def on_lost(self, record: WorkerRecord) -> None:
        """Fail the run, even if the node caused the loss: the caller would not notice that a replacement starts new
        episodes."""
        ended = record.handle.poll() if record.handle is not None else None
        if ended is not None and ended.blameless and self._rollouts is not None:
            self.server.fail(record.died(ended))

    def on_error(self, record: WorkerRecord, failure: m.Failure, error: WorkerError) -> None:
        if failure.ticket is not None:
            text, where = str(error).splitlines()[0], error.where
            self.server.events.emit(  # not logged, since the call raises it
                "warned", text, worker=where.worker, node=where.host, traceback=error.evidence, logged=False
            )
            self._error = self._error or error
        else:
            self._broadcast.failed(record, failure, error)


def _infos(frame: BytesLike, record: WorkerRecord) -> list[Info]:
    infos = unpack(frame)
    if not isinstance(infos, list):
        raise WireError(f"infos of type {type(infos).__name__}; expected a list.")
    found: list[Info] = []
    for entry in infos:
        match entry:
            case (int(i), dict() | None as final, dict(info)) if 0 <= i < record.num_envs:
                found.append((record.first + i, final, info))
            case _:
                raise WireError(f"an info that is not (environment below {record.num_envs}, final info, info).")
    return found
