"""Returns against hand-worked and published numbers, against sums written out in O(T^2), and by properties."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from farstep.errors import ConfigError
from farstep.learners.returns import (
    fold_ends,
    gae,
    lambda_returns,
    n_step,
    retrace_delta,
    retrace_q,
    usable,
    vtrace,
)

Array = NDArray[Any]
T, N = 9, 6
seeds = st.integers(0, 10**6)
units = st.floats(0.0, 1.0)


class Rollout(NamedTuple):
    """Random rows with ends of both kinds; NaN in entries that must not be used."""

    rewards: Array
    values: Array
    last_values: Array
    terminated: Array
    truncated: Array
    final_values: Array

    @classmethod
    def random(cls, seed: int, steps: int = T, slots: int = N, dtype: Any = np.float64) -> Rollout:
        rng = np.random.default_rng(seed)
        terminated, truncated = (rng.random((steps, slots)) < 0.15 for _ in range(2))
        final_values = np.where(truncated & ~terminated, rng.normal(size=(steps, slots)), np.nan)
        rewards, values = (rng.normal(size=(steps, slots)).astype(dtype) for _ in range(2))
        last_values = np.where((terminated | truncated)[-1], np.nan, rng.normal(size=slots))
        return cls(rewards, values, last_values.astype(dtype), terminated, truncated, final_values.astype(dtype))

    @property
    def ended(self) -> Array:
        return self.terminated | self.truncated

    def following(self, t: int, i: int) -> float:
        """The value of what follows a row."""
        if self.terminated[t, i]:
            return 0.0
        if self.truncated[t, i]:
            return float(self.final_values[t, i])
        return float(self.last_values[i] if t + 1 == len(self.values) else self.values[t + 1, i])


# References: sums as the papers have them, term by term.


def gae_reference(rollout: Rollout, gamma: float, lam: float) -> Array:
    found = np.zeros(rollout.values.shape)
    for t, i in np.ndindex(found.shape):
        for k in range(t, len(found)):
            error = rollout.rewards[k, i] + gamma * rollout.following(k, i) - rollout.values[k, i]
            found[t, i] += (gamma * lam) ** (k - t) * error
            if rollout.ended[k, i]:
                break
    return found


def n_step_reference(rollout: Rollout, gamma: float, n: int) -> Array:
    found = np.zeros(rollout.values.shape)
    for t, i in np.ndindex(found.shape):
        for k in range(t, min(t + n, len(found))):
            found[t, i] += gamma ** (k - t) * rollout.rewards[k, i]
            if rollout.ended[k, i]:
                break
        found[t, i] += gamma ** (k - t + 1) * rollout.following(k, i)
    return found


def trace_reference(errors: Array, discounts: Array, weights: Array, first: int) -> Array:
    """sum_k (prod_{s<=j<k} discount_j) (prod_{s+first <= i < k+first} c_i) e_k"""
    found = np.zeros(errors.shape)
    for s, i in np.ndindex(found.shape):
        for k in range(s, len(found)):
            between = weights[s + first : k + first, i]
            found[s, i] += np.prod(discounts[s:k, i]) * np.prod(between) * errors[k, i]
    return found


def off_policy(seed: int, steps: int = T, slots: int = N) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    drawn = {name: rng.normal(size=(steps, slots)) for name in ("log_rhos", "rewards", "values")}
    discounts = rng.uniform(0.5, 1.0, (steps, slots)) * (rng.random((steps, slots)) > 0.2)
    return {**drawn, "bootstrap_value": rng.normal(size=slots), "discounts": discounts}


def errors_of(rows: dict[str, Array]) -> Array:
    following = np.vstack([rows["values"][1:], rows["bootstrap_value"][None]])
    return rows["rewards"] + rows["discounts"] * following - rows["values"]


# GAE, lambda returns, n-step returns.


def test_gae_of_the_published_vectors() -> None:
    """Spec async_ppo 1.7. `done` there is of the observation before a row: row t ends if done[t + 1]."""
    rewards = np.array([[1, 0], [0, 1], [2, 0]], np.float32)
    values = np.array([[0.5, 0.2], [0.4, 0.1], [0.3, 0.6], [0.7, 0.8]], np.float32)
    done = np.array([[0, 0], [0, 1], [0, 0], [1, 0]], bool)
    nothing = np.zeros_like(done[1:])
    finals = np.full_like(rewards, np.nan)
    advantages, returns = gae(rewards, values[:-1], values[-1], done[1:], nothing, finals, 0.99, 0.95)
    assert advantages.dtype == returns.dtype == np.float32
    expected = [[2.802847, 0], [1.895850, 1.774576], [2, 0.792]]
    np.testing.assert_allclose(returns, expected, rtol=1e-6, atol=1e-6)
    expected = [[2.302847, -0.2], [1.495850, 1.674576], [1.7, 0.192]]
    np.testing.assert_allclose(advantages, expected, rtol=1e-6, atol=1e-6)


def test_an_end_by_hand() -> None:
    """One environment, gamma = lambda = 1/2: row 0 is terminated, row 1 truncated with 8 still to come, row 2 both."""
    column = [[1.0], [1.0], [1.0], [1.0]]
    terminated, truncated = np.array([[True], [False], [True], [False]]), np.array([[False], [True], [True], [False]])
    finals = np.array([[np.nan], [8.0], [np.nan], [np.nan]])
    advantages, returns = gae(
        np.array(column), np.array(column), np.array([6.0]), terminated, truncated, finals, 0.5, 0.5
    )
    assert advantages.ravel().tolist() == [0.0, 4.0, 0.0, 3.0]
    assert returns.ravel().tolist() == [1.0, 5.0, 1.0, 4.0]


@settings(max_examples=50, deadline=None)
@given(seeds, units, units)
def test_gae_is_the_sum_of_the_paper(seed: int, gamma: float, lam: float) -> None:
    rollout = Rollout.random(seed)
    advantages, returns = gae(*rollout, gamma, lam)
    np.testing.assert_allclose(advantages, gae_reference(rollout, gamma, lam), atol=1e-12)
    np.testing.assert_allclose(returns, advantages + rollout.values, atol=1e-12)
    np.testing.assert_array_equal(lambda_returns(*rollout, gamma, lam), returns)


@settings(max_examples=50, deadline=None)
@given(seeds, units, st.integers(1, T + 3))
def test_n_step_returns_are_sums_of_rewards(seed: int, gamma: float, n: int) -> None:
    rollout = Rollout.random(seed)
    np.testing.assert_allclose(n_step(*rollout, gamma, n), n_step_reference(rollout, gamma, n), atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(seeds, units, units)
def test_lambda_returns_are_a_mean_of_n_step_returns(seed: int, gamma: float, lam: float) -> None:
    """(1 - lambda) sum_n lambda^(n-1) G^(n), where beyond an end all n-step returns are equal."""
    rollout = Rollout.random(seed)
    expected = lam**T * n_step_reference(rollout, gamma, T)
    for n in range(1, T + 1):
        expected += (1 - lam) * lam ** (n - 1) * n_step_reference(rollout, gamma, n)
    np.testing.assert_allclose(lambda_returns(*rollout, gamma, lam), expected, atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(seeds, units, units)
def test_returns_of_a_batch_equal_those_of_its_single_episodes(seed: int, gamma: float, lam: float) -> None:
    rollout = Rollout.random(seed)
    found = gae(*rollout, gamma, lam)[0]
    for i in range(N):
        start = 0
        for stop in [*(np.flatnonzero(rollout.ended[:, i]) + 1), T]:
            rows = slice(start, stop), slice(i, i + 1)
            episode = Rollout(*(a[i : i + 1] if a.ndim == 1 else a[rows] for a in rollout))
            if start < stop < T:
                episode = episode._replace(last_values=np.array([np.nan]))  # what follows is another episode's
            np.testing.assert_allclose(found[rows], gae(*episode, gamma, lam)[0], atol=1e-12)
            start = stop


@pytest.mark.parametrize("shape", [(1, 3), (5, 1), (1, 1)])
def test_small_batches(shape: tuple[int, int]) -> None:
    rollout = Rollout.random(3, *shape)
    np.testing.assert_allclose(gae(*rollout, 0.9, 0.8)[0], gae_reference(rollout, 0.9, 0.8), atol=1e-12)
    np.testing.assert_allclose(n_step(*rollout, 0.9, 2), n_step_reference(rollout, 0.9, 2), atol=1e-12)


# Rows without a known successor: filler rows and cuts.


def test_usable_rows_are_transitions_whose_successor_is_known() -> None:
    def flags(text: str) -> Array:
        return np.array([[letter == "x" for letter in text]]).T

    #               an end, two fillers | a cut | a row before filler | an end | the last row
    valid = flags("xx..xxxx.xxx")
    starts = flags("....x.x..x.x")
    ended = flags(".x........x.")
    expected = flags("xx..x.x..xxx")
    nothing = np.zeros_like(ended)
    for terminated, truncated in [(ended, nothing), (nothing, ended), (ended, ended)]:
        np.testing.assert_array_equal(usable(valid, starts, terminated, truncated), expected)
    assert valid.sum() == 9, "an argument was changed"


def cut_rollout(seed: int) -> tuple[Rollout, Array, Rollout, Rollout]:
    """A rollout that lost rows after row 3 and has a filler row after an end at row 6; what is before the cut as a
    rollout that ends with the value of row 3; what is after the filler."""
    rollout = Rollout.random(seed, 12)
    rollout.terminated[:9] = rollout.truncated[:9] = False
    rollout.terminated[6] = True
    rollout.final_values[:9] = np.nan
    valid, starts = np.ones((12, N), bool), np.zeros((12, N), bool)
    valid[7], starts[4], starts[8] = False, True, True
    mask = usable(valid, starts, rollout.terminated, rollout.truncated)
    assert np.flatnonzero(~mask[:, 0]).tolist() == [3, 7]
    before = Rollout(*(a[:3] if a.ndim == 2 else rollout.values[3] for a in rollout))
    after = Rollout(*(a[8:] if a.ndim == 2 else a for a in rollout))
    rollout.rewards[3] = np.nan  # its successor is lost, so its reward is no use either; its value is
    rollout.rewards[7] = rollout.final_values[7] = np.inf
    rollout.values[7] = np.nan
    return rollout, mask, before, after


@settings(max_examples=30, deadline=None)
@given(seeds, units, units)
def test_returns_do_not_cross_a_cut(seed: int, gamma: float, lam: float) -> None:
    rollout, mask, before, after = cut_rollout(seed)
    middle = Rollout(*(a[4:7] if a.ndim == 2 else a for a in rollout))
    with np.errstate(all="raise", under="ignore"):
        advantages, returns = gae(*rollout, gamma, lam, valid=mask)
        sums = n_step(*rollout, gamma, 2, valid=mask)
    for rows, part in ((slice(0, 3), before), (slice(4, 7), middle), (slice(8, 12), after)):
        np.testing.assert_allclose(advantages[rows], gae_reference(part, gamma, lam), atol=1e-12)
        np.testing.assert_allclose(sums[rows], n_step_reference(part, gamma, 2), atol=1e-12)
    assert (advantages[~mask] == 0).all()
    for found in (returns, sums):
        np.testing.assert_array_equal(found[~mask], rollout.values[~mask])


@settings(max_examples=30, deadline=None)
@given(seeds, units, units)
def test_off_policy_traces_stop_at_a_cut_too(seed: int, gamma: float, lam: float) -> None:
    rollout, mask, before, after = cut_rollout(seed)
    log_rhos = np.random.default_rng(seed).normal(size=mask.shape)
    pieces = [(slice(0, 3), before), (slice(8, 12), after)]
    log_rhos[7] = np.nan

    def folded(part: Rollout, logs: Array) -> tuple[Array, Array, Array, Array, Array]:
        rewards, discounts, _ = fold_ends(part.rewards, part.terminated, part.truncated, part.final_values, gamma)
        return logs, rewards, part.values, part.last_values, discounts

    whole = folded(rollout, log_rhos)
    vs, advantages = vtrace(*whole, lam=lam, valid=mask)
    delta = retrace_delta(*whole, lam, valid=mask)
    log_rhos, rewards, values, bootstrap, discounts = whole
    targets = retrace_q(log_rhos, rewards, values, values, bootstrap, discounts, lam, valid=mask)
    for rows, part in pieces:
        arguments = folded(part, log_rhos[rows])
        expected = vtrace(*arguments, lam=lam)
        np.testing.assert_allclose(vs[rows], expected[0], atol=1e-12)
        np.testing.assert_allclose(advantages[rows], expected[1], atol=1e-12)
        np.testing.assert_allclose(delta[rows], retrace_delta(*arguments, lam), atol=1e-12)
    assert (advantages[~mask] == 0).all() and (delta[~mask] == 0).all()
    np.testing.assert_array_equal(vs[~mask], rollout.values[~mask])
    np.testing.assert_allclose(targets, delta + rollout.values, atol=1e-12)


# V-trace and Retrace.


def test_vtrace_of_the_impala_vectors() -> None:
    """Spec methods 4.5.1: the inputs of scalable_agent's test, against the sum written out."""
    steps = 5
    for slots in (1, 5):
        grid = np.arange(steps * slots, dtype=np.float32).reshape(steps, slots)
        rows: dict[str, Any] = {
            "log_rhos": 5 * (grid / (slots * steps) - 0.5),
            "rewards": grid,
            "values": grid / slots,
            "bootstrap_value": np.arange(slots, dtype=np.float32) + 1.0,
            "discounts": np.array([[0.9 / (b + 1) for b in range(slots)]] * steps, np.float32),
        }
        vs, advantages = vtrace(**rows, rho_bar=3.7, c_bar=1.0, pg_rho_bar=2.2)
        assert vs.dtype == advantages.dtype == np.float32
        ratios = np.exp(rows["log_rhos"].astype(np.float64))
        errors = np.minimum(ratios, 3.7) * errors_of(rows)
        expected = rows["values"] + trace_reference(errors, rows["discounts"], np.minimum(ratios, 1), 0)
        np.testing.assert_allclose(vs, expected, rtol=1e-5)
        following = np.vstack([expected[1:], rows["bootstrap_value"][None]])
        expected = np.minimum(ratios, 2.2) * (rows["rewards"] + rows["discounts"] * following - rows["values"])
        np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-5)


