"""TorchRL's multi-process collectors: environments and policy together on two workers."""

from functools import partial

import _setup  # noqa: F401

# isort: split
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.envs import EnvBase, GymWrapper
from workload import Policy, make_env, make_policy, measure, parse_arguments, report

ACT_KEYS = ("action", "logprob", "value")
ROLLOUT_KEYS = ("observation", *ACT_KEYS, ("next", "reward"), ("next", "terminated"), ("next", "truncated"))


class Act(nn.Module):
    """The shared policy, as a function from tensors to tensors."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, obs: Tensor) -> tuple[Tensor, ...]:
        output = self.policy.act(obs)
        return tuple(output[key] for key in ACT_KEYS)


def main() -> None:
    workload = parse_arguments(modes=("sync", "async"))
    sync = workload.mode == "sync"
    make = partial(vector_env, workload.env, workload.envs_per_process)
    shared = {
        "create_env_fn": [make] * workload.workers,
        "policy": TensorDictModule(Act(make_policy(workload)), in_keys=["observation"], out_keys=list(ACT_KEYS)),
        "total_frames": -1,
        "num_threads": 1,
        "num_sub_threads": 1,
    }
    # The synchronous collector splits a batch over its workers; the asynchronous one takes one from each.
    if sync:
        collector = MultiSyncCollector(**shared, frames_per_batch=workload.transitions, cat_results="stack")
    else:
        collector = MultiAsyncCollector(**shared, frames_per_batch=workload.transitions // workload.workers)
    batches = iter(collector)

    def collect() -> int:
        transitions = 0
        while transitions < workload.transitions:
            batch = next(batches).select(*ROLLOUT_KEYS)
            # What the asynchronous collector yields is the worker's own memory; stacking copied the other.
            owned = batch if sync else batch.clone()
            transitions += owned.numel()
        return transitions

    measurement = measure(collect, workload.seconds)
    collector.shutdown()
    report(
        f"torchrl-{workload.mode}",
        workload,
        measurement,
        notes="a SyncVectorEnv on each worker, twice as fast as its SerialEnv",
        packages=("torchrl", "tensordict"),
    )


def vector_env(env_id: str, num_envs: int) -> EnvBase:
    """Many environments as one; resetting is left to the collector, as TorchRL prefers it."""
    factories = [partial(make_env, env_id)] * num_envs
    envs = SyncVectorEnv(factories, copy=False, autoreset_mode=AutoresetMode.DISABLED)
    return GymWrapper(envs, categorical_action_encoding=True)


if __name__ == "__main__":
    main()
