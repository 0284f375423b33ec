"""Selects the episodes that went better than expected: DistRL's trajectory-level value."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from farstep.checkpoint.checks import require
from farstep.core import Array, Nested
from farstep.learners.episodes.padded_episodes import Episodes
from farstep.learners.loop.checkpoints.saving import check_tensor
from farstep.learners.networks.encoders import hidden_layers
from farstep.learners.networks.nets import ActorCritic, NetConfig
from farstep.learners.networks.normalizers import RunningMoments
from farstep.learners.replay.optimizer import FlatAdam
from farstep.learners.replay.saved_parts import SavedNetwork
from farstep.schema import map_leaves

_SCORES = 1_000
"""Number of recent episodes among which the quantile is computed."""


class TrajectoryCritic(nn.Module):
    """Predicts the outcome of an episode from its first observation, to find episodes that went better than expected.

    The outcome is the return, normalized by its running mean and standard deviation; or success, as a logit.

    Args:
        agent: The agent; its encoders make the features, and do not learn from this critic.
        config: Options of the network.
    """

    def __init__(self, agent: ActorCritic, config: NetConfig) -> None:
        super().__init__()
        layers, width = hidden_layers(agent.encoders.width, config.hidden, config.activation)
        self.layers = nn.Sequential(layers, nn.Linear(width, 1))
        self.returns = RunningMoments(())

    def forward(self, agent: ActorCritic, first_obs: Nested) -> Tensor:
        """Return the predictions `[N]` for first observations `[N, ...]`."""
        with torch.no_grad():
            features = agent.encoders(first_obs)
        prediction: Tensor = self.layers(features)
        return prediction.squeeze(-1)


class EpisodeFilter:
    """Selects episodes whose outcome exceeds the critic's prediction by at least a quantile of recent episodes.

    A `SavedPart`: the parameters of the critic, and `scores`, outcome minus prediction of recent episodes.

    Args:
        agent: The agent, on the learner's device.
        net: Options of the critic's network.
        quantile: The quantile, from 0 to 1.
        success_gamma: Discount factor, if the outcome is success; None: it is the normalized return.
        optimizer: Learning rate and largest gradient norm.
    """

    def __init__(
        self,
        agent: ActorCritic,
        net: NetConfig,
        quantile: float,
        success_gamma: float | None,
        optimizer: tuple[float, float],
    ) -> None:
        self._agent, self._quantile, self._success_gamma = agent, quantile, success_gamma
        self._device = next(agent.parameters()).device
        self.critic = TrajectoryCritic(agent, net).to(self._device)
        self.optimizer = FlatAdam(self.critic.parameters(), *optimizer)
        self._scores: deque[float] = deque(maxlen=_SCORES)

    def select(self, episodes: Episodes) -> tuple[Array, Tensor]:
        """Return which episodes pass, `[N]`, and the critic's loss, after an update of the critic on them."""
        prediction = self.critic(self._agent, map_leaves(lambda leaf: leaf[0], episodes.obs))
        if self._success_gamma is not None:
            outcome = torch.from_numpy(episodes.success(self._success_gamma)[0]).to(self._device)
            loss = functional.binary_cross_entropy_with_logits(prediction, outcome)
            scores = outcome - prediction.detach().sigmoid()
        else:
            returns = torch.from_numpy(np.where(episodes.valid, episodes.reward + episodes.penalty, 0).sum(0))
            returns = returns.to(self._device)
            self.critic.returns.update(returns)
            outcome = self.critic.returns(returns)
            loss = 0.5 * (prediction - outcome).square().mean()
            scores = outcome - prediction.detach()
        self.optimizer.minimize(loss)
        found = scores.numpy(force=True)
        self._scores.extend(found.tolist())
        return found >= np.quantile(self._scores, self._quantile), loss

    def state(self) -> dict[str, object]:
        """Return the parameters of the critic by name, and the scores."""
        return {**SavedNetwork(self.critic).state(), "scores": torch.tensor(list(self._scores), dtype=torch.float64)}

    def check(self, where: str, state: object) -> tuple[dict[str, Tensor], list[float]]:
        """Return saved parameters and scores; raise `Refused`, naming them `where`, if they do not fit."""
        scores: object = torch.zeros(0, dtype=torch.float64)  # absent in checkpoints of earlier versions
        if isinstance(state, dict):
            state = dict(state)
            scores = state.pop("scores", scores)
        parameters = SavedNetwork(self.critic).check(where, state)
        count = len(scores) if isinstance(scores, Tensor) and scores.ndim == 1 else -1
        require(0 <= count <= _SCORES, f"{where}.scores is not an array of at most {_SCORES} numbers")
        checked = check_tensor(f"{where}.scores", scores, torch.zeros(count, dtype=torch.float64))
        return parameters, checked.tolist()

    def load(self, saved: tuple[dict[str, Tensor], list[float]]) -> None:
        """Restore checked parameters and scores."""
        parameters, scores = saved
        SavedNetwork(self.critic).load(parameters)
        self._scores = deque(scores, maxlen=_SCORES)
