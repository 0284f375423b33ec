"""Losses in torch: clipped PPO, decoupled PPO and the value loss, each with its metrics.

All arguments of a loss have the same shape: `[B]` for a minibatch, or `[T, N]` for a rollout. Rows where `valid` is
False are excluded (see `returns.usable`; None: all rows are valid). Excluded rows are set to 0 first, so that NaN in
them affects neither the loss nor a gradient. Means are over valid rows; without valid rows they are 0.

Metrics are detached 0-d tensors. The caller can convert many metrics to numbers at once, which waits for the device
only once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from farstep.errors import ConfigError, unknown_name
from farstep.learners.returns import LOG_RATIO_LIMIT

WeightMode = Literal["mask", "truncate"]
Denominator = Literal["valid", "kept"]
Metrics = dict[str, Tensor]

_SAME = 1e-12
"""If the variance of numbers is below this fraction of their mean square, they differ only by rounding."""


def clipped_ppo(
    logprob: Tensor,
    old_logprob: Tensor,
    advantages: Tensor,
    valid: Tensor | None,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float | None = None,
) -> tuple[Tensor, Metrics]:
    """Compute PPO's clipped surrogate loss (Schulman et al. 2017, eq. 7).

        L = mean(max(-A r, -A clip(r, 1 - low, 1 + high)))        r = exp(logprob - old_logprob)

    With `clip_ratio_c` = c, the loss of a row is at most c |A| (dual clip, Ye et al. 2020). Without it, the loss of a
    row with a negative advantage grows without bound as r grows.

    Args:
        logprob: Log-probabilities of the actions under the policy that is optimized.
        old_logprob: Log-probabilities under the old policy; the ratio to it is clipped around 1.
        advantages: Advantages A.
        valid: False on rows to exclude; None: all rows are valid.
        clip_ratio_low: Lower clip range of the ratio, from 0 to 1.
        clip_ratio_high: Upper clip range of the ratio, at least 0.
        clip_ratio_c: Bound of the dual clip, above 1; None: no dual clip.

    Returns:
        The loss, with a gradient only with respect to `logprob`, and metrics by name.

    Raises:
        ConfigError: Shapes differ, or an option is out of range.
    """
    (logprob, old_logprob, advantages), counted = _rows(
        valid, logprob=logprob, old_logprob=old_logprob, advantages=advantages
    )
    losses, reported = _surrogate(logprob, old_logprob, advantages, clip_ratio_low, clip_ratio_high, clip_ratio_c)
    loss = losses.sum() / counted.number
    return loss, {"policy_loss": loss.detach(), **counted.means(reported)}


def decoupled_ppo(
    logprob: Tensor,
    behave_logprob: Tensor,
    proximal_logprob: Tensor,
    advantages: Tensor,
    valid: Tensor | None,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float | None,
    behave_weight_threshold: float | None,
    behave_weight_mode: WeightMode = "mask",
    behave_weight_lower: float | None = None,
    denominator: Denominator = "valid",
    versions: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Compute the decoupled PPO loss for rows of an older policy (Hilton et al. 2022).

        L = mean(w max(-A r, -A clip(r, 1 - low, 1 + high)))
        r = exp(logprob - proximal_logprob)               ratio of the optimized to the proximal policy
        w = exp(proximal_logprob - behave_logprob)        weight of a row, without a gradient

    If proximal and behavior log-probabilities are equal and the bounds include 1, then w is 1, and the result equals
    that of `clipped_ppo` bit for bit.

    Args:
        logprob: Log-probabilities of the actions under the policy that is optimized.
        behave_logprob: Log-probabilities under the behavior policy, i.e. the policy that acted.
        proximal_logprob: Log-probabilities under the proximal policy; the ratio r to it is clipped around 1.
        advantages: Advantages A.
        valid: False on rows to exclude; None: all rows are valid.
        clip_ratio_low: Lower clip range of the ratio, from 0 to 1.
        clip_ratio_high: Upper clip range of the ratio, at least 0.
        clip_ratio_c: Bound of the dual clip, above 1 (see `clipped_ppo`); None: no dual clip.
        behave_weight_threshold: Upper bound of w; None: no bound.
        behave_weight_mode: What happens to rows whose w is outside the bounds: `"mask"` excludes them, `"truncate"`
            sets w to the bound.
        behave_weight_lower: Lower bound of w; None: no bound.
        denominator: `"valid"` divides by the number of valid rows; `"kept"` divides by the number of rows that were not
            excluded, so the remaining rows gain weight as more rows are excluded.
        versions: Version that acted in each row; used only for the metric `average_version`.

    Returns:
        The loss, with a gradient only with respect to `logprob`, and metrics by name.

    Raises:
        ConfigError: Shapes differ, or an option is out of range or unknown.
    """
    _check_choice("behave_weight_mode", behave_weight_mode, get_args(WeightMode))
    _check_choice("denominator", denominator, get_args(Denominator))
    _check_weight_bounds(behave_weight_lower, behave_weight_threshold)
    (logprob, behave_logprob, proximal_logprob, advantages), counted = _rows(
        valid,
        logprob=logprob,
        behave_logprob=behave_logprob,
        proximal_logprob=proximal_logprob,
        advantages=advantages,
    )
    losses, reported = _surrogate(logprob, proximal_logprob, advantages, clip_ratio_low, clip_ratio_high, clip_ratio_c)
    with torch.no_grad():
        log_weights = _bounded(proximal_logprob - behave_logprob)
        weights = log_weights.exp()
        bounded = weights.clamp(behave_weight_lower or 0.0, behave_weight_threshold)
        within = bounded == weights
        kept = within if behave_weight_mode == "mask" else torch.ones_like(within)
        kept = kept if counted.valid is None else kept & counted.valid
        bounded = torch.where(kept, bounded, 0.0)
        reported |= {
            "behav_approx_kl": torch.where(kept, -log_weights, 0.0),
            "behav_clip_fraction": ~within,
            "behave_k3": _k3(log_weights),
            "ess": weights.square(),
            "weight": weights,
            "kept": kept,
        }
    if denominator == "valid":
        loss = (losses * bounded).sum() / counted.number
    else:
        loss = (losses * bounded).sum() / kept.sum().clamp(min=1)
    metrics = {"policy_loss": loss.detach(), **counted.means(reported)}
    metrics["behav_approx_kl"] = _ratio(metrics["behav_approx_kl"], metrics.pop("kept"))
    metrics["ess"] = _ratio(metrics.pop("weight").square(), metrics["ess"])
    metrics["behave_weight_p95"] = _upper_quantile(weights, counted, 0.05)
    if versions is not None:
        _check_shapes(logprob, versions=versions)
        metrics["average_version"] = counted.means({"": versions.double()})[""].to(loss.dtype)
    return loss, metrics


