"""The worker process: take a ticket, pull weights if needed, roll the chunk, send it.

`Worker.handle` handles one message from the head and `Worker.work` processes one ticket; `Worker.serve` is the loop
around both. A worker inside the head's process does not run the loop: its launcher calls `handle` and `work` directly.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import pickle
import socket
import sys
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import cloudpickle

from farstep.acting.client import ServedActor, ServedError, ServerLost
from farstep.acting.connections import ServerAddress
from farstep.core import BytesLike, Link, Received
from farstep.errors import WireError, report_of
from farstep.resources import core_ranges
from farstep.rollout.program import Program
from farstep.rollout.progress import COUNT, PHASE, ROLLED, SLOT, Phase
from farstep.rollout.rows import Slots
from farstep.rollout.weight_headers import check_digest
from farstep.schema import space_schema
from farstep.wire import messages as m
from farstep.wire.codec import pack
from farstep.wire.compression import Compressor
from farstep.wire.versions import versions
from farstep.worker.acting import Actor
from farstep.worker.chunk_sender import ChunkSender
from farstep.worker.connection.acting_connection import ActingConnection
from farstep.worker.connection.inbox import Inbox, TicketCancelled
from farstep.worker.hosting.base import Host
from farstep.worker.hosting.bounds import BoundsCheck
from farstep.worker.hosting.hosts import AnyHost, failed_env, make_host
from farstep.worker.hosting.reward_check import RewardCheck
from farstep.worker.hosting.staggered import Staggered
from farstep.worker.hosting.strict import StrictEnvs
from farstep.worker.lock_step import LockStepWorker
from farstep.worker.rolling import AnyActor, Roller, Rollout
from farstep.worker.saving import Saving, seed_generators
from farstep.worker.weights.weight_messages import WeightMessages
from farstep.worker.weights.weight_sync import WeightSync
from farstep.worker.worker_timer import Part, WorkerTimer

log = logging.getLogger("farstep.worker")
_TIMED: dict[type[m.FromHead], Part | None] = {
    m.Probe: "inference",
    m.Call: "env",
    m.Welcome: None,
    m.SendBase: None,
    m.SendAgent: None,
    m.Parameters: None,
}
"""Messages that take time to handle, and the part of the worker's time that it counts toward; None: startup."""


