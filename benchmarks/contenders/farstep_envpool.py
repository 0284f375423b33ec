"""EnvPool's environments on farstep's workers, which act beside them."""

import _setup  # noqa: F401

# isort: split
from _farstep import INFERENCES, PACKAGES, collecting, contender_name, make_cluster, streaming
from workload import make_policy, measure, parse_arguments, report


def main() -> None:
    workload = parse_arguments(modes=("collect", "stream"), inferences=INFERENCES)
    policy = make_policy(workload)
    with make_cluster(workload, envpool=True) as env:
        env.launch()
        env.reset(seed=1)
        way = streaming if workload.mode == "stream" else collecting
        measurement = measure(way(env, policy, workload), workload.seconds)
    report(
        contender_name(f"envpool-{workload.mode}", workload),
        workload,
        measurement,
        notes="a filler row after each episode (EnvPool's autoreset)",
        packages=PACKAGES,
    )


if __name__ == "__main__":
    main()