MU = [[[8.9, 0.7], [5, 1], [0.6, 0.1], [-0.9, -0.1]], [[0.3, -5], [1, -8], [0.3, 1.7], [4.7, 3.3]]]
PI = [[[0.4, 0.5], [9.2, 8.8], [0.7, 4.4], [7.9, 1.4]], [[1, 0.9], [1, -1], [-4.3, 8.7], [0.8, 0.3]]]
ACTIONS = [[0, 1, 0, 0], [1, 0, 0, 1]]


def rlax_rows() -> dict[str, Any]:
    """Spec methods 4.5.2."""

    def log_probability(logits: Any) -> Array:
        logits = np.asarray(logits)
        logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return np.take_along_axis(logs, np.array(ACTIONS)[..., None], -1)[..., 0]

    return {
        "log_rhos": (log_probability(PI) - log_probability(MU)).T,
        "rewards": np.array([[-1.3, -1.3, 2.3, 42], [1.3, 5.3, -3.3, -5]]).T,
        "values": np.array([[2.1, 1.1, -3.1, 0], [3.1, 0.1, -1.1, 7.4]]).T,
        "bootstrap_value": np.array([8.4, -1.2]),
        "discounts": np.array([[0, 0.89, 0.85, 0.99], [0.88, 1, 0.83, 0.95]]).T,
    }


