"""Fixed points of critics that are trained on V-trace and Retrace targets, by exact expectations."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from farstep.learners.returns import retrace_delta, retrace_q, vtrace

Array = NDArray[Any]


class Process:
    """A small random decision process, two policies, and every trajectory of `steps` rows, with how likely it is
    under the policy that acts. So expectations are exact."""

    def __init__(self, seed: int, steps: int = 3, states: int = 3, actions: int = 2) -> None:
        rng = np.random.default_rng(seed)
        self.moves = rng.dirichlet(np.ones(states), (states, actions))
        self.reward = rng.normal(size=(states, actions)) * 3
        self.mu: Array
        self.pi: Array
        self.mu, self.pi = (rng.dirichlet(np.ones(actions) * 2, states) for _ in range(2))
        self.gamma, self.states = 0.9, states
        choices = itertools.product(range(states), *[range(actions), range(states)] * steps)
        paths = np.array(list(choices)).T
        self.state, self.action = paths[0::2], paths[1::2]
        taken = self.state[:-1], self.action
        self.likelihood = (self.mu[taken] * self.moves[(*taken, self.state[1:])]).prod(0)
        self.log_rhos = np.log(self.pi[taken] / self.mu[taken])
        self.rewards = self.reward[taken]

    def rows(self, values: Array) -> dict[str, Any]:
        found = values[self.state]
        return {
            "log_rhos": self.log_rhos,
            "rewards": self.rewards,
            "values": found[:-1],
            "bootstrap_value": found[-1],
            "discounts": np.full(self.rewards.shape, self.gamma),
        }

    def mean(self, first_row: Array, key: Array, size: int) -> Array:
        """Of the first row of each trajectory, over those that begin alike."""
        total = np.bincount(key, self.likelihood * first_row, size)
        return total / np.bincount(key, self.likelihood, size)

    def clipped(self, rho_bar: float) -> Array:
        weights = np.minimum(rho_bar * self.mu, self.pi)
        return weights / weights.sum(1, keepdims=True)

    def values_of(self, policy: Array) -> Array:
        moves = np.einsum("sa,sat->st", policy, self.moves)
        return np.linalg.solve(np.eye(self.states) - self.gamma * moves, (policy * self.reward).sum(1))

    def learned(self, target: Any) -> Array:
        values = np.zeros(self.states)
        for _ in range(400):
            values = self.mean(target(self.rows(values))[0], self.state[0], self.states)
        return values


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rho_bar", [0.7, 1.0, 2.0, math.inf])
def test_a_vtrace_critic_learns_the_value_of_the_clipped_policy(seed: int, rho_bar: float) -> None:
    process = Process(seed)
    expected = process.values_of(process.pi if rho_bar == math.inf else process.clipped(rho_bar))
    for c_bar in (0.5, 1.0):  # which changes the speed only
        found = process.learned(lambda rows, c_bar=c_bar: vtrace(**rows, rho_bar=rho_bar, c_bar=c_bar)[0])
        np.testing.assert_allclose(found, expected, atol=1e-8)


@pytest.mark.parametrize("seed", range(3))
def test_a_critic_of_the_published_retrace_target_learns_something_else(seed: int) -> None:
    process = Process(seed)
    found = process.learned(lambda rows: rows["values"] + retrace_delta(**rows))
    at_mu, at_clipped = process.values_of(process.mu), process.values_of(process.clipped(1.0))
    assert np.abs(found - at_clipped).max() > 1e-2 and np.abs(found - at_mu).max() > 1e-3
    assert np.abs(found - at_mu).max() < np.abs(at_clipped - at_mu).max(), "between the two"


@pytest.mark.parametrize("seed", range(3))
def test_delta_is_the_advantage_where_values_are_those_of_the_clipped_policy(seed: int) -> None:
    process = Process(seed)
    actions = process.mu.shape[1]
    key = process.state[0] * actions + process.action[0]

    def mean_delta(values: Array) -> Array:
        return process.mean(retrace_delta(**process.rows(values))[0], key, process.mu.size).reshape(process.mu.shape)

    def advantage(values: Array) -> Array:
        return process.reward + process.gamma * process.moves @ values - values[:, None]

    values = process.values_of(process.clipped(1.0))
    np.testing.assert_allclose(mean_delta(values), advantage(values), atol=1e-10)
    values = process.values_of(process.pi)
    assert np.abs(mean_delta(values) - advantage(values)).max() > 1e-3, "clipping has a bias there"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lam", [0.5, 1.0])
def test_retrace_learns_the_action_values_of_the_policy(seed: int, lam: float) -> None:
    process = Process(seed)
    q: Array = np.zeros(process.mu.shape)
    key = process.state[0] * q.shape[1] + process.action[0]
    for _ in range(400):
        rows = process.rows((process.pi * q).sum(1))
        targets = retrace_q(q_values=q[process.state[:-1], process.action], **rows, lam=lam)
        q = process.mean(targets[0], key, q.size).reshape(q.shape)
    expected = process.reward + process.gamma * process.moves @ process.values_of(process.pi)
    np.testing.assert_allclose(q, expected, atol=1e-8)


def test_bandit_of_the_specification_converges_to_the_expected_values() -> None:
    """Spec methods 4.5.5: pi = (.2, .8), mu = (.5, .5), rewards 0 and 1, one step."""
    log_rhos, rewards, discounts = np.log([[0.4, 1.6]]), np.array([[0.0, 1.0]]), np.zeros((1, 2))

    def learned(target: Any) -> float:
        value = 0.0
        for _ in range(200):
            rows = log_rhos, rewards, np.full((1, 2), value), np.zeros(2), discounts
            value = float(target(*rows).mean())  # mu is even
        return value

    assert learned(lambda *rows: rows[2] + retrace_delta(*rows)) == pytest.approx(0.5)
    assert learned(lambda *rows: vtrace(*rows)[0]) == pytest.approx(5 / 7)
    unclipped: Any = partial(vtrace, rho_bar=math.inf)
    assert learned(lambda *rows: unclipped(*rows)[0]) == pytest.approx(0.8)