class Worker:
    """Hosts a range of environment slots and rolls one chunk per ticket of the head."""

    def __init__(
        self,
        link: Link,
        worker: int,
        incarnation: int,
        run: str,
        words: memoryview,
        has_gpu: bool = False,
        acting_address: ServerAddress | None = None,
    ) -> None:
        self._link, self._words, self._has_gpu = link, words, has_gpu
        self._id = (worker, incarnation, run)
        self._inbox = Inbox(link, words)
        self._server = ActingConnection(worker, acting_address, self._inbox, words)
        self._tickets: deque[tuple[m.Ticket, list[Any]]] = deque()
        self.running = True
        """False once the run has ended or the head has stopped the worker."""
        self._owns_process = False
        """False for a worker inside the head's process."""
        self._host: AnyHost | None = None
        self._actor: AnyActor | None = None
        self._sync = WeightSync(words)
        self._weights = WeightMessages(link, self._inbox, self._sync)
        self._lock_step: LockStepWorker | None = None
        """Set if `make_vec` steps the environments without messages."""
        self._timer = WorkerTimer()
        self._index = 0  # of chunks started so far (see `messages.Chunk.index`)
        self._bounds, self._rewards = BoundsCheck(), RewardCheck()

    # ---- the loop ----

    def hello(self) -> None:
        worker, incarnation, run = self._id
        self._words[PHASE] = Phase.CONNECT
        cores = core_ranges(os.sched_getaffinity(0))[:1000]
        self._send(m.Hello(worker, incarnation, run, socket.gethostname(), os.getpid(), versions(), cores))

    def serve(self) -> None:
        """Handle messages and tickets until `Stop`. Raise `EOFError` if the head closed the connection."""
        self._owns_process = True
        self.hello()
        while self.running:
            if self._lock_step is not None and not self._tickets:
                self._lock_step.serve(self._roller.first_lane())
            received = self._inbox.receive(0.0 if self._tickets else None)  # messages first, then tickets
            if received is not None:
                self.handle(received)
            elif self._tickets:
                self.work()

    def work(self) -> bool:
        """Process the next ticket. Return False if there is none."""
        if not self._tickets:
            return False
        self._run_ticket(*self._tickets.popleft())
        return True

    @property
    def _user_errors(self) -> tuple[type[BaseException], ...]:
        """The exceptions that count as failures of the environment or agent. They include `SystemExit` and, in a
        process that ignores Ctrl-C, `KeyboardInterrupt`.
        """
        return (Exception, SystemExit, KeyboardInterrupt) if self._owns_process else (Exception, SystemExit)

    def close(self) -> None:
        """Release resources; only a worker inside the head's process needs this, since it does not exit."""
        self._sync.close()
        with contextlib.suppress(Exception):
            self._close_environments()

    def _close_environments(self) -> None:
        if self._host is not None:
            host, self._host = self._host, None
            host.close()

    def _send(self, message: m.FromWorker, *frames: Any) -> None:
        self._link.send([m.encode(message), *frames])

    def handle(self, received: Received) -> None:
        """Handle one message from the head.

        The worker reports errors to the head. It continues after an error in a `Call` or in a new agent; after any
        other error it raises `SystemExit`.
        """
        message = m.decode_from_head(received.frames)
        timed = type(message) in _TIMED
        if timed:
            self._timer.lap("tickets")
        try:
            self._dispatch(message, received)
        except self._user_errors as error:
            in_agent = Phase(self._words[PHASE]) in (Phase.LOAD, Phase.ACT)
            rejected = message.agent if isinstance(message, (m.SendAgent, m.Parameters)) and in_agent else None
            self._report(error, request=message.request if isinstance(message, m.Call) else None, agent=rejected)
            self._words[PHASE] = Phase.IDLE
            if not isinstance(message, m.Call) and rejected is None:
                raise SystemExit(1) from error
        finally:
            if timed:
                self._time_message(message)

    def _time_message(self, message: m.FromHead) -> None:
        """Add the time since the message arrived to the part that `_TIMED` names."""
        part = _TIMED[type(message)]
        if part is not None:
            self._timer.lap(part)
        elif isinstance(message, m.Welcome):
            self._timer.restart()
        else:
            self._timer.skip()

    def _dispatch(self, message: m.FromHead, received: Received) -> None:
        match message:
            case m.Ticket():
                self._tickets.append((message, list(received.frames[1:])))
            case m.Cancel():
                self._tickets = deque(entry for entry in self._tickets if entry[0].seq > message.upto)
            case m.ReturnTickets():
                self._tickets.clear()
                self._send(m.Idle())
            case m.Unparked():
                self._unparked(message)
            case m.Continued():
                self._timer.remove_suspension(message.suspended_s)
            case m.UseServer() | m.ForgetServer():
                self._server.set_server(message)
            case m.Newest() if isinstance(self._actor, ServedActor):
                self._actor.newest = message.version
            case m.Probe():
                # A probe of another agent is for one that was replaced.
                if message.agent == self._weights.agent_id and isinstance(self._actor, Actor):
                    self._sync.compare(message, received.frames[1:], self._actor)
            case m.Weights():
                log.debug("ignoring weights of version %d: their ticket was cancelled", message.version)
            case m.GrantSend() | m.Taken():
                pass  # its chunk was cancelled, or is complete
            case m.SetLayout():
                self._roller.set_layout(message, received.fds)
            case m.SetDoorbells():
                self._set_doorbells(message, received.fds)
            case m.SendAgent():
                self._adopt(message, bytes(received.frames[1]))
            case m.SendBase() | m.Parameters() | m.Newest():
                if isinstance(message, m.Parameters) and message.agent == self._weights.agent_id:
                    self._check_digest(message)
                self._weights.handle(message, received)
            case m.Call():
                self._call(message, received.frames[1])
            case m.Welcome():
                self._construct(message, received.frames[1])
            case m.Refuse():
                log.error("refused by the head: %s", message.reason)
                self.running = False
            case m.Stop():
                self.running = False
                self._close_environments()
            case _:
                raise WireError(f"unexpected {type(message).__name__}.")

    # ---- setup: environments, agent, weights ----

    def _construct(self, message: m.Welcome, program: BytesLike) -> None:
        sys.path[:] = list(dict.fromkeys(message.path + sys.path))
        self._words[PHASE] = Phase.CONSTRUCT
        self._first_slot = message.first_slot
        self._program: Program = pickle.loads(program)
        slots = Slots(message.first_slot, message.seeds, message.episodes)
        self._host = make_host(self._program, slots, self._words, message.clock)
        self._obs, self._obs_schema = space_schema(self._host.observation_space, "obs")
        _, self._action_schema = space_schema(self._host.action_space, "action")
        rate = getattr(self._link, "rate", lambda: math.inf)
        compressor = Compressor(self._program.compression, self._program.codecs, rate)
        sender = ChunkSender(self._program.transfer, self._send, self._inbox.poll, compressor)
        self._inbox.on_taken = sender.acknowledged
        self._roller = Roller(self._host, self._words, self._inbox.poll, sender, self._timer)
        self._sync.rule = self._program.sync
        self._weights.config = self._program.weights
        spaces = (pack(self._host.observation_space), pack(self._host.action_space))
        self._send(m.Ready(*spaces, self._host.num_stacked_frames if isinstance(self._host, Host) else 0))
        self._words[PHASE] = Phase.CONNECT  # the time limit of this phase allows for slow imports
        for module in message.preload:  # import now, while the head does not wait for this worker
            __import__(module)
        self._seed_globals(self._program.seed, message.first_slot)
        self._words[PHASE] = Phase.IDLE

    def _set_doorbells(self, message: m.SetDoorbells, fds: Sequence[int]) -> None:
        assert isinstance(self._host, StrictEnvs)
        fail = partial(self._report, step=True)
        around = (self._host, self._words, self._timer, self._send, fail, self._user_errors)
        self._lock_step = LockStepWorker(message, fds, self._link.fileno(), *around)

    def _seed_globals(self, root: int, slot: int) -> None:
        if self._owns_process:  # inside the head's process, the global generators belong to the user
            seed_generators(root, slot, self._id[1])

    def _adopt(self, message: m.SendAgent, payload: bytes) -> None:
        self._words[PHASE] = Phase.LOAD
        if isinstance(self._actor, ServedActor):
            self._actor.close()
        self._actor, self._weights.agent_id = None, -1
        self._weights.new_agent(message)
        assert isinstance(self._host, Host)
        if message.served:
            self._join_server(message.agent, self._host)
            return
        had_torch = "torch" in sys.modules
        slots, program = self._host.slots, self._program
        content_hash, base = self._weights.base
        if message.base != content_hash:
            raise WireError(f"an agent with the base {message.base}; this worker has {content_hash or 'none'}.")
        has_gpu = self._has_gpu and not message.on_cpu
        space = self._host.observation_space
        actor = Actor(payload, program.inference, self._obs, slots, program.weights, has_gpu, base, space)
        if "torch" in sys.modules and not had_torch:
            sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
            self._seed_globals(self._program.seed, slots.first)
        self._host.prepare(self._user_errors)
        self._words[PHASE] = Phase.ACT
        schema, state_schema, state = actor.dry_run(self._host.current, self._action_schema)
        description = self._sync.start_probing(actor, self._obs, schema, state)
        self._actor, self._weights.agent_id = actor, message.agent
        note = actor.policy.note
        self._send(
            m.AgentReady(message.agent, schema, pack(actor.recorded), state_schema, pack(state), note, description)
        )
        if self._owns_process:
            gc.collect()
            gc.freeze()  # exclude existing objects, mostly torch's, from garbage collection
        self._words[PHASE] = Phase.IDLE

    def _join_server(self, agent: int, host: Host) -> None:
        host.prepare(self._user_errors)
        assert self._program.serving is not None
        schemas = (self._obs_schema, self._action_schema)
        joined = self._server.join(agent, host, self._obs, schemas, self._program.serving)
        if joined is not None:
            self._actor, ready = joined
            self._weights.agent_id = agent
            self._send(ready)
            self._words[PHASE] = Phase.IDLE

    def _check_digest(self, message: m.Parameters) -> None:
        assert isinstance(self._actor, Actor)
        self._words[PHASE] = Phase.LOAD
        check_digest(message.digest, self._actor.loader.schema)
        self._words[PHASE] = Phase.IDLE

    def _unparked(self, message: m.Unparked) -> None:
        self._timer.skip()
        self._sync.unparked()
        if isinstance(self._host, Staggered) and self._host.reenter(message.clock):
            self._index += 1  # a gap in the index: the next chunk does not continue the last one

    # ---- a ticket ----

    def _run_ticket(self, ticket: m.Ticket, frames: list[Any]) -> None:
        self._timer.lap("tickets")
        self._index += ticket.steps > 0
        try:
            self._update_weights(ticket)
            rollout = self._roller.roll(ticket, frames, self._actor, self._index, self._sync.passed)
        except TicketCancelled:
            return
        except ServerLost:
            self._retry_with_new_server(ticket, frames)
            return
        except self._user_errors as error:
            self._fail(ticket, frames, error)
            self._timer.lap("env")
            return
        except BaseException:  # Ctrl-C, if the worker runs in the user's process
            self._recover(None)
            raise
        finally:
            self._words[PHASE] = Phase.IDLE
        try:
            self._send_chunk(ticket, rollout)
        except TicketCancelled:
            return
        finally:
            self._timer.lap("send")

    def _retry_with_new_server(self, ticket: m.Ticket, frames: list[Any]) -> None:
        """Roll a ticket again with the replacement of the acting server, which knows nothing of current episodes."""
        if ticket.reset is not None:
            ticket.reset.seeds = None  # already applied
        try:
            self._join_new_server()
        except TicketCancelled:
            return
        except ServedError as error:
            self._report(error, agent=self._weights.agent_id)
            return
        finally:
            self._words[PHASE] = Phase.IDLE
            self._timer.lap("inference")
        self._tickets.appendleft((ticket, frames))

    def _join_new_server(self) -> None:
        """Restart all episodes, and join the replacement of the acting server. May raise `TicketCancelled`."""
        assert isinstance(self._actor, ServedActor) and isinstance(self._host, Host)
        self._recover(None)
        self._words[PHASE] = Phase.LOAD
        self._host.prepare(self._user_errors)
        self._words[PHASE] = Phase.LOAD
        self._actor.join(self._host.current)

    def _update_weights(self, ticket: m.Ticket) -> None:
        if isinstance(self._actor, Actor) and ticket.steps:
            try:
                self._sync.pull_if_needed(ticket, self._actor)
            finally:
                self._timer.lap("weights")

    def _send_chunk(self, ticket: m.Ticket, rollout: Rollout) -> None:
        """Send a chunk; if the number of senders is limited, wait for this worker's turn. May raise
        `TicketCancelled`."""
        chunk = self._chunk(ticket, rollout)
        if chunk.keys and ticket.steps > 1 and self._program.transfer.max_senders is not None:
            self._send(m.RequestSend(ticket.seq, self._index))
            self._inbox.wait_for_turn(ticket, self._index)
        self._words[ROLLED] = ticket.seq  # tells the head that the chunk is being sent
        self._send(chunk, *rollout.frames)

    def _chunk(self, ticket: m.Ticket, rollout: Rollout) -> m.Chunk:
        """Return the chunk's header."""
        unmeasured = ""
        if self._sync.probing is not None and ticket.steps:
            unmeasured = self._sync.probing.take_note()
            self._sync.probing.remember(self._index, rollout.version, self._roller.rows, ticket.steps)
        source = self._actor if isinstance(self._actor, ServedActor) else self._sync
        totals, payload = source.take_totals(), rollout.payload
        return m.Chunk(
            ticket=ticket.seq,
            version=rollout.version,
            resume=rollout.resume,
            index=self._index,
            infos=rollout.infos is not None,
            inference=self._actor.take_note() if self._actor is not None else "",
            passed=rollout.passed,
            divergence=source.divergence,
            unmeasured=unmeasured,
            out_of_bounds=self._bounds.check(self._host, self._roller.rows, ticket.steps),
            bad_reward=self._rewards.check(self._host, self._roller.rows, ticket.steps),
            syncs=totals.pulls,
            synced_bytes=totals.nbytes,
            times=self._timer.take(),
            keys=payload.keys,
            codecs=payload.codecs,
            first=payload.first,
            clock=rollout.clock,
            stagger_steps=rollout.stagger_steps,
        )

    def _recover(self, i: int | None) -> None:
        assert self._host is not None
        self._index += 1  # a gap in the index: the next chunk does not continue the last one
        self._host.recover(i)

    def _fail(self, ticket: m.Ticket, frames: list[Any], error: BaseException) -> None:
        """Report an error that a ticket raised, recover, and retry the ticket if an environment raised it."""
        phase, slot = Phase(self._words[PHASE]), self._words[SLOT]
        in_env = phase in (Phase.STEP, Phase.RESET, Phase.CONSTRUCT)
        retry = in_env and isinstance(self._host, Host)
        self._report(error, ticket=ticket.seq, again=retry)
        try:
            self._recover(slot if in_env else None)
        except self._user_errors as second:  # rebuilding failed; a new process may succeed
            self._report(second)
            raise SystemExit(1) from second
        if retry:  # before later tickets, to keep the worker's chunks in order
            if ticket.reset is not None:
                ticket.reset.seeds = None  # already applied, and the failed slot must not reuse its seed
            self._tickets.appendleft((ticket, frames))

    def _report(
        self,
        error: BaseException,
        ticket: int | None = None,
        again: bool = False,
        request: int | None = None,
        agent: int | None = None,
        step: bool = False,
    ) -> None:
        phase = Phase(self._words[PHASE])
        remote = error.failed if isinstance(error, ServedError) else None  # as it was raised in the acting server
        report = remote or report_of(error)
        program = getattr(self, "_program", None)  # missing if the worker fails before it gets its program
        found = {} if program is None else failed_env(program, self._host, self._first_slot, self._words[SLOT], phase)
        self._send(
            m.Failure(
                message=report.message,
                traceback=report.traceback,
                phase=remote.phase if remote else phase.label,
                kind=report.kind,
                version=self._actor.version if self._actor else None,
                ticket=ticket,
                again=again,
                request=request,
                agent=agent,
                step=step,
                **found,
            )
        )

    # ---- calls on environments ----

    def _call_target(self, message: m.Call) -> Saving | AnyHost | None:
        if message.name not in ("save", "resume"):
            return self._host
        assert isinstance(self._host, Host)
        return Saving(self._host, self._actor, self._owns_process, self._user_errors)

    def _call(self, message: m.Call, arguments: BytesLike) -> None:
        self._words[PHASE] = Phase.STEP
        self._words[COUNT] += 1
        args, kwargs = cloudpickle.loads(arguments)
        try:
            result = getattr(self._call_target(message), message.name)(*args, **kwargs)
        except ServerLost:
            self._join_new_server()
            result = getattr(self._call_target(message), message.name)(*args, **kwargs)
        self._words[PHASE] = Phase.IDLE  # errors in encoding the result are not errors of the environment
        self._send(m.Reply(message.request), pack(result))
