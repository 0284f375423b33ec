"""Steps environments with the caller's own actions, for `make_vec`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from farstep.config.launch import LaunchConfig
from farstep.core import Array, Received
from farstep.errors import WireError, WorkerError
from farstep.head.chunks.incoming_chunks import IncomingChunk, decode_ends
from farstep.head.chunks.rollouts import Rollouts, base_rows
from farstep.head.events import EventLog
from farstep.head.members.broadcast import Broadcast
from farstep.head.members.worker_records import ResetRequest, WorkerRecord
from farstep.head.server import Server
from farstep.head.stats.counters import members_snapshot
from farstep.head.stats.rates import Rate
from farstep.head.stats.worker_times import WorkerTimes
from farstep.head.stepping.lock_step import Info, LockStepHead, checked_infos
from farstep.head.tickets.records import AcceptedChunk, IssuedTicket
from farstep.rollout.program import Program
from farstep.schema import ArraySpec, Schema, space_schema
from farstep.wire import messages as m
from farstep.wire.codec import unpack


class Stepper:
    """Sends actions to all workers and receives one row. It is the client of a `Server`.

    Local workers step without messages (see `lock_step.py`). Resets, calls and the first step after a change of the
    layout are messages with answers. Each of them leaves no unread message behind, so that steps and messages keep
    their order although steps use shared memory and messages use the socket; after one that was interrupted, the next
    step is a message, too.

    A worker that dies is not restarted: the next call raises. After an exception in an environment, the workers keep
    running, and the caller can continue with `reset`.
    """

    def __init__(self, config: LaunchConfig, program: Program, envs_per_node: int, events: EventLog) -> None:
        self.server = Server(config, program, envs_per_node, 0, 0, self, events)
        self.times = WorkerTimes(len(self.server.records))
        self._counted = [(0, 0)] * len(self.server.records)
        """For each worker, the nanoseconds on the board of steps that `times` includes: environments and waiting."""
        self._steps_by_message = [0] * len(self.server.records)
        self._rated_steps = [0] * len(self.server.records)
        """For each worker, the steps that its rate includes."""
        self._steps = 0
        self._num_envs = self.server.records[-1].stop
        self._total_steps = self._counted_steps = 0
        """Steps of environments until now, and until the last snapshot."""
        self._rate = Rate()
        self._reset: ResetRequest | None = None
        self._error: WorkerError | None = None
        self._broadcast = Broadcast(self.server, without_lost=False)
        self._rollouts: Rollouts | None = None
        self.row: dict[str, Array] = {}
        """Row 0 of each block: the step, or the observations of a reset."""
        self.next_obs: dict[str, Array] = {}
        """Row 1 of each block of observations: those after the step."""
        self.lock_step: LockStepHead | None = None
        """Set if workers are processes that share memory with the head."""
        self._in_order = False
        """Whether workers have answered all messages, so that a step may be requested without one."""

    def start(self) -> tuple[Any, Any]:
        """Start the workers and return the observation and action space of one environment."""
        observation_space, action_space = self.server.start()
        obs, self._obs_schema = space_schema(observation_space, "obs")
        _, actions = space_schema(action_space, "action")
        self._rollouts = Rollouts(self.server.records, obs, self._obs_schema)
        self._set_layout(actions)
        if self.server.shares_memory and not self.server.is_driven:
            self.lock_step = LockStepHead(self.server, self._raise_error, self._read_messages)
            self.lock_step.announce()
        return observation_space, action_space

    def close(self) -> None:
        try:
            self.server.close()
        finally:
            if self.lock_step is not None:
                self.lock_step.close()
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
        self._in_order = False
        if message := rollouts.fit(1, 1, {**base_rows(self._obs_schema, "<f8"), **actions}, {}):
            assert rollouts.memory is not None
            self.row = {name: block[0, 0] for name, block in rollouts.blocks.items()}
            self.next_obs = {name: rollouts.blocks[name][0, 1] for name in self._obs_schema}
            with self.server.locked():
                self.server.outbox.announce(message, fds=[rollouts.memory.fd])

    def begin_step(self, actions: Mapping[str, Array]) -> None:
        """Request a step of every environment."""
        self._discard()
        for name, array in actions.items():
            if array.dtype != self.row[name].dtype:  # environments get actions in the caller's dtype
                self._set_layout({name: ArraySpec.of(array) for name, array in actions.items()})
                break
        for name, array in actions.items():
            self.row[name][...] = array
        if self.lock_step is not None and self._in_order:
            self._error = None
            self.lock_step.begin()
        else:
            self._issue(1, None)

    def finish_step(self) -> Sequence[Info]:
        """Wait for the step and return the infos."""
        if self.lock_step is not None and not self.server.tickets.is_open:
            infos = self.lock_step.finish()
        else:
            infos = self._collect()
        self._total_steps += self._num_envs
        return infos

    def reset(self, request: ResetRequest) -> Sequence[Info]:
        self._discard()
        self._issue(0, request)
        return self._collect()

    def send(self, chosen: Array) -> None:
        """Request a step of some environments. Their actions are in the blocks."""
        assert self.lock_step is not None
        if not self.lock_step.num_in_flight:
            self.lock_step.settle()
            self._error = None
        if not self._in_order:
            self._read_messages()
        self.lock_step.send(chosen)

    def receive(self, count: int) -> tuple[Array, list[Info]]:
        """Wait until `count` environments have finished. Return them in order, and their infos."""
        assert self.lock_step is not None
        before = self.lock_step.num_in_flight
        received = self.lock_step.receive(count)
        self._total_steps += before - self.lock_step.num_in_flight
        return received

    def _read_messages(self) -> None:
        """Handle all messages that workers have sent until now."""
        self._in_order = False
        self._broadcast.call("describe", ())  # each worker's answer follows all its earlier messages
        self._in_order = True

    def stats(self) -> dict[str, Any]:
        """Steps, workers and times, as in `ClusterEnv.stats`."""
        with self.server.locked():
            now, steps = time.monotonic(), self._total_steps  # another thread may be stepping
            times = self._current_times(now)
            self._rate.add(steps - self._counted_steps, now)
            self._counted_steps = steps
            return {
                "steps": steps,
                "steps_per_second": self._rate.per_second(now),
                **members_snapshot(self.server, times, now),
                "time": {"workers": times.total(), "per_worker": times.per_worker()},
            }

    def _current_times(self, now: float) -> WorkerTimes:
        """How workers have spent their time until now, and their rates."""
        if self.lock_step is not None:
            board = self.lock_step.board
            for worker, (env_ns, wait_ns) in enumerate(zip(board.env_ns, board.wait_ns, strict=True)):
                old_env_ns, old_wait_ns = self._counted[worker]
                seconds = max(0, env_ns - old_env_ns) / 1e9, max(0, wait_ns - old_wait_ns) / 1e9
                self.times.add(worker, m.Times(env=seconds[0], tickets=seconds[1]))
                self._counted[worker] = (env_ns, wait_ns)
        for record in self.server.records:
            steps = self._steps_of(record)
            self.times.arrived(record.worker, steps - self._rated_steps[record.worker], now)
            self._rated_steps[record.worker] = steps
        return self.times

    def _steps_of(self, record: WorkerRecord) -> int:
        """Return how many steps the environments of a worker have done."""
        steps = self._steps_by_message[record.worker]
        if self.lock_step is not None:
            board = self.lock_step.board
            steps += board.done[record.worker] * record.num_envs + int(board.stepped[record.columns].sum())
        return steps

    def _discard(self) -> None:
        """Wait until no step is unfinished, and discard results that were not read."""
        if self.lock_step is not None and not self.lock_step.is_clean:
            self.lock_step.settle()
            self.lock_step.discard()

    def _issue(self, steps: int, reset: ResetRequest | None) -> None:
        """Issue one ticket to every worker."""
        server = self.server
        self._in_order = False
        with server.locked():
            server.raise_failure()
            if server.tickets.is_open:  # left open by a call that was interrupted
                server.cancel()
            self._steps, self._reset, self._error = steps, reset, None
            server.tickets.open(None, None, 1)
            server.grant()

    def _collect(self) -> Sequence[Info]:
        """Wait for the chunks of all workers."""
        server = self.server
        with server.locked():
            try:
                accepted = server.wait(self._arrived)
            finally:
                if server.tickets.is_open:
                    server.cancel()
        self._in_order = True
        return [info for a in accepted for info in a.info]

    def _arrived(self) -> list[AcceptedChunk] | None:
        self._raise_error()
        return self.server.tickets.take(0)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def call(self, name: str, *arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Call a function on every worker. Return the values in the order of slots.

        Args:
            name: The function.
            arguments: One tuple of arguments for all workers, or one tuple per worker.
        """
        if self.lock_step is not None:
            self.lock_step.settle()
        in_order, self._in_order = self._in_order, False
        answers = self._broadcast.call(name, *arguments)
        self._in_order = in_order
        return tuple(value for answer in answers for value in answer or ())

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
                issued = self.server.tickets.outstanding.get(message.ticket)
                if issued is not None and issued.worker == record.worker:  # otherwise the ticket has been cancelled
                    self._take(record, message, received)
            case m.Reply():
                self._broadcast.replied(record, message, received)
            case m.StepInfos() if self.lock_step is not None:
                self.lock_step.take_infos(record, unpack(received.frames[1]))
            case _:
                raise WireError(f"{type(message).__name__} from a worker of make_vec, which has no agent.")

    def _take(self, record: WorkerRecord, chunk: m.Chunk, received: Received) -> None:
        self.times.add(record.worker, chunk.times)
        self._steps_by_message[record.worker] += self._steps * record.num_envs
        ends, *frames = received.frames[1:]
        infos = checked_infos(unpack(frames.pop()), record) if chunk.infos and frames else []
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
        if self.lock_step is not None:
            self.lock_step.wake()
        ended = record.handle.poll() if record.handle is not None else None
        if ended is not None and ended.blameless and self._rollouts is not None:
            self.server.fail(record.died(ended))

    def on_error(self, record: WorkerRecord, failure: m.Failure, error: WorkerError) -> None:
        if failure.ticket is not None or failure.step:
            text, where = str(error).splitlines()[0], error.where
            self.server.events.emit(  # not logged, since the call raises it
                "warned", text, worker=where.worker, node=where.host, traceback=error.evidence, logged=False
            )
            self._error = self._error or error
        else:
            self._broadcast.failed(record, failure, error)
