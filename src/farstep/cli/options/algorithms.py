"""The learners that a command can name, and how to make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from farstep.cluster_env import ClusterEnv
from farstep.learners.aride import Aride, ArideConfig
from farstep.learners.async_ppo import AsyncPPO, AsyncPPOConfig
from farstep.learners.dqn import DQN, ApexConfig, DQNConfig, make_q_agent
from farstep.learners.impala import Impala, ImpalaConfig
from farstep.learners.loop.training import Learner
from farstep.learners.networks.agent import NetworkAgent
from farstep.learners.networks.nets import Space, make_agent
from farstep.learners.options.run_config import RunConfig
from farstep.learners.ppo import PPO, PPOConfig
from farstep.learners.sac import SAC, SACConfig, make_soft_actor
from farstep.resources import usable_cpus


@dataclass(frozen=True)
class Algorithm:
    """How the command line makes a learner and its agent."""

    config: type[Any]
    """Class of the learner's options; their field `net` has the options of the network."""
    learner: Callable[..., Learner]
    """Makes the learner of an agent, options, seed and device."""
    agent: Callable[[Space, Space, Any], NetworkAgent]
    """Makes the agent for an observation space, an action space and the learner's options."""


def _actor_critic(observation_space: Space, action_space: Space, config: Any) -> NetworkAgent:
    return make_agent(observation_space, action_space, config.net, config.gamma)


ALGORITHMS = {
    "ppo": Algorithm(PPOConfig, PPO, _actor_critic),
    "async-ppo": Algorithm(AsyncPPOConfig, AsyncPPO, _actor_critic),
    "impala": Algorithm(ImpalaConfig, Impala, _actor_critic),
    "dqn": Algorithm(DQNConfig, DQN, make_q_agent),
    "apex": Algorithm(ApexConfig, DQN, make_q_agent),
    "sac": Algorithm(SACConfig, SAC, make_soft_actor),
    "aride": Algorithm(ArideConfig, Aride, _actor_critic),
}
RELEASING: dict[Any, str] = {PPO: "ppo", AsyncPPO: "async-ppo", Impala: "impala"}
"""Learners that can hold their device only during updates."""


def agent_for(config: Any, observation_space: Space, action_space: Space) -> NetworkAgent:
    """Make a new agent of the learner with these options, for the spaces of an environment."""
    algorithm = next(each for each in ALGORITHMS.values() if each.config is type(config))
    return algorithm.agent(observation_space, action_space, config)


def make_learner(name: str, run: RunConfig, config: Any, env: ClusterEnv) -> Learner:
    """Create the agent for the environments of a run, and its learner.

    Args:
        name: A key of `ALGORITHMS`.
        run: Seed, device and threads.
        config: The learner's configuration.
        env: The environments; launched if they are not running.

    Returns:
        The learner.
    """
    torch.manual_seed(run.seed)
    agent = agent_for(config, *env.launch())
    learner = ALGORITHMS[name].learner(agent, config, run.seed, run.device)
    if run.release_device:
        assert isinstance(learner, PPO | AsyncPPO | Impala)
        learner.release_device()
    # For small matrices, more threads do not help; if workers need the cores, they even slow them down.
    torch.set_num_threads(run.threads or (usable_cpus() if agent.sees_images and learner.synchronous else 1))
    return learner
