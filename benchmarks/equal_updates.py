"""SAC that learns while workers roll, compared with SAC that alternates, with equal numbers of steps and updates.

    python benchmarks/equal_updates.py --env Pendulum-v1 --images /tmp                     # three seeds of each
    python benchmarks/equal_updates.py --env costly:SlowPendulum-v1 --images /tmp --out slow.json
    python benchmarks/equal_updates.py --show benchmarks/results/equal_updates.json        # only the table

In offpolicy.py, a run ends at the threshold, so the two variants make different numbers of updates. Here a run has no
threshold: it ends after a fixed number of steps, with the same seeds and the same ratio of updates to steps. The number
of steps is a multiple of the rows that all workers roll before an alternating run learns.

Steps of Pendulum-v1 take much less time than updates. With SlowPendulum-v1, which sleeps in each step, rolling takes
about as long as learning.

Seeds, processes and seconds are those of learning.py, which also has the options.
"""

from __future__ import annotations

from dataclasses import replace

import learning
from children import run_script
from costly import SLOW_PENDULUM
from learning import Benchmark, Learner, Task
from offpolicy import OFFPOLICY
from offpolicy_tables import ALTERNATING, CONCURRENT, REPLAY, equal_updates

SLOW = f"costly:{SLOW_PENDULUM}"


def on_slow_task(learner: Learner) -> Learner:
    """The learner, also on the slow task, with its options on Pendulum-v1."""
    assert learner.by_task is not None
    return replace(learner, by_task={**learner.by_task, SLOW: learner.by_task["Pendulum-v1"]})


EQUAL_UPDATES = Benchmark(
    script="equal_updates.py",
    description=__doc__,
    tasks={
        "Pendulum-v1": Task(env="Pendulum-v1", threshold=None, max_steps=20_480),
        SLOW: Task(env=SLOW, threshold=None, max_steps=10_240),
    },
    learners=tuple(on_slow_task(found) for found in OFFPOLICY.learners if found.name in (CONCURRENT, ALTERNATING)),
    cleanrl=OFFPOLICY.cleanrl,
    layout=replace(REPLAY, image="equal-updates"),
    summary=equal_updates,
)


def main() -> int:
    return learning.main(EQUAL_UPDATES)


if __name__ == "__main__":
    run_script(main)
