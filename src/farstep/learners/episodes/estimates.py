"""What the current networks say about replayed episodes: importance ratios, values and advantages of Retrace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from farstep.buffer.samplers import trajectory_priority
from farstep.core import Array
from farstep.learners.episodes.padded_episodes import Episodes
from farstep.learners.networks.nets import ActorCritic, Evaluation, RecurrentActorCritic
from farstep.learners.networks.normalizers import RewardScale
from farstep.learners.returns import LOG_RATIO_LIMIT, fold_ends, retrace_delta


def evaluate(agent: ActorCritic, episodes: Episodes) -> tuple[Evaluation, Tensor]:
    """Evaluate the valid steps of episodes, and the values of final observations `[N]`, without their gradient.

    A recurrent agent is unrolled from the start of each episode.
    """
    sample = episodes.valid_rows(episodes.sample)
    if not isinstance(agent, RecurrentActorCritic):
        with torch.no_grad():
            final_value = agent.value(episodes.final_obs)
        return agent.evaluate(episodes.valid_rows(episodes.obs), sample), final_value
    device = next(agent.parameters()).device
    starts = torch.zeros(episodes.valid.shape, dtype=torch.bool, device=device)
    starts[0] = True
    initial = tuple(part.to(device) for part in agent.initial_state(starts.shape[1]))
    features, states = agent.unroll(episodes.obs, initial, starts)
    last = torch.from_numpy(episodes.length - 1).to(device)
    columns = torch.arange(starts.shape[1], device=device)
    after = tuple(torch.stack(parts)[last, columns] for parts in zip(*states, strict=True))
    evaluation = agent.evaluate_features(features[episodes.steps.to(device)], sample)
    with torch.no_grad():
        return evaluation, agent.value_after(episodes.final_obs, after)


@dataclass(frozen=True)
class Estimates:
    """What the current networks say about episodes; arrays `[T, N]`, 0 on padding."""

    log_rho: Array
    logprob: Array
    value: Array
    delta: Array
    """Advantages of Retrace."""
    td_error: Array
    """One-step TD errors."""

    @property
    def rho(self) -> Array:
        """Importance ratios."""
        return np.exp(self.log_rho)

    def priorities(self, length: Array, w1: float, w2: float, w3: float) -> Array:
        """Return the priority of each episode for DPER, `[N]`."""
        columns = zip(length, self.td_error.T, self.rho.T, self.logprob.T, strict=True)
        return np.array(
            [trajectory_priority(td[:n], rho[:n], log[:n], w1=w1, w2=w2, w3=w3) for n, td, rho, log in columns]
        )


def estimate(
    episodes: Episodes,
    evaluation: Evaluation,
    final_value: Tensor,
    *,
    gamma: float,
    retrace_lambda: float,
    scale: RewardScale | None,
    are_logits: bool,
) -> Estimates:
    """Compute ratios, TD errors and advantages.

    Args:
        episodes: The episodes.
        evaluation: What `evaluate` returned for their valid steps.
        final_value: What `evaluate` returned for their final observations.
        gamma: Discount factor.
        retrace_lambda: Lambda of Retrace.
        scale: Scale of rewards; None: they are not scaled.
        are_logits: Whether values are logits of the probability of success.
    """
    valid = episodes.valid

    def on_grid(rows: Tensor) -> Array:
        grid = np.zeros(valid.shape, np.float32)
        grid[valid] = rows.numpy(force=True)
        return grid

    value = on_grid(evaluation.value.detach().sigmoid() if are_logits else evaluation.value)
    final = (final_value.sigmoid() if are_logits else final_value).numpy(force=True)
    logprob = on_grid(evaluation.logprob)
    log_rho = np.where(valid, logprob - episodes.logprob, 0.0).clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    reward = episodes.reward + episodes.penalty
    if scale is not None:
        reward = scale(reward)
    final = np.broadcast_to(final, valid.shape)
    rewards, discounts, _ = fold_ends(reward, episodes.terminated, episodes.truncated, final, gamma)
    after = np.zeros(valid.shape[1])
    delta, td_error = (
        retrace_delta(log_rho, rewards, value, after, discounts, lam, valid=valid) for lam in (retrace_lambda, 0.0)
    )
    return Estimates(log_rho, logprob, value, delta, td_error)


def critic_targets(
    values: Array, deltas: Array, rhos: Array, mode: Literal["vtrace", "paper"], rho_bar: float
) -> Array:
    """Return the critic's targets of steps, all arrays of the same shape.

        V + min(rho_bar, rho) * Delta   mode "vtrace"       V + Delta   mode "paper"

    Args:
        values: Values V.
        deltas: Advantages Delta of Retrace.
        rhos: Importance ratios.
        mode: Which target.
        rho_bar: Clip of the ratios.
    """
    return values + (deltas if mode == "paper" else np.minimum(rho_bar, rhos) * deltas)
