"""Updates an agent's running statistics: of rewards before each update, of observations after it."""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from farstep.batch import Batch
from farstep.checkpoint.checks import check_array, check_finite, converted
from farstep.core import Array
from farstep.errors import RewardError
from farstep.learners.networks.nets import ActorCritic
from farstep.schema import map_leaves


class SavedStatistics(msgspec.Struct, forbid_unknown_fields=True):
    """The state of `Statistics`."""

    returns: np.ndarray


class Statistics:
    """Updates running statistics with each batch. It keeps the discounted return of each slot, to scale rewards."""

    def __init__(self, agent: ActorCritic) -> None:
        self._agent = agent
        self._returns: Array = np.zeros(0, np.float32)

    def observe(self, batch: Batch) -> None:
        """Update the observation statistics with a batch, after the learner has used it."""
        valid = batch["valid"]
        if self._agent.normalizes_obs:
            device = next(self._agent.parameters()).device
            self._agent.update_moments(map_leaves(lambda leaf: torch.from_numpy(leaf[valid]).to(device), batch["obs"]))

    def observe_rewards(self, batch: Batch) -> None:
        """Update the reward statistics with a batch, before the learner uses it."""
        scale, slots = self._agent.reward_scale, batch.slots
        if scale is None:
            return
        self._returns = np.pad(self._returns, (0, max(int(slots.max()) + 1 - len(self._returns), 0)))
        ended = batch["terminated"] | batch["truncated"]
        for columns in _columns_by_turn(slots):
            restarted = ~batch.continues[columns] | batch["episode_start"][0, columns]
            running = np.where(restarted, 0, self._returns[slots[columns]]).astype(np.float32)
            scale.update(batch["reward"][:, columns], ended[:, columns], batch["valid"][:, columns], running)
            self._returns[slots[columns]] = running

    def state(self) -> dict[str, object]:
        """Return the state for a checkpoint."""
        return {"returns": self._returns}

    @staticmethod
    def check(state: object) -> SavedStatistics:
        """Check a saved state with any number of slots. Raise `Refused` if it is malformed."""
        saved = converted("statistics", state, SavedStatistics)
        check_array("statistics.returns", saved.returns, (saved.returns.size,), np.float32)
        check_finite("statistics.returns", saved.returns)
        return saved

    def load(self, saved: SavedStatistics) -> None:
        """Restore a checked state."""
        self._returns = saved.returns


def _columns_by_turn(slots: Array) -> list[Array]:
    """Return groups of columns: the first column of every slot, then the second, and so on. No group has a slot
    twice."""
    earlier = np.array([np.count_nonzero(slots[:column] == slot) for column, slot in enumerate(slots)])
    return [np.flatnonzero(earlier == turn) for turn in range(earlier.max(initial=-1) + 1)]


def check_rewards(batch: Batch) -> None:
    """Raise `RewardError` if a reward is not finite, naming its environment."""
    rewards = batch["reward"]
    if np.isfinite(rewards).all() or not (bad := np.argwhere(~np.isfinite(rewards) & batch["valid"])).size:
        return
    row, column = bad[0]
    raise RewardError(
        f"the environment in slot {batch.slots[column]} returned the reward {rewards[row, column]} (row {row} of a "
        "rollout); expected a finite number. Correct the environment, or clip its rewards with a wrapper."
    )
