"""The worker: ticket, weights, roll, hand over. `handle` takes one message; `serve` is the loop around it."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import pickle
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence
from typing import Any

import cloudpickle
from gymnasium.vector import AutoresetMode

from farstep.agents.divergence import Comparison, comparing_method
from farstep.core import BytesLike, Link, Received, SyncState
from farstep.errors import ConfigError, WireError, described, printable
from farstep.rollout.program import Program
from farstep.rollout.progress import CANCEL, COUNT, PHASE, ROLLED, SLOT, Phase
from farstep.rollout.rows import Slots
from farstep.rollout.weight_headers import check_digest
from farstep.schema import Schema, space_schema
from farstep.sync.rules import divergence_of, name_of, probes_of, rows_of, threshold_of
from farstep.wire import messages as m
from farstep.wire.codec import pack
from farstep.wire.compression import Compressor
from farstep.wire.versions import versions
from farstep.worker.acting import Actor
from farstep.worker.chunk_sender import ChunkSender
from farstep.worker.hosting.base import Host, HostedEnvs
from farstep.worker.hosting.stagger import Places
from farstep.worker.hosting.staggered import StaggeredEnvs, StaggeredVector
from farstep.worker.hosting.strict import StrictEnvs
from farstep.worker.hosting.vector import HostedVector
from farstep.worker.probing import Probing
from farstep.worker.rolling import AnyHost, NotWanted, Roller
from farstep.worker.saving import Saving, seed_generators
from farstep.worker.weights import RemoteWeights, SharedWeights, Weights

log = logging.getLogger("farstep.worker")
_TURN_S = 1.0
_KNOWN_ERRORS = ("builtins", "farstep.errors")


class Worker:
    """Hosts a range of environment slots and does what the head's tickets say."""

    def __init__(
        self, link: Link, worker: int, incarnation: int, run: str, words: memoryview, has_gpu: bool = False
    ) -> None:
        self._link, self._words, self._has_gpu = link, words, has_gpu
        self._id = (worker, incarnation, run)
        self._tickets: deque[tuple[m.Ticket, list[Any]]] = deque()
        self._unread: deque[Received] = deque()
        """What arrived while a ticket was being done, for afterwards."""
        self._running = True
        self._owns_process = False
        self._host: AnyHost | None = None
        self._weights: Weights | None = None
        self._actor: Actor | None = None
        self._probing: Probing | None = None
        self._agent_id = -1
        self._pulled_at = self._idle_since = time.monotonic()
        self._index = 0
        self._synced = (0, 0, 0.0)
        """Pulls of weights, their bytes, and seconds they took, that no chunk has reported yet."""
        self._passed = -1
        self._divergence: float | None = None

    # ---- the loop ----

    def hello(self) -> None:
        worker, incarnation, run = self._id
        self._words[PHASE] = Phase.CONNECT
        self._send(m.Hello(worker, incarnation, run, socket.gethostname(), os.getpid(), versions()))

    def serve(self) -> None:
        """Until told to stop, or until the head is gone."""
        self._owns_process = True
        self.hello()
        while self._running:
            # With work at hand, only look whether something newer was said.
            received = self._unread.popleft() if self._unread else self._link.receive(0.0 if self._tickets else None)
            if received is not None:
                self.handle(received)
            elif self._tickets:
                self.work()

    def work(self) -> bool:
        """Do the next ticket; False if there is none."""
        if not self._tickets:
            return False
        self._do(*self._tickets.popleft())
        return True

    @property
    def _theirs(self) -> tuple[type[BaseException], ...]:
        """What an environment or agent fails with: also sys.exit(), and KeyboardInterrupt where nobody types Ctrl-C."""
        return (Exception, SystemExit, KeyboardInterrupt) if self._owns_process else (Exception, SystemExit)

    @property
    def running(self) -> bool:
        return self._running

    def close(self) -> None:
        """Give back what the end of a process would, for a worker without one of its own."""
        self._drop_weights()
        with contextlib.suppress(Exception):
            self._close_environments()

    def _close_environments(self) -> None:
        if self._host is not None:
            host, self._host = self._host, None
            host.close()

    def _drop_weights(self) -> None:
        if self._weights is not None:
            self._weights.close()
            self._weights = None

    def _send(self, message: m.FromWorker, *frames: Any) -> None:
        self._link.send([m.encode(message), *frames])

    def handle(self, received: Received) -> None:
        """One message of the head; what goes wrong in it is reported, and ends the worker unless a ticket did it."""
        message = m.decode_from_head(received.frames)
        try:
            self._dispatch(message, received)
        except self._theirs as error:
            agents_own = Phase(self._words[PHASE]) in (Phase.LOAD, Phase.ACT)
            refused = message.agent if isinstance(message, (m.SendAgent, m.Parameters)) and agents_own else None
            self._report(error, request=message.request if isinstance(message, m.Call) else None, agent=refused)
            self._words[PHASE] = Phase.IDLE
            if not isinstance(message, m.Call) and refused is None:
                raise SystemExit(1) from error

    def _dispatch(self, message: m.FromHead, received: Received) -> None:
        match message:
            case m.Ticket():
                self._tickets.append((message, list(received.frames[1:])))
            case m.Cancel():
                self._tickets = deque(entry for entry in self._tickets if entry[0].seq > message.upto)
            case m.Newest():
                if isinstance(self._weights, RemoteWeights):
                    self._weights.announced = message.version
            case m.Probe():
                self._hear(message, received.frames[1:])
            case m.Weights():
                log.debug("weights of version %d come too late", message.version)
            case m.GrantSend():
                pass  # for a chunk that was given up meanwhile
            case m.Taken():
                pass  # of a chunk that is done
            case m.SetLayout():
                self._roller.lay(message, received.fds)
            case m.SendAgent():
                self._adopt(message, bytes(received.frames[1]))
            case m.Parameters():
                self._connect_weights(message, received.fds)
            case m.Call():
                self._call(message, received.frames[1])
            case m.Welcome():
                self._construct(message, received.frames[1])
            case m.Refuse():
                log.error("refused by the head: %s", message.reason)
                self._running = False
            case m.Stop():
                self._running = False
                self._close_environments()
            case _:
                raise WireError(f"unexpected {type(message).__name__}.")

    # ---- getting ready ----

    def _construct(self, message: m.Welcome, program: BytesLike) -> None:
        sys.path[:] = list(dict.fromkeys(message.path + sys.path))
        self._words[PHASE] = Phase.CONSTRUCT
        self._first_slot = message.first_slot
        self._program: Program = pickle.loads(program)
        slots = Slots(message.first_slot, message.seeds, message.episodes)
        source = self._program.source
        if self._program.autoreset_mode:
            mode = AutoresetMode(self._program.autoreset_mode)
            self._host = StrictEnvs(source, slots, self._words, mode)
        elif (stagger := self._program.stagger) is not None:
            kind = StaggeredVector if source.is_vector else StaggeredEnvs
            self._host = kind(source, slots, self._words, Places(stagger, self._program.num_slots, message.clock))
        else:
            self._host = (HostedVector if source.is_vector else HostedEnvs)(source, slots, self._words)
        self._obs, self._obs_schema = space_schema(self._host.observation_space, "obs")
        _, self._action_schema = space_schema(self._host.action_space, "action")
        rate = getattr(self._link, "rate", lambda: math.inf)
        compressor = Compressor(self._program.compression, self._program.codecs, rate)
        self._sender = ChunkSender(self._program.transfer, self._send, self._look, compressor)
        self._roller = Roller(self._host, self._words, self._look, self._sender)
        spaces = (pack(self._host.observation_space), pack(self._host.action_space))
        self._send(m.Ready(*spaces))
        self._words[PHASE] = Phase.CONNECT  # whose limit is meant for imports
        for module in message.preload:  # while the head makes up its mind, not when it waits
            __import__(module)
        self._seed_globals(self._program.seed, message.first_slot)
        self._words[PHASE] = Phase.IDLE

    def _seed_globals(self, root: int, slot: int) -> None:
        """Not in the caller's own process, whose generators are the caller's."""
        if self._owns_process:
            seed_generators(root, slot, self._id[1])

    def _adopt(self, message: m.SendAgent, payload: bytes) -> None:
        self._words[PHASE] = Phase.LOAD
        self._actor, self._probing, self._agent_id = None, None, -1
        self._drop_weights()
        had_torch = "torch" in sys.modules
        assert isinstance(self._host, Host)
        slots = self._host.slots
        actor = Actor(payload, self._program.inference, self._obs, slots, self._program.weights, self._has_gpu)
        if "torch" in sys.modules and not had_torch:
            sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
            self._seed_globals(self._program.seed, slots.first)
        self._host.prepare(self._theirs)
        self._words[PHASE] = Phase.ACT
        schema, state_schema, state = actor.probe(self._host.current, self._action_schema)
        description: Schema = {}
        window = probes_of(self._program.sync)
        if window and comparing_method(actor.policy.agent, schema):
            comparison = Comparison(actor.policy, self._obs, actor.structure["action"], state or None, schema)
            description = comparison.check(actor.example)
            self._probing = Probing(comparison, window, rows_of(self._program.sync))
        self._actor, self._agent_id = actor, message.agent
        note = actor.policy.note
        self._send(
            m.AgentReady(message.agent, schema, pack(actor.structure), state_schema, pack(state), note, description)
        )
        if self._owns_process:
            gc.collect()
            gc.freeze()  # what is there now stays: the collector need not look at torch's objects again and again
        self._words[PHASE] = Phase.IDLE

    def _connect_weights(self, message: m.Parameters, fds: Sequence[int]) -> None:
        if message.agent != self._agent_id:  # of an agent that was refused here
            for fd in fds:
                os.close(fd)
            return
        assert self._actor is not None
        self._words[PHASE] = Phase.LOAD
        check_digest(message.digest, self._actor.loader.schema)
        self._words[PHASE] = Phase.IDLE
        if fds:
            self._weights = SharedWeights(fds[0], message.nbytes, message.buffers)
        else:
            self._weights = RemoteWeights(self._ask_for_weights, self._program.weights.delta)

    def _hear(self, probe: m.Probe, frames: Sequence[BytesLike]) -> None:
        if probe.agent != self._agent_id or self._probing is None or self._actor is None:
            return  # of an agent that was replaced meanwhile
        self._words[PHASE] = Phase.ACT
        self._words[COUNT] += 1
        self._probing.hear(probe, frames, self._actor.version)
        self._words[PHASE] = Phase.IDLE

    def _ask_for_weights(self, held: int) -> tuple[int, int, Sequence[BytesLike]]:
        self._send(m.WeightRequest(self._agent_id, held))
        while True:  # the head answers; should it not, our time in this phase is limited
            received = self._link.receive(None)
            message = m.decode_from_head(received.frames) if received is not None else None
            if received is None or message is None:
                continue
            if isinstance(message, m.Weights) and message.agent == self._agent_id:
                if len(received.frames) < 2:
                    raise NotWanted
                return message.version, message.base, received.frames[1:]
            self._put_off(message, received)
            if isinstance(message, m.Stop):
                raise NotWanted

    def _wait_for_turn(self, ticket: m.Ticket) -> None:
        """Others send first; the head says when they are done, takes the ticket back, or is gone."""
        self._send(m.RequestSend(ticket.seq, self._index))
        while self._words[CANCEL] < ticket.seq:
            received = self._link.receive(_TURN_S)
            if received is None:
                self._words[COUNT] += 1  # waiting, not stuck: others may take as long as they need
                continue
            message = m.decode_from_head(received.frames)
            if isinstance(message, m.GrantSend):
                if message.index == self._index:
                    return
                continue
            self._put_off(message, received)
            if isinstance(message, m.Stop):
                break
        raise NotWanted

    def _put_off(self, message: m.FromHead, received: Received) -> None:
        """While a ticket is being done, only what takes it back is heard; the rest comes afterwards, in order."""
        if isinstance(message, m.Taken):
            self._sender.heard(message)
            return
        if isinstance(message, m.Cancel):
            self._words[CANCEL] = message.upto
        self._unread.append(received)

    def _look(self) -> None:
        """Hear, in the middle of a ticket, what a worker with shared memory would see in its words."""
        while (received := self._link.receive(0.0)) is not None:
            message = m.decode_from_head(received.frames)
            self._put_off(message, received)
            if isinstance(message, m.Stop):
                raise NotWanted

    # ---- a ticket ----

    def _do(self, ticket: m.Ticket, frames: list[Any]) -> None:
        waited_s = time.monotonic() - self._idle_since
        self._index += ticket.steps > 0
        try:
            self._sync(ticket)
            chunk, arrays = self._roller.roll(ticket, frames, self._actor, self._index, self._passed)
        except NotWanted:
            return
        except self._theirs as error:
            self._give_up(ticket, frames, error)
            return
        except BaseException:  # Ctrl-C of somebody whose environments live in the same process
            self._recover(None)
            raise
        finally:
            self._words[PHASE] = Phase.IDLE
            self._idle_since = time.monotonic()
        chunk.index, chunk.tickets_s, chunk.divergence = self._index, waited_s, self._divergence
        if self._probing is not None and ticket.steps:
            chunk.unmeasured = self._probing.take_note()
            self._probing.remember(self._index, chunk.version, self._roller.rows, ticket.steps)
        (chunk.syncs, chunk.synced_bytes, chunk.weights_s), self._synced = self._synced, (0, 0, 0.0)
        if self._actor is not None:
            chunk.inference = self._actor.take_note()
        if chunk.keys and ticket.steps > 1 and self._program.transfer.in_turn is not None:
            try:
                self._wait_for_turn(ticket)
            except NotWanted:
                return
        self._words[ROLLED] = ticket.seq  # from now on it travels
        self._send(chunk, *arrays)

    def _sync(self, ticket: m.Ticket) -> None:
        """Pull weights if the rule or the ticket's bound says so."""
        actor, weights, probing, rule = self._actor, self._weights, self._probing, self._program.sync
        if actor is None or weights is None or not ticket.steps:
            return
        # A divergence that cannot be measured counts as too large.
        divergences = probing.divergences if probing is not None else (math.inf,) * (probes_of(rule) > 0)
        state = SyncState(actor.version, weights.newest(), time.monotonic() - self._pulled_at, divergences)
        self._words[PHASE] = Phase.LOAD  # a rule that raises once would raise again: the run is over
        try:
            self._divergence = divergence_of(rule, state) if probing is not None else None
            wanted = state.newest > state.held and bool(rule.should_pull(state))
        except Exception as error:
            raise ConfigError(
                f"the sync rule {name_of(rule)} raised {described(error)}, for {state}, so it is unknown "
                "when workers pull weights: let should_pull(state) answer for every state (farstep.core.SyncState)."
            ) from error
        self._passed = self._kept_for(state)
        if not wanted and self._passed >= ticket.min_version:
            return
        began = time.monotonic()
        self._words[PHASE] = Phase.LOAD
        self._words[COUNT] += 1
        version, nbytes = weights.load(actor.loader)
        actor.loaded(version)
        self._pulled_at, self._passed = time.monotonic(), actor.version
        syncs, total, seconds = self._synced
        self._synced = syncs + 1, total + nbytes, seconds + self._pulled_at - began
        if probing is not None:
            self._words[PHASE] = Phase.ACT
            self._words[COUNT] += 1
            self._divergence = probing.pulled(version)

    def _kept_for(self, state: SyncState) -> int:
        """Weights that are kept count as the newest version that they were compared with, or need not be."""
        if self._probing is not None:
            return max(state.held, self._probing.compared)
        return state.newest if state.held >= 0 and threshold_of(self._program.sync) == math.inf else state.held

    def _recover(self, i: int | None) -> None:
        assert self._host is not None
        self._index += 1  # whatever comes next does not follow what was handed over
        self._host.recover(i)

    def _give_up(self, ticket: m.Ticket, frames: list[Any], error: BaseException) -> None:
        phase, slot = Phase(self._words[PHASE]), self._words[SLOT]
        in_env = phase in (Phase.STEP, Phase.RESET, Phase.CONSTRUCT)
        again = in_env and isinstance(self._host, Host)
        self._report(error, ticket=ticket.seq, again=again)
        try:
            self._recover(slot if in_env else None)
        except self._theirs as another:  # it cannot even be built again: perhaps in a new process
            self._report(another)
            raise SystemExit(1) from another
        if again:  # before any later ticket: chunks of a worker must follow each other
            if ticket.reset is not None:
                ticket.reset.seeds = None  # slots have them by now, and one that failed must not go back to them
            self._tickets.appendleft((ticket, frames))

    def _report(
        self,
        error: BaseException,
        ticket: int | None = None,
        again: bool = False,
        request: int | None = None,
        agent: int | None = None,
    ) -> None:
        phase = Phase(self._words[PHASE])
        text = printable("".join(traceback.format_exception(error)))
        self._send(
            m.Failure(
                message=described(error),
                traceback=text,
                phase=phase.label,
                kind=type(error).__name__ if type(error).__module__ in _KNOWN_ERRORS else "",
                version=self._actor.version if self._actor else None,
                ticket=ticket,
                again=again,
                request=request,
                agent=agent,
                **self._where(phase),
            )
        )

    def _where(self, phase: Phase) -> dict[str, int]:
        """What is known of the environment that raised; of one inside a vector, nothing."""
        program = getattr(self, "_program", None)
        if program is None or program.source.is_vector or phase not in (Phase.CONSTRUCT, Phase.RESET, Phase.STEP):
            return {}
        i = self._words[SLOT]
        where = {"slot": self._first_slot + i}
        if self._host is None or phase is Phase.CONSTRUCT:
            return where
        if (seed := self._host.seed_of(i)) is not None:
            where["seed"] = seed
        if phase is Phase.STEP:
            where["episode_step"] = self._host.slots.episode_step(i)
        return where

    # ---- calls on environments ----

    def _saving(self) -> Saving:
        assert isinstance(self._host, Host)
        return Saving(self._host, self._actor, self._owns_process, self._theirs)

    def _call(self, message: m.Call, arguments: BytesLike) -> None:
        self._words[PHASE] = Phase.STEP
        self._words[COUNT] += 1
        args, kwargs = cloudpickle.loads(arguments)
        target = self._saving() if message.name in ("save", "resume") else self._host
        result = getattr(target, message.name)(*args, **kwargs)
        self._words[PHASE] = Phase.IDLE  # whether the result can travel is not the environment's doing
        self._send(m.Reply(message.request), pack(result))
