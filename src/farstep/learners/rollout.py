"""A batch made ready to learn from: tensors, values, advantages, and the minibatches they are taken in."""

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
    """Time-major tensors `[T, N, ...]` on the learner's device."""

    obs: Nested
    sample: Nested
    """What the policy sampled: the action, before it was cut off at bounds."""
    logprob: Tensor
    """Of the policy that acted."""
    version: Tensor
    valid: Tensor
    episode_start: Tensor
    initial_state: State | None
    reward: Array
    terminated: Array
    truncated: Array
    value: Array
    """Of each row: as recorded, or said anew by the learner where the weights that acted were older than its own."""
    last_value: Array
    final_value: Array
    """Where an episode ended, what its final observation is worth."""
    proximal: Tensor
    """Log-probabilities under the learner's weights when it took the batch; as recorded for rows that those acted."""

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.valid.shape
        return rows, columns

    def columns(self) -> dict[str, Tensor]:
        """What minibatches take along, by name."""
        value = torch.from_numpy(self.value).to(self.valid.device)
        return {"logprob": self.logprob, "proximal": self.proximal, "value": value, **self.mask()}

    def mask(self) -> dict[str, Tensor]:
        """The column that says which rows count, unless all do."""
        return {} if bool(self.valid.all()) else {"valid": self.valid}

    def advantages(self, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
        """Advantages and returns by GAE."""
        found = gae(
            self.reward, self.value, self.last_value, self.terminated, self.truncated, self.final_value,
            gamma, gae_lambda, valid=self.valid.numpy(force=True),
        )  # fmt: skip
        advantages, returns = (torch.from_numpy(array).to(self.valid.device) for array in found)
        return advantages, returns


@torch.no_grad()
def prepare(agent: ActorCritic, batch: Batch, version: int, device: torch.device) -> Rollout:
    """What a batch says, and what the critic says of where it ends; `version` is that of the agent's present weights.

    Rows that older weights acted (asynchronous collection, AAPS) are evaluated once more: one forward gives their
    values and proximal log-probabilities.
    """

    def tensor(array: Array) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(array)).to(device)

    key = "sample" if agent.keeps_samples else "action"
    obs, sample = map_leaves(tensor, batch["obs"]), map_leaves(tensor, batch[key])
    logprob, value = tensor(batch["logprob"]), np.array(batch["value"])
    valid = usable(batch["valid"], batch["episode_start"], batch["terminated"], batch["truncated"])
    episode_start = tensor(batch["episode_start"])
    stale = batch["version"] < version
    final = batch.final_obs
    last_obs, final_obs = map_leaves(tensor, batch.last_obs), map_leaves(tensor, final.obs)
    state: State | None = None
    proximal, evaluation = logprob, None
    if isinstance(agent, RecurrentActorCritic):
        state = tuple(map_leaves(tensor, list(batch.initial_state)))
        features, states = agent.unroll(obs, state, episode_start)
        if stale.any():
            evaluation = agent.evaluate_features(features, map_leaves(lambda leaf: leaf.flatten(0, 1), sample))
        last_value = agent.value_after(last_obs, states[-1])
        rows, columns = torch.as_tensor(np.array(final.row)).long(), torch.as_tensor(np.array(final.slot)).long()
        at_ends = tuple(torch.stack([after[k] for after in states])[rows, columns] for k in range(len(state)))
        finals = agent.value_after(final_obs, at_ends) if len(final) else torch.zeros(0)
    else:
        if stale.any():
            evaluation = agent.evaluate(*(map_leaves(lambda leaf: leaf.flatten(0, 1), part) for part in (obs, sample)))
        last_value = agent.value(last_obs)
        finals = agent.value(final_obs) if len(final) else torch.zeros(0)
    if evaluation is not None:
        value = np.where(stale, evaluation.value.reshape(logprob.shape).numpy(force=True), value)
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
    """Some rows of a rollout, flat `[n, ...]`; of a recurrent agent's, whole sequences `[T, n, ...]`."""

    obs: Nested
    sample: Nested
    initial_state: State | None
    episode_start: Tensor
    _columns: dict[str, Tensor]

    def evaluate(self, agent: ActorCritic) -> Evaluation:
        """What the agent says of it now."""
        if isinstance(agent, RecurrentActorCritic):
            assert self.initial_state is not None
            return agent.evaluate_sequences(self.obs, self.sample, self.initial_state, self.episode_start)
        return agent.evaluate(self.obs, self.sample)

    def split(self, size: int) -> Iterator[Minibatch]:
        """Smaller ones, of about `size` rows; sequences stay whole."""
        rows, axis = (1, 0) if self.initial_state is None else (self.episode_start.shape[0], 1)
        width = self.episode_start.shape[axis]
        for chosen in torch.split(torch.arange(width, device=self.episode_start.device), max(1, size // rows)):
            yield self.take(chosen)

    def take(self, chosen: Tensor) -> Minibatch:
        """Some of its rows, or of its sequences."""
        axis = 0 if self.initial_state is None else 1

        def some(leaf: Tensor) -> Tensor:
            return leaf.index_select(axis, chosen)

        return Minibatch(
            map_leaves(some, self.obs),
            map_leaves(some, self.sample),
            None if self.initial_state is None else tuple(part[chosen] for part in self.initial_state),
            some(self.episode_start),
            {name: some(column) for name, column in self._columns.items()},
        )

    def normalized(self) -> Minibatch:
        """With advantages of mean 0 and deviation 1."""
        advantages = self._columns["advantages"]
        found = normalize(advantages, self._columns.get("valid"))
        return replace(self, _columns={**self._columns, "advantages": found})

    def __getitem__(self, name: str) -> Tensor:
        """A column, flat."""
        return self._columns[name].flatten()

    @property
    def valid(self) -> Tensor | None:
        """Which rows count; None: all of them."""
        return self["valid"] if "valid" in self._columns else None

    @property
    def num_valid(self) -> Tensor | int:
        return len(self) if self.valid is None else self.valid.sum().clamp_min(1)

    def flat(self) -> Minibatch:
        """Sequences as single rows, of an agent without memory."""

        def joined(leaf: Tensor) -> Tensor:
            return leaf.flatten(0, 1)

        return Minibatch(
            map_leaves(joined, self.obs),
            map_leaves(joined, self.sample),
            None,
            joined(self.episode_start),
            {name: joined(column) for name, column in self._columns.items()},
        )

    def __len__(self) -> int:
        return self.episode_start.numel()


def minibatches(
    rollout: Rollout, columns: dict[str, Tensor], size: int, generator: torch.Generator
) -> Iterator[Minibatch]:
    """All rows once, shuffled, about `size` at a time (the last may be smaller); a recurrent agent's whole sequences.

    `columns` are `[T, N]` tensors that are taken along.
    """
    rows, slots = rollout.shape
    whole = Minibatch(rollout.obs, rollout.sample, rollout.initial_state, rollout.episode_start, columns)
    if rollout.initial_state is None:
        whole, rows, slots = whole.flat(), 1, rows * slots
    order = torch.randperm(slots, generator=generator).to(rollout.valid.device)
    for chosen in torch.split(order, max(1, size // rows)):
        yield whole.take(chosen)
