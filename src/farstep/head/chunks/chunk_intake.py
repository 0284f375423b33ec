"""Receives chunks and parts from workers, and decides which workers may send."""

from __future__ import annotations

import time

from farstep.core import Array, Received
from farstep.errors import WireError
from farstep.head.chunks.continuity import Continuity
from farstep.head.chunks.incoming_chunks import EarlyPart
from farstep.head.chunks.rollouts import Rollouts, key_of
from farstep.head.chunks.send_queue import SendQueue
from farstep.head.members.worker_records import WorkerRecord
from farstep.head.request import Request
from farstep.head.server import Server
from farstep.head.stats.counters import Counters
from farstep.head.tickets.records import IssuedTicket
from farstep.head.warnings.user_warnings import UserWarnings
from farstep.head.weights.publisher import Publisher
from farstep.wire import messages as m


class ChunkIntake:
    """Checks and stores the chunks that workers send for the current request, and reports them to the tickets.

    Args:
        server: The workers and their tickets.
        publisher: Knows the current version, and keeps rows for probes.
        counters: Counts bytes and the workers' reports.
        warnings: Warns the user about the workers' reports.
        continuity: Knows which slots of a part continue the rows that were delivered last.
        max_senders: Maximum number of workers that send their last stage at the same time; None: all.
    """

    def __init__(
        self,
        server: Server,
        publisher: Publisher,
        counters: Counters,
        warnings: UserWarnings,
        continuity: Continuity,
        max_senders: int | None,
    ) -> None:
        self._server, self._publisher = server, publisher
        self._counters, self._warnings, self._continuity = counters, warnings, continuity
        self._max_senders, self._send_queue = max_senders, SendQueue(max_senders)
        self._rollouts: Rollouts | None = None
        self.request = Request()
        """The request that workers currently roll for."""

    def start(self, rollouts: Rollouts) -> None:
        """Set where chunks are stored; called once, when the environments' spaces are known."""
        self._rollouts = rollouts

    def end(self) -> None:
        """End the current request after its tickets were cancelled."""
        self._send_queue.clear()
        self._counters.workers.cancelled()
        self.request = Request()

    def take_chunk(self, record: WorkerRecord, chunk: m.Chunk, received: Received) -> None:
        """Check a complete chunk and accept it, unless its ticket has been cancelled."""
        tickets, request = self._server.tickets, self.request
        if self._send_queue.done(record.worker):
            self._grant_sends()
        self._counters.reported(record.worker, chunk)
        if chunk.inference:
            self._warnings.note_inference(chunk.inference)
        if chunk.unmeasured:
            self._warnings.note_unmeasured(chunk.unmeasured)
        if chunk.out_of_bounds:
            self._warnings.note_out_of_bounds(chunk.out_of_bounds)
        if chunk.bad_reward:
            self._warnings.note_bad_reward(chunk.bad_reward)
        issued = tickets.outstanding.get(chunk.ticket)
        if issued is None or issued.worker != record.worker:
            return  # cancelled, or the worker was declared lost; already counted as dropped
        if chunk.syncs and chunk.divergence is not None and not self._server.outbox.is_served:
            self._warnings.note_remaining(chunk.divergence)
        if chunk.infos and not request.infos:
            raise WireError("a chunk with infos that its ticket does not request.")
        rollouts, publisher = self._rollouts, self._publisher
        assert rollouts is not None
        began = time.monotonic()
        info = rollouts.take(record, issued, request.steps, chunk, received, publisher.version)
        if chunk.keys:
            self._counters.receive_s += time.monotonic() - began
        self._counters.received(record.worker, info.nbytes, request.steps * record.num_envs)
        tickets.accept(record.worker, chunk.ticket, chunk.passed, info)
        if not issued.round:
            times = chunk.times
            self._server.slots.note_first_chunk(times.env + times.inference + times.send + times.weights)
        if not self._server.shares_memory:
            is_busy = tickets.outstanding.num_of(record.worker) > 0
            self._counters.workers.accepted(record.worker, time.monotonic(), is_busy)
        if publisher.prober is not None and request.steps:
            publisher.prober.remember(record, chunk, rollouts.rows(record, issued.lane), request.steps)
        record.resume[:], record.clock = info.resume, chunk.clock
        if request.on_part is not None:
            self._notify(issued, info.stage, None, info.ends, info.key, chunk.passed)
        if request.num_chunks is not None:
            self._server.grant()  # lets a fast worker continue while the learner is busy

    def take_part(self, record: WorkerRecord, part: m.Part, received: Received) -> None:
        """Store a part of a chunk: arrays that a remote worker sends before the rest."""
        issued = self._server.tickets.outstanding.get(part.ticket)
        if issued is None or issued.worker != record.worker:
            return
        if part.passed > self._publisher.version:
            raise WireError(f"a part of version {part.passed}; the newest is {self._publisher.version}.")
        assert self._rollouts is not None
        began = time.monotonic()
        ends = self._rollouts.take_part(record, issued, self.request.steps, part, received)
        self._counters.receive_s += time.monotonic() - began
        if ends is None:
            self._server.outbox.send(record, m.Taken(part.index))
        elif self.request.on_part is not None:
            self._notify(issued, part.stage, part.stage + 1, ends, key_of(record, part.index), part.passed)

    def _notify(self, issued: IssuedTicket, stage: int, stop: int | None, ends: Array, key: int, version: int) -> None:
        """Call `on_part` for the complete stages, from `stage` to `stop` (exclusive)."""
        request = self.request
        assert self._rollouts is not None and request.on_part is not None
        continues = self._continuity.continues(issued.worker, key)
        part = self._rollouts.part(issued, request.steps, stage, stop, ends, continues)
        request.on_part(EarlyPart(issued, key, version, part))

    # ---- the send queue ----

    def queue_send(self, record: WorkerRecord, message: m.RequestSend) -> None:
        """Queue a worker that wants to send the last stage of its chunk."""
        if self._max_senders is None:
            raise WireError("a request for a turn to send, although TransferTrigger.max_senders sets no limit.")
        issued = self._server.tickets.outstanding.get(message.ticket)
        if issued is not None and issued.worker == record.worker:  # otherwise the ticket has been cancelled
            self._send_queue.request(record.worker, record.incarnation, message.index)
            self._grant_sends()

    def forget(self, record: WorkerRecord) -> None:
        """Remove a lost worker from the send queue."""
        self._send_queue.forget(record.worker)
        self._grant_sends()

    def _grant_sends(self) -> None:
        for worker, index in self._send_queue.next(lambda worker: self._server.records[worker].incarnation):
            self._server.outbox.send(self._server.records[worker], m.GrantSend(index))
