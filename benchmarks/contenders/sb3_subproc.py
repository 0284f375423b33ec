"""Stable-Baselines3's vector environments: one process per environment, or all in this process."""

from functools import partial

import _setup  # noqa: F401

# isort: split
import numpy as np
import torch
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv
from workload import Rollout, make_env, make_policy, measure, parse_arguments, report


def main() -> None:
    workload = parse_arguments(modes=("subproc", "dummy"))
    policy = make_policy(workload)
    rollout = Rollout.empty(workload)
    factories = [partial(make_env, workload.env)] * workload.num_envs
    # Forked, because the default imports torch in every process: a minute for 64; the stepping is the same.
    subproc = workload.mode == "subproc"
    envs = SubprocVecEnv(factories, start_method="fork") if subproc else DummyVecEnv(factories)
    envs.seed(1)
    obs = envs.reset()
    truncated = np.zeros(workload.num_envs, np.bool_)

    def collect() -> int:
        nonlocal obs
        with torch.inference_mode():
            for t in range(workload.steps):
                action = rollout.write_action(t, obs, policy.act(obs))
                obs, reward, done, infos = envs.step(action)
                truncated[:] = False
                for index in np.flatnonzero(done):
                    truncated[index] = infos[index].get("TimeLimit.truncated", False)
                rollout.write_outcome(t, reward, done & ~truncated, truncated)
        return workload.transitions

    measurement = measure(collect, workload.seconds)
    envs.close()
    report(f"sb3-{workload.mode}", workload, measurement, packages=("stable-baselines3",))


if __name__ == "__main__":
    main()
