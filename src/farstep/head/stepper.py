"""Single steps with the caller's own actions: the server's client that stands behind `make_vec`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farstep.config.launch import LaunchConfig
from farstep.core import Array, BytesLike, Received
from farstep.errors import WireError, WorkerError
from farstep.head.chunks.incoming_chunks import IncomingChunk, records_of
from farstep.head.chunks.rollouts import Rollouts, base_rows
from farstep.head.members.broadcast import Broadcast
from farstep.head.members.worker_records import ResetRequest, WorkerRecord
from farstep.head.server import Server
from farstep.head.tickets.records import AcceptedChunk, IssuedTicket
from farstep.rollout.program import Program
from farstep.schema import ArraySpec, Schema, space_schema
from farstep.wire import messages as m
from farstep.wire.codec import unpack

Info = tuple[int, Mapping[str, Any] | None, Mapping[str, Any]]
"""Environment, what its episode ended with, and the step's or reset's info."""


class Stepper:
    """Actions in, one row of everything out. A failure raises: nothing is restarted behind the learner's back.

    After an exception of an environment the workers are as they were, and a reset goes on from there.
    """

    def __init__(self, config: LaunchConfig, program: Program, envs_per_node: int) -> None:
        self.server = Server(config, program, envs_per_node, 0, 0, self)
        self._steps = 0
        self._reset: ResetRequest | None = None
        self._error: WorkerError | None = None
        self._broadcast = Broadcast(self.server, without_lost=False)
        self._rollouts: Rollouts | None = None

    def start(self) -> tuple[Any, Any]:
        """Start the workers; the spaces of one environment."""
        observation_space, action_space = self.server.start()
        obs, self._obs_schema = space_schema(observation_space, "obs")
        _, actions = space_schema(action_space, "action")
        self._rollouts = Rollouts(self.server.records, obs, self._obs_schema)
        self._lay(actions)
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

    def _lay(self, actions: Schema) -> None:
        rollouts = self._rollouts
        assert rollouts is not None
        self._action_schema = actions
        if lay := rollouts.fit(1, 1, {**base_rows(self._obs_schema, "<f8"), **actions}, {}):
            assert rollouts.memory is not None
            with self.server.locked():
                self.server.announce(lay, fds=[rollouts.memory.fd])

    def step(self, actions: Mapping[str, Array]) -> list[Info]:
        """Step every environment."""
        schema = {name: ArraySpec.of(array) for name, array in actions.items()}
        if schema != self._action_schema:  # an environment gets its action in the dtype that it was given in
            self._lay(schema)
        for name, array in actions.items():
            self.blocks[name][0, 0] = array
        return self._roll(1, None)

    def reset(self, issued: ResetRequest) -> list[Info]:
        return self._roll(0, issued)

    def _roll(self, steps: int, reset: ResetRequest | None) -> list[Info]:
        """One ticket for every worker."""
        server = self.server
        with server.locked():
            server.raise_failure()
            if server.tickets.is_open:  # of a call that was interrupted
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
        """Do something on every worker; `arguments` is one tuple for all, or one each. Values in order of slots."""
        return tuple(value for answer in self._broadcast.call(name, *arguments) for value in answer or ())

    # ---- the server's side ----

    def version(self) -> int:
        return 0  # the learner acts: there is no policy on the workers

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
                if issued is not None and issued.worker == record.worker:  # else it was taken back meanwhile
                    self._take(record, message, received)
            case m.Reply():
                self._broadcast.replied(record, message, received)
            case _:
                raise WireError(f"{type(message).__name__} from a worker of make_vec, which has no agent.")

    def _take(self, record: WorkerRecord, chunk: m.Chunk, received: Received) -> None:
        ends, *frames = received.frames[1:]
        infos = _infos(frames.pop(), record) if chunk.infos and frames else []
        if self.server.shares_memory and (frames or chunk.keys):
            raise WireError("a chunk with arrays from a worker with shared memory.")
        if not self.server.shares_memory:
            assert self._rollouts is not None and self._rollouts.layout is not None
            incoming = IncomingChunk(self._rollouts.rows(record, 0), self._steps)
            incoming.ends = records_of(ends, record, self._steps)
            incoming.add(chunk.keys, frames, codecs=chunk.codecs)
            incoming.complete([self._rollouts.layout.names()])
        self.server.tickets.accept(record.worker, chunk.ticket, 0, infos)

    def on_lost(self, record: WorkerRecord) -> None:
        """The learner would step into episodes that it did not begin if another worker took the place of this one."""
        ended = record.handle.poll() if record.handle is not None else None
        if ended is not None and ended.blameless and self._rollouts is not None:
            self.server.fail(record.died(ended))

    def on_error(self, record: WorkerRecord, failure: m.Failure, error: WorkerError) -> None:
        if failure.ticket is not None:
            self._error = self._error or error
        else:
            self._broadcast.failed(record, failure, error)


def _infos(frame: BytesLike, record: WorkerRecord) -> list[Info]:
    infos = unpack(frame)
    if not isinstance(infos, list):
        raise WireError("infos that are not a list.")
    found: list[Info] = []
    for entry in infos:
        match entry:
            case (int(i), dict() | None as final, dict(info)) if 0 <= i < record.num_envs:
                found.append((record.first + i, final, info))
            case _:
                raise WireError("infos that are not of this worker's environments.")
    return found