def test_the_rlax_vectors() -> None:
    rows = rlax_rows()
    expected = [[0.4751513, 22.3122237, 0.0387608, 3.2206988], [95.6391751, 0.8809058, 1.1426e-5, 1.9085436]]
    np.testing.assert_allclose(np.exp(rows["log_rhos"]).T, expected, rtol=1e-4)
    vtrace_errors = {
        1.0: [[-1.6155143, -3.4973226, 1.8670533, 50.316], [1.4662437, 3.6116405, -8.3327e-5, -13.54]],
        0.9: [[-1.6155143, -3.7962756, 1.7012789, 50.316], [1.148433, 3.6116578, -7.05e-5, -13.54]],
    }
    deltas = {
        1.0: [[-3.4, -3.4973224, 48.1686, 50.316], [1.4662434, 4.0999166, -7.2962, -13.54]],
        0.9: [[-3.4, -3.7962756, 43.89174, 50.316], [1.148433, 4.0999365, -6.17238, -13.54]],
    }
    for lam in (1.0, 0.9):
        vs, advantages = vtrace(**rows, lam=lam)
        np.testing.assert_allclose((vs - rows["values"]).T, vtrace_errors[lam], rtol=1e-5, atol=1e-7)
        delta = retrace_delta(**rows, lam=lam)
        np.testing.assert_allclose(delta.T, deltas[lam], rtol=1e-5)
        # rlax's q_estimate is V + Delta, so that its advantage is the clipped ratio times Delta.
        ratios = np.minimum(1, np.exp(rows["log_rhos"]))
        np.testing.assert_allclose(advantages, ratios * delta, atol=1e-12)


