"""Converts a batch to tensors with values and advantages, and splits it into minibatches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from farstep.batch import Batch
from farstep.core import Array, Nested
from farstep.learners.losses import normalize
from farstep.learners.networks.nets import ActorCritic, Evaluation, RecurrentActorCritic, State
from farstep.learners.returns import gae, usable
from farstep.schema import map_leaves


@dataclass(frozen=True)
class Rollout:
    """A batch as time-major tensors `[T, N, ...]` on the learner's device."""

    obs: Nested
    sample: Nested
    """The sampled action, before it was clipped to the bounds of the action space."""
    logprob: Tensor
    """Log-probabilities of the samples under the policy that acted."""
    version: Tensor
    """Version of the weights that acted."""
    valid: Tensor
    """True on rows that are transitions with a known successor (`returns.usable`)."""
    episode_start: Tensor
    initial_state: State | None
    reward: Array
    terminated: Array
    truncated: Array
    value: Array
    """Values of the rows: recomputed if older weights acted, otherwise as recorded."""
    last_value: Array
    """Values of the observations after the last row, `[N]`."""
    final_value: Array
    """Values of final observations in the rows in which episodes ended; 0 in other rows."""
    proximal: Tensor
    """Log-probabilities under the learner's weights at the start of the update: recomputed if older weights acted,
    otherwise as recorded."""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and of environments."""
        rows, columns = self.valid.shape
        return rows, columns

    def columns(self) -> dict[str, Tensor]:
        """Return the tensors that PPO's loss needs in each minibatch, by name."""
        value = torch.from_numpy(self.value).to(self.valid.device)
        return {"logprob": self.logprob, "proximal": self.proximal, "value": value, **self.mask()}

    def mask(self) -> dict[str, Tensor]:
        """Return the column `valid`; empty if all rows are valid."""
        return {} if bool(self.valid.all()) else {"valid": self.valid}

    def advantages(self, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
        """Compute advantages and returns by GAE (see `returns.gae`).

        Args:
            gamma: Discount factor.
            gae_lambda: Lambda of GAE.

        Returns:
            Advantages and returns, each `[T, N]`.
        """
        arrays = gae(
            self.reward, self.value, self.last_value, self.terminated, self.truncated, self.final_value,
            gamma, gae_lambda, valid=self.valid.numpy(force=True),
        )  # fmt: skip
        advantages, returns = (torch.from_numpy(array).to(self.valid.device) for array in arrays)
        return advantages, returns


@torch.no_grad()
def prepare(
    agent: ActorCritic, batch: Batch, version: int, device: torch.device, *, values_are_current: bool = True
) -> Rollout:
    """Convert a batch to tensors, and compute the values of last and final observations.

    If older weights acted in some rows (asynchronous collection, AAPS), one forward pass over the batch recomputes the
    values and proximal log-probabilities of these rows.

    Args:
        agent: The agent that learns.
        batch: The rows to learn from.
        version: Version of the agent's weights.
        device: Device of the learner.
        values_are_current: Whether recorded values come from the critic of the row's version. If not, all values are
            recomputed.

    Returns:
        The rollout.
    """

    def tensor(array: Array) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(array)).to(device)

    key = "sample" if agent.keeps_samples else "action"
    obs, sample = map_leaves(tensor, batch["obs"]), map_leaves(tensor, batch[key])
    logprob, value = tensor(batch["logprob"]), np.array(batch["value"])
    valid = usable(batch["valid"], batch["episode_start"], batch["terminated"], batch["truncated"])
    episode_start = tensor(batch["episode_start"])
    stale = batch["version"] < version
    unknown = stale if values_are_current else np.ones_like(stale)
    final = batch.final_obs
    last_obs, final_obs = map_leaves(tensor, batch.last_obs), map_leaves(tensor, final.obs)
    state: State | None = None
    proximal, evaluation = logprob, None
    if isinstance(agent, RecurrentActorCritic):
        state = tuple(map_leaves(tensor, list(batch.initial_state)))
        features, states = agent.unroll(obs, state, episode_start)
        if unknown.any():
            evaluation = agent.evaluate_features(features, map_leaves(lambda leaf: leaf.flatten(0, 1), sample))
        last_value = agent.value_after(last_obs, states[-1])
        rows, columns = torch.as_tensor(np.array(final.row)).long(), torch.as_tensor(np.array(final.slot)).long()
        at_ends = tuple(torch.stack([after[k] for after in states])[rows, columns] for k in range(len(state)))
        finals = agent.value_after(final_obs, at_ends) if len(final) else torch.zeros(0)
    else:
        if unknown.any():
            evaluation = agent.evaluate(*(map_leaves(lambda leaf: leaf.flatten(0, 1), part) for part in (obs, sample)))
        last_value = agent.value(last_obs)
        finals = agent.value(final_obs) if len(final) else torch.zeros(0)
    if evaluation is not None:
        value = np.where(unknown, evaluation.value.reshape(logprob.shape).numpy(force=True), value)
        proximal = torch.where(tensor(stale), evaluation.logprob.reshape(logprob.shape), logprob)
    final_value = np.zeros_like(value)
    final_value[final.row, final.slot] = finals.numpy(force=True)
    reward = np.array(batch["reward"])
    if agent.reward_scale is not None:
        reward = agent.reward_scale(reward)
    return Rollout(
        obs, sample, logprob, tensor(batch["version"]), tensor(valid), episode_start, state, reward,
        np.array(batch["terminated"]), np.array(batch["truncated"]), value, last_value.numpy(force=True), final_value,
        proximal,
    )  # fmt: skip


