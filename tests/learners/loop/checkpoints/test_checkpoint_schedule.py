"""When a run writes checkpoints."""

from __future__ import annotations

from farstep.learners.loop.checkpoints.checkpoint_schedule import CheckpointSchedule


def checkpoints(every: int | None, update_s: float, write_s: float, updates: int = 1000) -> list[int]:
    """The updates after which a run with these durations writes a checkpoint."""
    schedule, now, written = CheckpointSchedule(every), 0.0, []
    for update in range(1, updates + 1):
        now += update_s
        if schedule.due(update, now):
            schedule.wrote(now, now + write_s)
            now += write_s
            written.append(update)
    return written


def test_chosen_interval_does_not_depend_on_the_cost_of_checkpoints() -> None:
    assert checkpoints(4, update_s=0.001, write_s=5.0, updates=20) == [4, 8, 12, 16, 20]


def test_by_default_cheap_checkpoints_are_written_every_ten_updates() -> None:
    assert checkpoints(None, update_s=1.0, write_s=0.01, updates=40) == [10, 20, 30, 40]


def test_by_default_checkpoints_take_at_most_two_percent_of_the_time() -> None:
    written = checkpoints(None, update_s=0.05, write_s=0.2)
    assert written[0] == 10, "the first one is early, so that a short run can be resumed"
    spent = (len(written) - 1) * 0.2
    assert 0.01 < spent / (1000 * 0.05 + spent) <= 0.02


def test_a_slow_disk_delays_only_the_next_checkpoint() -> None:
    schedule = CheckpointSchedule(None)
    schedule.wrote(0.0, 2.0)
    assert not schedule.due(10, 50.0)
    assert schedule.due(20, 100.1)
    schedule.wrote(100.1, 100.2)
    assert schedule.due(30, 106.0)


def test_an_interval_is_kept_if_updates_are_reported_many_at_a_time() -> None:
    """A replay learner makes hundreds of updates between two reports; few of their counts are multiples."""
    schedule = CheckpointSchedule(100)
    assert [updates for updates in range(30, 400, 30) if schedule.due(updates, 0.0)] == [120, 210, 300]
