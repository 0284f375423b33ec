"""Gymnasium's own vector environments, the policy in the same process, as CleanRL's loops are written."""

from functools import partial

import _setup  # noqa: F401

# isort: split
import gymnasium as gym
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from workload import Rollout, make_env, make_policy, measure, parse_arguments, report


def main() -> None:
    workload = parse_arguments(modes=("sync", "async"))
    policy = make_policy(workload)
    rollout = Rollout.empty(workload)
    factories = [partial(make_env, workload.env)] * workload.num_envs
    envs: gym.vector.VectorEnv
    # SAME_STEP, so that every row is a transition; copy=False, as the rollout makes the copy.
    if workload.mode == "async":
        envs = AsyncVectorEnv(factories, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
    else:
        envs = SyncVectorEnv(factories, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
    obs, _ = envs.reset(seed=1)

    def collect() -> int:
        nonlocal obs
        with torch.inference_mode():
            for t in range(workload.steps):
                action = rollout.write_action(t, obs, policy.act(obs))
                obs, reward, terminated, truncated, _ = envs.step(action)
                rollout.write_outcome(t, reward, terminated, truncated)
        return workload.transitions

    measurement = measure(collect, workload.seconds)
    envs.close()
    report(f"gymnasium-{workload.mode}", workload, measurement, notes="autoreset SAME_STEP")


if __name__ == "__main__":
    main()