@dataclass(frozen=True)
class Minibatch:
    """Some rows of a rollout, flat `[n, ...]`. For a recurrent agent, whole sequences `[T, n, ...]`."""

    obs: Nested
    sample: Nested
    initial_state: State | None
    episode_start: Tensor
    _columns: dict[str, Tensor]

    def evaluate(self, agent: ActorCritic) -> Evaluation:
        """Evaluate the samples under the agent's current policy."""
        if isinstance(agent, RecurrentActorCritic):
            assert self.initial_state is not None
            return agent.evaluate_sequences(self.obs, self.sample, self.initial_state, self.episode_start)
        return agent.evaluate(self.obs, self.sample)

    def split(self, size: int) -> Iterator[Minibatch]:
        """Split into smaller minibatches of about `size` rows; sequences are not split."""
        rows, axis = (1, 0) if self.initial_state is None else (self.episode_start.shape[0], 1)
        width = self.episode_start.shape[axis]
        for chosen in torch.split(torch.arange(width, device=self.episode_start.device), max(1, size // rows)):
            yield self.take(chosen)

    def take(self, chosen: Tensor) -> Minibatch:
        """Select rows, or sequences of a recurrent agent, by index."""
        axis = 0 if self.initial_state is None else 1

        def select(leaf: Tensor) -> Tensor:
            return leaf.index_select(axis, chosen)

        return Minibatch(
            map_leaves(select, self.obs),
            map_leaves(select, self.sample),
            None if self.initial_state is None else tuple(tensor[chosen] for tensor in self.initial_state),
            select(self.episode_start),
            {name: select(column) for name, column in self._columns.items()},
        )

    def normalized(self) -> Minibatch:
        """Return a copy whose advantages are normalized to mean 0 and standard deviation 1."""
        advantages = normalize(self._columns["advantages"], self._columns.get("valid"))
        return replace(self, _columns={**self._columns, "advantages": advantages})

    def __getitem__(self, name: str) -> Tensor:
        """Return a column, flattened."""
        return self._columns[name].flatten()

    @property
    def valid(self) -> Tensor | None:
        """True on the rows to use; None: use all rows."""
        return self["valid"] if "valid" in self._columns else None

    @property
    def num_valid(self) -> Tensor | int:
        """Number of valid rows, at least 1."""
        return len(self) if self.valid is None else self.valid.sum().clamp_min(1)

    def flat(self) -> Minibatch:
        """Flatten sequences to rows, for an agent that is not recurrent."""

        def flatten(leaf: Tensor) -> Tensor:
            return leaf.flatten(0, 1)

        return Minibatch(
            map_leaves(flatten, self.obs),
            map_leaves(flatten, self.sample),
            None,
            flatten(self.episode_start),
            {name: flatten(column) for name, column in self._columns.items()},
        )

    def __len__(self) -> int:
        return self.episode_start.numel()


def minibatches(
    rollout: Rollout, columns: dict[str, Tensor], size: int, generator: torch.Generator
) -> Iterator[Minibatch]:
    """Iterate over all rows once, in random order.

    Args:
        rollout: The rows.
        columns: Further `[T, N]` tensors that the loss needs.
        size: Rows per minibatch; the last minibatch may be smaller. Sequences of a recurrent agent are not split.
        generator: Random generator for the order.

    Yields:
        Minibatches.
    """
    rows, slots = rollout.shape
    whole = Minibatch(rollout.obs, rollout.sample, rollout.initial_state, rollout.episode_start, columns)
    if rollout.initial_state is None:
        whole, rows, slots = whole.flat(), 1, rows * slots
    order = torch.randperm(slots, generator=generator).to(rollout.valid.device)
    for chosen in torch.split(order, max(1, size // rows)):
        yield whole.take(chosen)
