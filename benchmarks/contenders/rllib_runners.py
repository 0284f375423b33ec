"""RLlib's environment runners: one Ray actor per core, environments and policy together."""

from typing import Any

import _setup  # noqa: F401

# isort: split
import gymnasium as gym
import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.tune.registry import register_env
from workload import Policy, Workload, make_env, measure, parse_arguments, report


class ActorCritic(TorchRLModule):
    """The shared policy, which samples by itself so that RLlib's connectors need not."""

    def setup(self) -> None:
        super().setup()
        self.policy = Policy(self.observation_space.shape, int(self.action_space.n), self.model_config["sampler"])

    def _forward_exploration(self, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        output = self.policy.act(batch[Columns.OBS])
        return {
            Columns.ACTIONS: output["action"],
            Columns.ACTION_LOGP: output["logprob"],
            Columns.VF_PREDS: output["value"],
        }


def main() -> None:
    workload = parse_arguments()
    ray.init(num_cpus=workload.workers, include_dashboard=False, log_to_driver=False, configure_logging=False)
    register_env("throughput", EnvOf(workload.env))
    config = configuration(workload)
    runner = ray.remote(num_cpus=1)(SingleAgentEnvRunner)
    runners = [runner.remote(config=config, worker_index=index + 1) for index in range(workload.workers)]

    def collect() -> int:
        batches = ray.get([runner.sample.remote() for runner in runners])
        return sum(len(episode) for episodes in batches for episode in episodes)

    measurement = measure(collect, workload.seconds)
    ray.shutdown()
    report(
        "rllib",
        workload,
        measurement,
        notes="returns episodes, not put into T x N arrays; 2 env runners",
        packages=("ray",),
    )


class EnvOf:
    """An environment creator in the form that RLlib calls."""

    def __init__(self, env_id: str) -> None:
        self.env_id = env_id

    def __call__(self, _: object) -> gym.Env:
        return make_env(self.env_id)


def configuration(workload: Workload) -> PPOConfig:
    config = PPOConfig()
    config.environment("throughput")
    config.framework("torch")
    config.env_runners(
        num_env_runners=workload.workers,
        num_envs_per_env_runner=workload.envs_per_process,
        rollout_fragment_length=workload.steps,
    )
    config.rl_module(rl_module_spec=RLModuleSpec(module_class=ActorCritic, model_config={"sampler": workload.sampler}))
    return config


if __name__ == "__main__":
    main()