def test_retrace_of_the_rlax_vectors() -> None:
    """Spec methods 4.5.3; the target network's Q makes the targets, the network's own is compared with them."""
    own = np.array([[[1.1, 2.1], [-1.1, 1.1], [3.1, -3.1]], [[2.1, 3.1], [9.5, 0.1], [-2.1, -1.1]]])
    target = np.array(
        [[[1.2, 2.2], [-1.2, 0.2], [2.2, -1.2], [-2.25, -6]], [[4.2, 2.2], [1.2, 1.2], [-1.2, -2.2], [1.5, 1]]]
    )
    pi = np.array([[[0.5, 0.5], [0.2, 0.8], [0.6, 0.4], [0.9, 0.1]], [[0.1, 0.9], [1, 0], [0.3, 0.7], [0.7, 0.3]]])
    mu = np.array([[0.5, 0.1, 0.9, 0.3], [0.4, 0.6, 1, 0.9]])
    rewards, discounts = rlax_rows()["rewards"][:-1], rlax_rows()["discounts"][:-1]

    def taken(table: Array) -> Array:
        return np.take_along_axis(table, np.array(ACTIONS)[:, : table.shape[1], None], -1)[..., 0].T

    values = (pi * target).sum(-1).T
    log_rhos = np.log(taken(pi)) - np.log(mu.T)
    targets = retrace_q(log_rhos[:-1], rewards, taken(target)[:-1], values[:-1], values[-1], discounts, 0.9)
    expected = [[2.8800001, 3.8934109, 4.5942383], [0.31121615, 20.253206, 0.0031601219]]
    np.testing.assert_allclose(0.5 * (targets - taken(own)).T ** 2, expected, rtol=1e-5)


