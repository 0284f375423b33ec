"""Gymnasium's own vector environments, the policy in the same process, as CleanRL's loops are written."""

from functools import partial

import _setup  # noqa: F401

# isort: split
import gymnasium as gym
from _vector import measure_steps
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from workload import make_env, parse_arguments, report


def main() -> None:
    workload = parse_arguments(modes=("sync", "async"))
    factories = [partial(make_env, workload.env)] * workload.num_envs
    envs: gym.vector.VectorEnv
    # SAME_STEP, so that every row is a transition; copy=False, as the rollout makes the copy.
    if workload.mode == "async":
        envs = AsyncVectorEnv(factories, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
    else:
        envs = SyncVectorEnv(factories, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
    measurement = measure_steps(envs, workload)
    report(f"gymnasium-{workload.mode}", workload, measurement, notes="autoreset SAME_STEP")


if __name__ == "__main__":
    main()
