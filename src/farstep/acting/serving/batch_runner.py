"""Acts on the requests of workers, batch by batch, and pulls weights while no batch is in flight."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from farstep.acting import messages as am
from farstep.acting.mailbox import PULLED_BYTES
from farstep.acting.serving.answers import Answers
from farstep.acting.serving.arena import Arena, Requests, cover_running_chunks, num_expected
from farstep.acting.serving.batch_actor import BatchActor
from farstep.acting.serving.batching import StartTimes, most_rows, next_batch
from farstep.config.inference import ServedInference
from farstep.errors import described, memory_error_of, report_of
from farstep.rollout.progress import CANCEL, COUNT, PHASE, SERVED_BATCHES, SERVED_ROWS, Phase
from farstep.rollout.weight_headers import check_digest
from farstep.wire import messages as m
from farstep.wire.channels.doorbell import Fence
from farstep.worker.connection.inbox import TicketCancelled
from farstep.worker.weights.sources import RemoteWeights
from farstep.worker.weights.weight_sync import WeightSync

IDLE_S = 0.2
"""Seconds to wait for messages while there is nothing to do."""


class MemoryExhausted(Exception):
    """Memory ran out. The head restarts this process, and workers roll their chunks again."""

    def __init__(self, failure: am.Failed) -> None:
        super().__init__(failure.message)
        self.failure = failure


class BatchRunner:
    """Acts on the requests of workers.

    Args:
        arenas: The mailboxes of the workers.
        sync: Decides when to pull weights.
        words: Progress words, as for a worker.
        is_local: Whether the workers share memory with this process.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        arenas: Sequence[Arena],
        sync: WeightSync,
        words: memoryview,
        is_local: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._arenas, self._sync, self._words, self._is_local = arenas, sync, words, is_local
        self._clock = clock
        self.options = ServedInference()
        self.total_pulls = 0
        self._fence = Fence()
        self.digest = ""
        """Digest of the parameters that the head publishes."""
        self.reset()

    def reset(self) -> None:
        """Forget the agent."""
        self.actor: BatchActor | None = None
        self.probe_error: Exception | None = None
        """What the agent raised when it was compared with a new version."""
        self._divergence: float | None = None
        """The last running divergence of the current weights."""
        self._start_times = StartTimes()

    def run(self, until: float) -> float:
        """Act on pending requests.

        On the GPU, the next batch starts while the last one runs, if this does not make it smaller (see
        `_started_early`), or else before the answers to the last one are written. So the GPU need not wait for the
        host. At the end, no batch is in flight.

        Args:
            until: When to handle messages. From then on, no batch starts while another is unanswered, because a message
                may close a mailbox.

        Returns:
            For how many seconds to wait for messages.
        """
        if self.actor is None or self._sync.weights is None:
            return IDLE_S
        requests, wait_s = self._next_batch(self.actor, self._pending())
        if not requests:
            return wait_s
        answers = self._start(self.actor, requests)
        began = self._clock()
        while True:
            following = self._started_early(self.actor, answers, until, began)
            self._finish(self.actor, answers)
            finished = self._clock()
            self._start_times.note_end(_num_rows(answers.requests), finished - began)
            began = finished
            if following is None and self._may_overlap(self.actor, until):
                following = self._started_next(self.actor, self._pending())
                began = self._clock()
            self._send(self.actor, answers)
            if following is None:
                return 0.0
            answers = following

    def _may_overlap(self, actor: BatchActor, until: float) -> bool:
        """Whether a batch may start before the last one is answered."""
        return self._is_local and actor.policy.overlaps and self._clock() < until

    def _started_early(self, actor: BatchActor, running: Answers, until: float, began: float) -> Answers | None:
        """Start the next batch just before the running one ends or, if a later start would not make it larger, at once.

        A later start would not if the batch is full, or if all groups that are inside a chunk are in one of the two.

        Args:
            began: When the running batch began.

        Returns:
            The next batch; None if the running one is done, or if the next one must not start yet.
        """
        most, pending = self._most_rows(actor), list[Requests]()
        next_start = self._start_times.next_start(_num_rows(running.requests), began)
        # No yield between two polls: a wait for the GPU spins as well.
        while self._may_overlap(actor, until):
            if running.is_done():
                if pending and began < next_start < math.inf:
                    self._start_times.note_start(is_late=True)
                return None
            if not (pending := self._pending()):
                continue
            if _num_rows(pending) >= most or cover_running_chunks(self._arenas, [*pending, *running.requests]):
                return self._started_next(actor, pending)
            if self._clock() >= next_start:
                following = self._started_next(actor, pending)
                if following is not None and began < next_start:
                    self._start_times.note_start(is_late=running.is_done())
                return following
        return None

    def _started_next(self, actor: BatchActor, pending: Sequence[Requests]) -> Answers | None:
        """Start the next batch while another one is in flight. Return None if there is none without a pull."""
        requests, _ = self._next_batch(actor, pending, may_pull=False)
        return self._start(actor, requests) if requests else None

    def _most_rows(self, actor: BatchActor) -> int:
        """Largest number of rows of a batch."""
        if not (self._is_local and actor.policy.overlaps):
            return self.options.max_batch
        return most_rows(sum(arena.num_rows for arena in self._arenas), self.options.max_batch)

    def _pending(self) -> list[Requests]:
        return [requests for arena in self._arenas if (requests := arena.pending(self._fence)) is not None]

    def _next_batch(
        self, actor: BatchActor, pending: Sequence[Requests], may_pull: bool = True
    ) -> tuple[Sequence[Requests], float]:
        """Return the requests to act on now, and, if there are none, for how many seconds to wait for messages.

        Args:
            pending: The requests that wait.
            may_pull: Whether to pull weights first if the sync rule decides to. If False, there is no batch in this
                case, nor if the rule raises an error.
        """
        if not pending:
            return [], IDLE_S
        now = self._clock()
        try:
            admitted = self._update_weights(actor, pending, may_pull)
        except TicketCancelled:
            return [], IDLE_S  # the head has replaced the agent
        except EOFError:
            raise  # the head closed the connection
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            if not may_pull:
                return [], 0.0  # answers to the batch in flight come first
            for requests in pending:
                requests.mark_taken()
            self._send(actor, self._answers_to(actor, pending, failed(error, self._words)))
            return [], 0.0
        finally:
            self._words[PHASE] = Phase.IDLE
        options, most = self.options, self._most_rows(actor)
        fits = _num_rows(admitted) <= most
        if fits and not options.window_ms and _count(admitted) == _count(pending):
            return admitted, 0.0 if admitted else IDLE_S
        for requests in pending:
            requests.note_arrival(now)
        if not admitted:
            return [], IDLE_S
        possible = _count(admitted) + (num_expected(self._arenas, pending) if options.window_ms else 0)
        arrived = np.concatenate([requests.arena.arrived[requests.groups] for requests in admitted])
        num_envs = np.concatenate([requests.arena.num_envs[requests.groups] for requests in admitted])
        chosen, wait_s = next_batch(arrived, num_envs, possible, now, most, options.window_ms / 1000)
        batch, stop = [], 0
        for requests in admitted:
            batch.append(requests.select(chosen[stop : stop + len(requests)]))
            stop += len(requests)
        return _nonempty(batch), min(IDLE_S, wait_s)

    def _update_weights(self, actor: BatchActor, pending: Sequence[Requests], may_pull: bool) -> Sequence[Requests]:
        """Pull weights between two batches if the sync rule decides to. Return the requests that may be answered now.

        While a worker is inside a chunk that must have one version, the weights stay as they are. If they should
        change, chunks that have not begun wait for the end of that chunk.
        """
        if self.probe_error is not None:
            self._words[PHASE] = Phase.ACT
            raise self.probe_error
        pending = self._with_probe(actor, pending)
        if not pending:
            return []
        ticket = m.Ticket(0, 0, 1, max(max(requests.min_versions.tolist()) for requests in pending))
        if isinstance(weights := self._sync.weights, RemoteWeights):
            weights.announced = max(weights.announced, *(int(requests.newest.max()) for requests in pending))
        if any(arena.holds(self._words[CANCEL]) for arena in self._arenas):
            if not self._sync.needs_pull(ticket, actor):
                return pending
            return _nonempty(requests.select(requests.have_begun) for requests in pending)
        if not may_pull:
            return [] if self._sync.needs_pull(ticket, actor) else pending
        self._words[PHASE] = Phase.LOAD
        if actor.version < 0:
            check_digest(self.digest, actor.loader.schema)
        self._sync.pull_if_needed(ticket, actor)
        totals = self._sync.take_totals()
        self.total_pulls += totals.pulls
        self._divergence = self._divergence if self._sync.divergence is None else self._sync.divergence
        if totals.nbytes:
            pending[0].arena.mailbox_words[PULLED_BYTES][pending[0].mailboxes[0]] += totals.nbytes
        return pending

    def _with_probe(self, actor: BatchActor, pending: Sequence[Requests]) -> Sequence[Requests]:
        """The requests that do not have to wait for a probe of the newest version, which the head sends with every
        publish. A worker or the shared memory may have announced the version earlier."""
        probing, weights = self._sync.probing, self._sync.weights
        if probing is None or weights is None or actor.version < 0:
            return pending
        known = max(actor.version, probing.newest_probe)
        if weights.newest() > known:
            return []
        return _nonempty(requests.select(requests.newest <= known) for requests in pending)

    def _start(self, actor: BatchActor, batch: Sequence[Requests]) -> Answers:
        """Start to act on requests."""
        self._words[PHASE] = Phase.ACT
        self._words[COUNT] += 1
        for requests in batch:
            requests.mark_taken()
            requests.begin_chunks()
        answers = self._answers_to(actor, batch)
        try:
            answers.batch = actor.start(batch)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            answers.failure = failed(error, self._words)
        return answers

    def _finish(self, actor: BatchActor, answers: Answers) -> None:
        """Wait until the policy has acted."""
        self._words[PHASE] = Phase.ACT
        self._words[COUNT] += 1
        try:
            if answers.batch is not None:
                actor.finish(answers.batch)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            answers.failure = failed(error, self._words)
        self._words[PHASE] = Phase.IDLE
        self._words[SERVED_BATCHES] += 1
        self._words[SERVED_ROWS] += _num_rows(answers.requests)

    def _answers_to(self, actor: BatchActor, requests: Sequence[Requests], failure: am.Failed | None = None) -> Answers:
        return Answers(requests, actor.version, max(actor.version, self._sync.passed), failure)

    def _send(self, actor: BatchActor, answers: Answers) -> None:
        answers.send(actor.output_names, self.total_pulls, self._divergence, self._fence)


def _nonempty(found: Iterable[Requests]) -> list[Requests]:
    return [requests for requests in found if len(requests)]


def _count(found: Iterable[Requests]) -> int:
    return sum(len(requests) for requests in found)


def _num_rows(found: Iterable[Requests]) -> int:
    return sum(len(requests.rows) for requests in found)


def failed(error: BaseException, words: memoryview) -> am.Failed:
    """What to tell workers about an error in the current phase.

    Raises:
        MemoryExhausted: Memory ran out.
    """
    report, phase = report_of(error), Phase(words[PHASE]).label
    if (cause := memory_error_of(error)) is not None:
        raise MemoryExhausted(am.Failed(described(cause), report.traceback, phase)) from error
    return am.Failed(report.message, report.traceback, phase, report.kind)
