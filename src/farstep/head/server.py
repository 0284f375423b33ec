"""The I/O layer around tickets and supervisor: sends, receives and waits for messages.

A thread that waits for workers runs the event loop itself (see `event_loop.py`). While no thread waits, a background
thread runs the loop, so that dying and joining workers are handled at any time.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

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
    counted,
    typed_shortage,
)
from farstep.head.client import Client
from farstep.head.event_loop import EventLoop
from farstep.head.events import EventLog
from farstep.head.members import membership
from farstep.head.members.membership import State
from farstep.head.members.message_rules import check_message, is_late
from farstep.head.members.supervisor import Supervisor
from farstep.head.members.worker_records import WorkerRecord, acting_servers, expected, split
from farstep.head.slow_call_warnings import WaitWarning, warn_while_slow
from farstep.head.tickets.tickets import Tickets
from farstep.launch import launcher_for
from farstep.launch.acting_plan import ActingPlan
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
"""Large modules that workers import early if the head has imported them."""


class Server:
    """All workers of a run, their tickets, and the messages to and from each of them.

    Args:
        config: How workers are launched, and their time limits.
        program: What workers run.
        envs_per_node: Environments per node.
        root: Root seed of all slots.
        restart_budget: Failures tolerated within ten minutes; one more fails the run.
        client: Handles the workers' answers.
        events: Receives the events of the run.
        release_idle: Whether to suspend workers while no session of tickets is open.
    """

    def __init__(
        self,
        config: LaunchConfig,
        program: Program,
        envs_per_node: int,
        root: int,
        restart_budget: int,
        client: Client,
        events: EventLog,
        *,
        release_idle: bool = False,
    ) -> None:
        refuse_nested_launch()
        self._pid = os.getpid()
        self._program = program.pickled()
        self._close_s = config.timeouts.close_s
        engine = type(config).__name__.removesuffix("Config") if isinstance(config, EngineConfig) else ""
        self._slow_start = f"{engine} has not answered yet" if engine else "starting worker processes"
        self._client, self.events = client, events
        self._release_idle = release_idle
        workers = config.num_workers(envs_per_node)
        self.records = split(config.most_nodes, envs_per_node, workers, root)
        self._plan = ActingPlan(workers, config.most_nodes, program.serving)
        self.servers = acting_servers(self._plan.num_servers, workers, self.records[-1].stop)
        """The records of acting servers; empty if workers act themselves."""
        per_node = workers // config.most_nodes
        self.gpus_per_worker = config.gpus_per_node / per_node
        self.tickets = Tickets(workers, config.fewest_nodes * per_node)
        self.spaces: tuple[Any, Any] | None = None
        self.frame_stack = 0
        """Frames per stacked observation, as workers found it in their environments; 0: unknown."""
        self._announcements: list[tuple[int, m.FromHead, Sequence[Any], Sequence[int]]] = []
        """What a worker gets before its first ticket (agent, parameters, layout): numbers in the order of announcement,
        messages, frames and descriptors."""
        self._num_announced = 0
        self._holds = False
        """Whether no tickets are issued, because other runs use the slots of this run."""
        self._num_awake_calls = 0
        """Number of calls in `awake`."""
        self._reported_parked: set[int] = set()
        """Workers that an event has reported as parked since they last ran."""
        self.start_s = {"connect": 0.0, "construct": 0.0}
        """Durations of the slowest first start in seconds: from launch to `Hello`, and from `Hello` to `Ready`."""
        self.base_sent = 0
        """Bytes of `SendBase` messages to all workers."""
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
            self._event_loop = EventLoop()
            opened.callback(self._event_loop.close)
            with warn_while_slow(self._slow_start, events.emit):
                envs = max(record.num_envs for record in self.records)
                modules = [*_preloaded(), *program.source.modules()]
                launcher = launcher_for(config, self._plan, envs, modules, events.emit)
            opened.callback(launcher.close)
            self.shares_memory, self._driven = launcher.shares_memory, launcher.driven
            everyone = [*self.records, *self.servers]
            self.supervisor = Supervisor(
                launcher, everyone, config.timeouts, restart_budget, self._event_loop, self, events.emit
            )
            opened.pop_all()

    # ---- start and end ----

    def start(self) -> tuple[Any, Any]:
        """Start all workers, and wait until they have built their environments. Return the spaces of one
        environment."""
        self.begin()
        self.wait(lambda: True if self._all_ready() else None, starting=True)
        assert self.spaces is not None
        return self.spaces

    def begin(self) -> None:
        """Start all workers, without waiting for them."""
        self._started_at = time.monotonic()
        with self.locked(), warn_while_slow(self._slow_start, self.events.emit):
            self.supervisor.start()
        if not self._driven:
            with typed_shortage("the head's thread could not be started"):
                self._event_loop.start_thread(self._pump_alone, self._tick_s)

    def _all_ready(self) -> bool:
        """Whether a quorum of workers is present and all present workers are ready."""
        present = self.present()
        servers = [record for record in self.servers if record.phase != "queued"]
        return len(present) >= self.tickets.presence.quorum and all(record.ready for record in [*present, *servers])

    def scale(self, nodes: int) -> None:
        """Change the number of nodes. All their workers run: none is parked any more."""
        with self.locked():
            self.raise_failure()
            self.supervisor.launcher.scale(nodes)
            self._want(len(self.records))

    def scale_workers(self, workers: int) -> None:
        """Change the number of workers that run. The last workers are parked."""
        with self.locked():
            self.raise_failure()
            self._holds = False
            self.supervisor.launcher.make_room(workers)
            before = self.tickets.presence.wanted
            self._want(workers)
            if workers != before:
                self.events.emit("scaled", f"scaled from {before} to {counted(workers, 'worker')}")

    def hold(self) -> None:
        """Issue no tickets until `scale_workers` is called. Workers finish their open tickets and are idle then."""
        with self.locked():
            self.raise_failure()
            self._holds = True

    def num_running(self) -> int:
        """Return the number of workers that may be using a core: all that are not parked; 0 if a `hold` has made all
        of them idle."""
        with self.locked():
            self.raise_failure()
            return 0 if self._holds and not self.tickets.in_flight else len(self.present())

    def _want(self, workers: int) -> None:
        """Park all workers from number `workers` on, and unpark the others."""
        self.tickets.presence.wanted = workers
        for record in self.records:
            if record.worker >= workers:
                self.supervisor.act_on(membership.Park(record.worker))
                continue
            self._reported_parked.discard(record.worker)
            self.supervisor.act_on(membership.Unpark(record.worker))
            if record.ready:  # otherwise it joins when it is ready
                self.tickets.join(record.worker)
        self.grant()
        self._release()

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Context manager: inside, parked workers run, so that they can answer a call, and no process is suspended."""
        with self.locked():
            self._num_awake_calls += 1
            for record in self.records[self.tickets.presence.wanted :]:
                members = self.supervisor.membership
                if members.is_suspended(record.worker) or members.members[record.worker].retiring:
                    self.supervisor.act_on(membership.Unpark(record.worker))
        try:
            yield
        finally:
            with self.locked():
                self._num_awake_calls -= 1
                for record in self.records[self.tickets.presence.wanted :]:
                    self.supervisor.act_on(membership.Park(record.worker))
                self._release()

    def _release(self) -> None:
        """With `release_idle`, suspend all workers until the next message that they must act on (see `send`)."""
        if not self._release_idle or self.tickets.is_open or self._num_awake_calls:
            return
        for record in self.records:
            if record.ready and not record.owes_reply:
                self.supervisor.act_on(membership.Release(record.worker))

    def clients(self) -> list[list[int]]:
        """For each acting server, the workers that it acts for."""
        return [self._plan.clients_of(record.worker) for record in self.servers]

    def present(self) -> list[WorkerRecord]:
        """All workers that have a node and are not parked."""
        return [record for record in self.records if not self.tickets.presence.is_away(record.worker)]

    def unsettled(self) -> bool:
        """Whether the set of workers to wait for will change, because workers are missing or about to leave.

        Parked workers do not count, because only `scale` changes them.
        """
        members = self.supervisor.membership.members
        return any(
            not self._can_roll(record) for record in self.records if members[record.worker].state is not State.PARKED
        )

    def _can_roll(self, record: WorkerRecord) -> bool:
        if not record.ready or record.returning or record.handle is None or record.handle.leaving:
            return False
        presence = self.tickets.presence
        if record.worker in presence.retiring:
            return self.tickets.must_finish(record.worker)
        return record.worker not in presence.parked

    def __contains__(self, worker: object) -> bool:
        """Whether a worker can get a ticket."""
        return isinstance(worker, int) and self._can_roll(self.records[worker])

    def close(self) -> None:
        """Stop workers, kill those that do not stop in time, and free all resources.

        Idempotent. A second call, from another thread, returns after the first call has freed all resources.
        """
        if os.getpid() != self._pid:
            return  # a fork of the head does not own the workers
        with self._event_loop.lead():
            if self._closed:
                if self._closer != threading.get_ident():  # a signal handler in this thread would deadlock
                    self._event_loop.wait_for(self._freed)
                return
            self._closed, self._closer = True, threading.get_ident()
            try:
                self._stop_all()
                self._wait_for_ends(time.monotonic() + self._close_s)
            finally:  # also after Ctrl-C
                try:
                    self._end_all()
                finally:
                    self._freed.set()

    def _stop_all(self) -> None:
        self.supervisor.stop()
        self.supervisor.resume_all()
        for record in self.supervisor.records:
            if record.link is not None:
                record.words[CANCEL] = 2**62
                with contextlib.suppress(OSError):
                    record.link.send([m.encode(m.Stop())])

    def _end_all(self) -> None:
        self.supervisor.kill()
        try:
            self._wait_for_ends(time.monotonic() + 5.0)
        finally:
            self._event_loop.close()
            self.supervisor.close()

    def _wait_for_ends(self, deadline: float) -> None:
        while time.monotonic() < deadline and not self.supervisor.ended():
            self._pump(0.02)

    # ---- waiting ----

    def wait(self, poll: Callable[[], T | None], *, starting: bool = False) -> T:
        """Run the event loop until `poll` returns something, and return it.

        This always terminates: a worker without progress is killed after the time limit of its phase, and the restart
        budget is finite.

        Args:
            poll: Called after each event.
            starting: Whether the wait is for workers to start; then the warning about a long wait comes earlier.

        Raises:
            FarstepError: The run has failed, or is closed.
        """
        result = self.wait_until(poll, math.inf, starting=starting)
        assert result is not None
        return result

    def wait_until(self, poll: Callable[[], T | None], deadline: float, *, starting: bool = False) -> T | None:
        """Like `wait`, but return None after the deadline (in `time.monotonic()` seconds)."""
        with self._event_loop.lead():
            warning = WaitWarning(self.events.emit, time.monotonic(), starting=starting)
            while True:
                self.raise_failure()
                result = poll()
                if result is not None or (left := deadline - time.monotonic()) <= 0:
                    return result
                if (now := time.monotonic()) > warning.due and (
                    starting or self.tickets.in_flight or self.supervisor.launcher.waiting()
                ):
                    warning.warn(f" for {self.supervisor.whereabouts()}", now)
                self._pump(min(left, self._tick_s))

    def watch(self, fd: int, reader: Callable[[], None]) -> None:
        """Call `reader` whenever the descriptor can be read, in the thread that runs the event loop."""
        with self.locked():
            self._event_loop.register(fd, reader)

    def unwatch(self, fd: int) -> None:
        with self.locked():
            self._event_loop.unregister(fd)

    def raise_failure(self) -> None:
        """If the run has failed, close it and raise the error. If it is already closed, raise `ClosedError`."""
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
        """The state of the run in one word."""
        return "failed" if self._failure is not None else "closed" if self._closed else "running"

    def fail(self, error: FarstepError) -> None:
        """End the run with an error. The waiting call, or the next call, raises the error."""
        if self._failure is None:
            self._failure = error
            self.events.emit_failure(error)
        self.supervisor.stop()
        if self.tickets.is_open:
            self.cancel()  # otherwise workers would retry their tickets forever

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Hold the lock that protects all state."""
        self._check_process()
        return self._event_loop.locked()

    def local_pids(self) -> dict[str, int]:
        """The processes of the run on this machine, by name: the head, and workers that it has started itself."""
        with self.locked():
            workers = {f"{record.role} {record.worker}": record.handle for record in self.supervisor.records}
        found = {
            name: handle.pid
            for name, handle in workers.items()
            if handle is not None and handle.pid not in (0, os.getpid())
        }
        return {"the head": os.getpid(), **found}

    def _check_process(self) -> None:
        """Raise in a fork of the head, because a fork would read messages that belong to the head."""
        if os.getpid() != self._pid:
            raise ClosedError(
                f"this cluster belongs to process {self._pid} but was used in its fork {os.getpid()}; make a new "
                "cluster in the fork, or start processes with multiprocessing's spawn method."
            )

    def _pump_alone(self) -> None:
        """Run the event loop once, in the background thread."""
        try:
            self._pump(0.0)
        except LaunchError as error:  # a node joined with different versions
            if not self._closed:
                self.fail(error)
        except Exception as error:  # an internal error must reach the caller
            if not self._closed:
                internal = FarstepError(f"internal error in the head: {error!r}")
                internal.__cause__ = error
                self.fail(internal)
                log.exception("internal error in the head")  # logs the traceback, which an event would not

    def _pump(self, timeout_s: float) -> None:
        """Read messages, waiting up to `timeout_s`, and check processes every `_tick_s`; the caller holds the lock."""
        received = self.supervisor.read_shared()
        self._event_loop.poll(0.0 if received else timeout_s)
        if not self._event_loop.running:
            return  # closed by another thread
        self.supervisor.read_shared()
        if time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + self._tick_s
            self.supervisor.tick()

    # ---- callbacks of the supervisor (see `supervisor.Listener`) ----

    def expected(self, record: WorkerRecord) -> str:
        if record.is_server:  # it must answer as long as a worker of its node may need it
            clients = (self.records[worker] for worker in self._plan.clients_of(record.worker))
            return "idle" if any(each.handle is not None and each.handle.poll() is None for each in clients) else ""
        return expected(record, self.tickets.oldest_of(record.worker))

    def lost(self, record: WorkerRecord) -> None:
        if record.is_server:
            return  # its workers notice, and roll their chunks again
        self.tickets.lost(record.worker)
        self._client.on_lost(record)

    def absent(self, record: WorkerRecord) -> None:
        if not record.is_server:
            self.tickets.leave(record.worker)

    def draining(self, record: WorkerRecord) -> None:
        if not record.is_server:
            self.tickets.drain(record.worker)

    def retire(self, record: WorkerRecord) -> None:
        self.tickets.presence.retire(record.worker)
        if record.ready and not record.returning and not self.tickets.must_finish(record.worker):
            record.returning = True
            self.send(record, m.ReturnTickets())

    def parked(self, record: WorkerRecord) -> None:
        self.tickets.park(record.worker)
        self._client.on_parked(record)
        if record.worker not in self._reported_parked:  # otherwise it was awake for a call
            self._reported_parked.add(record.worker)
            text = f"worker {record.worker} on {record.host} is parked"
            self.events.emit("parked", text, worker=record.worker, node=record.host)

    def resumed(self, record: WorkerRecord) -> None:
        clocks = [self.records[worker].clock for worker in sorted(self.tickets.presence.present)]
        self.send(record, m.Resumed(clocks[0] if clocks else record.clock))
        self._send_announcements(record)

    def continued(self, record: WorkerRecord, suspended_s: float) -> None:
        self.send(record, m.Continued(suspended_s))

    def receive(self, worker: int, received: Received) -> None:
        if self._failure is not None and not self._closed:
            return  # the run has failed: ignore later messages
        record = self.supervisor.records[worker]
        try:
            self._handle(record, m.decode_from_worker(received.frames), received)
        except WireError as error:
            self.supervisor.reject(record, error)

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
            case _ if record.ready:  # otherwise it was declared lost, and its error must stay
                record.owes_reply = record.owes_reply and not isinstance(message, (m.AgentReady, m.Reply, m.Idle))
                record.error = None
                record.num_messages += 1
                if isinstance(message, m.Idle):
                    self._idle(record)
                    return
                self._client.on_message(record, message, received)
                if self.supervisor.membership.members[record.worker].retiring:
                    self.retire(record)  # it may have completed its window

    def _idle(self, record: WorkerRecord) -> None:
        if not record.returning:
            raise WireError("a report that it has returned its tickets, which the head did not request.")
        record.returning = False
        self.tickets.returned(record.worker)
        if not self.tickets.must_finish(record.worker) and not self._num_awake_calls:
            self.supervisor.act_on(membership.Idle(record.worker))
        self.grant()

    # ---- messages ----

    def drain(self) -> None:
        """Read all messages that have arrived. Sending on a ZeroMQ socket can clear the signal that wakes the event
        loop."""
        if not self.shares_memory:
            self.supervisor.read_shared()

    def send(
        self, record: WorkerRecord, message: m.FromHead, frames: Sequence[Any] = (), fds: Sequence[int] = ()
    ) -> int:
        """Send a message to one worker and return its size in bytes; 0 if it could not be sent.

        A released worker continues with it. It reads news of published versions later, before its next ticket.
        """
        if record.link is None:
            return 0
        if not isinstance(message, (m.Newest, m.Probe)):
            self.supervisor.act_on(membership.Acquire(record.worker))
        asks = isinstance(message, (m.SendAgent, m.Call, m.ReturnTickets)) and not record.is_server
        record.owes_reply = record.owes_reply or asks
        encoded = [m.encode(message), *frames]
        try:
            with typed_shortage(f"worker {record.worker} could not be sent a message"):
                record.link.send(encoded, fds if self.shares_memory else ())
        except OSError as error:
            self.supervisor.send_failed(record, error)
            return 0
        nbytes = sum(memoryview(frame).nbytes for frame in encoded)
        if isinstance(message, m.SendBase):
            self.base_sent += nbytes
        return nbytes

    def announce(self, message: m.FromHead, frames: Sequence[Any] = (), fds: Sequence[int] = ()) -> None:
        """Send a message to all ready workers now, and to other workers when they become ready or are unparked.

        The message replaces an earlier announcement of the same type.
        """
        self.retract(type(message))
        self._num_announced += 1
        self._announcements.append((self._num_announced, message, frames, fds))
        for record in self.supervisor.records:
            if record.ready:
                self._send_announcements(record)

    def _send_announcements(self, record: WorkerRecord) -> None:
        """Send the announcements that a worker did not get yet."""
        for number, message, frames, fds in self._announcements:
            if number > record.announced:
                record.announced = number
                if self.servers and not record.is_server:  # the agent and its weights go to the acting servers only
                    if isinstance(message, (m.SendBase, m.Parameters, m.Newest)):
                        continue
                    frames = [b""] if isinstance(message, m.SendAgent) else frames
                if not record.is_server or not isinstance(message, m.SetLayout):
                    self.send(record, message, frames, fds)

    def retract(self, *kinds: type) -> None:
        """Stop sending announcements of these types to workers that become ready."""
        self._announcements = [entry for entry in self._announcements if not isinstance(entry[1], kinds)]

    def _welcome(self, record: WorkerRecord, hello: m.Hello) -> None:
        different = mismatches(hello.versions)
        if hello.run != self.supervisor.run or hello.worker != record.worker or hello.incarnation != record.incarnation:
            different.append("it belongs to another run or incarnation")
        record.host, record.pid = hello.host, hello.pid
        if different:
            reason = f"{record.role} {record.worker} on {hello.host} does not fit: {'; '.join(different)}."
            self.send(record, m.Refuse(reason))
            self.fail(HandshakeError(f"{reason} Install the same versions on both sides."))
            return
        self.supervisor.act_on(membership.Hello(record.worker))
        self._set_phase(record, Phase.CONSTRUCT)
        if not record.incarnation:
            self.start_s["connect"] = time.monotonic() - self._started_at
        welcome = m.Welcome(
            record.first, record.roots, record.resume.tolist(), import_path(), _preloaded(), record.clock
        )
        self.send(record, welcome, [self._program])

    def _set_phase(self, record: WorkerRecord, phase: Phase) -> None:
        """Set the phase of a worker without shared memory until its next heartbeat arrives."""
        if not self.shares_memory:
            record.words[PHASE] = phase

    def _ready(self, record: WorkerRecord, message: m.Ready) -> None:
        if record.is_server:
            record.ready, record.has_been_ready, record.announced = True, True, 0
            self.supervisor.act_on(membership.Ready(record.worker))
            self._set_phase(record, Phase.IDLE)
            self._emit_ready(record)
            self._send_announcements(record)
            return
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
            self.frame_stack = message.frame_stack
            self.spaces = spaces  # prefer the spaces of slot 0, which have its random generators
        record.ready, record.has_been_ready, record.announced = True, True, 0
        retiring = self.supervisor.membership.members[record.worker].retiring
        if retiring and not self.tickets.must_finish(record.worker):
            self.tickets.park(record.worker)  # it is to be parked before its first ticket
        else:
            self.tickets.join(record.worker)
        if not record.incarnation:
            self.start_s["construct"] = time.monotonic() - self._started_at - self.start_s["connect"]
        self.supervisor.act_on(membership.Ready(record.worker))
        self._set_phase(record, Phase.IDLE)
        self._emit_ready(record)
        self._send_announcements(record)
        self.grant()

    def _emit_ready(self, record: WorkerRecord) -> None:
        if record.incarnation and not self.supervisor.membership.members[record.worker].blameless:
            text = f"{record.role} {record.worker} was restarted on {record.host} (restart {record.incarnation})"
            self.events.emit("restarted", text, worker=record.worker, node=record.host)
        else:
            text = f"{record.role} {record.worker} joined on {record.host}"
            self.events.emit("joined", text, worker=record.worker, node=record.host)

    def _failed(self, record: WorkerRecord, failure: m.Failure) -> None:
        error = record.failed(failure)
        if failure.request is not None or failure.agent is not None:
            record.owes_reply = False
            self._client.on_error(record, failure, error)
            return
        record.error = error
        first_time = failure.phase == "construct" and not record.has_been_ready
        if failure.phase in ("act", "load") or (failure.ticket is None and first_time):
            self.fail(error)  # a retry would fail in the same way
        elif failure.ticket is None:
            self.supervisor.emit_failure("lost", error)
        elif not failure.again:
            if self.tickets.give_back(record.worker, failure.ticket, "environment_failed"):
                self._client.on_error(record, failure, error)
        elif isinstance(error, (AgentError, ConfigError)):
            self.fail(error)  # neither is fixed by a retry
        elif self.tickets.retry(record.worker, failure.ticket, "environment_failed"):
            self.supervisor.act_on(membership.Failed(record.worker))
            if self._failure is None:
                self.supervisor.emit_failure("warned", error, "; continuing with the next episodes")
                record.error = None  # otherwise it could be reported as the cause of a later death

    # ---- tickets ----

    def grant(self) -> None:
        """Issue and send all tickets that workers may get now."""
        if self._failure is not None or self._holds:
            return
        for issued in self.tickets.grant(self, self._client.version()):
            ticket, frames = self._client.make_ticket(issued)
            self.send(self.records[issued.worker], ticket, frames)

    def cancel(self) -> None:
        """End the session and cancel its open tickets."""
        open_tickets = self.tickets.in_flight
        upto = self.tickets.cancel()
        for record in self.records:
            if open_tickets and record.link is not None:
                record.words[CANCEL] = upto
                if not self.supervisor.membership.is_suspended(record.worker):
                    self.send(record, m.Cancel(upto))
        self._release()


def _preloaded() -> list[str]:
    """Return the large modules that workers import early."""
    return [name for name in _PRELOADED if name in sys.modules]
