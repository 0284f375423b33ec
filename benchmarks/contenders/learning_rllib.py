"""RLlib's PPO on its new API stack: two environment runners, the learner in this process."""

from __future__ import annotations

import argparse
import os

import _setup  # noqa: F401

# isort: split
import ray
from _learning import Curve, parse_arguments, report
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--contender", default="rllib")
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
    chosen = dict(CARTPOLE if task.env.startswith("CartPole") else OTHERS)
    if options.num_envs:
        chosen["envs_per_runner"] = options.num_envs // NUM_RUNNERS
    net = CARTPOLE_NET if task.env.startswith("CartPole") else OTHERS_NET
    settings = {**chosen, **net, "num_env_runners": NUM_RUNNERS}
    config = (
        PPOConfig()
        .environment(task.env)
        .env_runners(num_env_runners=NUM_RUNNERS, num_envs_per_env_runner=chosen.pop("envs_per_runner"))
        .training(**chosen)
        .rl_module(model_config=DefaultModelConfig(**net))
        .debugging(seed=task.seed)
    )
    algorithm = config.build_algo()
    curve, steps, episodes, done = Curve(task.threshold), 0, 0, False
    while not done and steps < task.max_steps:
        found = algorithm.train()["env_runners"]
        steps = int(found["num_env_steps_sampled_lifetime"])
        episodes = int(found.get("num_episodes_lifetime", 0))
        if "episode_return_mean" in found:
            done = curve.mean(steps, float(found["episode_return_mean"]), episodes)
    algorithm.stop()
    ray.shutdown()
    report(options.contender, task, curve, settings, ("ray", "torch", "numpy", "gymnasium"))


if __name__ == "__main__":
    main()
