"""The I/O shell around tickets and the crew: who waits for what, and what is said to whom.

Whoever waits, pumps (see `switchboard.py`); while nobody waits, a thread does, so that a worker that dies or joins is
looked after at any time.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from farstep.config.launch import EngineConfig, LaunchConfig
from farstep.core import Received
from farstep.errors import (
    AgentError,
    ClosedError,
    ConfigError,
    FarstepError,
    HandshakeError,
    LaunchError,
    WireError,
    WorkerError,
    is_own,
    remote_error,
    typed_shortage,
)
from farstep.head.event_loop import EventLoop
from farstep.head.members import membership as life
from farstep.head.members.message_rules import check_message, is_late
from farstep.head.members.supervisor import Supervisor
from farstep.head.members.worker_records import WorkerRecord, expected, split
from farstep.head.slow_call_warnings import FIRST_NOTE_S, NOTE_S, noted_while_slow
from farstep.head.tickets.records import IssuedTicket
from farstep.head.tickets.tickets import Tickets
from farstep.launch import launcher_for
from farstep.launch.daemon.process import import_path
from farstep.rollout.nested_launch import refuse_nested_launch
from farstep.rollout.program import Program
from farstep.rollout.progress import CANCEL, PHASE, Phase, check_words, copy_words
from farstep.wire import messages as m
from farstep.wire.codec import unpack
from farstep.wire.versions import mismatches

log = logging.getLogger("farstep")
T = TypeVar("T")
_PRELOADED = ("torch",)
"""Heavy modules that workers import while the head is busy, if the head has them."""


class Client(Protocol):
    """Who uses the server: makes tickets of orders and takes what workers answer."""

    def make_ticket(self, issued: IssuedTicket) -> tuple[m.Ticket, Sequence[Any]]: ...

    def on_message(self, record: WorkerRecord, message: m.FromWorker, received: Received) -> None: ...

    def on_error(self, record: WorkerRecord, failure: m.Failure, error: WorkerError) -> None:
        """What the client asked of a worker (an agent, a call, a step) raised there; the worker is as before."""
        ...

    def on_lost(self, record: WorkerRecord) -> None:
        """A worker is gone, with what it was asked."""
        ...

    def version(self) -> int:
        """The current version of the policy."""
        ...


class Server:
    """All workers of a run, and the conversation with each of them."""

    def __init__(
        self,
        config: LaunchConfig,
        program: Program,
        envs_per_node: int,
        root: int,
        restart_budget: int,
        client: Client,
    ) -> None:
        refuse_nested_launch()
        self._pid = os.getpid()
        self._program = program.pickled()
        self._close_s = config.timeouts.close_s
        engine = type(config).__name__.removesuffix("Config") if isinstance(config, EngineConfig) else ""
        self._slow_start = f"{engine} has not answered yet" if engine else "worker processes are being started"
        self._client = client
        workers = config.num_workers(envs_per_node)
        self.records = split(config.most_nodes, envs_per_node, workers, root)
        per_node = workers // config.most_nodes
        self._fewest = config.fewest_nodes * per_node
        self.tickets = Tickets(workers, self._fewest)
        self.spaces: tuple[Any, Any] | None = None
        self.stage: list[tuple[m.FromHead, Sequence[Any], Sequence[int]]] = []
        """What a worker must be told before its first ticket: agent, parameters, layout."""
        self.start_s = {"connect": 0.0, "construct": 0.0}
        """How long the slowest first start took: until its hello, and from there until its environments were built."""
        self._started_at = 0.0
        self._failure: FarstepError | None = None
        self._closed = False
        self._closer = 0
        """The thread that called `close` first."""
        self._freed = threading.Event()
        limits = (config.timeouts.step_s, config.timeouts.reset_s, config.timeouts.act_s)
        self._tick_s = min(0.5, max(0.02, min(limits) / 4))
        self._next_tick = 0.0
        with typed_shortage("the head could not be set up"), contextlib.ExitStack() as opened:
            self._switchboard = EventLoop()
            opened.callback(self._switchboard.close)
            with noted_while_slow(self._slow_start):
                launcher = launcher_for(config, workers, max(record.num_envs for record in self.records))
            opened.callback(launcher.close)
            self.shares_memory, self._driven = launcher.shares_memory, launcher.driven
            self.supervisor = Supervisor(
                launcher, self.records, config.timeouts, restart_budget, self._switchboard, self
            )
            opened.pop_all()

    # ---- start and end ----

    def start(self) -> tuple[Any, Any]:
        """Start all workers and wait until each has built its environments; the spaces of one of these."""
        self.begin()
        self.wait(lambda: True if self._all_there() else None, starting=True)
        assert self.spaces is not None
        return self.spaces

    def begin(self) -> None:
        """Start all workers, without waiting for them."""
        self._started_at = time.monotonic()
        with self.locked(), noted_while_slow(self._slow_start):
            self.supervisor.start()
        if not self._driven:
            with typed_shortage("the head's thread could not be started"):
                self._switchboard.start_thread(self._pump_alone, self._tick_s)

    def _all_there(self) -> bool:
        """Whoever has a node is ready, and enough have one."""
        present = self.present()
        return len(present) >= self._fewest and all(record.ready for record in present)

    def scale(self, nodes: int) -> None:
        with self.locked():
            self.raise_failure()
            self.supervisor.launcher.scale(nodes)

    def present(self) -> list[WorkerRecord]:
        """All workers but those that no node has a place for."""
        return [record for record in self.records if record.worker not in self.tickets.presence.absent]

    def unsettled(self) -> bool:
        """Whether workers are missing or about to leave, so that the set of workers to wait for will change."""
        return not all(self._can_roll(record) for record in self.records)

    def _can_roll(self, record: WorkerRecord) -> bool:
        return record.ready and record.handle is not None and not record.handle.leaving

    def __contains__(self, worker: object) -> bool:
        """Whether a worker can be given a ticket."""
        return isinstance(worker, int) and self._can_roll(self.records[worker])

    def close(self) -> None:
        """Stop workers, kill the ones that do not stop in time, and free everything.

        Idempotent; a second call, from another thread, returns when the first has freed everything.
        """
        if os.getpid() != self._pid:
            return  # a fork of the head: the workers are not ours
        with self._switchboard.lead():
            if self._closed:
                if self._closer != threading.get_ident():  # a signal handler of that thread may close again
                    self._switchboard.wait_for(self._freed)
                return
            self._closed, self._closer = True, threading.get_ident()
            try:
                self._stop_all()
                self._wait_for_ends(time.monotonic() + self._close_s)
            finally:  # also for somebody who has no patience and interrupts
                try:
                    self._end_all()
                finally:
                    self._freed.set()

    def _stop_all(self) -> None:
        self.supervisor.stop()
        for record in self.records:
            if record.link is not None:
                record.words[CANCEL] = 2**62
                with contextlib.suppress(OSError):
                    record.link.send([m.encode(m.Stop())])

    def _end_all(self) -> None:
        self.supervisor.kill()
        try:
            self._wait_for_ends(time.monotonic() + 5.0)
        finally:
            self._switchboard.close()
            self.supervisor.close()

    def _wait_for_ends(self, deadline: float) -> None:
        while time.monotonic() < deadline and not self.supervisor.ended():
            self._pump(0.02)

    # ---- waiting ----

    def wait(self, done: Callable[[], T | None], *, starting: bool = False) -> T:
        """Pump until `done` answers; raises what the run failed of. Bounded: a worker without progress is killed
        after its phase's limit, and the restart budget is finite. With `starting`, it logs what it waits for after
        `FIRST_NOTE_S` instead of `NOTE_S`."""
        answer = self.wait_until(done, math.inf, starting=starting)
        assert answer is not None
        return answer

    def wait_until(self, done: Callable[[], T | None], deadline: float, *, starting: bool = False) -> T | None:
        """As `wait`, but None after the deadline."""
        with self._switchboard.lead():
            began = time.monotonic()
            next_note = began + (FIRST_NOTE_S if starting else NOTE_S)
            while True:
                self.raise_failure()
                answer = done()
                if answer is not None or (left := deadline - time.monotonic()) <= 0:
                    return answer
                self._pump(min(left, self._tick_s))
                if (now := time.monotonic()) > next_note and (
                    starting or self.tickets.in_flight or self.supervisor.launcher.waiting()
                ):
                    next_note = now + NOTE_S
                    log.warning("waiting for %.0f s: %s", now - began, self.supervisor.whereabouts())

    def watch(self, fd: int, reader: Callable[[], None]) -> None:
        """Whoever waits also looks at this descriptor."""
        with self.locked():
            self._switchboard.register(fd, reader)

    def unwatch(self, fd: int) -> None:
        with self.locked():
            self._switchboard.unregister(fd)

    def raise_failure(self) -> None:
        """Raise the run's failure the first time, a reference to it afterwards."""
        self._check_process()
        if self._failure is not None:
            failure = self._failure
            if self._closed:
                raise ClosedError(f"this cluster failed earlier and is closed: {str(failure).splitlines()[0]}")
            self.close()
            raise failure
        if self._closed:
            raise ClosedError("this cluster is closed; make a new one.")

    @property
    def state(self) -> str:
        """In a word, for whoever looks at it."""
        return "failed" if self._failure is not None else "closed" if self._closed else "running"

    def fail(self, error: FarstepError) -> None:
        """The run cannot go on; whoever waits gets the error."""
        if self._failure is None:
            self._failure = error
        self.supervisor.stop()
        if self.tickets.is_open:
            self.cancel()  # or workers would try again and again what nobody takes

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Nobody else changes anything for a moment."""
        self._check_process()
        return self._switchboard.locked()

    def _check_process(self) -> None:
        """Workers belong to the process that started them; a fork would only steal their answers."""
        if os.getpid() != self._pid:
            raise ClosedError(
                f"this cluster belongs to process {self._pid} and was used in its fork {os.getpid()}; make a new one "
                "there, or start processes with multiprocessing's spawn."
            )

    def _pump_alone(self) -> None:
        """What the background thread does while nobody waits."""
        try:
            self._pump(0.0)
        except LaunchError as error:  # of a node that came and does not fit
            if not self._closed:
                self.fail(error)
        except Exception as error:  # a bug of ours must reach the caller, not die in a thread
            if not self._closed:
                self.fail(FarstepError(f"internal error in the head: {error!r}"))
                log.exception("internal error in the head")

    def _pump(self, timeout_s: float) -> None:
        """Read what has arrived, look at processes, do what is due. The lock is held."""
        accepted = self.supervisor.read_shared()
        self._switchboard.poll(0.0 if accepted else timeout_s)
        if not self._switchboard.running:
            return  # somebody else closed it while we slept
        self.supervisor.read_shared()
        if time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + self._tick_s
            self.supervisor.tick()

    # ---- what the crew tells (see `supervisor.Watcher`) ----

    def expected(self, record: WorkerRecord) -> str:
        return expected(record, self.tickets.oldest_of(record.worker))

    def lost(self, record: WorkerRecord) -> None:
        self.tickets.lost(record.worker)
        self._client.on_lost(record)

    def absent(self, record: WorkerRecord) -> None:
        self.tickets.leave(record.worker)

    def draining(self, record: WorkerRecord) -> None:
        self.tickets.drain(record.worker)

    def receive(self, worker: int, received: Received) -> None:
        if self._failure is not None and not self._closed:
            return  # the run is over: nothing counts any more
        record = self.records[worker]
        try:
            self._handle(record, m.decode_from_worker(received.frames), received)
        except WireError as error:
            self.supervisor.distrust(record, error)

    def _handle(self, record: WorkerRecord, message: m.FromWorker, received: Received) -> None:
        state = self.supervisor.membership.members[record.worker].state
        check_message(message, received, state, self.shares_memory)
        if is_late(message, state):
            return
        match message:
            case m.Hello():
                self._welcome(record, message)
            case m.Ready():
                self._ready(record, message)
            case m.Progress():
                check_words(message.words, len(record.words))
                copy_words(message.words, record.words)
            case m.Failure():
                self._failed(record, message)
            case _ if record.ready:  # else it was given up, and what it died of stays
                record.asked = record.asked and not isinstance(message, (m.AgentReady, m.Reply))
                record.error = None
                record.heard += 1
                self._client.on_message(record, message, received)

    # ---- messages ----

    def drain(self) -> None:
        """Look once for what arrived: sending on a ZeroMQ socket can hide from whoever waits that something did."""
        if not self.shares_memory:
            self.supervisor.read_shared()

    def send(
        self, record: WorkerRecord, message: m.FromHead, frames: Sequence[Any] = (), fds: Sequence[int] = ()
    ) -> int:
        """Say it to one worker; how many bytes that took."""
        if record.link is None:
            return 0
        record.asked = record.asked or isinstance(message, (m.SendAgent, m.Call))
        said = [m.encode(message), *frames]
        try:
            with typed_shortage(f"worker {record.worker} could not be sent a message"):
                record.link.send(said, fds if self.shares_memory else ())
        except OSError as error:
            self.supervisor.cannot_tell(record, error)
            return 0
        return sum(memoryview(frame).nbytes for frame in said)

    def tell(self, message: m.FromHead, frames: Sequence[Any] = (), fds: Sequence[int] = ()) -> None:
        """Tell every worker that is there, and those that come later; replaces what was told before of its kind."""
        self.untell(type(message))
        self.stage.append((message, frames, fds))
        for record in self.records:
            if record.ready:
                self.send(record, message, frames, fds)

    def untell(self, *kinds: type) -> None:
        """Workers that come later are no longer told."""
        self.stage = [entry for entry in self.stage if not isinstance(entry[0], kinds)]

    def _welcome(self, record: WorkerRecord, hello: m.Hello) -> None:
        different = mismatches(hello.versions)
        if hello.run != self.supervisor.run or hello.worker != record.worker or hello.incarnation != record.incarnation:
            different.append("it belongs to another run or incarnation")
        record.host, record.pid = hello.host, hello.pid
        if different:
            reason = f"worker {record.worker} on {hello.host} does not fit: {'; '.join(different)}."
            self.send(record, m.Refuse(reason))
            self.fail(HandshakeError(f"{reason} Install the same versions on both sides."))
            return
        self.supervisor.act_on(life.Hello(record.worker))
        self._note(record, Phase.CONSTRUCT)
        if not record.incarnation:
            self.start_s["connect"] = time.monotonic() - self._started_at
        preload = [name for name in _PRELOADED if name in sys.modules]
        welcome = m.Welcome(record.first, record.roots, record.resume.tolist(), import_path(), preload, record.clock)
        self.send(record, welcome, [self._program])

    def _note(self, record: WorkerRecord, phase: Phase) -> None:
        """Where a worker without shared memory must be, until its next heartbeat says it."""
        if not self.shares_memory:
            record.words[PHASE] = phase

    def _ready(self, record: WorkerRecord, message: m.Ready) -> None:
        spaces = (unpack(message.observation_space), unpack(message.action_space))
        if self.spaces is not None and spaces != self.spaces:
            self.fail(
                HandshakeError(
                    f"worker {record.worker} on {record.host} has the spaces {spaces}, another worker has "
                    f"{self.spaces}. All environments of a run must have equal spaces."
                )
            )
            return
        if self.spaces is None or (record.worker == 0 and not record.incarnation):
            self.spaces = spaces  # those of slot 0, with its generators, in whatever order workers get ready
        record.ready = True
        self.tickets.join(record.worker)
        if not record.incarnation:
            self.start_s["construct"] = time.monotonic() - self._started_at - self.start_s["connect"]
        self.supervisor.act_on(life.Ready(record.worker))
        self._note(record, Phase.IDLE)
        for staged, frames, fds in self.stage:
            self.send(record, staged, frames, fds)
        self.grant()

    def _failed(self, record: WorkerRecord, failure: m.Failure) -> None:
        where = record.where(
            failure.phase,
            slot=failure.slot,
            seed=failure.seed,
            episode_step=failure.episode_step,
            version=failure.version,
        )
        who = "the agent" if failure.phase in ("act", "load") else "the environment"
        message = failure.message.partition(": ")[2] if is_own(failure.kind) else f"{who} raised {failure.message}"
        error = remote_error(failure.kind, message, where, failure.traceback)
        if failure.request is not None or failure.agent is not None:
            record.asked = False
            self._client.on_error(record, failure, error)
            return
        record.error = error
        first_time = failure.phase == "construct" and not record.incarnation and not record.ready
        if failure.phase in ("act", "load") or (failure.ticket is None and first_time):
            self.fail(error)  # trying the same again would only fail again
        elif failure.ticket is None:
            log.warning("%s", str(error).splitlines()[0])
        elif not failure.again:
            if self.tickets.give_back(record.worker, failure.ticket, "environment failed"):
                self._client.on_error(record, failure, error)
        elif isinstance(error, (AgentError, ConfigError)):
            self.fail(error)  # neither is mended by trying again
        elif self.tickets.again(record.worker, failure.ticket, "environment failed"):
            self.supervisor.act_on(life.Failed(record.worker))
            if self._failure is None:
                log.warning("%s; going on with the next episodes", str(error).splitlines()[0])
                record.error = None  # what it dies of later is something else

    # ---- tickets ----

    def grant(self) -> None:
        """Give every ticket that may be given now."""
        if self._failure is not None:
            return
        for issued in self.tickets.grant(self, self._client.version()):
            ticket, frames = self._client.make_ticket(issued)
            self.send(self.records[issued.worker], ticket, frames)

    def cancel(self) -> None:
        """Take back what was given and is not done."""
        open_tickets = self.tickets.in_flight
        upto = self.tickets.cancel()
        for record in self.records:
            if open_tickets and record.link is not None:
                record.words[CANCEL] = upto
                self.send(record, m.Cancel(upto))