def interpolate_proximal(logprob: Tensor, behave_logprob: Tensor, versions: Tensor, current_version: int) -> Tensor:
    """Approximate proximal log-probabilities without a forward pass (A-3PO).

        proximal = behave + d / (d + 1) (logprob - behave)        d = current_version - 1 - version

    Args:
        logprob: Log-probabilities of the actions under the policy that is optimized.
        behave_logprob: Log-probabilities under the behavior policy.
        versions: Version of the policy that acted in each row; below 0 if unknown.
        current_version: The learner's version plus one.

    Returns:
        Interpolated log-probabilities. They equal `behave_logprob` for rows of the learner's version and of unknown
        versions.

    Raises:
        ConfigError: Shapes differ.
    """
    _check_shapes(logprob, behave_logprob=behave_logprob, versions=versions)
    with torch.no_grad():
        age = (current_version - 1 - versions).to(torch.promote_types(logprob.dtype, torch.float32))
        old = (age > 0) & (versions >= 0)
        moved = behave_logprob + age / (age + 1) * _bounded(logprob - behave_logprob)
        return torch.where(old, moved.to(behave_logprob.dtype), behave_logprob)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    valid: Tensor | None,
    *,
    value_clip: float | None,
    huber_delta: float | None = None,
) -> tuple[Tensor, Metrics]:
    """Compute the critic's loss.

        L = mean(max(h(R - V), h(R - clip(V, V_old - value_clip, V_old + value_clip))))        h(x) = x^2 / 2

    With `huber_delta` = d, h(x) is d (|x| - d / 2) where |x| >= d.

    Args:
        values: Values V of the critic.
        old_values: Recorded values V_old; ignored if `value_clip` is None.
        returns: Value targets R.
        valid: False on rows to exclude; None: all rows are valid.
        value_clip: Clip range of V around V_old, above 0; None: no clipping.
        huber_delta: The loss is linear for errors above this number, which must be above 0; None: squared error.

    Returns:
        The loss, with a gradient only with respect to `values`, and metrics: `value_loss`; `value_clip_ratio`, the
        fraction of rows whose loss clipping changed; `explained_variance`, 1 - Var(R - V) / Var(R), or 0 if returns do
        not vary.

    Raises:
        ConfigError: Shapes differ, or `value_clip` or `huber_delta` is not above 0.
    """
    for name, number in {"value_clip": value_clip, "huber_delta": huber_delta}.items():
        if number is not None and not number > 0:
            raise ConfigError(f"{name} is {number}; expected a number above 0, or None to disable it.")
    if value_clip is None:
        old_values = values.detach()
    (values, old_values, returns), counted = _rows(valid, values=values, old_values=old_values, returns=returns)
    errors = returns - values
    plain = losses = half_square(errors, huber_delta)
    if value_clip is not None:
        clipped = values.clamp(old_values - value_clip, old_values + value_clip)
        losses = torch.max(plain, half_square(returns - clipped, huber_delta))
    loss = losses.sum() / counted.number
    with torch.no_grad():
        # In float64, E[x^2] - E[x]^2 is accurate enough as a variance.
        error, total = errors.double(), returns.double()
        rows = {"error": error, "return": total, "error^2": error.square(), "return^2": total.square()}
        means = counted.means({"value_clip_ratio": losses > plain, **rows})
        variance = means["return^2"] - means["return"].square()
        unexplained = (means["error^2"] - means["error"].square()) / variance
        varies = variance > _SAME * means["return^2"]
    metrics = {
        "value_loss": loss.detach(),
        "value_clip_ratio": means["value_clip_ratio"].to(loss.dtype),
        "explained_variance": torch.where(varies, 1 - unexplained, 0.0).to(loss.dtype),
    }
    return loss, metrics


