"""farstep, synchronous: every worker rolls its share, and the batch is read when all have."""

import _setup  # noqa: F401

# isort: split
from _farstep import INFERENCES, PACKAGES, collecting, contender_name, make_cluster
from workload import make_policy, measure, parse_arguments, report


def main() -> None:
    workload = parse_arguments(modes=("each-episode-seeded", "seeded-once"), inferences=INFERENCES)
    policy = make_policy(workload)
    with make_cluster(workload, seed_episodes=workload.mode != "seeded-once") as env:
        env.launch()
        env.reset(seed=1)
        measurement = measure(collecting(env, policy, workload), workload.seconds)
    report(contender_name("collect", workload), workload, measurement, packages=PACKAGES)


if __name__ == "__main__":
    main()
