"""SAC that learns while workers roll, compared with SAC that alternates, with equal numbers of steps and updates.

    python benchmarks/equal_updates.py --markdown benchmarks/README.md --images /tmp       # three seeds of each
    python benchmarks/equal_updates.py --show benchmarks/results/equal_updates.json        # only the table

In offpolicy.py, a run ends at the threshold, so the two variants make different numbers of updates. Here a run has no
threshold: it ends after a fixed number of steps, with the same seeds and the same ratio of updates to steps. The number
of steps is a multiple of the rows that all workers roll before an alternating run learns.

Seeds, processes and seconds are those of learning.py, which also has the options.
"""

from __future__ import annotations

from dataclasses import replace

import learning
from children import run_script
from learning import Benchmark, Task
from offpolicy import OFFPOLICY
from offpolicy_tables import ALTERNATING, CONCURRENT, REPLAY, equal_updates

EQUAL_UPDATES = Benchmark(
    script="equal_updates.py",
    description=__doc__,
    tasks={"Pendulum-v1": Task(env="Pendulum-v1", threshold=None, max_steps=20_480)},
    learners=tuple(learner for learner in OFFPOLICY.learners if learner.name in (CONCURRENT, ALTERNATING)),
    cleanrl=OFFPOLICY.cleanrl,
    layout=replace(REPLAY, image="equal-updates"),
    summary=equal_updates,
)


def main() -> int:
    return learning.main(EQUAL_UPDATES)


if __name__ == "__main__":
    run_script(main)
