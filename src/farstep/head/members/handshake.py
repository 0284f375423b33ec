"""The handshake with a worker: `Hello`, `Welcome`, and `Ready` with the spaces of its environments."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from farstep.errors import FarstepError, HandshakeError
from farstep.event import Emit
from farstep.head.members import membership
from farstep.head.members.outbox import Outbox
from farstep.head.members.supervisor import Supervisor
from farstep.head.members.worker_records import WorkerRecord
from farstep.launch.daemon.process import import_path
from farstep.rollout.progress import PHASE, Phase
from farstep.wire import messages as m
from farstep.wire.codec import unpack
from farstep.wire.versions import OTHER_VERSIONS, mismatches

PRELOADED = ("torch",)
"""Large modules that workers import early if the head has imported them."""


class Handshake:
    """Sends workers the program, and checks that all have the same versions and spaces.

    Callers must hold the event loop's lock.

    Args:
        program: What workers run, pickled.
        supervisor: The processes of the workers.
        outbox: Sends messages to the workers.
        shares_memory: Whether workers write their phase to shared memory themselves.
        fail: Ends the run with an error.
        emit: Emits the events of the run.
    """

    def __init__(
        self,
        program: bytes,
        supervisor: Supervisor,
        outbox: Outbox,
        shares_memory: bool,
        fail: Callable[[FarstepError], None],
        emit: Emit,
    ) -> None:
        self._program, self._supervisor, self._outbox = program, supervisor, outbox
        self._shares_memory, self._fail, self._emit = shares_memory, fail, emit
        self.spaces: tuple[Any, Any] | None = None
        self.num_stacked_frames = 0
        """Frames per stacked observation, as workers found it in their environments; 0: unknown."""
        self.start_s = {"connect": 0.0, "construct": 0.0}
        """Durations of the slowest first start in seconds: from launch to `Hello`, and from `Hello` to `Ready`."""
        self._started_at = 0.0

    def begin(self) -> None:
        """Record that the first processes are about to be started."""
        self._started_at = time.monotonic()

    def welcome(self, record: WorkerRecord, hello: m.Hello) -> None:
        """Answer a worker that has connected: send it the program, or refuse it."""
        different = mismatches(hello.versions)
        predicate = OTHER_VERSIONS if different else "cannot be used"
        run = self._supervisor.run
        if hello.run != run or hello.worker != record.worker or hello.incarnation != record.incarnation:
            different.append("it belongs to another run or incarnation")
        record.host, record.pid, record.cores = hello.host, hello.pid, hello.cores
        if different:
            reason = f"{record.role} {record.worker} on {hello.host} {predicate}: {'; '.join(different)}."
            self._outbox.send(record, m.Refuse(reason))
            self._fail(HandshakeError(f"{reason} Install the same versions on both sides."))
            return
        self._supervisor.act_on(membership.Hello(record.worker))
        self._set_phase(record, Phase.CONSTRUCT)
        if not record.incarnation:
            self.start_s["connect"] = time.monotonic() - self._started_at
        welcome = m.Welcome(
            record.first, record.roots, record.resume.tolist(), import_path(), preloaded(), record.clock
        )
        self._outbox.send(record, welcome, [self._program])

    def accepts(self, record: WorkerRecord, message: m.Ready) -> bool:
        """Take the spaces of a worker that has built its environments. Fail the run if another worker has others."""
        spaces = (unpack(message.observation_space), unpack(message.action_space))
        if self.spaces is not None and spaces != self.spaces:
            self._fail(
                HandshakeError(
                    f"worker {record.worker} on {record.host} has the spaces {spaces}, another worker has "
                    f"{self.spaces}. All environments of a run must have equal spaces."
                )
            )
            return False
        if self.spaces is None or (record.worker == 0 and not record.incarnation):
            self.num_stacked_frames = message.frame_stack
            self.spaces = spaces  # prefer the spaces of slot 0, which have its random generators
        record.ready, record.has_been_ready, record.announced = True, True, 0
        return True

    def accept_server(self, record: WorkerRecord) -> None:
        """Count an acting server that has connected as alive, and send it the announcements."""
        record.ready, record.has_been_ready, record.announced = True, True, 0
        self._supervisor.act_on(membership.Ready(record.worker))
        self._set_phase(record, Phase.IDLE)
        self._emit_ready(record)
        self._outbox.send_announcements(record)

    def complete(self, record: WorkerRecord) -> None:
        """Count an accepted worker as alive, and send it the announcements."""
        if not record.incarnation:
            self.start_s["construct"] = time.monotonic() - self._started_at - self.start_s["connect"]
        self._supervisor.act_on(membership.Ready(record.worker))
        self._set_phase(record, Phase.IDLE)
        self._emit_ready(record)
        self._outbox.send_announcements(record)

    def _set_phase(self, record: WorkerRecord, phase: Phase) -> None:
        """Set the phase of a worker without shared memory until its next heartbeat arrives."""
        if not self._shares_memory:
            record.words[PHASE] = phase

    def _emit_ready(self, record: WorkerRecord) -> None:
        if record.incarnation and not self._supervisor.membership.members[record.worker].blameless:
            text = f"{record.role} {record.worker} was restarted on {record.host} (restart {record.incarnation})"
            self._emit("restarted", text, worker=record.worker, node=record.host)
        else:
            text = f"{record.role} {record.worker} joined on {record.host}"
            self._emit("joined", text, worker=record.worker, node=record.host)


def preloaded() -> list[str]:
    """Return the large modules that workers import early."""
    return [name for name in PRELOADED if name in sys.modules]