def masked_mean(rows: Tensor, valid: Tensor | None) -> Tensor:
    """Compute the mean over valid rows.

    Args:
        rows: Numbers, for example entropies.
        valid: False on rows to exclude; None: all rows are valid.

    Returns:
        The mean, with a gradient; 0 if no row is valid.

    Raises:
        ConfigError: Shapes differ.
    """
    (rows,), counted = _rows(valid, rows=rows)
    return rows.sum() / counted.number


def normalize(advantages: Tensor, valid: Tensor | None, *, correction: int = 1, eps: float = 1e-8) -> Tensor:
    """Normalize advantages to mean 0 and standard deviation 1 over valid rows.

        (A - mean(A)) / (std(A) + eps)

    Args:
        advantages: Advantages A.
        valid: False on rows to exclude; None: all rows are valid.
        correction: The variance divides by the number of rows minus this: 1 for the unbiased estimate (as in torch and
            CleanRL), 0 for the plain variance.
        eps: Added to the standard deviation.

    Returns:
        Normalized advantages, without a gradient; 0 on excluded rows.

    Raises:
        ConfigError: Shapes differ.
    """
    (rows,), counted = _rows(valid, advantages=advantages.detach().double())
    rows = rows - rows.sum() / counted.number
    if counted.valid is not None:
        rows = torch.where(counted.valid, rows, 0.0)
    freedom = torch.as_tensor(counted.number - correction).clamp(min=1)
    return (rows / ((rows.square().sum() / freedom).sqrt() + eps)).to(advantages.dtype)


