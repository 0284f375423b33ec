"""The crew: every worker's process and connection, started, watched and replaced as membership says."""

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
from farstep.head.event_loop import EventLoop
from farstep.head.members import membership as life
from farstep.head.members.worker_records import WorkerRecord
from farstep.rollout.progress import BEAT_S, COUNT, SLOT, Phase, check_words
from farstep.wire.messages import Stop, encode

log = logging.getLogger("farstep")
_MESSAGES_AT_ONCE = 64
"""Read from one worker before others get their turn."""
_MOST_NAMED = 8
"""Workers that a log line about waiting lists by name."""
_LAST_WORDS_S = 1.0
"""A worker whose connection closed usually ends by itself; until then it may still say why."""


class Watcher(Protocol):
    """Who hears of the crew."""

    def receive(self, worker: int, received: Received) -> None:
        """A worker said something."""
        ...

    def expected(self, record: WorkerRecord) -> str:
        """What this worker is waited for if it does nothing (see `records.expected`)."""
        ...

    def lost(self, record: WorkerRecord) -> None:
        """What it was doing will not be done."""
        ...

    def absent(self, record: WorkerRecord) -> None:
        """There is no node for it; it comes when there is one."""
        ...

    def draining(self, record: WorkerRecord) -> None:
        """The worker's node is about to leave."""
        ...

    def fail(self, error: FarstepError) -> None:
        """The run cannot go on."""
        ...


