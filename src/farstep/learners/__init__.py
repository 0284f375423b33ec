"""Learners (they train an agent in a `ClusterEnv`), their networks, and the training loop.

`farstep train` uses these classes; from Python:

    config = farstep.learners.PPOConfig(learning_rate=1e-3)
    agent = farstep.learners.make_agent(*env.launch(), config.net, config.gamma)
    learner = farstep.learners.PPO(agent, config, seed=1)
    farstep.learners.Training(learner, env, farstep.learners.Limits(total_steps=100_000)).run()

`losses` (torch) and `returns` (NumPy) are modules of functions for learners that users write. Names are imported when
they are first used, so that importing this package does not import torch.
"""

from __future__ import annotations

import importlib

from farstep.errors import install_extra

TYPE_CHECKING = False  # type checkers treat this name as True; importing typing would slow down the start
if TYPE_CHECKING:
    from farstep.learners import losses as losses
    from farstep.learners import returns as returns
    from farstep.learners.aride import Aride as Aride
    from farstep.learners.aride import ArideConfig as ArideConfig
    from farstep.learners.async_ppo import AsyncPPO as AsyncPPO
    from farstep.learners.async_ppo import AsyncPPOConfig as AsyncPPOConfig
    from farstep.learners.dqn import DQN as DQN
    from farstep.learners.dqn import ApexConfig as ApexConfig
    from farstep.learners.dqn import DQNConfig as DQNConfig
    from farstep.learners.dqn import make_q_agent as make_q_agent
    from farstep.learners.impala import Impala as Impala
    from farstep.learners.impala import ImpalaConfig as ImpalaConfig
    from farstep.learners.loop.evaluation import Evaluator as Evaluator
    from farstep.learners.loop.iteration import Iteration as Iteration
    from farstep.learners.loop.iteration import Loop as Loop
    from farstep.learners.loop.limits import Limits as Limits
    from farstep.learners.loop.progress import Progress as Progress
    from farstep.learners.loop.stop_signals import Stopped as Stopped
    from farstep.learners.loop.training import Learner as Learner
    from farstep.learners.loop.training import Sink as Sink
    from farstep.learners.loop.training import Training as Training
    from farstep.learners.networks.agent import NetworkAgent as NetworkAgent
    from farstep.learners.networks.nets import ActorCritic as ActorCritic
    from farstep.learners.networks.nets import NetConfig as NetConfig
    from farstep.learners.networks.nets import RecurrentActorCritic as RecurrentActorCritic
    from farstep.learners.networks.nets import make_agent as make_agent
    from farstep.learners.networks.q_network import QAgent as QAgent
    from farstep.learners.networks.q_network import QNetConfig as QNetConfig
    from farstep.learners.networks.soft_actor import SACNetConfig as SACNetConfig
    from farstep.learners.networks.soft_actor import SoftActor as SoftActor
    from farstep.learners.ppo import PPO as PPO
    from farstep.learners.ppo import PPOConfig as PPOConfig
    from farstep.learners.replay.config import EpisodeReplayConfig as EpisodeReplayConfig
    from farstep.learners.replay.config import ReplayConfig as ReplayConfig
    from farstep.learners.sac import SAC as SAC
    from farstep.learners.sac import SACConfig as SACConfig
    from farstep.learners.sac import make_soft_actor as make_soft_actor

_HOMES = {
    "DQN": "dqn",
    "PPO": "ppo",
    "SAC": "sac",
    "ActorCritic": "networks.nets",
    "ApexConfig": "dqn",
    "Aride": "aride",
    "ArideConfig": "aride",
    "AsyncPPO": "async_ppo",
    "AsyncPPOConfig": "async_ppo",
    "DQNConfig": "dqn",
    "EpisodeReplayConfig": "replay.config",
    "Evaluator": "loop.evaluation",
    "Impala": "impala",
    "ImpalaConfig": "impala",
    "Iteration": "loop.iteration",
    "Learner": "loop.training",
    "Limits": "loop.limits",
    "Loop": "loop.iteration",
    "NetConfig": "networks.nets",
    "NetworkAgent": "networks.agent",
    "PPOConfig": "ppo",
    "Progress": "loop.progress",
    "QAgent": "networks.q_network",
    "QNetConfig": "networks.q_network",
    "RecurrentActorCritic": "networks.nets",
    "ReplayConfig": "replay.config",
    "SACConfig": "sac",
    "SACNetConfig": "networks.soft_actor",
    "Sink": "loop.training",
    "SoftActor": "networks.soft_actor",
    "Stopped": "loop.stop_signals",
    "Training": "loop.training",
    "make_agent": "networks.nets",
    "make_q_agent": "dqn",
    "make_soft_actor": "sac",
}
_MODULES = ("losses", "returns")

__all__ = [*_HOMES, *_MODULES]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'farstep.learners' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"farstep.learners.{_HOMES.get(name, name)}")
    except ModuleNotFoundError as error:
        if command := install_extra(error.name or ""):
            error.add_note(f"farstep.learners.{name} needs {error.name}; install it with: {command}")
        raise
    return module if name in _MODULES else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