def _surrogate(
    logprob: Tensor,
    anchor: Tensor,
    advantages: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the clipped loss of each row (0 where the advantage is 0), and tensors whose means are metrics."""
    if not (0 <= clip_ratio_low <= 1 and clip_ratio_high >= 0):
        raise ConfigError(
            f"clip_ratio_low and clip_ratio_high are {clip_ratio_low} and {clip_ratio_high}; the ratio is clipped to "
            "[1 - low, 1 + high]. low must be from 0 to 1, and high at least 0, such as 0.2 for both."
        )
    if clip_ratio_c is not None and not clip_ratio_c > 1:
        raise ConfigError(
            f"clip_ratio_c is {clip_ratio_c}; it bounds ratios above 1, so it must be above 1. "
            "Use 3.0, or None for no dual clip."
        )
    log_ratio = _bounded(logprob - anchor)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    costs = -advantages
    unclipped_loss, clipped_loss = costs * ratio, costs * clipped
    losses = single_clip = torch.max(unclipped_loss, clipped_loss)
    bound = torch.full_like(costs, torch.inf)
    if clip_ratio_c is not None:
        bound = clip_ratio_c * costs.abs()
        losses = torch.min(losses, bound)
    with torch.no_grad():
        return losses, {
            "proximal_ratio": ratio,
            "clipped_proximal_ratio": clipped,
            "clip_fraction": unclipped_loss < clipped_loss,
            "dual_clip_fraction": bound < single_clip,
            "proximal_approx_kl": -log_ratio,
            "proximal_k3": _k3(log_ratio),
        }


@dataclass(frozen=True)
class _Counted:
    """Which rows are valid, and their number."""

    valid: Tensor | None
    number: Tensor | int
    """Number of valid rows, at least 1, so that it can be a divisor."""

    @torch.no_grad()
    def means(self, rows: dict[str, Tensor]) -> Metrics:
        """Return the means of several tensors of finite numbers, in one operation: separate ones would cost more than
        the loss."""
        stacked = torch.stack([array.flatten() for array in rows.values()])
        totals = stacked.sum(dim=1) if self.valid is None else stacked @ self.valid.flatten().to(stacked.dtype)
        return dict(zip(rows, (totals / self.number).unbind(), strict=True))


def _rows(valid: Tensor | None, **rows: Tensor) -> tuple[list[Tensor], _Counted]:
    """Return the tensors in float32 or float64, 0 where not valid. All except the first are detached."""
    first = next(iter(rows.values()))
    _check_shapes(first, **rows)
    arrays = [first, *(array.detach() for array in list(rows.values())[1:])]
    arrays = [array if array.dtype in (torch.float32, torch.float64) else array.float() for array in arrays]
    if valid is None:
        return arrays, _Counted(None, max(first.numel(), 1))
    _check_shapes(first, valid=valid)
    valid = valid.bool()
    return [torch.where(valid, array, 0.0) for array in arrays], _Counted(valid, valid.sum().clamp(min=1))


def half_square(errors: Tensor, huber_delta: float | None) -> Tensor:
    """Compute half the squared errors, or the Huber loss.

    Args:
        errors: Errors of any shape.
        huber_delta: Size of an error beyond which its loss is linear. None: quadratic for all errors.

    Returns:
        One loss per error.
    """
    squares = 0.5 * errors.square()
    if huber_delta is None:
        return squares
    size = errors.abs()
    return torch.where(size < huber_delta, squares, huber_delta * (size - 0.5 * huber_delta))


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _k3(log_ratio: Tensor) -> Tensor:
    """Return Schulman's non-negative estimate of KL(old || new) (see `farstep.agents.distributions.kl_estimate`)."""
    return log_ratio.expm1() - log_ratio


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """Return the quotient, or 0 where the divisor is not positive."""
    return torch.where(below > 0, above / below, 0.0)


def _upper_quantile(rows: Tensor, counted: _Counted, share: float) -> Tensor:
    """Return the quantile (NumPy's definition) that a fraction `share` of the valid rows exceeds; 0 without valid rows.

    `topk` takes enough rows for the case that all are valid, because reading the number of valid rows would wait for
    the device.
    """
    if not rows.numel():
        return rows.sum()
    valid_rows = rows if counted.valid is None else torch.where(counted.valid, rows, 0.0)
    place = share * (torch.as_tensor(counted.number, device=rows.device) - 1)
    top = valid_rows.flatten().topk(min(rows.numel(), math.ceil(share * rows.numel()) + 1)).values
    ends = top.take(torch.stack([place.floor(), place.ceil()]).long())
    return ends[0].lerp(ends[1], place.frac().to(ends.dtype))


def _check_shapes(like: Tensor, **arrays: Tensor) -> None:
    for name, array in arrays.items():
        if array.shape != like.shape:
            raise ConfigError(
                f"{name} has shape {list(array.shape)}; expected {list(like.shape)}, the shape of the first argument. "
                "Losses do not broadcast: sum log-probabilities over the parts of an action, and flatten or expand "
                "the other arguments."
            )


def _check_choice(name: str, got: str, known: tuple[str, ...]) -> None:
    if got not in known:
        raise ConfigError(unknown_name(name, got, known))


def _check_weight_bounds(lower: float | None, upper: float | None) -> None:
    if upper is not None and not upper > 0:
        raise ConfigError(
            f"behave_weight_threshold is {upper}; weights are ratios of probabilities, so every row would exceed it. "
            "Use a number above 1, such as 2.0, or None for no bound."
        )
    if lower is not None and not 0 <= lower <= (torch.inf if upper is None else upper):
        raise ConfigError(
            f"behave_weight_lower is {lower}; expected a number from 0 to behave_weight_threshold ({upper}), "
            "such as 0.5, or None for no bound."
        )
