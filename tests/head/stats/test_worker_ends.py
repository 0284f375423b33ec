"""The head's counters after the end of a worker."""

from __future__ import annotations

from farstep.head.stats.counters import Counters
from farstep.wire.messages import Times


def test_a_worker_that_ended_has_neither_rate_nor_divergence() -> None:
    counters = Counters(2)
    for worker in (0, 1):
        counters.divergence[worker] = 0.5
        for now in (100.0, 101.0):
            counters.workers.arrived(worker, 50, now)
        counters.workers.add(worker, Times(env=2.0))
    counters.forget(1)
    assert counters.divergence == {0: 0.5}
    assert counters.workers.rates(101.0) == [50.0, 0.0]
    assert counters.workers.total()["env"] == 4.0, "the sums keep the seconds of workers that ended"


def test_the_time_until_a_replacement_starts_is_not_held() -> None:
    workers = Counters(1).workers
    workers.issued(0, 10.0)
    workers.forget(0)
    workers.issued(0, 50.0)
    workers.accepted(0, 51.0, has_more=False)
    assert workers.held_s == 1.0
