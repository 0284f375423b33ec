"""Starts, watches and restarts the processes and connections of all workers, as `Membership` decides."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from farstep.config.launch import RESTART_WINDOW_S, Timeouts
from farstep.core import Launcher, Received
from farstep.errors import FarstepError, LaunchError, ResourceError, WireError, WorkerError, typed_shortage
from farstep.event import Emit, EventKind
from farstep.head.event_loop import EventLoop
from farstep.head.members import membership
from farstep.head.members.worker_records import WorkerRecord
from farstep.head.warnings.pending_workers import PendingWorker, describe
from farstep.rollout.progress import BEAT_S, COUNT, SLOT, ChunkProgress, Phase, check_words
from farstep.wire.messages import Stop, encode

log = logging.getLogger("farstep")
_MESSAGES_AT_ONCE = 64
"""Maximum number of messages read from one worker before the next worker is served."""
_PHASES = {
    "connect": "importing modules",
    "idle": "idle with work to do",
    "load": "loading weights",
    "transfer": "sending",
}
"""Descriptions of phases in which a running worker calls neither an environment nor the policy."""
_STARTING = ("connect", "construct", "load")
"""Phases in which a worker runs the user's imports and constructors."""
_EXIT_GRACE_S = 1.0
"""Seconds for a worker to end by itself after its connection closed; its exit status then explains the cause."""


class Listener(Protocol):
    """Callbacks of the supervisor."""

    def receive(self, worker: int, received: Received) -> None:
        """Handle a message from a worker."""
        ...

    def expected(self, record: WorkerRecord) -> str:
        """What the head still expects of this worker if it is idle (see `worker_records.expected`)."""
        ...

    def lost(self, record: WorkerRecord) -> None:
        """Reclaim the worker's tickets, because its process died or is about to be killed."""
        ...

    def absent(self, record: WorkerRecord) -> None:
        """Continue without the worker, because it has no node."""
        ...

    def draining(self, record: WorkerRecord) -> None:
        """Issue no new tickets to the worker, because its node is about to leave."""
        ...

    def retire(self, record: WorkerRecord) -> None:
        """Issue no new tickets to the worker, because it is to be parked; report `membership.Idle` when it is idle."""
        ...

    def parked(self, record: WorkerRecord) -> None:
        """Continue without the worker, because its process was suspended."""
        ...

    def unparked(self, record: WorkerRecord) -> None:
        """Send the worker what it missed, because it is no longer parked."""
        ...

    def continued(self, record: WorkerRecord, suspended_s: float) -> None:
        """Send the worker for how long it was suspended, because its process continues after it was released."""
        ...

    def fail(self, error: FarstepError) -> None:
        """End the run with this error."""
        ...


