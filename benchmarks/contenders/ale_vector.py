"""ale-py's AtariVectorEnv: emulators on C++ threads with the policy in this process, or on farstep's workers."""

import _setup  # noqa: F401

# isort: split
from _farstep import collecting
from _vector import measure_steps
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode
from workload import PIXEL_ENVS, Workload, make_policy, measure, parse_arguments, report

import farstep

SETTINGS = {
    "game": "pong",
    "repeat_action_probability": 0.25,
    "use_fire_reset": False,
    "reward_clipping": False,
    "autoreset_mode": AutoresetMode.SAME_STEP,
}
"""As ``workload.make_env`` has them."""


def main() -> None:
    workload = parse_arguments(modes=("native", "farstep"))
    if workload.env not in PIXEL_ENVS:
        raise SystemExit(f"ale_vector.py: AtariVectorEnv has no {workload.env}")
    (collect_native if workload.mode == "native" else collect_farstep)(workload)


def collect_native(workload: Workload) -> None:
    envs = AtariVectorEnv(num_envs=workload.num_envs, num_threads=workload.workers, **SETTINGS)
    measurement = measure_steps(envs, workload)
    report("ale-vector", workload, measurement, notes="autoreset SAME_STEP", packages=("ale-py",))


def collect_farstep(workload: Workload) -> None:
    policy = make_policy(workload)
    env_config = {
        "type": "vector",
        "env_name": "ale_py.vector_env.AtariVectorEnv",
        "env_kwargs": {"num_threads": 1, **SETTINGS},
        "envs_per_node": workload.num_envs,
        "seed": 1,
    }
    config = farstep.LocalConfig(workers_per_node=workload.workers)
    with farstep.ClusterEnv(env_config, config) as env:
        env.launch()
        measurement = measure(collecting(env, policy, workload), workload.seconds)
    report("farstep-ale-vector", workload, measurement, packages=("farstep", "ale-py"))


if __name__ == "__main__":
    main()
