"""Advantages and returns in NumPy, on time-major arrays `[T, N]` of T rows and N environments.

The value that follows row t depends on how the row ends:

    row t ──► V of row t+1            the episode continues
          ──► 0                       terminated (also if truncated at the same time)
          ──► V of its final_obs      truncated: `final_values[t]`, ignored on all other rows
          ──► unknown                 the worker died and the next rows are lost, or the next row is a filler row (a
                                      reset of a vector environment)

`gae`, `lambda_returns` and `n_step` take the flags of a batch. `vtrace`, `retrace_delta` and `retrace_q` take
discounts, as in their papers; `fold_ends` converts flags to rewards and discounts. The argument `valid` is the
result of `usable`: False on rows that are not transitions, and on rows whose successor is unknown. Sums stop at an
invalid row. The row before it bootstraps from the value of the invalid row. The advantage of the invalid row is 0, and
its reward, flags and ratio are ignored, even if they are NaN.

Sums are computed in float64; results have the dtype of `values`.
"""

from __future__ import annotations

import numpy as np

from farstep.core import Array
from farstep.errors import ConfigError

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clipped to plus or minus this number. exp(20) = 5e8 is above any useful clip range, and sums of its
square over a batch do not overflow float32."""


def usable(valid: Array, episode_start: Array, terminated: Array, truncated: Array) -> Array:
    """Find the rows that are transitions with a known successor. Pass the result as `valid` to returns and losses.

    Two kinds of rows are excluded. The first are filler rows. The second are rows that neither terminate nor truncate
    an episode, although the next row starts an episode (the worker died) or is a filler row. For these, using the next
    row as successor would join two episodes. The successor of the last row is the observation after the rollout
    (`last_values` of `gae`), so the last row is excluded only if it is a filler row.

    Args:
        valid: `batch["valid"]`, `[T, N]`; False on filler rows.
        episode_start: `batch["episode_start"]`, `[T, N]`.
        terminated: `batch["terminated"]`, `[T, N]`.
        truncated: `batch["truncated"]`, `[T, N]`.

    Returns:
        Booleans `[T, N]`.

    Raises:
        ConfigError: Shapes differ.
    """
    valid, episode_start, ended = _flags(valid), _flags(episode_start), _flags(terminated) | _flags(truncated)
    _check_shapes(valid.shape, episode_start=episode_start, terminated=ended)
    usable_rows = valid.copy()
    usable_rows[:-1] &= ended[:-1] | (valid[1:] & ~episode_start[1:])
    return usable_rows


def fold_ends(
    rewards: Array, terminated: Array, truncated: Array, final_values: Array, gamma: float
) -> tuple[Array, Array, Array]:
    """Convert the ends of episodes to rewards and discounts, for `vtrace`, `retrace_delta` and `retrace_q`.

    The discount of a row that ends an episode is 0, which also cuts the trace. The bootstrap value of a truncated
    episode, gamma V(final_obs), is added to its last reward.

    Args:
        rewards: Rewards `[T, N]`.
        terminated: `batch["terminated"]`, `[T, N]`.
        truncated: `batch["truncated"]`, `[T, N]`.
        final_values: Values of final observations, `[T, N]`; used only on truncated rows.
        gamma: Discount factor, from 0 to 1.

    Returns:
        Rewards, discounts (gamma or 0), and booleans that are False where an episode ends; each `[T, N]`.

    Raises:
        ConfigError: Shapes differ, or `gamma` is out of range.

    Example:
        >>> rewards, discounts, _ = fold_ends(rewards, terminated, truncated, final_values, gamma)
        >>> vs, advantages = vtrace(log_rhos, rewards, values, bootstrap_value, discounts, valid=usable(...))
    """
    _check_unit(gamma=gamma)
    terminated, truncated = _flags(terminated), _flags(truncated)
    _check_shapes(np.shape(rewards), terminated=terminated, truncated=truncated, final_values=final_values)
    continues = ~(terminated | truncated)
    bootstrap = np.where(truncated & ~terminated, np.asarray(final_values, np.float64), 0.0)
    dtype = _float_type(rewards)
    return (rewards + gamma * bootstrap).astype(dtype), (gamma * continues).astype(dtype), continues


def gae(
    rewards: Array,
    values: Array,
    last_values: Array,
    terminated: Array,
    truncated: Array,
    final_values: Array,
    gamma: float,
    gae_lambda: float,
    *,
    valid: Array | None = None,
) -> tuple[Array, Array]:
    """Compute advantages and returns by generalized advantage estimation (Schulman et al. 2016, eq. 16).

        A_t = delta_t + gamma lambda A_{t+1}        delta_t = r_t + gamma V_{t+1} - V_t        R_t = A_t + V_t

    Args:
        rewards: Rewards r, `[T, N]`.
        values: Values V of the rows' observations, `[T, N]`.
        last_values: Values of the observations after the last row, `[N]`.
        terminated: `batch["terminated"]`, `[T, N]`.
        truncated: `batch["truncated"]`, `[T, N]`.
        final_values: Values of final observations, `[T, N]`; used only on truncated rows.
        gamma: Discount factor, from 0 to 1.
        gae_lambda: Lambda of GAE, from 0 to 1.
        valid: The result of `usable`; None: all rows are valid.

    Returns:
        Advantages A and returns R, each `[T, N]`. On invalid rows, the advantage is 0.

    Raises:
        ConfigError: Shapes differ, or a number is out of range.
    """
    _check_unit(gae_lambda=gae_lambda)
    rewards, discounts, valid = _steps(rewards, values, terminated, truncated, final_values, gamma, valid)
    errors = _td_errors(rewards, values, values, last_values, discounts, valid)
    _run_back(errors, gae_lambda * discounts)
    dtype = _float_type(values)
    return errors.astype(dtype), (errors + values).astype(dtype)


def lambda_returns(
    rewards: Array,
    values: Array,
    last_values: Array,
    terminated: Array,
    truncated: Array,
    final_values: Array,
    gamma: float,
    gae_lambda: float,
    *,
    valid: Array | None = None,
) -> Array:
    """Compute TD(lambda) returns: the mean of all n-step returns, with weights (1 - lambda) lambda^(n-1).

    Args:
        rewards: Rewards, `[T, N]`.
        values: Values of the rows' observations, `[T, N]`.
        last_values: Values of the observations after the last row, `[N]`.
        terminated: `batch["terminated"]`, `[T, N]`.
        truncated: `batch["truncated"]`, `[T, N]`.
        final_values: Values of final observations, `[T, N]`; used only on truncated rows.
        gamma: Discount factor, from 0 to 1.
        gae_lambda: Lambda, from 0 to 1.
        valid: The result of `usable`; None: all rows are valid.

    Returns:
        Returns `[T, N]`; `values` on invalid rows.

    Raises:
        ConfigError: Shapes differ, or a number is out of range.
    """
    return gae(rewards, values, last_values, terminated, truncated, final_values, gamma, gae_lambda, valid=valid)[1]


def n_step(
    rewards: Array,
    values: Array,
    last_values: Array,
    terminated: Array,
    truncated: Array,
    final_values: Array,
    gamma: float,
    n: int,
    *,
    valid: Array | None = None,
) -> Array:
    """Compute n-step returns.

        R_t = r_t + gamma r_{t+1} + ... + gamma^(n-1) r_{t+n-1} + gamma^n V_{t+n}

    The sum has fewer terms if the episode or the rollout ends within n rows, or if an invalid row follows.

    Args:
        rewards: Rewards r, `[T, N]`.
        values: Values V of the rows' observations, `[T, N]`.
        last_values: Values of the observations after the last row, `[N]`.
        terminated: `batch["terminated"]`, `[T, N]`.
        truncated: `batch["truncated"]`, `[T, N]`.
        final_values: Values of final observations, `[T, N]`; used only on truncated rows.
        gamma: Discount factor, from 0 to 1.
        n: Number of rewards, at least 1.
        valid: The result of `usable`; None: all rows are valid.

    Returns:
        Returns R, `[T, N]`; `values` on invalid rows.

    Raises:
        ConfigError: Shapes differ, or a number is out of range.
    """
    if n < 1:
        raise ConfigError(f"n is {n}; an n-step return needs at least one reward. Use n >= 1.")
    rewards, discounts, valid = _steps(rewards, values, terminated, truncated, final_values, gamma, valid)
    _check_shapes(np.shape(values)[1:], last_values=last_values)
    returns = np.concatenate([values, np.asarray(last_values)[None]], dtype=np.float64)
    continues = discounts != 0
    for _ in range(min(n, len(rewards))):  # k-step return of a row: its reward plus the next row's (k-1)-step return
        longer = rewards + discounts * np.where(continues, returns[1:], 0.0)
        returns[:-1] = longer if valid is None else np.where(valid, longer, values)
    return returns[:-1].astype(_float_type(values))


def vtrace(
    log_rhos: Array,
    rewards: Array,
    values: Array,
    bootstrap_value: Array,
    discounts: Array,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    pg_rho_bar: float = 1.0,
    lam: float = 1.0,
    *,
    valid: Array | None = None,
) -> tuple[Array, Array]:
    """Compute value targets and policy-gradient advantages by V-trace (Espeholt et al. 2018, section 4.1).

        v_t = V_t + rho_t delta_t + gamma_t lam c_t (v_{t+1} - V_{t+1})
        A_t = min(pg_rho_bar, ratio_t) (r_t + gamma_t (lam v_{t+1} + (1 - lam) V_{t+1}) - V_t)
        delta_t = r_t + gamma_t V_{t+1} - V_t
        rho_t = min(rho_bar, ratio_t), c_t = min(c_bar, ratio_t), ratio_t = pi(a_t|s_t) / mu(a_t|s_t)

    Here pi is the learner's policy, and mu the policy that acted. With lam < 1, the advantage bootstraps from lam v +
    (1 - lam) V, as in DeepMind's library rlax; the paper uses v. The critic converges to the value of the policy that
    is proportional to min(rho_bar mu, pi). With `rho_bar=math.inf`, this policy is pi.

    Args:
        log_rhos: log pi - log mu of the actions taken, `[T, N]`.
        rewards: Rewards r, `[T, N]`.
        values: Values V of the rows' observations, `[T, N]`.
        bootstrap_value: Values of the observations after the last row, `[N]`.
        discounts: gamma, or 0 where an episode ends, `[T, N]` (see `fold_ends`).
        rho_bar: Clip of the ratio that weights each TD error, above 0.
        c_bar: Clip of the ratio in the trace, above 0.
        pg_rho_bar: Clip of the ratio that weights the advantage, above 0.
        lam: Decay of the trace, from 0 to 1.
        valid: The result of `usable`; None: all rows are valid.

    Returns:
        Value targets v and advantages A, each `[T, N]`. On invalid rows, they are `values` and 0.

    Raises:
        ConfigError: Shapes differ, or a number is out of range.
    """
    _check_unit(lam=lam)
    _check_positive(rho_bar=rho_bar, c_bar=c_bar, pg_rho_bar=pg_rho_bar)
    ratios, rewards, discounts, valid = _off_policy(log_rhos, rewards, values, discounts, valid)
    errors = _td_errors(rewards, values, values, bootstrap_value, discounts, valid)
    corrections = np.minimum(rho_bar, ratios) * errors
    _run_back(corrections, lam * discounts * np.minimum(c_bar, ratios))
    errors[:-1] += lam * discounts[:-1] * corrections[1:]  # bootstraps from lam v + (1 - lam) V instead of V
    dtype = _float_type(values)
    return (corrections + values).astype(dtype), (np.minimum(pg_rho_bar, ratios) * errors).astype(dtype)


def retrace_delta(
    log_rhos: Array,
    rewards: Array,
    values: Array,
    bootstrap_value: Array,
    discounts: Array,
    lam: float = 1.0,
    *,
    valid: Array | None = None,
) -> Array:
    """Compute advantages by Retrace on state values, as in A-RIDE (DistRL, Wang et al. 2024).

        Delta_t = delta_t + gamma_t c_{t+1} Delta_{t+1}        c_t = lam min(1, ratio_t)
        delta_t = r_t + gamma_t V_{t+1} - V_t                  ratio_t = pi(a_t|s_t) / mu(a_t|s_t)

    The action of row t is not weighted by its ratio, so V_t + Delta_t estimates Q(s_t, a_t). A critic trained on this
    estimate would be biased toward the policy that acted. Train the critic on V + min(1, ratio) Delta, the target of
    V-trace.

    Args:
        log_rhos: log pi - log mu of the actions taken, `[T, N]`.
        rewards: Rewards r, `[T, N]`.
        values: Values V of the rows' observations, `[T, N]`.
        bootstrap_value: Values of the observations after the last row, `[N]`.
        discounts: gamma, or 0 where an episode ends, `[T, N]` (see `fold_ends`).
        lam: Decay of the trace, from 0 to 1.
        valid: The result of `usable`; None: all rows are valid.

    Returns:
        Advantages Delta, `[T, N]`; 0 on invalid rows.

    Raises:
        ConfigError: Shapes differ, or `lam` is out of range.
    """
    return _retrace(log_rhos, rewards, values, values, bootstrap_value, discounts, lam, valid).astype(
        _float_type(values)
    )


def retrace_q(
    log_rhos: Array,
    rewards: Array,
    q_values: Array,
    values: Array,
    bootstrap_value: Array,
    discounts: Array,
    lam: float = 1.0,
    *,
    valid: Array | None = None,
) -> Array:
    """Compute targets of Q(s, a) by Retrace (Munos et al. 2016, eq. 3 and 4).

        target_t = Q_t + Delta_t                               Delta_t = delta_t + gamma_t c_{t+1} Delta_{t+1}
        delta_t = r_t + gamma_t V_{t+1} - Q_t                  c_t = lam min(1, pi(a_t|s_t) / mu(a_t|s_t))

    Args:
        log_rhos: log pi - log mu of the actions taken, `[T, N]`.
        rewards: Rewards r, `[T, N]`.
        q_values: Q of the actions taken, `[T, N]`.
        values: V = E_pi Q(s, .), the mean over the policy's actions, `[T, N]`.
        bootstrap_value: V of the observations after the last row, `[N]`.
        discounts: gamma, or 0 where an episode ends, `[T, N]` (see `fold_ends`).
        lam: Decay of the trace, from 0 to 1.
        valid: The result of `usable`; None: all rows are valid.

    Returns:
        Targets `[T, N]`; `q_values` on invalid rows.

    Raises:
        ConfigError: Shapes differ, or `lam` is out of range.
    """
    corrections = _retrace(log_rhos, rewards, q_values, values, bootstrap_value, discounts, lam, valid)
    return (corrections + q_values).astype(_float_type(q_values))


def ratio_statistics(log_rhos: Array, rho_bar: float) -> dict[str, float]:
    """Compute statistics of the importance ratios of rows.

    Args:
        log_rhos: log pi - log mu of the actions taken, `[n]`.
        rho_bar: Clip of the ratio.

    Returns:
        `rho_mean`, the mean ratio; `rho_clip_fraction`, the fraction above `rho_bar`; and `ess`, the effective sample
        size divided by the number of rows. Empty without rows.
    """
    if not len(log_rhos):
        return {}
    rhos = np.exp(np.clip(log_rhos.astype(np.float64), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    ess = rhos.sum() ** 2 / (len(rhos) * np.square(rhos).sum())
    return {"rho_mean": rhos.mean(), "rho_clip_fraction": (rhos > rho_bar).mean(), "ess": ess}


def _retrace(
    log_rhos: Array,
    rewards: Array,
    own: Array,
    values: Array,
    bootstrap_value: Array,
    discounts: Array,
    lam: float,
    valid: Array | None,
) -> Array:
    _check_unit(lam=lam)
    ratios, rewards, discounts, valid = _off_policy(log_rhos, rewards, values, discounts, valid)
    errors = _td_errors(rewards, own, values, bootstrap_value, discounts, valid)
    _run_back(errors, lam * discounts[:-1] * np.minimum(1.0, ratios[1:]))
    return errors


def _steps(
    rewards: Array,
    values: Array,
    terminated: Array,
    truncated: Array,
    final_values: Array,
    gamma: float,
    valid: Array | None,
) -> tuple[Array, Array, Array | None]:
    """Return rewards, discounts and `valid` of on-policy rows. On invalid rows, rewards and discounts are 0."""
    _check_shapes(np.shape(values), rewards=rewards)
    if valid is not None:
        valid = _flags(valid)
        _check_shapes(np.shape(values), valid=valid)
        rewards, truncated = np.where(valid, rewards, 0.0), _flags(truncated) & valid
    rewards = np.asarray(rewards, np.float64)
    rewards, discounts, _ = fold_ends(rewards, terminated, truncated, final_values, gamma)
    return rewards, discounts if valid is None else np.where(valid, discounts, 0.0), valid


def _off_policy(
    log_rhos: Array, rewards: Array, values: Array, discounts: Array, valid: Array | None
) -> tuple[Array, Array, Array, Array | None]:
    """Return ratios, rewards, discounts and `valid`. On invalid rows, ratios are 1, rewards and discounts 0."""
    shape = np.shape(values)
    _check_shapes(shape, log_rhos=log_rhos, rewards=rewards, discounts=discounts)
    if valid is not None:
        valid = _flags(valid)
        _check_shapes(shape, valid=valid)
        log_rhos, rewards, discounts = (np.where(valid, array, 0.0) for array in (log_rhos, rewards, discounts))
    log_rhos, rewards, discounts = (np.asarray(array, np.float64) for array in (log_rhos, rewards, discounts))
    return np.exp(log_rhos.clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)), rewards, discounts, valid


def _td_errors(
    rewards: Array, own: Array, values: Array, last_values: Array, discounts: Array, valid: Array | None
) -> Array:
    """Compute TD errors: reward + discount * value of the next row - `own` value; 0 on invalid rows."""
    _check_shapes(np.shape(rewards), values=values, q_values=own)
    _check_shapes(np.shape(rewards)[1:], last_values=last_values)
    following = np.concatenate([values[1:], np.asarray(last_values)[None]], dtype=np.float64)
    following[discounts == 0] = 0.0  # the value may be NaN, and 0 * NaN is NaN
    return rewards + discounts * following - (own if valid is None else np.where(valid, own, 0.0))


def _run_back(errors: Array, factors: Array) -> None:
    """Accumulate from the end, in place: errors[t] += factors[t] * errors[t + 1]; a factor of 0 also stops NaN."""
    for t in range(len(errors) - 2, -1, -1):
        errors[t] += np.where(factors[t] == 0, 0, factors[t] * errors[t + 1])


def _flags(array: Array) -> Array:
    return np.asarray(array, np.bool_)


def _float_type(array: Array) -> np.dtype[np.floating]:
    dtype = np.asarray(array).dtype
    return dtype if dtype.kind == "f" else np.dtype(np.float64)


def _check_shapes(shape: tuple[int, ...], **arrays: Array) -> None:
    for name, array in arrays.items():
        if np.shape(array) != shape:
            raise ConfigError(
                f"{name} has shape {list(np.shape(array))}; expected {list(shape)}: one entry per row and environment, "
                f"time first ([T, N]; [N] for values after the last row). Arrays are not broadcast."
            )


def _check_unit(**numbers: float) -> None:
    for name, number in numbers.items():
        if not 0.0 <= number <= 1.0:
            raise ConfigError(f"{name} is {number}; expected a number from 0 to 1, such as 0.95.")


def _check_positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if not number > 0.0:
            raise ConfigError(
                f"{name} is {number}; the bound of a ratio must be above 0. Pass 1.0, or math.inf for no clip."
            )
