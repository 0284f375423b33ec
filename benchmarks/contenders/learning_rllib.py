"""RLlib's PPO, SAC or DQN on its new API stack; the learner is in this process."""

from __future__ import annotations

import argparse
import os
from typing import Any

import _setup  # noqa: F401

# isort: split
import ray
from _learning import Curve, parse_arguments, report
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

Settings = dict[str, Any]

NUM_RUNNERS = 2
CARTPOLE = {"lr": 3e-4, "num_epochs": 6, "vf_loss_coeff": 0.01, "envs_per_runner": 4}
CARTPOLE_NET = {"fcnet_hiddens": [32], "fcnet_activation": "linear", "vf_share_layers": True}
"""Of RLlib's own tuned example, cartpole_ppo.py, which leaves batches (4,000 rows, 128 at a time) at their defaults."""
OTHERS = {
    "lr": 3e-4,
    "num_epochs": 10,
    "gamma": 0.99,
    "lambda_": 0.95,
    "train_batch_size_per_learner": 4096,
    "minibatch_size": 256,
    "vf_loss_coeff": 0.5,
    "vf_clip_param": 1e6,
    "clip_param": 0.2,
    "entropy_coeff": 0.01,
    "use_kl_loss": False,
    "grad_clip": 0.5,
    "envs_per_runner": 8,
}
OTHERS_NET = {"fcnet_hiddens": [64, 64], "fcnet_activation": "tanh", "vf_share_layers": False}
"""RLlib has no tuned example of LunarLander: the usual values. Its default clips value losses at 10, too low here."""

SAC_SHARED = {
    "initial_alpha": 1.001,
    "lr": None,
    "target_entropy": "auto",
    "tau": 0.005,
    "train_batch_size_per_learner": 256,
    "target_network_update_freq": 1,
}
SAC = {
    "Pendulum-v1": {
        "actor_lr": 2e-4,
        "critic_lr": 8e-4,
        "alpha_lr": 9e-4,
        "n_step": (2, 5),
        "replay_buffer_config": {
            "type": "PrioritizedEpisodeReplayBuffer",
            "capacity": 100_000,
            "alpha": 1.0,
            "beta": 0.0,
        },
        "num_steps_sampled_before_learning_starts": 256,
    },
    "HalfCheetah-v5": {
        "actor_lr": 3e-4,
        "critic_lr": 3e-4,
        "alpha_lr": 3e-4,
        "n_step": 1,
        "replay_buffer_config": {
            "type": "PrioritizedEpisodeReplayBuffer",
            "capacity": 100_000,
            "alpha": 0.6,
            "beta": 0.4,
        },
        "num_steps_sampled_before_learning_starts": 10_000,
    },
}
SAC_NET = {
    "fcnet_hiddens": [256, 256],
    "fcnet_activation": "relu",
    "fcnet_kernel_initializer": "xavier_uniform_",
    "head_fcnet_hiddens": [],
    "head_fcnet_activation": None,
    "head_fcnet_kernel_initializer": "orthogonal_",
    "head_fcnet_kernel_initializer_kwargs": {"gain": 0.01},
}
"""Of RLlib's own tuned examples, pendulum_sac.py and halfcheetah_sac.py."""
DQN = {
    "lr": 6.3e-4,
    "train_batch_size_per_learner": 128,
    "n_step": 1,
    "double_q": True,
    "dueling": True,
    "epsilon": [(0, 1.0), (12_000, 0.05)],
    "target_network_update_freq": 250,
    "num_steps_sampled_before_learning_starts": 1000,
    "replay_buffer_config": {
        "type": "PrioritizedEpisodeReplayBuffer",
        "capacity": 50_000,
        "alpha": 0.6,
        "beta": 0.4,
    },
}
DQN_NET = {"fcnet_hiddens": [256, 256], "fcnet_activation": "relu", "head_fcnet_hiddens": []}
"""RLlib has no tuned example of DQN on LunarLander: the form of cartpole_dqn.py, with RL Baselines3 Zoo's numbers."""


def ppo(env: str, num_envs: int | None) -> tuple[AlgorithmConfig, Settings]:
    """PPO with two environment runners."""
    chosen = dict(CARTPOLE if env.startswith("CartPole") else OTHERS)
    if num_envs:
        chosen["envs_per_runner"] = num_envs // NUM_RUNNERS
    net = CARTPOLE_NET if env.startswith("CartPole") else OTHERS_NET
    settings = {**chosen, **net, "num_env_runners": NUM_RUNNERS}
    config = (
        PPOConfig()
        .env_runners(num_env_runners=NUM_RUNNERS, num_envs_per_env_runner=chosen.pop("envs_per_runner"))
        .training(**chosen)
        .rl_module(model_config=DefaultModelConfig(**net))
    )
    return config, settings


def replay(
    config: AlgorithmConfig, chosen: Settings, net: Settings, num_envs: int | None
) -> tuple[AlgorithmConfig, Settings]:
    """A replay learner: an environment in this process, as in the examples, or one in each of `num_envs` runners."""
    runners = num_envs or 0
    config = (
        config.env_runners(num_env_runners=runners, num_envs_per_env_runner=1)
        .training(**chosen)
        .rl_module(model_config=DefaultModelConfig(**net))
    )
    return config, {**chosen, **net, "num_env_runners": runners}


def sac(env: str, num_envs: int | None) -> tuple[AlgorithmConfig, Settings]:
    return replay(SACConfig(), {**SAC_SHARED, **SAC[env]}, SAC_NET, num_envs)


def dqn(env: str, num_envs: int | None) -> tuple[AlgorithmConfig, Settings]:
    return replay(DQNConfig(), DQN, DQN_NET, num_envs)


ALGORITHMS = {"ppo": ppo, "sac": sac, "dqn": dqn}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--contender", default="rllib")
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="ppo")
    parser.add_argument("--num-envs", type=int, help="another number than the settings above have")
    task, options = parse_arguments(parser)
    os.environ["RAY_DEDUP_LOGS"] = "0"
    ray.init(
        address="local",  # never an existing cluster: another run may have one
        num_cpus=NUM_RUNNERS + 1,
        object_store_memory=10**9,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
    )
    config, settings = ALGORITHMS[options.algorithm](task.env, options.num_envs)
    algorithm = config.environment(task.env).debugging(seed=task.seed).build_algo()
    curve, steps, done, rows = Curve(task), 0, False, 0
    while not done and steps < task.max_steps:
        result = algorithm.train()
        found = result["env_runners"]
        steps = int(found["num_env_steps_sampled_lifetime"])
        rows = result.get("learners", {}).get("default_policy", {}).get("num_module_steps_trained_lifetime", rows)
        # Ray 2.60 averages over the episodes of this iteration only (NaN: none); the curve averages over the last 100.
        for _ in range(int(found.get("num_episodes", 0))):
            done = curve.episode(steps, float(found["episode_return_mean"]))
    algorithm.stop()
    ray.shutdown()
    report(
        options.contender,
        task,
        curve,
        settings,
        ("ray", "torch", "numpy", "gymnasium"),
        updates=None if options.algorithm == "ppo" else int(rows) // settings["train_batch_size_per_learner"],
    )


if __name__ == "__main__":
    main()
