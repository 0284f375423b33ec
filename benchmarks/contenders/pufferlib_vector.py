"""PufferLib's vectorization: all environments in this process, or on workers that spin on shared memory."""

import contextlib
import tempfile
from functools import partial

import _setup  # noqa: F401

# isort: split
import gymnasium as gym
import numpy as np
import torch
from workload import Rollout, make_env, make_policy, measure, parse_arguments, report

with tempfile.TemporaryDirectory() as _scratch, contextlib.chdir(_scratch):
    # Importing pufferlib leaves a link called "resources" in the working directory.
    import pufferlib.emulation
    import pufferlib.vector

NOTES = {
    "serial": "in one process",
    "sync": "1 worker: a second one spins against the learner on 2 cores and is slower",
    "async": "half of the environments per batch",
}


def main() -> None:
    workload = parse_arguments(modes=("serial", "sync", "async"))
    batch_size = workload.num_envs // 2 if workload.mode == "async" else workload.num_envs
    num_batches = workload.transitions // batch_size
    policy = make_policy(workload)
    rollout = Rollout.empty(workload, num_envs=batch_size, steps=num_batches)
    agent_ids = np.zeros((num_batches, batch_size), np.int32)
    layout: dict[str, object] = {"backend": pufferlib.vector.Serial}
    if workload.mode != "serial":
        layout = {
            "backend": pufferlib.vector.Multiprocessing,
            "num_workers": workload.workers if workload.mode == "async" else 1,
            "batch_size": batch_size,
        }
    envs = pufferlib.vector.make(partial(puffer_env, workload.env), num_envs=workload.num_envs, seed=1, **layout)
    envs.async_reset(seed=1)

    def collect() -> int:
        with torch.inference_mode():
            for t in range(num_batches):
                obs, reward, terminated, truncated, _, agent_ids[t], _ = envs.recv()
                # Workers overwrite what recv returned once they are sent on, so the outcome is stored first.
                rollout.write_outcome(t, reward, terminated, truncated)
                envs.send(rollout.write_action(t, obs, policy.act(obs)))
        return workload.transitions

    measurement = measure(collect, workload.seconds)
    envs.close()
    report(
        f"pufferlib-{workload.mode}",
        workload,
        measurement,
        notes=f"3.0.0 from source; {NOTES[workload.mode or 'serial']}; a filler row after each episode",
    )


def puffer_env(env_id: str, buf: object = None, seed: int = 0) -> gym.Env:
    return pufferlib.emulation.GymnasiumPufferEnv(env_creator=partial(make_env, env_id), buf=buf, seed=seed)


if __name__ == "__main__":
    main()
