"""The I/O shell around membership and tickets: sockets, processes, clocks, and who waits for what.

Whoever waits, pumps (see `switchboard.py`); while nobody waits, a thread does, so that a worker that dies or joins is
looked after at any time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from farstep.config import Timeouts
from farstep.core import Received
from farstep.errors import ClosedError, FarstepError, HandshakeError, WireError, WorkerError, remote_error
from farstep.head import membership as life
from farstep.head.seats import Engine, Seat, preloads
from farstep.head.switchboard import Switchboard
from farstep.head.tickets import Order, Tickets
from farstep.launch.local import import_path
from farstep.wire import messages as m
from farstep.wire.codec import unpack
from farstep.worker.loop import versions
from farstep.worker.progress import BEAT_S, CANCEL, COUNT, PHASE, SLOT, Phase, copy_words

log = logging.getLogger("farstep")
T = TypeVar("T")
_NOTE_S = 10.0
"""A call that takes longer says what it waits for, this often."""


class Client(Protocol):
    """Who uses the server: makes tickets of orders and takes what workers answer."""

    def make_ticket(self, order: Order) -> tuple[m.Ticket, Sequence[Any]]: ...

    def on_message(self, seat: Seat, message: m.FromWorker, received: Received) -> None: ...

    def version(self) -> int:
        """The current version of the policy."""
        ...


class Server:
    """All workers of a run, and the conversation with each of them."""

    def __init__(
        self,
        engine: Engine,
        seats: list[Seat],
        program: bytes,
        timeouts: Timeouts,
        restart_budget: int,
        roots: list[int],
        client: Client,
    ) -> None:
        self._engine, self.seats, self._timeouts = engine, seats, timeouts
        self._program = program
        # Where progress is reported by message, what we know is up to a heartbeat old (and a message may be late).
        slack_s = 0.0 if engine.shares_memory else 3 * BEAT_S
        limits = {phase.label: getattr(timeouts, f"{phase.label}_s") + slack_s for phase in Phase}
        self.membership = life.Membership(len(seats), limits, restart_budget)
        self.tickets = Tickets(len(seats))
        self.roots = roots
        self.resume = np.zeros(len(roots), np.int64)
        self.run = f"{time.time_ns():x}"
        self.spaces: tuple[Any, Any] | None = None
        self.stage: list[tuple[m.FromHead, Sequence[Any], Sequence[int]]] = []
        """What a worker must be told before its first ticket: agent, parameters, layout."""
        self._client: weakref.ref[Client] = weakref.ref(client)  # weak: it owns us, and is freed when forgotten
        self.start_s = {"connect": 0.0, "construct": 0.0}
        """How long the slowest first start took: until its hello, and from there until its environments were built."""
        self._started_at = 0.0
        self.call_errors: list[WorkerError] = []
        """What calls on environments raised; the caller takes it from here."""
        self._failure: FarstepError | None = None
        self._closed = False
        self._tick_s = min(0.5, max(0.02, min(timeouts.step_s, timeouts.reset_s, timeouts.act_s) / 4))
        self._next_tick = 0.0
        self._switchboard = Switchboard()
        for fd in engine.filenos():
            self._switchboard.register(fd, lambda: None)

    @property
    def shares_memory(self) -> bool:
        return self._engine.shares_memory

    # ---- start and end ----

    def start(self) -> None:
        """Start all workers; `wait_ready` waits for them."""
        self._started_at = time.monotonic()
        self._perform(self.membership.start(time.monotonic()))
        if self._engine.threaded:
            self._switchboard.start_thread(self._pump_alone, self._tick_s)

    def wait_ready(self) -> None:
        """Until every worker has built its environments."""
        self.wait(lambda: True if all(seat.ready for seat in self.seats) else None)

    def close(self) -> None:
        """Stop workers, kill the ones that do not stop in time, and free everything. Idempotent."""
        with self._switchboard.lead():
            if self._closed:
                return
            self._closed = True
            self.membership.stop()
            for seat in self.seats:
                if seat.link is not None:
                    seat.words[CANCEL] = 2**62
                    with contextlib.suppress(OSError):
                        seat.link.send([m.encode(m.Stop())])
            try:
                self._wait_for_ends(time.monotonic() + self._timeouts.close_s)
            finally:  # also for somebody who has no patience and interrupts
                self._kill_all()
                self._switchboard.close()
                self._engine.close()

    def _kill_all(self) -> None:
        for seat in self.seats:
            if seat.handle is not None:
                seat.handle.kill()
        self._wait_for_ends(time.monotonic() + 5.0)
        for seat in self.seats:
            self._drop_process(seat)

    def _wait_for_ends(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            if all(seat.handle is None or seat.handle.poll() is not None for seat in self.seats):
                return
            self._pump(0.02)

    # ---- waiting ----

    def wait(self, done: Callable[[], T | None]) -> T:
        """Pump until `done` answers; raises what the run failed of. Bounded: a worker without progress is killed
        after its phase's limit, and the restart budget is finite."""
        with self._switchboard.lead():
            began = time.monotonic()
            next_note = began + _NOTE_S
            while True:
                self.raise_failure()
                answer = done()
                if answer is not None:
                    return answer
                self._pump(self._tick_s)
                if (now := time.monotonic()) > next_note:
                    next_note = now + _NOTE_S
                    log.warning("waiting for %.0f s: %s", now - began, self._whereabouts())

    def _whereabouts(self) -> str:
        """What each worker that keeps us waiting is doing."""
        parts = []
        for seat, member in zip(self.seats, self.membership.members, strict=True):
            phase, slot = int(seat.words[PHASE]), seat.first + int(seat.words[SLOT])
            if member.state is not life.State.ALIVE:
                parts.append(f"worker {seat.worker} is {member.state.value} (restart {member.incarnation})")
            elif phase != Phase.IDLE:
                parts.append(f"worker {seat.worker} in {Phase(phase).label}, environment slot {slot}")
        return "; ".join(parts) or "all workers are idle"

    def raise_failure(self) -> None:
        """Raise the run's failure the first time, a reference to it afterwards."""
        if self._failure is not None:
            failure = self._failure
            if self._closed:
                raise ClosedError(f"this cluster failed earlier and is closed: {str(failure).splitlines()[0]}")
            self.close()
            raise failure
        if self._closed:
            raise ClosedError("this cluster is closed; make a new one.")

    def fail(self, error: FarstepError) -> None:
        """The run cannot go on; whoever waits gets the error."""
        if self._failure is None:
            self._failure = error
        self.membership.stop()

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Exclude the background thread for a moment."""
        return self._switchboard.locked()

    def _pump_alone(self) -> None:
        """What the background thread does while nobody waits."""
        try:
            self._pump(0.0)
        except Exception as error:  # a bug of ours must reach the caller, not die in a thread
            self.fail(FarstepError(f"internal error in the head: {error!r}"))
            log.exception("internal error in the head")

    def _pump(self, timeout_s: float) -> None:
        """Read what has arrived, look at processes, do what is due. The lock is held."""
        arrived = self._engine.drain(self._receive)
        if not self._engine.threaded:
            arrived = self._drive() or arrived
        self._switchboard.poll(0.0 if arrived else timeout_s)
        self._engine.drain(self._receive)
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + self._tick_s
            self._observe(now)
            self._perform(self.membership.tick(now))

    def _drive(self) -> bool:
        """Workers in this process move when we make them."""
        moved = False
        for seat in self.seats:
            while seat.link is not None and not seat.link.closed and (received := seat.link.receive()) is not None:
                moved = True
                self._receive(seat.worker, received)
                if self._failure is not None and not self._closed:
                    return True  # the run is over: nobody takes another step
            if seat.handle is not None and seat.handle.poll() is not None:
                self._process_ended(seat)
        return moved

    def _observe(self, now: float) -> None:
        for seat in self.seats:
            if seat.handle is not None:
                if not self._engine.threaded and seat.link is not None:
                    continue  # it cannot be stuck without us
                phase, count, slot = (int(seat.words[i]) for i in (PHASE, COUNT, SLOT))
                idle = "idle" if seat.asked or self.tickets.busy(seat.worker) else ""
                label = Phase(phase).label if phase in Phase.__members__.values() and phase else idle
                self._act_on(life.Observed(seat.worker, label, (count, slot)))
                seat.link.flush() if seat.link is not None else None

    # ---- doing what membership says ----

    def _act_on(self, event: life.Event) -> None:
        self._perform(self.membership.handle(event, time.monotonic()))

    def _perform(self, actions: Sequence[life.Action]) -> None:
        for action in actions:
            seat = self.seats[action.worker]
            match action:
                case life.Start():
                    self._start_seat(seat, action.incarnation)
                case life.Kill():
                    if action.stuck_in and seat.handle is not None:
                        limit = getattr(self._timeouts, f"{action.stuck_in}_s")
                        seat.error = seat.stuck(action.stuck_in, limit)
                        log.warning("%s", str(seat.error).splitlines()[0])
                    if seat.handle is not None:
                        seat.handle.kill()
                case life.Lost():
                    seat.ready, seat.agent, seat.generation = False, -1, -1
                    self.tickets.lost(seat.worker)
                case life.GiveUp():
                    self.fail(seat.error or WorkerError("a worker failed", seat.where("?")))

    def _start_seat(self, seat: Seat, incarnation: int) -> None:
        self._drop_process(seat)
        seat.incarnation = incarnation
        seat.ready, seat.agent, seat.generation, seat.error, seat.asked = False, -1, -1, None, False
        try:
            self._engine.start(seat, self.run)
        except OSError as error:
            self.fail(WorkerError(f"a worker could not be started: {error}", seat.where("start")))
            return
        seat.pid = seat.handle.pid if seat.handle else 0
        if self._engine.threaded:
            assert seat.handle is not None
            if seat.link is not None and hasattr(seat.link, "fileno"):
                self._switchboard.register(seat.link.fileno(), lambda: self._read(seat))
            self._switchboard.register(seat.handle.exit_fd, lambda: self._process_ended(seat))
            self._switchboard.register(seat.handle.output_fd, lambda: self._read_output(seat))

    def _drop_process(self, seat: Seat) -> None:
        if seat.link is not None:
            if hasattr(seat.link, "fileno") and self._engine.threaded:
                self._switchboard.unregister(seat.link.fileno())
            seat.link.close()
            seat.link = None
        if seat.handle is not None:
            self._switchboard.unregister(seat.handle.exit_fd)
            self._switchboard.unregister(seat.handle.output_fd)
            seat.handle.close()
            seat.handle = None

    def _process_ended(self, seat: Seat) -> None:
        ended = seat.handle.poll() if seat.handle is not None else None
        if ended is None:
            return
        if seat.link is not None and hasattr(seat.link, "fileno") and self._engine.threaded:
            self._read(seat)  # what it said before it ended still counts
        word = int(seat.words[PHASE])
        phase = Phase(word).label if word in Phase.__members__.values() else "?"
        if seat.error is None and not self._closed:
            seat.error = seat.died(ended, phase)
            log.warning("%s", str(seat.error).splitlines()[0])
        if self._engine.threaded and seat.handle is not None:
            self._switchboard.unregister(seat.handle.exit_fd)
        self._act_on(life.Ended(seat.worker))

    def _read_output(self, seat: Seat) -> None:
        if seat.handle is None:
            return
        new = seat.handle.read_output()
        if not new:
            self._switchboard.unregister(seat.handle.output_fd)
        for line in new.decode(errors="replace").splitlines():
            log.info("worker %d: %s", seat.worker, line)

    # ---- messages ----

    def _read(self, seat: Seat) -> None:
        while seat.link is not None:
            try:
                received = seat.link.receive()
            except EOFError:
                self._switchboard.unregister(seat.link.fileno())
                self._act_on(life.Gone(seat.worker))
                return
            except WireError as error:
                log.warning("worker %d sent what cannot be read: %s", seat.worker, error)
                self._act_on(life.Gone(seat.worker))
                return
            if received is None:
                return
            for fd in received.fds:  # no message of a worker has one
                os.close(fd)
            self._receive(seat.worker, received)

    def _receive(self, worker: int, received: Received) -> None:
        seat = self.seats[worker]
        try:
            message = m.decode_from_worker(received.frames)
        except WireError as error:
            log.warning("worker %d sent what cannot be read: %s", worker, error)
            self._act_on(life.Gone(worker))
            return
        match message:
            case m.Hello():
                self._welcome(seat, message)
            case m.Ready():
                self._ready(seat, message)
            case m.Progress():
                copy_words(message.words, seat.words)
            case m.Failure():
                self._failed(seat, message)
            case _:
                if seat.ready:  # else it was given up: what it died of stays
                    seat.asked, seat.error = False, None
                self._hand_over(seat, message, received)

    def _hand_over(self, seat: Seat, message: m.FromWorker, received: Received) -> None:
        client = self._client()
        try:
            if client is not None:
                client.on_message(seat, message, received)
        except WireError as error:
            log.warning("worker %d sent what cannot be true: %s", seat.worker, error)
            self._act_on(life.Gone(seat.worker))

    def send(self, seat: Seat, message: m.FromHead, frames: Sequence[Any] = (), fds: Sequence[int] = ()) -> None:
        if seat.link is not None:
            seat.asked = seat.asked or isinstance(message, (m.Ship, m.Call))
            shared = fds if self._engine.shares_memory else ()
            seat.link.send([m.encode(message), *frames], shared)

    def _welcome(self, seat: Seat, hello: m.Hello) -> None:
        mine = versions()
        different = [
            f"{name} {mine.get(name, '?')} here and {hello.versions.get(name, '?')} on the worker"
            for name in sorted(mine.keys() | hello.versions.keys())
            if mine.get(name) != hello.versions.get(name)
        ]
        if hello.run != self.run or hello.worker != seat.worker or hello.incarnation != seat.incarnation:
            different.append("it belongs to another run or incarnation")
        seat.host, seat.pid = hello.host, hello.pid
        if different:
            reason = f"worker {seat.worker} on {hello.host} does not fit: {'; '.join(different)}."
            self.send(seat, m.Refuse(reason))
            self.fail(HandshakeError(f"{reason} Install the same versions on both sides."))
            return
        self._act_on(life.Hello(seat.worker))
        self._note(seat, Phase.CONSTRUCT)
        if not seat.incarnation:
            self.start_s["connect"] = time.monotonic() - self._started_at
        columns = slice(seat.first, seat.stop)
        self.send(
            seat,
            m.Welcome(
                seat.first,
                seat.num_envs,
                self.roots[columns],
                self.resume[columns].tolist(),
                self._program,
                import_path(),
                preloads(),
            ),
        )

    def _note(self, seat: Seat, phase: Phase) -> None:
        """Where a worker without shared memory must be, until its next heartbeat says it."""
        if not self._engine.shares_memory:
            seat.words[PHASE] = phase

    def _ready(self, seat: Seat, message: m.Ready) -> None:
        spaces = (unpack(message.observation_space), unpack(message.action_space))
        if self.spaces is None:
            self.spaces = spaces
        elif spaces != self.spaces:
            self.fail(
                HandshakeError(
                    f"worker {seat.worker} on {seat.host} has the spaces {spaces}, another worker has {self.spaces}. "
                    "All environments of a run must have equal spaces."
                )
            )
            return
        seat.ready = True
        if not seat.incarnation:
            self.start_s["construct"] = time.monotonic() - self._started_at - self.start_s["connect"]
        self._act_on(life.Ready(seat.worker))
        self._note(seat, Phase.IDLE)
        for staged, frames, fds in self.stage:
            self.send(seat, staged, frames, fds)
        self.grant()

    def _failed(self, seat: Seat, failure: m.Failure) -> None:
        where = seat.where(
            failure.phase,
            slot=failure.slot,
            seed=failure.seed,
            episode_step=failure.episode_step,
            version=failure.version,
        )
        what = "the agent raised" if failure.phase in ("act", "load") else "the environment raised"
        error = remote_error(failure.kind, f"{what} {failure.message}", where, failure.traceback)
        if failure.request is not None:
            seat.asked = False
            self.call_errors.append(error)
            return
        seat.error = error
        first_time = failure.phase == "construct" and not seat.incarnation and not seat.ready
        if failure.phase in ("act", "load") or (failure.ticket is None and first_time):
            self.fail(error)  # trying the same again would only fail again
            return
        onward = "" if failure.phase == "close" else "; going on with the next episodes"
        log.warning("%s%s", str(error).splitlines()[0], onward)
        given_up = self.tickets.again if failure.again else self.tickets.give_back
        if failure.ticket is not None and given_up(seat.worker, failure.ticket, "environment failed"):
            self._act_on(life.Failed(seat.worker))
            seat.error = None  # it went on: what it dies of later is something else
            self.grant()

    # ---- tickets ----

    def grant(self) -> None:
        """Give every ticket that may be given now."""
        client = self._client()
        if self._failure is not None or client is None:
            return
        available = [seat.worker for seat in self.seats if seat.ready]
        for order in self.tickets.grant(available, client.version()):
            ticket, frames = client.make_ticket(order)
            self.send(self.seats[order.worker], ticket, frames)

    def cancel(self) -> None:
        """Take back what was given and is not done."""
        open_tickets = self.tickets.in_flight
        upto = self.tickets.cancel()
        for seat in self.seats:
            if open_tickets and seat.link is not None:
                seat.words[CANCEL] = upto
                self.send(seat, m.Cancel(upto))
