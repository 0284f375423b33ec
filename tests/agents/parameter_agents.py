"""Agents of every kind, and the loading of their parameters as by a worker of this host."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from farstep.agents.parameters import ParameterLoader, as_stored, leaves_of
from farstep.head.weights.parameters import ParameterStore
from farstep.worker.weights.sources import SharedWeights


class Base:
    def act(self, obs: Any) -> Any:
        return obs


class Module(torch.nn.Module, Base):
    """By name, buffers included."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.net = torch.nn.Linear(size, 2)
        self.register_buffer("scale", torch.ones(2))

    def get_parameters(self) -> Any:
        return self.state_dict()


class ListModule(Module):
    def get_parameters(self) -> Any:
        return list(self.parameters())


class IteratorModule(Module):
    def get_parameters(self) -> Any:
        return self.parameters()


class NumpyAgent(Base):
    """Written in place."""

    def __init__(self) -> None:
        self.weights: dict[str, Any] = {
            "w": np.arange(6.0).reshape(2, 3),
            "layers": [np.zeros(2, np.float32), np.ones((), np.int64)],
        }

    def get_parameters(self) -> Any:
        return self.weights


class SetterAgent(Base):
    """Gets what `get_parameters` returns, in the same types."""

    def __init__(self) -> None:
        self.parameters: dict[str, Any] = {"w": torch.arange(3.0), "n": (np.arange(2), 1.5), "count": 3}

    def get_parameters(self) -> Any:
        return self.parameters

    def set_parameters(self, parameters: Any) -> None:
        self.parameters = parameters


class JaxAgent(Base):
    def __init__(self, size: int = 3) -> None:
        self.w = jnp.arange(float(size))

    def get_parameters(self) -> Any:
        return {"w": self.w}


class JaxSetterAgent(JaxAgent):
    def set_parameters(self, parameters: Any) -> None:
        self.w = jnp.asarray(parameters["w"])


@contextmanager
def store_of(agent: Any) -> Iterator[ParameterStore]:
    with closing(ParameterStore(agent, agent_id=1, workers=2)) as store:
        yield store


def pulled(store: ParameterStore, agent: Any) -> int:
    """What a worker of this host does: load the newest version into its copy of the agent."""
    message = store.message()
    with closing(SharedWeights(os.dup(store.memory.fd), message.nbytes, message.buffers)) as weights:
        assert weights.newest() == store.version
        return weights.load(ParameterLoader(agent))[0]


def published_if_changed(store: ParameterStore, agent: Any) -> bool:
    """What `collect` does."""
    changed = store.changed(agent)
    if changed:
        store.publish(agent)
    return changed


def numbers(agent: Any) -> list[Any]:
    return [as_stored(name, leaf) for name, leaf in leaves_of(agent.get_parameters())]


AGENTS: list[Callable[[], Any]] = [Module, ListModule, IteratorModule, NumpyAgent, SetterAgent, JaxSetterAgent]
