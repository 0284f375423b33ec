"""The limit: one process per core with its share of the environments, stepped and acted for, nothing moved.

Each process runs the leanest loop there is over plain environments and writes into arrays of its own, so
whatever steps the same environments and hands rollouts to a learner can at best draw level with it. EnvPool
can pass it: its environments are not these.
"""

import multiprocessing
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any, TypeAlias

import _setup  # noqa: F401

# isort: split
import numpy as np
import torch
from workload import (
    Array,
    Measurement,
    Policy,
    Rollout,
    Workload,
    make_env,
    make_policy,
    measure,
    parse_arguments,
    report,
    spaces_of,
)

Act: TypeAlias = Callable[[Array], Mapping[str, Any]]


def main() -> None:
    workload = parse_arguments(inferences=("eager", "fast"))
    report(f"limit-{workload.inference}", workload, in_processes(workload, run))


def in_processes(workload: Workload, run: Callable[[int, Workload, Barrier, Connection], None]) -> Measurement:
    """Call ``run`` in one forked process per worker; each sends its own measurement."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(workload.workers)
    receivers, processes = [], []
    for index in range(workload.workers):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=run, args=(index, workload, barrier, sender), daemon=True)
        process.start()
        sender.close()
        receivers.append(receiver)
        processes.append(process)
    try:
        parts: list[Measurement] = [receiver.recv() for receiver in receivers]
    except EOFError:
        raise SystemExit("one of the processes of the limit failed; the error is printed above") from None
    for process in processes:
        process.join()
    return together(parts)


def run(index: int, workload: Workload, barrier: Barrier, sender: Connection) -> None:
    """One of the processes: its environments, its policy, its arrays."""
    policy = make_policy(workload)
    torch.manual_seed(index)
    act = fast_act(policy, workload) if workload.inference == "fast" else policy.act
    collect = lean_loop(index, workload, act)
    with torch.inference_mode():
        sender.send(measure(collect, workload.seconds, warm=barrier.wait))


def lean_loop(index: int, workload: Workload, act: Act) -> Callable[[], int]:
    num_envs = workload.envs_per_process
    rollout = Rollout.empty(workload, num_envs=num_envs, steps=workload.steps + 1)
    envs = [make_env(workload.env) for _ in range(num_envs)]
    obs = rollout.obs
    for i, env in enumerate(envs):
        obs[workload.steps, i], _ = env.reset(seed=index * num_envs + i)
    steps = [env.step for env in envs]
    rewards, terminateds, truncateds = [0.0] * num_envs, [False] * num_envs, [False] * num_envs

    def collect() -> int:
        obs[0] = obs[workload.steps]
        for t in range(workload.steps):
            output = act(obs[t])
            rollout.action[t] = action = np.asarray(output["action"])
            rollout.logprob[t] = output["logprob"]
            rollout.value[t] = output["value"]
            following = obs[t + 1]
            # NumPy's integers, as every vector environment passes them: their cost is the environments' own.
            for i, (step, choice) in enumerate(zip(steps, action, strict=True)):
                seen, rewards[i], terminated, truncated, _ = step(choice)
                terminateds[i] = terminated
                truncateds[i] = truncated
                following[i] = envs[i].reset()[0] if terminated or truncated else seen
            rollout.reward[t] = rewards
            rollout.terminated[t] = terminateds
            rollout.truncated[t] = truncateds
        return workload.steps * num_envs

    return collect


def together(parts: list[Measurement]) -> Measurement:
    """The processes ran side by side: their rates add up."""
    transitions = sum(part.transitions for part in parts)
    return Measurement(
        transitions=transitions,
        rollouts=min(part.rollouts for part in parts),
        seconds=transitions / sum(part.steps_per_second for part in parts),
        startup_s=max(part.startup_s for part in parts),
    )


# --- farstep's own inference -----------------------------------------------------------------------------


def fast_act(policy: Policy, workload: Workload) -> Act:
    """``policy.act`` as farstep's workers call it when env_config has ``"inference": "auto"``."""
    from farstep.agents.policy import Policy as WorkerPolicy

    observation_space, _ = spaces_of(workload.env)
    example = np.stack([observation_space.sample() for _ in range(workload.envs_per_process)])
    worker_policy = WorkerPolicy(policy, "auto")
    worker_policy.accelerate(example, None, None)
    if not worker_policy.note.startswith("fast"):
        raise RuntimeError(f"farstep has no fast path for this policy ({worker_policy.note}): nothing to measure")
    return lambda obs: worker_policy(obs, None, None, None)


if __name__ == "__main__":
    main()
