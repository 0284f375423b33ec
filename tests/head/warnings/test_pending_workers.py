"""The line about pending workers and nodes is short and groups them by state."""

from __future__ import annotations

import pytest

from farstep.head.warnings.pending_workers import PendingWorker, describe


def acting(*workers: int) -> list[PendingWorker]:
    return [PendingWorker(worker, "in act") for worker in workers]


@pytest.mark.parametrize(
    ("workers", "text"),
    [
        ([], "workers, all of which are idle"),
        ([PendingWorker(3, "in step", 37)], "worker 3, in step (slot 37)"),
        ([PendingWorker(3, "lost")], "worker 3, lost"),
        (acting(0, 1), "2 workers: 2 in act (workers 0, 1)"),
        ([PendingWorker(0, "in step", 2), *acting(1)], "2 workers: 1 in step (slot 2), 1 in act (worker 1)"),
        ([*acting(*range(13)), PendingWorker(13, "in step", 37)], "14 workers: 13 in act, 1 in step (slot 37)"),
        (
            [
                *[PendingWorker(worker, "starting") for worker in range(10)],
                PendingWorker(10, "lost"),
                PendingWorker(11, "restarting"),
                *[PendingWorker(worker, "constructing", 4 * worker) for worker in (12, 13)],
            ],
            "14 workers: 10 starting, 2 constructing (slots 48, 52), 1 lost (worker 10), 1 restarting (worker 11)",
        ),
        (
            [
                *acting(*range(900)),
                *[PendingWorker(worker, "in step", worker) for worker in range(900, 999)],
                PendingWorker(999, "sending"),
            ],
            "1,000 workers: 900 in act, 99 in step, 1 sending (worker 999)",
        ),
    ],
    ids=lambda value: f"{len(value)} workers" if isinstance(value, list) else "",
)
def test_workers_are_grouped_by_what_they_do(workers: list[PendingWorker], text: str) -> None:
    assert describe(workers) == text


def test_unconnected_nodes_come_first() -> None:
    missing = "1 of 2 nodes not connected yet: job 7 is PENDING"
    assert describe([], missing) == missing
    assert describe(acting(4), missing) == f"{missing}; worker 4, in act"
