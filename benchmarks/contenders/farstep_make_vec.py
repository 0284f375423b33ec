"""farstep's VectorEnv: the environments on workers, the policy in this process, for unmodified learners."""

import _setup  # noqa: F401

# isort: split
from _farstep import PACKAGES, gymnasium_source
from _vector import measure_steps
from gymnasium.vector import AutoresetMode
from workload import parse_arguments, report

import farstep


def main() -> None:
    workload = parse_arguments()
    source = gymnasium_source(workload.env)
    envs = farstep.make_vec(
        source.pop("env_name"),
        num_envs=workload.num_envs,
        config=farstep.LocalConfig(nodes=1, workers_per_node=workload.workers),
        autoreset_mode=AutoresetMode.SAME_STEP,
        **source,
    )
    measurement = measure_steps(envs, workload)
    report("farstep-make_vec", workload, measurement, notes="autoreset SAME_STEP", packages=PACKAGES)


if __name__ == "__main__":
    main()
