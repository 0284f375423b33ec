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
from farstep.head import membership as life
from farstep.head.event_loop import Switchboard
from farstep.head.worker_records import Seat
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

    def expected(self, seat: Seat) -> str:
        """What this worker is waited for if it does nothing (see `seats.expected`)."""
        ...

    def lost(self, seat: Seat) -> None:
        """What it was doing will not be done."""
        ...

    def absent(self, seat: Seat) -> None:
        """There is no node for it; it comes when there is one."""
        ...

    def draining(self, seat: Seat) -> None:
        """The worker's node is about to leave."""
        ...

    def fail(self, error: FarstepError) -> None:
        """The run cannot go on."""
        ...


class Crew:
    """All workers of a run. Everything here happens under the switchboard's lock."""

    def __init__(
        self,
        launcher: Launcher,
        seats: Sequence[Seat],
        timeouts: Timeouts,
        restart_budget: int,
        switchboard: Switchboard,
        watcher: Watcher,
    ) -> None:
        self.seats = seats
        self.launcher = launcher
        self._timeouts, self._switchboard, self._watcher = timeouts, switchboard, watcher
        # Where progress is reported by message, what we know is up to a heartbeat old (and a message may be late).
        slack_s = 0.0 if launcher.shares_memory else 3 * BEAT_S
        phases = [*(phase.label for phase in Phase if phase is not Phase.QUEUED), "transfer"]
        limits = {phase: getattr(timeouts, f"{phase}_s") + slack_s for phase in phases}
        self.membership = life.Membership(len(seats), limits, restart_budget)
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
        return all(seat.handle is None or seat.handle.poll() is not None for seat in self.seats)

    def kill(self) -> None:
        for seat in self.seats:
            if seat.handle is not None:
                seat.handle.kill()

    def close(self) -> None:
        for seat in self.seats:
            self._drop_process(seat)
        self.launcher.close()

    def whereabouts(self) -> str:
        """What each worker that keeps somebody waiting is doing."""
        queued = [waiting] if (waiting := self.launcher.waiting()) else []
        parts: list[str] = []
        for seat, member in zip(self.seats, self.membership.members, strict=True):
            if seat.phase == "queued":
                continue
            if member.state is not life.State.ALIVE:
                again = f" (restart {member.incarnation})" if member.incarnation else ""
                parts.append(f"worker {seat.worker} is {member.state.value}{again}")
            elif seat.phase != "idle":
                i = int(seat.words[SLOT])
                slot = f", environment slot {seat.first + i}" if i >= 0 else ""
                parts.append(f"worker {seat.worker} in {seat.phase}{slot}")
        rest = [f"{len(parts) - _MOST_NAMED} more workers"] if len(parts) > _MOST_NAMED else []
        return "; ".join([*queued, *parts[:_MOST_NAMED], *rest]) or "all workers are idle"

    # ---- reading ----

    def read_shared(self) -> bool:
        """What has arrived on connections that have no descriptor per worker; True if anything did."""
        arrived = self.launcher.drain(self._watcher.receive)
        if self.launcher.driven:
            for seat in self.seats:
                arrived = self._drive(seat) or arrived
        return arrived

    def _drive(self, seat: Seat) -> bool:
        """A worker in this process moves when we make it: its environments may hang, so Ctrl-C must reach them."""
        moved = False
        while seat.link is not None:
            with self._switchboard.interruptible():
                received = seat.link.receive()
            if received is None:
                break
            moved = True
            self._watcher.receive(seat.worker, received)
            if self.membership.stopping:
                break  # the run is over: nobody takes another step before whoever waits has heard of it
        if seat.handle is not None and seat.handle.poll() is not None:
            self._process_ended(seat)
        return moved

    def _read(self, seat: Seat, limit: int | None = _MESSAGES_AT_ONCE) -> None:
        count = 0
        while seat.link is not None and (limit is None or count < limit):
            count += 1
            try:
                received = seat.link.receive()
            except EOFError:
                self._switchboard.unregister(seat.link.fileno())
                seat.silent_since = time.monotonic()
                return
            except OSError as error:
                self.distrust(seat, WireError(f"a message that could not be received: {error}"))
                return
            except WireError as error:
                self.distrust(seat, error)
                return
            if received is None:
                return
            for fd in received.fds:
                os.close(fd)
            if received.fds:
                self.distrust(seat, WireError(f"a message with {len(received.fds)} descriptors; workers send none."))
                return
            self._watcher.receive(seat.worker, received)

    def distrust(self, seat: Seat, error: WireError) -> None:
        """A worker said what cannot be read, or cannot be true: it is replaced."""
        if self.membership.is_running(seat.worker):
            log.warning("worker %d sent a message that cannot be accepted: %s", seat.worker, str(error))
            seat.blame(seat.phase)
            seat.error = WorkerError(
                f"a worker sent a message that cannot be accepted: {error}", seat.where(seat.phase)
            )
        self.act_on(life.Gone(seat.worker))

    def _read_output(self, seat: Seat) -> None:
        if seat.handle is None:
            return
        new = seat.handle.read_output()
        if new is None:
            self._switchboard.unregister(seat.handle.output_fd)
        for line in (new or b"").decode(errors="replace").splitlines():
            log.info("worker %d: %s", seat.worker, line)

    # ---- watching ----

    def tick(self) -> None:
        """Look at everybody's progress, and do what time alone brings about."""
        for seat in self.seats:
            if seat.handle is None or self.launcher.driven:
                continue  # one in this process cannot be stuck without us
            if time.monotonic() - seat.silent_since > _LAST_WORDS_S:
                seat.silent_since = math.inf
                self.act_on(life.Gone(seat.worker))
            if self.launcher.shares_memory and self.membership.is_running(seat.worker):  # it writes its words itself
                try:
                    check_words(seat.words)
                except WireError as error:
                    self.distrust(seat, error)
            phase = seat.phase
            if phase == "idle":
                phase = self._watcher.expected(seat)
            count = (int(seat.words[COUNT]), int(seat.words[SLOT]), seat.heard)
            self.act_on(life.Observed(seat.worker, phase, count))
            if seat.link is not None:
                seat.link.flush()
            if seat.handle.leaving:
                self._watcher.draining(seat)
                if not self._watcher.expected(seat):
                    self._send_off(seat)
        try:
            self.launcher.tick()
        except LaunchError as error:
            self._watcher.fail(error)
        self._perform(self.membership.tick(time.monotonic()))

    def _send_off(self, seat: Seat) -> None:
        """Its node is taken away, and it owes nothing any more."""
        if seat.ready and seat.link is not None:
            seat.ready = False  # no ticket finds it
            seat.link.send([encode(Stop())])

    def act_on(self, event: life.Event) -> None:
        self._perform(self.membership.handle(event, time.monotonic()))

    def _perform(self, actions: Sequence[life.Action]) -> None:
        for action in actions:
            seat = self.seats[action.worker]
            match action:
                case life.Start():
                    self._start_process(seat, action.incarnation)
                case life.Kill():
                    if action.stuck_in and seat.handle is not None:
                        limit_s = getattr(self._timeouts, f"{action.stuck_in}_s")
                        seat.blame(action.stuck_in)
                        seat.error = seat.stuck(action.stuck_in, limit_s)
                        log.warning("%s", str(seat.error).splitlines()[0])
                    if seat.handle is not None:
                        seat.handle.kill()
                case life.Ask():
                    if seat.handle is not None and self.launcher.nodes():  # others are asked when they are killed
                        seat.handle.dump_stacks()
                case life.Lost():
                    seat.ready = False
                    self._watcher.lost(seat)
                case life.GiveUp():
                    undead = WorkerError("a worker does not end, although it was killed", seat.where(seat.phase))
                    error = seat.shortage or seat.error or undead
                    budget = self.membership.restart_budget
                    if action.failures and budget and isinstance(error, WorkerError):
                        error.preface(
                            f"restart_budget={budget} is used up: {action.failures} failures within "
                            f"{RESTART_WINDOW_S / 60:g} minutes. The last:"
                        )
                    self._watcher.fail(error)

    def _start_process(self, seat: Seat, incarnation: int) -> None:
        self._drop_process(seat)
        seat.incarnation, seat.ready, seat.error, seat.asked = incarnation, False, None, False
        seat.silent_since = math.inf
        try:
            with typed_shortage(f"worker {seat.worker} could not be started"):
                started = self.launcher.start(seat.worker, incarnation, self.run)
        except ResourceError as error:
            self._not_started(seat, error)
            return
        except OSError as error:
            self._watcher.fail(WorkerError(f"a worker could not be started: {error}", seat.where("start")))
            return
        except LaunchError as error:
            self._watcher.fail(error)
            return
        seat.shortage = None
        seat.handle, seat.link = started.handle, started.link
        seat.words, seat.host, seat.pid = started.words, started.host, started.handle.pid
        readers: list[tuple[int, Callable[[Seat], None]]] = [
            (started.link.fileno(), self._read),
            (started.handle.exit_fd, self._process_ended),
            (started.handle.output_fd, self._read_output),
        ]
        for fd, reader in readers:
            self._switchboard.register(fd, lambda reader=reader: reader(seat))  # type: ignore[misc]
        if seat.phase == "queued":
            self._watcher.absent(seat)

    def _not_started(self, seat: Seat, error: ResourceError) -> None:
        """Retry a replacement later; during the launch, fail at once."""
        if not seat.incarnation:
            self._watcher.fail(error)
            return
        if not self.membership.members[seat.worker].attempts:
            log.warning("%s Retrying for %g s.", str(error), self._timeouts.connect_s)
        seat.incarnation -= 1
        seat.shortage = error
        self.act_on(life.NotStarted(seat.worker))

    def cannot_tell(self, seat: Seat, error: OSError) -> None:
        """Replace a worker to which a message could not be sent; its replacement gets the message."""
        seat.error = WorkerError(str(error), seat.where(seat.phase))
        log.warning("%s; replacing the worker", str(seat.error).splitlines()[0])
        self.act_on(life.Gone(seat.worker))

    def _process_ended(self, seat: Seat) -> None:
        ended = seat.handle.poll() if seat.handle is not None else None
        if ended is None or seat.handle is None:
            return
        self.launcher.drain(self._watcher.receive)  # what it said before it ended still counts
        if seat.link is not None and seat.link.fileno() >= 0:
            self._read(seat, limit=None)
        if seat.error is None and not self.membership.stopping and not ended.blameless:
            seat.blame(seat.phase)
            seat.error = seat.died(ended)
            log.warning("%s", str(seat.error).splitlines()[0])
        self._switchboard.unregister(seat.handle.exit_fd)
        self.act_on(life.Ended(seat.worker, ended.blameless))
        if ended.blameless:  # it went with its node, and batches go on without it, however soon it is back
            self._watcher.absent(seat)

    def _drop_process(self, seat: Seat) -> None:
        if seat.link is not None:
            self._switchboard.unregister(seat.link.fileno())
            seat.link.close()
            seat.link = None
        if seat.handle is not None:
            self._read_output(seat)
            self._switchboard.unregister(seat.handle.exit_fd)
            self._switchboard.unregister(seat.handle.output_fd)
            seat.handle.close()
            seat.handle = None
