"""EnvPool: the environments rewritten in C++ on its own threads, the policy in this process."""

import _setup  # noqa: F401

# isort: split
import envpool
import numpy as np
import torch
from workload import (
    PIXEL_ENVS,
    Rollout,
    Workload,
    make_policy,
    measure,
    parse_arguments,
    report,
)


def main() -> None:
    workload = parse_arguments(modes=("sync", "async"))
    if workload.mode == "sync":
        collect_sync(workload)
    else:
        collect_async(workload)


def make(workload: Workload, batch_size: int) -> envpool.python.protocol.EnvPool:
    """The pool; for Pong with sticky actions and without a forced start, as ALE/Pong-v5 has them."""
    shared = {
        "env_type": "gymnasium",
        "num_envs": workload.num_envs,
        "batch_size": batch_size,
        "num_threads": workload.workers,
        "seed": 1,
    }
    if workload.env in PIXEL_ENVS:
        task = workload.env.removeprefix("ALE/")
        return envpool.make(task, **shared, repeat_action_probability=0.25, use_fire_reset=False)
    return envpool.make(workload.env, **shared)


def collect_sync(workload: Workload) -> None:
    """All environments step together."""
    policy = make_policy(workload)
    rollout = Rollout.empty(workload)
    envs = make(workload, workload.num_envs)
    action_dtype = envs.action_space.dtype
    obs, _ = envs.reset()

    def collect() -> int:
        nonlocal obs
        with torch.inference_mode():
            for t in range(workload.steps):
                action = rollout.write_action(t, obs, policy.act(obs))
                obs, reward, terminated, truncated, _ = envs.step(action.astype(action_dtype))
                rollout.write_outcome(t, reward, terminated, truncated)
        return workload.transitions

    finish(workload, measure(collect, workload.seconds), "a filler row after each episode (its autoreset)")


def collect_async(workload: Workload) -> None:
    """The policy acts for one half of the environments while the other half steps."""
    batch_size = workload.num_envs // 2
    num_batches = workload.transitions // batch_size
    policy = make_policy(workload)
    rollout = Rollout.empty(workload, num_envs=batch_size, steps=num_batches)
    env_ids = np.zeros((num_batches, batch_size), np.int32)
    envs = make(workload, batch_size)
    action_dtype = envs.action_space.dtype
    envs.async_reset()

    def collect() -> int:
        with torch.inference_mode():
            for t in range(num_batches):
                obs, reward, terminated, truncated, info = envs.recv()
                action = rollout.write_action(t, obs, policy.act(obs))
                envs.send(action.astype(action_dtype), info["env_id"])
                env_ids[t] = info["env_id"]
                rollout.write_outcome(t, reward, terminated, truncated)
        return workload.transitions

    measurement = measure(collect, workload.seconds)
    finish(workload, measurement, "rows in order of arrival with env_id; a filler row after each episode")


def finish(workload: Workload, measurement: object, notes: str) -> None:
    report(f"envpool-{workload.mode}", workload, measurement, notes=notes, packages=("envpool",))


if __name__ == "__main__":
    main()
