"""The loop of the contenders that are Gymnasium vector environments, with the policy in the same process."""

import gymnasium as gym
import torch
from workload import Measurement, Rollout, Workload, make_policy, measure


def measure_steps(envs: gym.vector.VectorEnv, workload: Workload) -> Measurement:
    """Measure rollouts of ``envs``, and close them."""
    policy = make_policy(workload)
    rollout = Rollout.empty(workload)
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
    return measurement