def test_the_hand_worked_vector() -> None:
    """Spec methods 4.5.4; the last discount is 0, so the bootstrap has no effect."""
    rewards, discounts, values = (np.array([a]).T for a in ([1.0, 0, 2], [0.9, 0.9, 0], [0.3, 0.6, 0.2]))
    log_rhos = np.log(np.array([[0.5, 2, 0.8]]).T)
    for bootstrap in (5.0, np.nan):
        rows = log_rhos, rewards, values, np.array([bootstrap]), discounts
        np.testing.assert_allclose(vtrace(*rows)[0].ravel(), [1.3142, 1.476, 1.64], atol=1e-12)
        np.testing.assert_allclose(retrace_delta(*rows).ravel(), [2.0284, 0.876, 1.8], atol=1e-12)
        np.testing.assert_allclose(retrace_delta(*rows, 0.8).ravel(), [1.684096, 0.6168, 1.8], atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(seeds, units, st.floats(0.2, 5.0), st.floats(0.2, 5.0))
def test_traces_are_the_sums_of_the_papers(seed: int, lam: float, rho_bar: float, c_bar: float) -> None:
    rows = off_policy(seed)
    ratios, discounts, errors = np.exp(rows["log_rhos"]), rows["discounts"], errors_of(rows)
    vs = vtrace(**rows, rho_bar=rho_bar, c_bar=c_bar, lam=lam)[0]
    expected = trace_reference(np.minimum(rho_bar, ratios) * errors, discounts, lam * np.minimum(c_bar, ratios), 0)
    np.testing.assert_allclose(vs - rows["values"], expected, atol=1e-10)
    expected = trace_reference(errors, discounts, lam * np.minimum(1, ratios), 1)
    np.testing.assert_allclose(retrace_delta(**rows, lam=lam), expected, atol=1e-10)
    q_values = np.random.default_rng(seed + 1).normal(size=(T, N))
    errors += rows["values"] - q_values
    expected = q_values + trace_reference(errors, discounts, lam * np.minimum(1, ratios), 1)
    np.testing.assert_allclose(retrace_q(q_values=q_values, **rows, lam=lam), expected, atol=1e-10)


@settings(max_examples=50, deadline=None)
@given(seeds, units)
def test_vtrace_is_retrace_times_the_clipped_ratio(seed: int, lam: float) -> None:
    """Spec methods 4.3, for rho_bar = c_bar = 1 and any lambda; the q-estimate minus V is Delta."""
    rows = off_policy(seed)
    ratios, delta = np.minimum(1, np.exp(rows["log_rhos"])), retrace_delta(**rows, lam=lam)
    vs, advantages = vtrace(**rows, lam=lam)
    np.testing.assert_allclose(vs - rows["values"], ratios * delta, atol=1e-12)
    np.testing.assert_allclose(advantages, ratios * delta, atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(seeds, st.floats(0.01, 1.0), units)
def test_on_policy_all_are_the_n_step_return_and_with_lambda_gae(seed: int, gamma: float, lam: float) -> None:
    rollout = Rollout.random(seed)
    rewards, discounts, continues = fold_ends(
        rollout.rewards, rollout.terminated, rollout.truncated, rollout.final_values, gamma
    )
    np.testing.assert_array_equal(continues, ~rollout.ended)
    rows = np.zeros((T, N)), rewards, rollout.values, rollout.last_values, discounts
    expected = n_step_reference(rollout, gamma, T)
    targets = retrace_q(rows[0], rewards, rollout.values, rollout.values, rollout.last_values, discounts)
    for found in (vtrace(*rows)[0], rollout.values + retrace_delta(*rows), targets):
        np.testing.assert_allclose(found, expected, atol=1e-12)
    expected = gae_reference(rollout, gamma, lam)
    vs, advantages = vtrace(*rows, lam=lam)
    for found in (vs - rollout.values, advantages, retrace_delta(*rows, lam)):
        np.testing.assert_allclose(found, expected, atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(seeds, units, st.integers(0, T - 2))
def test_a_discount_of_zero_splits_episodes(seed: int, lam: float, end: int) -> None:
    rows = off_policy(seed)
    rows["discounts"][end] = 0.0
    first = {name: a[: end + 1] if a.ndim == 2 else np.full(N, np.nan) for name, a in rows.items()}
    second = {name: a[end + 1 :] if a.ndim == 2 else a for name, a in rows.items()}

    def everything(rows: dict[str, Any]) -> list[Array]:
        values = rows["values"]
        return [*vtrace(**rows, lam=lam), retrace_delta(**rows, lam=lam), retrace_q(q_values=values, **rows, lam=lam)]

    for whole, *parts in zip(everything(rows), everything(first), everything(second), strict=True):
        np.testing.assert_allclose(whole, np.vstack(parts), atol=1e-12)


def test_a_truncated_row_bootstraps_from_its_final_observation_and_cuts_the_trace() -> None:
    """r = 1 with 10 still to come at row 0, which is truncated; row 1 is another episode's."""
    rows = np.array([[1.0], [3.0]]), np.array([[False], [False]]), np.array([[True], [False]])
    rewards, discounts, continues = fold_ends(*rows, np.array([[10.0], [np.nan]]), 0.5)
    assert (rewards.ravel().tolist(), discounts.ravel().tolist()) == ([6.0, 3.0], [0.0, 0.5])
    assert continues.ravel().tolist() == [False, True]
    arguments = np.log([[0.5], [2.0]]), rewards, np.array([[2.0], [1.0]]), np.array([4.0]), discounts
    assert vtrace(*arguments)[0].ravel().tolist() == pytest.approx([2 + 0.5 * 4, 1 + 4])
    assert vtrace(*arguments)[1].ravel().tolist() == pytest.approx([0.5 * 4, 4])
    assert retrace_delta(*arguments).ravel().tolist() == pytest.approx([4, 4])


def test_extreme_ratios_stay_finite() -> None:
    rows = off_policy(1)
    rows["log_rhos"] = np.where(rows["log_rhos"] > 0, np.inf, -np.inf)
    with np.errstate(all="raise", under="ignore"):
        for found in (*vtrace(**rows, rho_bar=math.inf), retrace_delta(**rows)):
            assert np.isfinite(found).all()


# Types and refusals.


def test_float32_is_returned_as_float32_and_summed_in_float64() -> None:
    rollout = Rollout.random(1, 2000, 3, np.float32)
    doubles = Rollout(*(a.astype(np.float64) if a.dtype.kind == "f" else a for a in rollout))
    exact = gae(*doubles, 0.999, 0.99)[0]
    found = gae(*rollout, 0.999, 0.99)[0]
    np.testing.assert_array_equal(found, exact.astype(np.float32))
    rollout = rollout._replace(rewards=rollout.rewards.astype(np.float64))
    outputs = [*gae(*rollout, 0.9, 0.9), n_step(*rollout, 0.9, 3), lambda_returns(*rollout, 0.9, 0.9)]
    assert {a.dtype for a in outputs} == {np.dtype(np.float32)}, "the dtype of values, for any dtype of rewards"


def test_arguments_are_left_as_they_are() -> None:
    rollout, mask, *_ = cut_rollout(1)
    before = [a.copy() for a in (*rollout, mask)]
    gae(*rollout, 0.9, 0.9, valid=mask)
    n_step(*rollout, 0.9, 2, valid=mask)
    for a, b in zip((*rollout, mask), before, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["rewards", "last_values", "terminated", "truncated", "final_values"])
def test_a_wrong_shape_is_refused_and_not_broadcast(name: str) -> None:
    rollout = Rollout.random(1)
    rollout = rollout._replace(**{name: getattr(rollout, name)[..., None]})
    for compute in (lambda: gae(*rollout, 0.9, 0.9), lambda: n_step(*rollout, 0.9, 3)):
        with pytest.raises(ConfigError, match=rf"{name} has shape .*, 1\]; expected \[.*Arrays are not broadcast"):
            compute()


@pytest.mark.parametrize(
    ("compute", "words"),
    [
        (lambda: gae(*Rollout.random(1), 1.1, 0.9), "gamma is 1.1; expected a number from 0 to 1"),
        (lambda: gae(*Rollout.random(1), 0.9, -1.0), "gae_lambda is -1.0"),
        (lambda: n_step(*Rollout.random(1), 0.9, 0), "n is 0; .* Use n >= 1"),
        (lambda: vtrace(**off_policy(1), lam=2.0), "lam is 2.0"),
        (lambda: vtrace(**off_policy(1), rho_bar=0.0), "rho_bar is 0.0; .* math.inf for no clip"),
        (lambda: gae(*Rollout.random(1), 0.9, 0.9, valid=np.ones(T, bool)), "valid has shape"),
        (lambda: vtrace(**off_policy(1), valid=np.ones(T, bool)), "valid has shape"),
        (
            lambda: usable(np.ones((2, 2)), np.ones((2, 2)), np.ones((2, 2)), np.ones(2)[:, None, None]),
            "terminated|truncated",
        ),
    ],
    ids=["gamma", "lambda", "n", "lam", "rho_bar", "valid", "off-policy valid", "flags"],
)
def test_wrong_options_are_refused(compute: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        compute()


def test_returns_need_no_torch() -> None:
    code = "import sys, farstep.learners.returns\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
