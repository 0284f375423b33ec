"""Agents of every kind, and one worker and the head that exchange probes, without processes."""

from __future__ import annotations

from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import torch

from farstep.agents.divergence import Comparison
from farstep.agents.policy import Policy
from farstep.head.members.worker_records import split
from farstep.head.weights.probes import Prober
from farstep.rollout.blocks import Layout
from farstep.rollout.rows import Rows
from farstep.schema import ArraySpec
from farstep.wire.messages import Chunk, Probe
from farstep.worker.weights.probing import Probing

STEPS, ENVS, SIZE = 20, 6, 3


class LinearAgent:
    """Logits linear in the observation."""

    def __init__(self, weight: float = 0.0) -> None:
        self.w: Any = np.full((SIZE, 4), weight) * np.arange(4)

    def act(self, obs: Any) -> Any:
        return np.zeros(len(obs), np.int64)

    def get_parameters(self) -> Any:
        return {"w": self.w}

    def distribution(self, obs: Any) -> Any:
        return {"logits": obs @ self.w}


class GaussianAgent(LinearAgent):
    def distribution(self, obs: Any) -> Any:
        return {"mean": obs @ self.w[:, :2], "log_std": np.full((len(obs), 2), self.w[0, 1])}


class MixedAgent(LinearAgent):
    def distribution(self, obs: Any) -> Any:
        return {
            "arm": GaussianAgent.distribution(cast(Any, self), obs),
            "hand": ({"logits": obs @ self.w}, {"bernoulli": obs @ self.w}),
        }


class JaxAgent(LinearAgent):
    def distribution(self, obs: Any) -> Any:
        return {"logits": jnp.asarray(obs @ self.w)}


class TorchAgent(torch.nn.Module):
    """Its results differ in training mode: dropout, and statistics of batches."""

    def __init__(self, weight: float = 0.0) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((SIZE, 4), weight) * torch.arange(4))
        self.norm = torch.nn.BatchNorm1d(SIZE)
        self.drop = torch.nn.Dropout(0.5)

    def act(self, obs: Any) -> Any:
        return torch.zeros(len(obs), dtype=torch.int64)

    def get_parameters(self) -> Any:
        return self.state_dict()

    def distribution(self, obs: Any) -> Any:
        return torch.distributions.Categorical(logits=self.drop(self.norm(obs)) @ self.w)


class MultiTorchAgent(TorchAgent):
    """Two choices of four each: logits of three dimensions."""

    def distribution(self, obs: Any) -> Any:
        logits = obs @ self.w
        return torch.distributions.Independent(
            torch.distributions.Categorical(logits=torch.stack([logits, -logits], 1)), 1
        )


class SquashedAgent(TorchAgent):
    def distribution(self, obs: Any) -> Any:
        normal = torch.distributions.Normal(obs @ self.w, 1.0)
        return torch.distributions.TransformedDistribution(normal, torch.distributions.TanhTransform())


class DeterministicAgent(LinearAgent):
    """With a measure of its own."""

    def distribution(self, obs: Any) -> Any:
        return obs @ self.w

    def divergence(self, local: Any, learner: Any) -> Any:
        return ((local["distribution"] - learner["distribution"]) ** 2).sum(axis=1)


class World:
    """One worker and the head, with the messages between them."""

    def __init__(self, learner: Any, worker: Any, num_seats: int = 1) -> None:
        rows = {"obs": ArraySpec((SIZE,), "<f8"), "action": ArraySpec((), "<i8"), "episode_start": ArraySpec((), "|b1")}
        chunks = {"state": ArraySpec((2,), "<f4")}
        self.layout = Layout(1, STEPS, ENVS, rows, chunks)
        self.blocks = self.layout.views(bytearray(self.layout.nbytes))
        self.records = split(1, ENVS, num_seats, 0)
        for record in self.records:
            record.ready = True
        self.head = Prober(Comparison(Policy(learner), "obs", "action", "state"), self.records, rows=64)
        self.worker = Probing(Comparison(Policy(worker), "obs", "action", "state"), window=4, rows=64)
        self.index, self.version, self.generator = 0, 0, np.random.default_rng(0)

    def rows(self, worker: int = 0) -> Rows:
        record = self.records[worker]
        return Rows(self.layout, self.blocks, 0, record.first, record.stop)

    def roll(self, version: int = 0, heard: bool = True, actor: Any = None) -> None:
        """A chunk that the worker hands over, and that the head accepts (or not); actions by a policy, or any."""
        self.index += 1
        self.blocks["obs"][:] = self.generator.normal(size=self.blocks["obs"].shape)
        self.blocks["action"][:] = self.generator.integers(0, 4, self.blocks["action"].shape)
        self.blocks["state"][:] = self.generator.normal(size=self.blocks["state"].shape)
        if actor is not None:
            logits = self.blocks["obs"] @ actor.w
            likely = (np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)).cumsum(axis=-1)
            self.blocks["action"][:] = (self.generator.random(likely.shape[:-1])[..., None] > likely).sum(axis=-1)
        self.worker.remember(self.index, version, self.rows(), STEPS)
        if heard:
            for record in self.records:
                chunk = Chunk(0, version, b"", index=self.index)
                self.head.remember(record, chunk, self.rows(record.worker), STEPS)

    def probe(self) -> tuple[Probe, list[bytes]]:
        self.version += 1
        request = self.head.requests()[0]
        answer = self.head.answers([request])[0]
        return Probe(1, self.version, request.indices, list(answer)), [array.tobytes() for array in answer.values()]

    def publish(self, held: int = 0) -> float:
        self.worker.compare(*self.probe(), held)
        return self.worker.divergences[0]
