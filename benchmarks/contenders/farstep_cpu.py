"""farstep, synchronous, for compare_commits.py: CPU time of head and workers during the rollouts, without the start."""

import _setup  # noqa: F401

# isort: split
import json
import sys

from _farstep import INFERENCES, collecting, make_cluster
from cpu_meter import descendants_s, waited_for_s
from workload import make_policy, measure, parse_arguments

import farstep


def cpu_s() -> float:
    return waited_for_s() + sum(descendants_s().values())


def main() -> None:
    workload = parse_arguments(inferences=INFERENCES)
    policy = make_policy(workload)
    start_s = 0.0

    def start() -> None:
        nonlocal start_s
        start_s = cpu_s()

    with make_cluster(workload) as env:
        env.launch()
        env.reset(seed=1)
        found = measure(collecting(env, policy, workload), workload.seconds, start)
        used_s = cpu_s() - start_s
    result = {
        "farstep": farstep.__file__,
        "steps_per_second": round(found.steps_per_second, 1),
        "cpu_s_per_million_steps": round(used_s / found.transitions * 1e6, 3),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
