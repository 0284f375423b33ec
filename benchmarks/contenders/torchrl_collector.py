"""TorchRL's multi-process collectors: environments and policy together on two workers."""

from collections.abc import Callable
from functools import partial

import _setup  # noqa: F401

# isort: split
import os

from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.envs import EnvBase, GymWrapper, SerialEnv
from workload import NUM_PROCESSES, Policy, make_env, make_policy, measure, parse_arguments, report

KEYS = ("observation", "action", "logprob", "value", ("next", "reward"), ("next", "terminated"), ("next", "truncated"))


class Act(nn.Module):
    """The shared policy with its outputs in the order of the keys below."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, obs: Tensor) -> tuple[Tensor, ...]:
        output = self.policy.act(obs)
        return output["action"], output["logprob"], output["value"]


def main() -> None:
    workload = parse_arguments(modes=("sync", "async"))
    policy = TensorDictModule(
        Act(make_policy(workload)), in_keys=["observation"], out_keys=["action", "logprob", "value"]
    )
    if os.environ.get("V") == "vec":
        make = partial(vector_env, workload.env, workload.envs_per_process)
    else:
        make = partial(serial_env, workload.env, workload.envs_per_process)
    sync = workload.mode == "sync"
    kw = eval(os.environ.get("KW", "{}"))
    kind = MultiSyncCollector if sync else MultiAsyncCollector
    collector = kind(
        [make] * NUM_PROCESSES,
        policy,
        frames_per_batch=workload.transitions if sync else workload.transitions // NUM_PROCESSES,
        total_frames=-1,
        num_threads=1,
        num_sub_threads=1,
        **({"cat_results":"stack"} if sync else {}),
        **kw,
    )
    batches = iter(collector)

    def collect() -> int:
        t = 0
        while t < workload.transitions:
            b = next(batches)
            b = b.select(*KEYS)
            if not sync:
                b = b.clone()
            t += b.numel()
        return t

    measurement = measure(collect, workload.seconds)
    collector.shutdown()
    report(f"torchrl-{workload.mode}", workload, measurement, packages=("torchrl", "tensordict"))


def vector_env(env_id: str, num_envs: int) -> EnvBase:
    factories = [partial(make_env, env_id)] * num_envs
    return GymWrapper(SyncVectorEnv(factories, copy=False, autoreset_mode=getattr(AutoresetMode, os.environ.get("AM","DISABLED"))), categorical_action_encoding=True)


def single_env(env_id: str) -> EnvBase:
    return GymWrapper(make_env(env_id), categorical_action_encoding=True)


def serial_env(env_id: str, num_envs: int) -> EnvBase:
    return SerialEnv(num_envs, partial(single_env, env_id))


if __name__ == "__main__":
    main()
