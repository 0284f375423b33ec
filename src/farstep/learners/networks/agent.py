"""What the training loop, evaluations and the command line need of the agent of any learner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import nn

from farstep.config.env import WeightsConfig
from farstep.core import Array
from farstep.errors import AgentError, ConfigError


class NetworkAgent(nn.Module):
    """A torch module that acts on workers and is trained on the head; base class of the agents of farstep's learners.

    A subclass defines `act`. The head publishes all its parameters and buffers; what only the learner needs (target
    networks, critics) belongs to the learner.

    Args:
        arguments: Positional arguments of the subclass, with which a pickled or copied agent is rebuilt.
    """

    act: Callable[..., Any]
    """A method `act(obs)`, as `farstep.core.Agent` describes it."""
    sees_images: bool
    """Whether observations are encoded by convolutions."""
    learner_only: tuple[str, ...] = ()
    """Prefixes of the names of parameters that `act` does not need for its actions."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__()
        self._arguments = arguments
        self.greedy = False
        """Whether to take the best action instead of exploring, as in an evaluation."""

    def get_parameters(self) -> dict[str, Any]:
        """Return what the head publishes.

        Returns:
            Parameters and buffers by name: tensors that share memory with the module.
        """
        return self.state_dict()

    def base_parameters(self) -> Mapping[str, torch.Tensor]:
        """Return parameters that never change. Workers get them once, and checkpoints have only their content hash.

        Returns:
            The parameters by name; none, unless the agent is a `farstep.agents.lora.LoraAgent` with adapters.
        """
        return {}

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies of arrays: an optimizer makes parameters views of one vector, and each view would pickle all of it.
        state = {name: tensor.numpy(force=True).copy() for name, tensor in self.state_dict().items()}
        return self._rebuild, (self._arguments, state, self.greedy)

    @classmethod
    def _rebuild(cls, arguments: tuple[Any, ...], state: Mapping[str, Array], greedy: bool) -> Self:
        """Rebuild a pickled or copied agent, on the CPU."""
        with torch.random.fork_rng(devices=[]):  # initial weights are drawn and overwritten
            agent = cls(*arguments)
        agent.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
        agent.greedy = greedy
        return agent


def check_sent(agent: NetworkAgent, weights: WeightsConfig) -> None:
    """Raise `ConfigError` if workers would not get new values of a parameter that their actions depend on.

    Args:
        agent: The agent.
        weights: Which of its parameters are sent.
    """
    for name in agent.get_parameters():
        if not weights.travels(name) and not name.startswith(agent.learner_only):
            part = name.partition(".")[0]
            raise ConfigError(
                f"weights.only leaves out {name!r}, which the policy needs: workers would keep its first values. Add "
                f"'{part}.*'."
            )


def check_kind(agent: object, kind: type[NetworkAgent], learner: str, *, adapters: bool) -> None:
    """Raise `AgentError` unless a learner can train an agent.

    Args:
        agent: The agent that was passed to the learner.
        kind: Class of the agents that the learner trains.
        learner: Name of the learner.
        adapters: Whether the learner can train adapters (`farstep.agents.lora.LoraAgent`).
    """
    has_adapters = isinstance(agent, NetworkAgent) and bool(agent.base_parameters())
    if isinstance(agent, kind) and (adapters or not has_adapters):
        return
    expected = kind.__name__ if adapters else f"{kind.__name__} without adapters"
    advice = (
        f"Derive the agent's class from it, e.g. class Policy(LoraAgent, {kind.__name__})."
        if adapters
        else "Train adapters with PPO, AsyncPPO, Impala or Aride, whose agents are of class ActorCritic (docs/lora.md)."
    )
    raise AgentError(
        f"{learner} trains agents of class {expected}; got {type(agent).__name__}{' with adapters' * has_adapters}. "
        f"{advice}"
    )
