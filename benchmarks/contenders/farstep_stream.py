"""farstep, asynchronous: workers roll ahead by at most one batch while the last one is read."""

import _setup  # noqa: F401

# isort: split
from _farstep import INFERENCES, PACKAGES, contender_name, make_cluster, streaming
from workload import make_policy, measure, parse_arguments, report


def main() -> None:
    workload = parse_arguments(inferences=INFERENCES)
    policy = make_policy(workload)
    with make_cluster(workload) as env:
        env.launch()
        env.reset(seed=1)
        measurement = measure(streaming(env, policy, workload), workload.seconds)
    report(contender_name("stream", workload), workload, measurement, packages=PACKAGES)


if __name__ == "__main__":
    main()