class Supervisor:
    """All workers of a run. Everything here happens under the switchboard's lock."""

    def __init__(
        self,
        launcher: Launcher,
        records: Sequence[WorkerRecord],
        timeouts: Timeouts,
        restart_budget: int,
        switchboard: EventLoop,
        watcher: Watcher,
    ) -> None:
        self.records = records
        self.launcher = launcher
        self._timeouts, self._switchboard, self._watcher = timeouts, switchboard, watcher
        # Where progress is reported by message, what we know is up to a heartbeat old (and a message may be late).
        slack_s = 0.0 if launcher.shares_memory else 3 * BEAT_S
        phases = [*(phase.label for phase in Phase if phase is not Phase.QUEUED), "transfer"]
        limits = {phase: getattr(timeouts, f"{phase}_s") + slack_s for phase in phases}
        self.membership = life.Membership(len(records), limits, restart_budget)
        self.run = f"{time.time_ns():x}"
        for fd in launcher.filenos():
            switchboard.register(fd, lambda: None)

    def start(self) -> None:
        try:
            with self._switchboard.interruptible():  # Ctrl-C stops waiting for an engine that does not answer
                self.launcher.prepare()
        except LaunchError as error:
            self._watcher.fail(error)
            return
        self._perform(self.membership.start(time.monotonic()))

    def stop(self) -> None:
        """From now on, ends are expected."""
        self.membership.stop()
        self.launcher.stop()

    def ended(self) -> bool:
        return all(record.handle is None or record.handle.poll() is not None for record in self.records)

    def kill(self) -> None:
        for record in self.records:
            if record.handle is not None:
                record.handle.kill()

    def close(self) -> None:
        for record in self.records:
            self._drop_process(record)
        self.launcher.close()

    def whereabouts(self) -> str:
        """What each worker that keeps somebody waiting is doing."""
        queued = [waiting] if (waiting := self.launcher.waiting()) else []
        parts: list[str] = []
        for record, member in zip(self.records, self.membership.members, strict=True):
            if record.phase == "queued":
                continue
            if member.state is not life.State.ALIVE:
                again = f" (restart {member.incarnation})" if member.incarnation else ""
                parts.append(f"worker {record.worker} is {member.state.value}{again}")
            elif record.phase != "idle":
                i = int(record.words[SLOT])
                slot = f", environment slot {record.first + i}" if i >= 0 else ""
                parts.append(f"worker {record.worker} in {record.phase}{slot}")
        rest = [f"{len(parts) - _MOST_NAMED} more workers"] if len(parts) > _MOST_NAMED else []
        return "; ".join([*queued, *parts[:_MOST_NAMED], *rest]) or "all workers are idle"

    # ---- reading ----

    def read_shared(self) -> bool:
        """What has arrived on connections that have no descriptor per worker; True if anything did."""
        accepted = self.launcher.drain(self._watcher.receive)
        if self.launcher.driven:
            for record in self.records:
                accepted = self._drive(record) or accepted
        return accepted

    def _drive(self, record: WorkerRecord) -> bool:
        """A worker in this process moves when we make it: its environments may hang, so Ctrl-C must reach them."""
        moved = False
        while record.link is not None:
            with self._switchboard.interruptible():
                received = record.link.receive()
            if received is None:
                break
            moved = True
            self._watcher.receive(record.worker, received)
            if self.membership.stopping:
                break  # the run is over: nobody takes another step before whoever waits has heard of it
        if record.handle is not None and record.handle.poll() is not None:
            self._process_ended(record)
        return moved

    def _read(self, record: WorkerRecord, limit: int | None = _MESSAGES_AT_ONCE) -> None:
        count = 0
        while record.link is not None and (limit is None or count < limit):
            count += 1
            try:
                received = record.link.receive()
            except EOFError:
                self._switchboard.unregister(record.link.fileno())
                record.silent_since = time.monotonic()
                return
            except OSError as error:
                self.distrust(record, WireError(f"a message that could not be received: {error}"))
                return
            except WireError as error:
                self.distrust(record, error)
                return
            if received is None:
                return
            for fd in received.fds:
                os.close(fd)
            if received.fds:
                self.distrust(record, WireError(f"a message with {len(received.fds)} descriptors; workers send none."))
                return
            self._watcher.receive(record.worker, received)

    def distrust(self, record: WorkerRecord, error: WireError) -> None:
        """A worker said what cannot be read, or cannot be true: it is replaced."""
        if self.membership.is_running(record.worker):
            log.warning("worker %d sent a message that cannot be accepted: %s", record.worker, str(error))
            record.blame(record.phase)
            record.error = WorkerError(
                f"a worker sent a message that cannot be accepted: {error}", record.where(record.phase)
            )
        self.act_on(life.Gone(record.worker))

    def _read_output(self, record: WorkerRecord) -> None:
        if record.handle is None:
            return
        new = record.handle.read_output()
        if new is None:
            self._switchboard.unregister(record.handle.output_fd)
        for line in (new or b"").decode(errors="replace").splitlines():
            log.info("worker %d: %s", record.worker, line)

    # ---- watching ----

    def tick(self) -> None:
        """Look at everybody's progress, and do what time alone brings about."""
        for record in self.records:
            if record.handle is None or self.launcher.driven:
                continue  # one in this process cannot be stuck without us
            if time.monotonic() - record.silent_since > _LAST_WORDS_S:
                record.silent_since = math.inf
                self.act_on(life.Gone(record.worker))
            if self.launcher.shares_memory and self.membership.is_running(record.worker):  # it writes its words itself
                try:
                    check_words(record.words)
                except WireError as error:
                    self.distrust(record, error)
            phase = record.phase
            if phase == "idle":
                phase = self._watcher.expected(record)
            count = (int(record.words[COUNT]), int(record.words[SLOT]), record.heard)
            self.act_on(life.Observed(record.worker, phase, count))
            if record.link is not None:
                record.link.flush()
            if record.handle.leaving:
                self._watcher.draining(record)
                if not self._watcher.expected(record):
                    self._send_off(record)
        try:
            self.launcher.tick()
        except LaunchError as error:
            self._watcher.fail(error)
        self._perform(self.membership.tick(time.monotonic()))

    def _send_off(self, record: WorkerRecord) -> None:
        """Its node is taken away, and it owes nothing any more."""
        if record.ready and record.link is not None:
            record.ready = False  # no ticket finds it
            record.link.send([encode(Stop())])

    def act_on(self, event: life.Event) -> None:
        self._perform(self.membership.handle(event, time.monotonic()))

    def _perform(self, actions: Sequence[life.Action]) -> None:
        for action in actions:
            record = self.records[action.worker]
            match action:
                case life.Start():
                    self._start_process(record, action.incarnation)
                case life.Kill():
                    if action.stuck_in and record.handle is not None:
                        limit_s = getattr(self._timeouts, f"{action.stuck_in}_s")
                        record.blame(action.stuck_in)
                        record.error = record.stuck(action.stuck_in, limit_s)
                        log.warning("%s", str(record.error).splitlines()[0])
                    if record.handle is not None:
                        record.handle.kill()
                case life.Ask():
                    if record.handle is not None and self.launcher.nodes():  # others are asked when they are killed
                        record.handle.dump_stacks()
                case life.Lost():
                    record.ready = False
                    self._watcher.lost(record)
                case life.GiveUp():
                    undead = WorkerError("a worker does not end, although it was killed", record.where(record.phase))
                    error = record.shortage or record.error or undead
                    budget = self.membership.restart_budget
                    if action.failures and budget and isinstance(error, WorkerError):
                        error.preface(
                            f"restart_budget={budget} is used up: {action.failures} failures within "
                            f"{RESTART_WINDOW_S / 60:g} minutes. The last:"
                        )
                    self._watcher.fail(error)

    def _start_process(self, record: WorkerRecord, incarnation: int) -> None:
        self._drop_process(record)
        record.incarnation, record.ready, record.error, record.asked = incarnation, False, None, False
        record.silent_since = math.inf
        try:
            with typed_shortage(f"worker {record.worker} could not be started"):
                started = self.launcher.start(record.worker, incarnation, self.run)
        except ResourceError as error:
            self._not_started(record, error)
            return
        except OSError as error:
            self._watcher.fail(WorkerError(f"a worker could not be started: {error}", record.where("start")))
            return
        except LaunchError as error:
            self._watcher.fail(error)
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
            self._switchboard.register(fd, lambda reader=reader: reader(record))  # type: ignore[misc]
        if record.phase == "queued":
            self._watcher.absent(record)

    def _not_started(self, record: WorkerRecord, error: ResourceError) -> None:
        """Retry a replacement later; during the launch, fail at once."""
        if not record.incarnation:
            self._watcher.fail(error)
            return
        if not self.membership.members[record.worker].attempts:
            log.warning("%s Retrying for %g s.", str(error), self._timeouts.connect_s)
        record.incarnation -= 1
        record.shortage = error
        self.act_on(life.NotStarted(record.worker))

    def cannot_tell(self, record: WorkerRecord, error: OSError) -> None:
        """Replace a worker to which a message could not be sent; its replacement gets the message."""
        record.error = WorkerError(str(error), record.where(record.phase))
        log.warning("%s; replacing the worker", str(record.error).splitlines()[0])
        self.act_on(life.Gone(record.worker))

    def _process_ended(self, record: WorkerRecord) -> None:
        ended = record.handle.poll() if record.handle is not None else None
        if ended is None or record.handle is None:
            return
        self.launcher.drain(self._watcher.receive)  # what it said before it ended still counts
        if record.link is not None and record.link.fileno() >= 0:
            self._read(record, limit=None)
        if record.error is None and not self.membership.stopping and not ended.blameless:
            record.blame(record.phase)
            record.error = record.died(ended)
            log.warning("%s", str(record.error).splitlines()[0])
        self._switchboard.unregister(record.handle.exit_fd)
        self.act_on(life.Ended(record.worker, ended.blameless))
        if ended.blameless:  # it went with its node, and batches go on without it, however soon it is back
            self._watcher.absent(record)

    def _drop_process(self, record: WorkerRecord) -> None:
        if record.link is not None:
            self._switchboard.unregister(record.link.fileno())
            record.link.close()
            record.link = None
        if record.handle is not None:
            self._read_output(record)
            self._switchboard.unregister(record.handle.exit_fd)
            self._switchboard.unregister(record.handle.output_fd)
            record.handle.close()
            record.handle = None