class Supervisor:
    """The processes of all workers of a run. Callers must hold the event loop's lock."""

    def __init__(
        self,
        launcher: Launcher,
        records: Sequence[WorkerRecord],
        timeouts: Timeouts,
        restart_budget: int,
        event_loop: EventLoop,
        listener: Listener,
        emit: Emit,
    ) -> None:
        self.records = records
        self.launcher = launcher
        self._timeouts, self._event_loop, self._listener, self._emit = timeouts, event_loop, listener, emit
        # Progress that arrives by message is up to one heartbeat old, and the message may be late.
        slack_s = 0.0 if launcher.shares_memory else 3 * BEAT_S
        phases = [*(phase.label for phase in Phase if phase is not Phase.QUEUED), "transfer"]
        limits = {phase: getattr(timeouts, f"{phase}_s") + slack_s for phase in phases}
        servers = sum(record.is_server for record in records)
        self.membership = membership.Membership(len(records) - servers, limits, restart_budget, servers)
        self.run = f"{time.time_ns():x}"
        for fd in launcher.filenos():
            event_loop.register(fd, self._read_changed)

    def start(self) -> None:
        try:
            with self._event_loop.interruptible():  # Ctrl-C must work while an engine does not answer
                self.launcher.prepare()
        except LaunchError as error:
            self._listener.fail(error)
            return
        self._perform(self.membership.start(time.monotonic()))

    def stop(self) -> None:
        """Expect workers to end, and do not restart them."""
        self.membership.stop()
        self.launcher.stop()

    def resume_all(self) -> None:
        """Let suspended processes continue, so that they can stop by themselves."""
        for record in self.records:
            state = self.membership.members[record.worker].state
            if record.handle is not None and state in (membership.State.PARKED, membership.State.RELEASED):
                record.handle.resume()

    def ended(self) -> bool:
        return all(record.handle is None or record.handle.poll() is not None for record in self.records)

    def kill_starting(self) -> None:
        """Kill workers that import modules, construct environments or load an agent: they do not read messages."""
        for record in self.records:
            if record.handle is not None and (record.link is None or record.phase in _STARTING):
                record.handle.kill()

    def kill(self) -> None:
        for record in self.records:
            if record.handle is not None:
                record.handle.kill()

    def close(self) -> None:
        for record in self.records:
            self._drop_process(record)
        self.launcher.close()

    def local_pids(self) -> dict[str, int]:
        """The processes of workers that the head has started itself on this machine, by name."""
        handles = {f"{record.role} {record.worker}": record.handle for record in self.records}
        return {
            name: handle.pid
            for name, handle in handles.items()
            if handle is not None and handle.pid not in (0, os.getpid())
        }

    def whereabouts(self) -> str:
        """What the head is waiting for: nodes, and workers that are starting or still working."""
        pending = [found for record in self.records if (found := self._pending(record)) is not None]
        return describe(pending, self.launcher.waiting())

    def slowest_chunk(self) -> ChunkProgress | None:
        """The progress of the chunk that takes longest to complete; None if no worker rolls one."""
        ready = [record for record in self.records if record.ready and not record.is_server]
        found = (ChunkProgress.of(record.worker, record.num_envs, record.words) for record in ready)
        return max(filter(None, found), key=lambda chunk: chunk.seconds_left, default=None)

    def _pending(self, record: WorkerRecord) -> PendingWorker | None:
        """What a worker is doing; None if it has no work or no node."""
        member, phase = self.membership.members[record.worker], record.phase
        is_idle_server = member.dismissed or (record.is_server and phase == "idle")
        if phase == "queued" or member.state is membership.State.PARKED or is_idle_server:
            return None
        state = member.state.value
        if member.state is membership.State.ALIVE:
            if phase == "idle" and not (phase := self._listener.expected(record)):
                return None
            state = _PHASES.get(phase, f"in {phase}")
        elif member.state in (membership.State.DYING, membership.State.WAITING):
            state = "lost" if member.incarnation >= 0 else "starting"
        elif member.state is membership.State.STARTING and member.incarnation:
            state = "restarting"
        return PendingWorker(record.worker, state, record.current_slot(phase))

    # ---- reading ----

    def read_shared(self) -> bool:
        """Read connections that several workers share. Return whether a message had arrived."""
        received = self.launcher.drain(self._listener.receive)
        if self.launcher.driven:
            for record in self.records:
                received = self._drive(record) or received
        return received

    def _drive(self, record: WorkerRecord) -> bool:
        """Run a worker that shares this thread. Deliver Ctrl-C, because its environments may hang."""
        progressed = False
        while record.link is not None:
            with self._event_loop.interruptible():
                received = record.link.receive()
            if received is None:
                break
            progressed = True
            self._listener.receive(record.worker, received)
            if self.membership.stopping:
                break  # the run has failed: do not step again before the caller gets the error
        if record.handle is not None and record.handle.poll() is not None:
            self._process_ended(record)
        return progressed

    def _read(self, record: WorkerRecord, limit: int | None = _MESSAGES_AT_ONCE) -> None:
        count = 0
        while record.link is not None and (limit is None or count < limit):
            count += 1
            try:
                received = record.link.receive()
            except EOFError:
                self._event_loop.unregister(record.link.fileno())
                record.silent_since = time.monotonic()
                return
            except OSError as error:
                self.reject(record, WireError(f"a message that could not be received: {error}"))
                return
            except WireError as error:
                self.reject(record, error)
                return
            if received is None:
                return
            for fd in received.fds:
                os.close(fd)
            if received.fds:
                self.reject(record, WireError(f"a message with {len(received.fds)} descriptors; workers send none."))
                return
            self._listener.receive(record.worker, received)

    def reject(self, record: WorkerRecord, error: WireError) -> None:
        """Replace a worker that sent an unreadable or invalid message."""
        if self.membership.is_running(record.worker):
            record.blame(record.phase)
            record.error = WorkerError(
                f"a worker sent a message that cannot be accepted: {error}", record.where(record.phase)
            )
            text = f"{record.role} {record.worker} sent a message that cannot be accepted: {error}"
            self._read_output(record)
            output = record.handle.output() if record.handle is not None else ""
            self._emit("lost", text, worker=record.worker, node=record.host, traceback=output)
        self.act_on(membership.Disconnected(record.worker))

    def _read_changed(self) -> None:
        """Check workers without descriptors that have printed or ended."""
        for worker in self.launcher.changed():
            self._read_output(self.records[worker])
            self._process_ended(self.records[worker])

    def _read_output(self, record: WorkerRecord) -> None:
        if record.handle is None:
            return
        new = record.handle.read_output()
        if new is None:
            self._event_loop.unregister(record.handle.output_fd)
        for line in (new or b"").decode(errors="replace").splitlines():
            log.info("%s %d: %s", record.role, record.worker, line)

    # ---- supervising ----

    def tick(self) -> None:
        """Check the progress of all workers, and perform the actions that are due."""
        for record in self.records:
            if self.membership.members[record.worker].retiring:
                self._listener.retire(record)
            if record.handle is None or self.launcher.driven:
                continue  # a worker in this thread can only be stuck if the head is stuck
            if time.monotonic() - record.silent_since > _EXIT_GRACE_S:
                record.silent_since = math.inf
                self.act_on(membership.Disconnected(record.worker))
            if self.launcher.shares_memory and self.membership.is_running(
                record.worker
            ):  # the worker itself writes its words
                try:
                    check_words(record.words)
                except WireError as error:
                    self.reject(record, error)
            phase = record.phase
            if phase == "idle":
                phase = self._listener.expected(record)
            count = (int(record.words[COUNT]), int(record.words[SLOT]), record.num_messages)
            self.act_on(membership.Observed(record.worker, phase, count))
            if record.link is not None:
                record.link.flush()
            if record.handle.leaving:
                self._listener.draining(record)
                if not self._listener.expected(record):
                    self._stop_drained(record)
        try:
            self.launcher.tick()
        except LaunchError as error:
            self._listener.fail(error)
        self._perform(self.membership.tick(time.monotonic()))

    def _stop_drained(self, record: WorkerRecord) -> None:
        """Stop a worker whose node is leaving and that has finished its work."""
        was_suspended = self.membership.is_suspended(record.worker)
        if was_suspended:
            self.act_on(membership.Unpark(record.worker))  # its environments are to be closed
        self.act_on(membership.Acquire(record.worker))
        if record.ready and record.link is not None:
            record.ready = False  # so that it gets no ticket
            record.link.send([encode(Stop())])
        if was_suspended:
            self.act_on(membership.Park(record.worker))

    def act_on(self, event: membership.Event) -> None:
        """Report an event to the membership, and perform the actions that it returns."""
        self._perform(self.membership.handle(event, time.monotonic()))

    def _perform(self, actions: Sequence[membership.Action]) -> None:
        for action in actions:
            record = self.records[action.worker]
            match action:
                case membership.Start():
                    self._start_process(record, action.incarnation)
                case membership.Kill():
                    if action.stuck_in and record.handle is not None:
                        limit_s = getattr(self._timeouts, f"{action.stuck_in}_s")
                        record.blame(action.stuck_in)
                        record.error = record.stuck(action.stuck_in, limit_s)
                        self.emit_failure("stuck", record.error)
                    if record.handle is not None:
                        record.handle.kill()
                case membership.RequestStacks():
                    if (
                        record.handle is not None and self.launcher.nodes()
                    ):  # for local workers, `WorkerRecord.stuck` does this
                        record.handle.dump_stacks()
                case membership.Retire():
                    self._listener.retire(record)
                case membership.SuspendParked():
                    record.ready = False
                    if record.handle is not None:
                        record.handle.suspend(parked=True)
                    self._listener.parked(record)
                case membership.ResumeParked():
                    record.ready = True
                    if record.handle is not None:
                        record.handle.resume()
                    self._listener.unparked(record)
                case membership.SuspendReleased():
                    if record.handle is not None:
                        record.handle.suspend()
                case membership.ResumeReleased():
                    if record.handle is not None:
                        record.handle.resume()
                    self._listener.continued(record, action.suspended_s)
                case membership.Lost():
                    record.ready = False
                    self._listener.lost(record)
                case membership.GiveUp():
                    unkillable = WorkerError("a worker did not end after it was killed", record.where(record.phase))
                    error = record.shortage or record.error or unkillable
                    budget = self.membership.restart_budget
                    if action.failures and budget and isinstance(error, WorkerError):
                        error.preface(
                            f"restart_budget={budget} is used up: {action.failures} failures within "
                            f"{RESTART_WINDOW_S / 60:g} minutes. The last:"
                        )
                    self._listener.fail(error)

    def _start_process(self, record: WorkerRecord, incarnation: int) -> None:
        self._drop_process(record)
        record.incarnation, record.ready, record.error, record.owes_reply = incarnation, False, None, False
        record.returning = False
        record.silent_since = math.inf
        try:
            with typed_shortage(f"{record.role} {record.worker} could not be started"):
                started = self.launcher.start(record.worker, incarnation, self.run)
        except ResourceError as error:
            self._not_started(record, error)
            return
        except OSError as error:
            self._listener.fail(WorkerError(f"a worker could not be started: {error}", record.where("start")))
            return
        except LaunchError as error:
            self._listener.fail(error)
            return
        record.shortage = None
        record.handle, record.link = started.handle, started.link
        record.words, record.host, record.pid = started.words, started.host, started.handle.pid
        readers: list[tuple[int, Callable[[WorkerRecord], None]]] = [
            (started.link.fileno(), self._read),
            (started.handle.exit_fd, self._process_ended),
            (started.handle.output_fd, self._read_output),
        ]
        for fd, reader in readers:
            self._event_loop.register(fd, lambda reader=reader: reader(record))  # type: ignore[misc]
        if record.phase == "queued":
            self.act_on(membership.Observed(record.worker, "queued", ()))
            self._listener.absent(record)

    def _not_started(self, record: WorkerRecord, error: ResourceError) -> None:
        """Retry a restart later. If the first start failed, fail the run."""
        if not record.incarnation:
            self._listener.fail(error)
            return
        if not self.membership.members[record.worker].attempts:
            text = f"{error} Retrying for {self._timeouts.connect_s:g} s."
            self._emit("warned", text, worker=record.worker, node=record.host)
        record.incarnation -= 1
        record.shortage = error
        self.act_on(membership.NotStarted(record.worker))

    def send_failed(self, record: WorkerRecord, error: OSError) -> None:
        """Restart a worker because a message could not be sent to it. Its replacement gets the message."""
        record.error = WorkerError(str(error), record.where(record.phase))
        self.emit_failure("lost", record.error, "; restarting the worker")
        self.act_on(membership.Disconnected(record.worker))

    def _process_ended(self, record: WorkerRecord) -> None:
        ended = record.handle.poll() if record.handle is not None else None
        if ended is None or record.handle is None:
            return
        member = self.membership.members[record.worker]
        self.launcher.drain(self._listener.receive)  # messages that the worker sent before it ended still count
        if record.link is not None and record.link.fileno() >= 0:
            self._read(record, limit=None)
        if record.error is None and not (self.membership.stopping or ended.blameless or member.dismissed):
            record.blame(record.phase)
            record.error = record.died(ended)
            is_parked = member.state is membership.State.PARKED
            self.emit_failure("lost", record.error, "; it is parked, and is restarted when needed" if is_parked else "")
        self._event_loop.unregister(record.handle.exit_fd)
        self.act_on(membership.Ended(record.worker, ended.blameless))
        if ended.blameless:  # its node ended: batches continue without the worker until it rejoins
            self._listener.absent(record)
        if member.dismissed:
            self._drop_process(record)

    def emit_failure(self, kind: EventKind, error: WorkerError, consequence: str = "") -> None:
        """Emit a failure of a worker with its traceback or output."""
        text, where = str(error).splitlines()[0] + consequence, error.where
        self._emit(kind, text, worker=where.worker, node=where.host, traceback=error.evidence)

    def _drop_process(self, record: WorkerRecord) -> None:
        if record.link is not None:
            self._event_loop.unregister(record.link.fileno())
            record.link.close()
            record.link = None
        if record.handle is not None:
            self._read_output(record)
            self._event_loop.unregister(record.handle.exit_fd)
            self._event_loop.unregister(record.handle.output_fd)
            record.handle.close()
            record.handle = None
