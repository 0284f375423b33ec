"""Moves an agent's running statistics on, after each update, for the rollouts that come."""

from __future__ import annotations

import numpy as np
import torch

from farstep.batch import Batch
from farstep.core import Array
from farstep.learners.nets import ActorCritic
from farstep.spec import map_leaves


class Statistics:
    """Remembers, for the scale of rewards, each slot's discounted return so far."""

    def __init__(self, agent: ActorCritic) -> None:
        self._agent = agent
        self._returns: Array = np.zeros(0, np.float32)

    def observe(self, batch: Batch) -> None:
        """Take a batch into account that has been learned from."""
        valid = batch["valid"]
        if self._agent.normalizes_obs:
            device = next(self._agent.parameters()).device
            self._agent.update_moments(map_leaves(lambda leaf: torch.from_numpy(leaf[valid]).to(device), batch["obs"]))
        if self._agent.reward_scale is not None:
            running = self._running(batch)
            ended = batch["terminated"] | batch["truncated"]
            self._agent.reward_scale.update(np.where(valid, batch["reward"], 0), ended, running)
            self._returns[batch.slots] = running

    def _running(self, batch: Batch) -> Array:
        """The discounted returns that the batch's columns go on with."""
        missing = int(batch.slots.max()) + 1 - len(self._returns)
        self._returns = np.pad(self._returns, (0, max(missing, 0)))
        fresh = ~batch.continues | batch["episode_start"][0]
        return np.where(fresh, 0, self._returns[batch.slots]).astype(np.float32)

    def state(self) -> dict[str, object]:
        return {"returns": self._returns}

    def load(self, state: dict[str, object]) -> None:
        self._returns = np.array(state["returns"], np.float32)
