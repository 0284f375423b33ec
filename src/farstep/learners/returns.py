"""What rows of a rollout are worth: advantages and returns, in NumPy, time-major `[T, N]`.

    row t ──► V of row t+1            the episode goes on
          ──► 0                       terminated (also if truncated at the same time)
          ──► V of its final_obs      truncated: `final_values[t]`, ignored on all other rows
          ──► nobody knows            cut: the rows between were lost with a worker, or only filled a reset

`gae`, `lambda_returns` and `n_step` take the flags as they are in a batch. `vtrace` and the two Retraces take discounts
as published; `fold_ends` makes rewards and discounts out of the flags. Rows of which nobody knows the successor, and
rows that are no transitions at all, have `valid` False, see `usable`: nothing is added up across them, what a row
before one is worth ends in the value of the invalid row, and their own advantage is 0. What their other entries hold,
NaN included, does not matter.

Sums run in float64; what comes out is of the type of `values`.
"""

from __future__ import annotations

import numpy as np

from farstep.core import Array
from farstep.errors import ConfigError

LOG_RATIO_LIMIT = 20.0
"""exp of it is 5e8: beyond what any clipping keeps, and the squares of a whole batch can be added up in float32."""


def usable(valid: Array, episode_start: Array, terminated: Array, truncated: Array) -> Array:
    """Which rows are transitions whose successor is known; the `valid` of everything here and of the losses.

    Not filler rows; and not a row without an end of its own that is followed by a row which begins an episode (its
    worker died) or by filler: taking the next row for its successor would join two episodes. The last row's successor
    is what `last_values` are the values of.
    """
    valid, episode_start, ended = _flags(valid), _flags(episode_start), _flags(terminated) | _flags(truncated)
    _check_shapes(valid.shape, episode_start=episode_start, terminated=ended)
    found = valid.copy()
    found[:-1] &= ended[:-1] | (valid[1:] & ~episode_start[1:])
    return found


def fold_ends(
    rewards: Array, terminated: Array, truncated: Array, final_values: Array, gamma: float
) -> tuple[Array, Array, Array]:
    """Rewards, discounts and where the trace goes on, of rows with these ends, as `vtrace` and the Retraces take them.

    An end makes the discount 0, which cuts the trace as well (each of its factors has the discount in it); what a
    truncated episode would still have been worth, gamma V(final_obs), is paid out with its last reward:

        rewards, discounts, _ = fold_ends(rewards, terminated, truncated, final_values, gamma)
        vs, advantages = vtrace(log_rhos, rewards, values, bootstrap_value, discounts, valid=usable(...))

    The third, False at ends, is for traces of one's own.
    """
    _check_unit(gamma=gamma)
    terminated, truncated = _flags(terminated), _flags(truncated)
    _check_shapes(np.shape(rewards), terminated=terminated, truncated=truncated, final_values=final_values)
    goes_on = ~(terminated | truncated)
    paid = np.where(truncated & ~terminated, np.asarray(final_values, np.float64), 0.0)
    dtype = _float_type(rewards)
    return (rewards + gamma * paid).astype(dtype), (gamma * goes_on).astype(dtype), goes_on


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
    """Advantages and returns by generalised advantage estimation (Schulman et al. 2016, eq. 16).

    `values` are those of the rows, `last_values` `[N]` those of the observations after the last row.
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
    """TD(lambda) returns: all n-step returns, weighted by (1 - lambda) lambda^(n-1); `values` on invalid rows."""
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
    """Rewards of the next `n` rows and the value of what follows them; fewer rows where the episode, the rollout or
    what is known ends sooner. `values` on invalid rows."""
    if n < 1:
        raise ConfigError(f"n is {n}; an n-step return needs at least one reward. Give n >= 1.")
    rewards, discounts, valid = _steps(rewards, values, terminated, truncated, final_values, gamma, valid)
    _check_shapes(np.shape(values)[1:], last_values=last_values)
    found = np.concatenate([values, np.asarray(last_values)[None]], dtype=np.float64)
    goes_on = discounts != 0
    for _ in range(min(n, len(rewards))):  # the k-step return of a row is made of the (k-1)-step return of the next
        longer = rewards + discounts * np.where(goes_on, found[1:], 0.0)
        found[:-1] = longer if valid is None else np.where(valid, longer, values)
    return found[:-1].astype(_float_type(values))


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
    """Value targets and policy-gradient advantages by V-trace (IMPALA, Espeholt et al. 2018, section 4.1).

    `log_rhos` are log pi - log mu of the actions taken, `discounts` gamma or 0 (see `fold_ends`). With lam < 1 the
    advantage bootstraps from lam v + (1 - lam) V, as rlax does. The critic's fixed point is the value of the policy
    proportional to min(rho_bar mu, pi); a `rho_bar` of `math.inf` gives that of pi.
    """
    _check_unit(lam=lam)
    _check_positive(rho_bar=rho_bar, c_bar=c_bar, pg_rho_bar=pg_rho_bar)
    ratios, rewards, discounts, valid = _off_policy(log_rhos, rewards, values, discounts, valid)
    errors = _td_errors(rewards, values, values, bootstrap_value, discounts, valid)
    corrections = np.minimum(rho_bar, ratios) * errors
    _run_back(corrections, lam * discounts * np.minimum(c_bar, ratios))
    errors[:-1] += lam * discounts[:-1] * corrections[1:]  # from V of the next row to lam v + (1 - lam) V
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
    """Retrace on state values, as A-RIDE has it: Delta_t = e_t + gamma_t c_{t+1} Delta_{t+1}, c = lam min(1, rho).

    An advantage: the first action is not corrected for, so that V + Delta estimates Q(s, a). A critic that learns
    V + Delta is biased towards the policy that acted; min(1, rho) Delta is V-trace's correction.
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
    """Targets of Q(s, a) by Retrace (Munos et al. 2016, eq. 3 and 4), c = lam min(1, rho).

    `q_values` are those of the actions taken, `values` the means over the policy's actions, E_pi Q(s, .), of the same
    rows, and `bootstrap_value` that mean of the observations after the last row. `q_values` on invalid rows.
    """
    found = _retrace(log_rhos, rewards, q_values, values, bootstrap_value, discounts, lam, valid)
    return (found + q_values).astype(_float_type(q_values))


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
    """Rewards, discounts and `valid` of rows with these ends; nothing to count on invalid ones."""
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
    """Ratios, rewards, discounts and `valid`; nothing to count on invalid rows."""
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
    """What each row and the value of the next say beyond the row's own value; 0 on invalid rows."""
    _check_shapes(np.shape(rewards), values=values, q_values=own)
    _check_shapes(np.shape(rewards)[1:], last_values=last_values)
    following = np.concatenate([values[1:], np.asarray(last_values)[None]], dtype=np.float64)
    following[discounts == 0] = 0.0  # also NaN: where the discount is 0 it is nobody's value
    return rewards + discounts * following - (own if valid is None else np.where(valid, own, 0.0))


def _run_back(errors: Array, factors: Array) -> None:
    """errors[t] += factors[t] * errors[t + 1], from the end, in place; nothing goes past a 0, not even NaN."""
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
                f"time first ([T, N], and [N] for what follows the last row). Nothing is broadcast."
            )


def _check_unit(**numbers: float) -> None:
    for name, number in numbers.items():
        if not 0.0 <= number <= 1.0:
            raise ConfigError(f"{name} is {number}; expected a number from 0 to 1, such as 0.95.")


def _check_positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if not number > 0.0:
            raise ConfigError(
                f"{name} is {number}; a clipped ratio must stay above 0. Give 1.0, or math.inf for no clip."
            )
