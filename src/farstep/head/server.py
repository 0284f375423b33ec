"""The I/O layer around tickets and supervisor: sends, receives and waits for messages.

A thread that waits for workers runs the event loop itself (see `event_loop.py`). While no thread waits, a background
thread runs the loop, so that dying and joining workers are handled at any time.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from farstep.config.launch import EngineConfig, LaunchConfig
from farstep.core import Received
from farstep.errors import AgentError, ClosedError, ConfigError, FarstepError, LaunchError, WireError, typed_shortage
from farstep.head.client import Client
from farstep.head.event_loop import EventLoop
from farstep.head.events import EventLog
from farstep.head.members import membership
from farstep.head.members.acting_clients import ActingClients
from farstep.head.members.availability import Availability
from farstep.head.members.handshake import Handshake, preloaded
from farstep.head.members.message_rules import check_message, is_late
from farstep.head.members.outbox import Outbox
from farstep.head.members.supervisor import Supervisor
from farstep.head.members.worker_records import WorkerRecord, acting_servers, expected, split
from farstep.head.slots.worker_slots import WorkerSlots
from farstep.head.tickets.tickets import Tickets
from farstep.head.warnings.slow_calls import FIRST_START_S, WaitWarning, warn_while_slow
from farstep.launch.acting_plan import ActingPlan
from farstep.launch.launchers import launcher_for
from farstep.rollout.nested_launch import refuse_nested_launch
from farstep.rollout.program import Program
from farstep.rollout.progress import check_words, copy_words
from farstep.wire import messages as m

log = logging.getLogger("farstep")
T = TypeVar("T")
_START_CLOSE_S = 1.0
"""Seconds for workers to end by themselves while they import modules or construct environments."""


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
        release_idle: Whether to suspend workers while no session of tickets is open, and in a feed while they have no
            ticket.
        prewarm: Whether to resume them shortly before the next session is expected.
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
        prewarm: bool = False,
    ) -> None:
        refuse_nested_launch()
        self._pid = os.getpid()
        pickled = program.pickled()
        self._close_s = config.timeouts.close_s
        engine = type(config).__name__.removesuffix("Config") if isinstance(config, EngineConfig) else ""
        self._slow_start = f"{engine} has not answered yet" if engine else "starting worker processes"
        self._first_wait = f"{engine} to answer" if engine else "worker processes to start"
        self.has_begun = False
        """Whether `begin` has returned. It holds the lock for as long as a command of an engine takes."""
        self._client, self.events = client, events
        workers = config.num_workers(envs_per_node)
        self.records = split(config.most_nodes, envs_per_node, workers, root)
        self._plan = ActingPlan(workers, config.most_nodes, program.serving, program.is_serving_optional)
        self.servers = acting_servers(self._plan.num_servers, workers, self.records[-1].stop)
        """The records of acting servers; empty if workers act themselves."""
        self._plan.warn_of_idle_servers(events.emit)
        self.workers_per_node, self.min_nodes = workers // config.most_nodes, config.fewest_nodes
        self.gpus_per_worker = config.gpus_per_node / self.workers_per_node
        self.tickets = Tickets(workers, self.min_nodes * self.workers_per_node)
        self._failure: FarstepError | None = None
        self.is_closed = False
        """Whether `close` was called."""
        self._wait_began = math.inf
        """When the call that is waiting began to wait, in `time.monotonic()` seconds; infinity: none waits."""
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
                modules = [*preloaded(), *program.source.modules()]
                launcher = launcher_for(config, self._plan, envs, modules, events.emit)
            opened.callback(launcher.close)
            self.shares_memory, self.is_driven = launcher.shares_memory, launcher.driven
            everyone = [*self.records, *self.servers]
            self.supervisor = Supervisor(
                launcher, everyone, config.timeouts, restart_budget, self._event_loop, self, events.emit
            )
            opened.pop_all()
        self.available = Availability(self.records, self.servers, self.tickets, self.supervisor.membership)
        self.outbox = Outbox(everyone, self.supervisor, self.shares_memory)
        self.handshake = Handshake(pickled, self.supervisor, self.outbox, self.shares_memory, self.fail, events.emit)
        self._acting_clients = ActingClients(
            self._plan, everyone, self.outbox, lambda: self.handshake.spaces, config.timeouts.connect_s
        )
        self.slots = WorkerSlots(self, client, release_idle=release_idle, prewarm=prewarm)

    # ---- start and end ----

    def start(self, on_begun: Callable[[], None] | None = None) -> tuple[Any, Any]:
        """Start all workers, call `on_begun`, and wait until the workers have built their environments and all their
        acting servers have a node. Return the spaces of one environment."""
        self.begin()
        if on_begun is not None:
            with self.locked():
                self.raise_failure()
            on_begun()
        self.wait(lambda: True if self.available.all_ready() and not self.lacks_server() else None, starting=True)
        assert self.handshake.spaces is not None
        return self.handshake.spaces

    def begin(self) -> None:
        """Start all workers, without waiting for them."""
        self.handshake.begin()
        with self.locked(), warn_while_slow(self._slow_start, self.events.emit):
            self.supervisor.start()
        if not self.is_driven:
            with typed_shortage("the head's thread could not be started"):
                self._event_loop.start_thread(self._pump_alone, self._tick_s)
        self.has_begun = True

    def dismiss_servers(self) -> None:
        """End the acting servers, because workers act themselves from now on."""
        with self.locked():
            dismissed, self.servers[:] = list(self.servers), []
            for record in dismissed:
                self.supervisor.act_on(membership.Dismiss(record.worker))

    def clients(self) -> list[list[int]]:
        """For each acting server, the workers that it acts for."""
        return [self._plan.clients_of(record.worker) for record in self.servers]

    def close(self) -> None:
        """Stop workers, kill those that do not stop in time, and free all resources.

        Idempotent. A second call, from another thread, returns after the first call has freed all resources.
        """
        if os.getpid() != self._pid:
            return  # a fork of the head does not own the workers
        with self._event_loop.lead():
            if self.is_closed:
                if self._closer != threading.get_ident():  # a signal handler in this thread would deadlock
                    self._event_loop.wait_for(self._freed)
                return
            self.is_closed, self._closer = True, threading.get_ident()
            try:
                self.slots.close()
                self.supervisor.stop()
                self.supervisor.resume_all()
                self.outbox.send_stop()
                deadline = time.monotonic() + self._close_s
                self._wait_for_ends(min(deadline, time.monotonic() + _START_CLOSE_S))
                self.supervisor.kill_starting()
                self._wait_for_ends(deadline)
            finally:  # also after Ctrl-C
                try:
                    self._end_all()
                finally:
                    self._freed.set()

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
            starting: Whether the wait is for workers to start (see `WaitWarning`).

        Raises:
            FarstepError: The run has failed, or is closed.
        """
        result = self.wait_until(poll, math.inf, starting=starting)
        assert result is not None
        return result

    def wait_until(self, poll: Callable[[], T | None], deadline: float, *, starting: bool = False) -> T | None:
        """Like `wait`, but return None after the deadline (in `time.monotonic()` seconds)."""
        with self._event_loop.lead():
            self._wait_began = time.monotonic()
            warning = WaitWarning(self.events.emit, self._wait_began, starting=starting)
            try:
                while True:
                    self.raise_failure()
                    result = poll()
                    if result is not None or (left := deadline - time.monotonic()) <= 0:
                        return result
                    if (now := time.monotonic()) > warning.due:
                        nodes_are_missing = bool(self.supervisor.launcher.waiting())
                        is_needed = starting or self.tickets.in_flight or nodes_are_missing
                        if is_needed and warning.is_unusual(now, nodes_are_missing=nodes_are_missing):
                            chunk = self.supervisor.slowest_chunk()
                            progress = "" if chunk is None else f"; {chunk}"
                            warning.warn(f" for {self.supervisor.whereabouts()}{progress}", now)
                    self._pump(min(left, self._tick_s))
            finally:
                self._wait_began = math.inf

    def waiting_for(self) -> str:
        """Return which nodes and workers have not started, or are still working. Does not wait for `begin`."""
        if not self.has_begun:
            return self._first_wait
        with self.locked():
            return self.supervisor.whereabouts()

    def unconnected_nodes(self) -> str:
        """Describe the nodes that are not connected; empty if all are connected."""
        with self.locked():
            return self.supervisor.launcher.waiting()

    def awaited_nodes(self) -> str:
        """Describe the unconnected nodes if a call has waited for several seconds and needs them; empty otherwise."""
        with self.locked():
            presence, waited_s = self.tickets.presence, time.monotonic() - self._wait_began
            needs_more = len(presence.present) < presence.quorum or self.lacks_server()
            return self.supervisor.launcher.waiting() if needs_more and waited_s >= FIRST_START_S else ""

    def lacks_server(self) -> bool:
        """Whether present workers cannot act because the node of their acting server is not connected."""
        return self._plan.is_remote and any(record.phase == "queued" for record in self.servers)

    @property
    def input_fd(self) -> int:
        """A descriptor that can be read while input waits that no thread has handled yet."""
        return self._event_loop.input_fd

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
            if self.is_closed:
                raise ClosedError(f"this cluster failed earlier and is closed: {str(failure).splitlines()[0]}")
            self.close()
            raise failure
        if self.is_closed:
            raise ClosedError("this cluster is closed; make a new one.")

    @property
    def state(self) -> str:
        """The state of the run in one word."""
        return "failed" if self._failure is not None else "closed" if self.is_closed else "running"

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
            return {"the head": os.getpid(), **self.supervisor.local_pids()}

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
            if not self.is_closed:
                self.fail(error)
        except Exception as error:  # an internal error must reach the caller
            if not self.is_closed:
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
        if self.supervisor.membership.restart_is_due or time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + self._tick_s
            self.supervisor.tick()

    # ---- callbacks of the supervisor (see `supervisor.Listener`) ----

    def expected(self, record: WorkerRecord) -> str:
        if record.is_server:
            return self._acting_clients.expected(record)
        return expected(record, self.tickets.outstanding.oldest_of(record.worker))

    def lost(self, record: WorkerRecord) -> None:
        self._acting_clients.lost(record)
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
        self.slots.parking.retire(record)

    def parked(self, record: WorkerRecord) -> None:
        self.slots.parking.parked(record)

    def unparked(self, record: WorkerRecord) -> None:
        self._acting_clients.worker_ready(record)
        self.slots.parking.unparked(record)

    def continued(self, record: WorkerRecord, suspended_s: float) -> None:
        self.outbox.send(record, m.Continued(suspended_s))

    def receive(self, worker: int, received: Received) -> None:
        if self._failure is not None and not self.is_closed:
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
                self.handshake.welcome(record, message)
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
                if isinstance(message, m.ClientAdmitted):
                    self._acting_clients.admitted(record, message)
                    return
                if isinstance(message, m.RejectClient):
                    self._reject_client(record, message)
                    return
                if isinstance(message, m.Idle):
                    self.slots.parking.returned(record)
                    self.grant()
                    return
                self._client.on_message(record, message, received)
                self.slots.release_without_ticket(record)
                if self.supervisor.membership.members[record.worker].retiring:
                    self.retire(record)  # it may have completed its window

    def _reject_client(self, server: WorkerRecord, message: m.RejectClient) -> None:
        """Replace a worker that has sent its acting server an invalid message."""
        self._acting_clients.check(server, message.worker)
        self.supervisor.reject(self.records[message.worker], WireError(f"to its acting server: {message.reason}"))

    # ---- messages ----

    def drain(self) -> None:
        """Read all messages that have arrived. Sending on a ZeroMQ socket can clear the signal that wakes the event
        loop."""
        if not self.shares_memory:
            self.supervisor.read_shared()

    def _ready(self, record: WorkerRecord, message: m.Ready) -> None:
        if record.is_server:
            self.handshake.accept_server(record)
            self._acting_clients.server_ready(record, message.listening)
            return
        if not self.handshake.accepts(record, message):
            return
        self.slots.parking.admit(record)
        self._acting_clients.worker_ready(record)
        self.handshake.complete(record)
        self.grant()

    def _failed(self, record: WorkerRecord, failure: m.Failure) -> None:
        error = record.failed(failure)
        if failure.request is not None or failure.agent is not None or failure.step:
            record.owes_reply = False
            self._client.on_error(record, failure, error)
            return
        record.error = error
        first_time = failure.phase == "construct" and not record.has_been_ready
        if record.ran_out_of_memory(failure):
            self.supervisor.emit_failure("lost", error, "; restarting it")
        elif failure.phase in ("act", "load") or (failure.ticket is None and first_time):
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
                self.events.emit_retry(error)
                record.error = None  # otherwise it could be reported as the cause of a later death

    # ---- tickets ----

    def grant(self) -> None:
        """Issue and send all tickets that workers may get now."""
        if self._failure is not None:
            return
        if self.slots.is_paused:
            self.slots.request_again()
            return
        for issued in self.tickets.grant(self.available, self._client.version()):
            self.slots.note_ticket()
            ticket, frames = self._client.make_ticket(issued)
            self.outbox.send(self.records[issued.worker], ticket, frames)

    def cancel(self) -> None:
        """End the session and cancel its open tickets."""
        open_tickets = self.tickets.in_flight
        upto = self.tickets.cancel()
        if open_tickets:
            self.outbox.send_cancel(upto)
        self.slots.end_session()
