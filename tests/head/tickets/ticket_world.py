"""A head's tickets with random workers and a random learner around them, every promise checked after every event."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque

from farstep.head.tickets.records import AcceptedChunk, IssuedTicket
from farstep.head.tickets.tickets import Tickets


class TicketWorld:
    """Counts independently, so that a bug in the counters of `Tickets` is found."""

    def __init__(
        self, seed: int, workers: int, max_staleness: int, num_chunks: int | None, eager: bool, rollouts: int = 1
    ) -> None:
        self.rng = random.Random(seed)
        self.rollouts = rollouts
        self.workers, self.max_staleness, self.num_chunks = workers, max_staleness, num_chunks
        self.tickets = Tickets(workers)
        self.version = 0
        self.eager = eager
        """Whether the learner publishes more often than once per batch."""
        self.speeds = [self.rng.choice((0.1, 1.0, 5.0)) for _ in range(workers)]
        self.up = [True] * workers
        self.queues: dict[int, deque[IssuedTicket]] = defaultdict(deque)
        """What each worker was told to roll, in order."""
        self.unread: dict[int, AcceptedChunk] = {}
        self.held: list[AcceptedChunk] = []
        self.published_for_held = False
        self.closed_seqs: list[tuple[int, int]] = []
        """Worker and number of tickets that were done, lost or cancelled."""
        self.accepted: Counter[int] = Counter()
        self.delivered: Counter[int] = Counter()
        self._open()

    def _open(self) -> None:
        self.tickets.open(self.max_staleness, self.num_chunks, rollouts=self.rollouts)
        self.lanes = self.tickets.lanes_needed(self.max_staleness, self.num_chunks, rollouts=self.rollouts)

    # ---- events ----

    def random_event(self) -> None:
        events = {
            self.finish: 40,
            self.grant: 20,
            self.learn: 20,
            self.publish: 8,
            self.repeat: 4,
            self.impostor: 4,
            self.fail: 2,
            self.retry: 2,
            self.die: 2,
            self.revive: 4,
            self.cancel: 0.3,
        }
        self.rng.choices(list(events), list(events.values()))[0]()
        self.check()

    def grant(self) -> None:
        available = [worker for worker in range(self.workers) if self.up[worker]]
        for order in self.tickets.grant(available, self.version):
            assert self.up[order.worker], "a ticket for a worker that is not there"
            assert 0 <= order.lane < self.lanes
            assert 0 <= order.min_version <= self.version, "a worker would wait for a version that never comes"
            self.queues[order.worker].append(order)

    def finish(self) -> None:
        """Some worker hands over the chunk of its oldest ticket; fast workers more often."""
        worker = self.rng.choices(range(self.workers), self.speeds)[0]
        if self.queues[worker]:
            oldest = self.queues[worker][0].min_version
            self.hand_over(worker, self.rng.choice((oldest, self.rng.randint(oldest, self.version))))

    def hand_over(self, worker: int, version: int) -> None:
        order = self.queues[worker].popleft()
        assert self.tickets.accept(worker, order.seq, version, f"chunk {order.seq}")
        self.accepted[order.seq] += 1
        self.unread[order.seq] = AcceptedChunk(order, version, f"chunk {order.seq}")
        self.closed_seqs.append((worker, order.seq))

    def learn(self) -> None:
        """The learner takes the next batch, which releases its last one."""
        if self.held:
            self.tickets.release()
            self.held = []
        stale_before = self.tickets.dropped["stale"]
        batch = self.tickets.take(self.version)
        too_old = [s for s, a in self.unread.items() if self.version - a.version > self.max_staleness]
        assert self.tickets.dropped["stale"] - stale_before == len(too_old)
        for seq in too_old:
            del self.unread[seq]
        if batch is not None:
            self._check_batch(batch)
            self.held, self.published_for_held = batch, False

    def _check_batch(self, batch: list[AcceptedChunk]) -> None:
        for arrived in batch:
            assert self.version - arrived.version <= self.max_staleness, "an old row was yielded"
            assert arrived == self.unread.pop(arrived.ticket.seq)
            self.delivered[arrived.ticket.seq] += 1
        owners = [arrived.ticket.worker for arrived in batch]
        assert owners == sorted(owners)
        if self.num_chunks is None:
            assert Counter(owners) == dict.fromkeys(range(self.workers), self.rollouts), (
                "a batch has `rollouts` chunks of every worker"
            )
            rounds = {(a.ticket.round, a.ticket.lane) for a in batch}
            assert len(rounds) == self.rollouts, "columns of different batches were mixed"
        else:
            assert len(batch) == self.num_chunks

    def publish(self) -> None:
        if self.eager or (self.held and not self.published_for_held):
            self.version += 1
            self.published_for_held = True

    def repeat(self) -> None:
        """A chunk whose ticket is done, lost or cancelled arrives (again)."""
        if self.closed_seqs:
            worker, seq = self.rng.choice(self.closed_seqs)
            assert not self.tickets.accept(worker, seq, self.version, "again")
            assert not self.tickets.give_back(worker, seq, "environment_failed")

    def impostor(self) -> None:
        """A worker hands over, or gives back, what another one is rolling; or an unknown ticket."""
        worker, other = self.rng.randrange(self.workers), self.rng.randrange(self.workers)
        seq = self.queues[worker][0].seq if worker != other and self.queues[worker] else 10**9
        assert not self.tickets.accept(other, seq, self.version, "stolen")
        assert not self.tickets.give_back(other, seq, "environment_failed")
        assert not self.tickets.retry(other, seq, "environment_failed")

    def fail(self) -> None:
        worker = self.rng.randrange(self.workers)
        if self.queues[worker]:
            order = self.queues[worker].popleft()
            assert self.tickets.give_back(worker, order.seq, "environment_failed")
            self.closed_seqs.append((worker, order.seq))

    def retry(self) -> None:
        """A worker failed and does the same ticket once more: one more was issued, one dropped, it stays open."""
        worker = self.rng.randrange(self.workers)
        if self.queues[worker]:
            assert self.tickets.retry(worker, self.queues[worker][0].seq, "environment_failed")

    def die(self) -> None:
        worker = self.rng.randrange(self.workers)
        self.tickets.lost(worker)
        self.closed_seqs += [(worker, order.seq) for order in self.queues.pop(worker, ())]
        self.up[worker] = False

    def revive(self) -> None:
        worker = self.rng.randrange(self.workers)
        self.up[worker] = True
        self.tickets.join(worker)

    def cancel(self) -> None:
        for worker, queue in self.queues.items():
            self.closed_seqs += [(worker, order.seq) for order in queue]
        self.queues.clear()
        self.unread.clear()
        self.held = []
        last = self.tickets.cancel()
        assert all(seq <= last for _, seq in self.closed_seqs)
        assert self.tickets.grant(range(self.workers), self.version) == []
        self._open()

    # ---- what must hold at any moment ----

    def check(self) -> None:
        tickets = self.tickets
        in_flight = sum(len(queue) for queue in self.queues.values())
        assert (tickets.in_flight, tickets.buffered) == (in_flight, len(self.unread))
        balance = tickets.delivered + sum(tickets.dropped.values()) + tickets.buffered + tickets.in_flight
        assert tickets.issued == balance, tickets.dropped
        assert tickets.delivered == len(self.delivered)
        ahead = in_flight + len(self.unread) + len(self.held)
        assert ahead <= (self.max_staleness + 1) * (self.num_chunks or self.workers * self.rollouts), "admission"
        self._check_lanes()

    def _check_lanes(self) -> None:
        unread: dict[int, list[int]] = defaultdict(list)
        for arrived in self.unread.values():
            unread[arrived.ticket.worker].append(arrived.ticket.lane)
        for worker, queue in self.queues.items():
            lanes = [order.lane for order in queue] + unread[worker]
            assert len(lanes) == len(set(lanes)), "a chunk would be written over another"
            if self.num_chunks is None and self.held:  # first-come batches are copies
                held = {arrived.ticket.lane for arrived in self.held}
                assert not held & set(lanes), "the learner's rows would change under its hands"

    def check_exactly_once(self) -> None:
        """Every accepted chunk was yielded once, or is unread, or was dropped and counted."""
        assert set(self.accepted.values()) | set(self.delivered.values()) <= {1}
        assert set(self.delivered) | set(self.unread) <= set(self.accepted)

    def next_batch(self) -> list[AcceptedChunk]:
        """When all workers are present and roll, the learner gets a batch: it is never starved."""
        self.up = [True] * self.workers
        for worker in range(self.workers):
            self.tickets.join(worker)
        self.learn()
        for _ in range((self.num_chunks or 1) + 2):
            if self.held:
                return self.held
            self.grant()
            for worker in range(self.workers):
                while self.queues[worker]:
                    self.hand_over(worker, self.version)
            self.check()
            self.learn()
        raise AssertionError("no batch although all workers did all they may")
