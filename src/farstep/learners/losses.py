"""What a learner minimises, in torch: clipped and decoupled PPO, the value loss, and what is reported of them.

Every loss takes rows of any one shape, a minibatch `[B]` as well as a rollout `[T, N]`, and `valid`, which is False on
rows that must not count (see `returns.usable`; None: all count). Those are replaced before anything is computed, so
that whatever they hold, NaN included, reaches neither the loss nor a gradient. Means are over valid rows; over none
they are 0.

Metrics are detached 0-d tensors: nothing waits for a device until the caller turns them into numbers, once for many.
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
"""Numbers whose variance is less than this share of their mean square differ by rounding only."""


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
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7), the ratio held in [1 - low, 1 + high].

    With `clip_ratio_c` no row loses more than c |A| (dual clip, Ye et al. 2020): a ratio far above 1 with a negative
    advantage would otherwise know no bound.
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
    current_version: int | None = None,
) -> tuple[Tensor, Metrics]:
    """PPO on rows of an older policy (Hilton et al. 2022): clipped around the proximal policy, and each row weighted by
    w = proximal / behaviour.

    `behave_weight_threshold` and `behave_weight_lower` bound w: a row beyond them is left out (`"mask"`) or weighted
    by the bound (`"truncate"`); None is no bound. Of rows that were left out the mean takes no notice with
    `denominator="kept"`, which gives the others more weight the more are missing; `"valid"` counts them.

    Where proximal and behaviour log-probabilities are equal, w is 1, and with bounds around 1 this is `clipped_ppo`
    bit for bit. `versions` and `current_version` are only reported.
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
    if current_version is not None:
        metrics["current_version"] = torch.full_like(loss.detach(), float(current_version))
    return loss, metrics


def interpolate_proximal(logprob: Tensor, behave_logprob: Tensor, versions: Tensor, current_version: int) -> Tensor:
    """Proximal log-probabilities without a forward pass: d / (d + 1) of the way from behaviour to now for a row that is
    d versions old, in log space (A-3PO). `current_version` is the learner's version plus one; rows of the learner's
    own version, and rows without one (below 0), stay as they were recorded.
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
    """Half the squared error of the critic, linear beyond `huber_delta`; with `value_clip` the larger of that and of
    the error of a value that moved no further than that from the old one. With None `old_values` do not matter.

    `value_clip_ratio` is the share of rows where clipping changed the loss; `explained_variance` is 0 where returns do
    not vary.
    """
    for name, number in {"value_clip": value_clip, "huber_delta": huber_delta}.items():
        if number is not None and not number > 0:
            raise ConfigError(f"{name} is {number}; expected a number above 0, or None to go without.")
    if value_clip is None:
        old_values = values.detach()
    (values, old_values, returns), counted = _rows(valid, values=values, old_values=old_values, returns=returns)
    errors = returns - values
    plain = losses = _half_square(errors, huber_delta)
    if value_clip is not None:
        clipped = values.clamp(old_values - value_clip, old_values + value_clip)  # exactly the value where within
        losses = torch.max(plain, _half_square(returns - clipped, huber_delta))
    loss = losses.sum() / counted.number
    with torch.no_grad():
        left, whole = (
            errors.double(),
            returns.double(),
        )  # in which a mean of squares less a squared mean is exact enough
        rows = {"left": left, "whole": whole, "left^2": left.square(), "whole^2": whole.square()}
        means = counted.means({"value_clip_ratio": losses > plain, **rows})
        variance = means["whole^2"] - means["whole"].square()
        unexplained = (means["left^2"] - means["left"].square()) / variance
        varies = variance > _SAME * means["whole^2"]
    metrics = {
        "value_loss": loss.detach(),
        "value_clip_ratio": means["value_clip_ratio"].to(loss.dtype),
        "explained_variance": torch.where(varies, 1 - unexplained, 0.0).to(loss.dtype),
    }
    return loss, metrics


def masked_mean(rows: Tensor, valid: Tensor | None) -> Tensor:
    """The mean over valid rows, of entropies for example; 0 if there are none."""
    (rows,), counted = _rows(valid, rows=rows)
    return rows.sum() / counted.number


def normalize(advantages: Tensor, valid: Tensor | None, *, correction: int = 1, eps: float = 1e-8) -> Tensor:
    """Advantages with mean 0 and deviation 1 over valid rows; 0 on the others.

    `correction=1` is the unbiased deviation, torch's and CleanRL's; 0 the one of the rows themselves.
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
    """The clipped loss of each row, which is 0 where the advantage is, and rows whose means are reported."""
    if not (0 <= clip_ratio_low <= 1 and clip_ratio_high >= 0):
        raise ConfigError(
            f"clip_ratio_low and clip_ratio_high are {clip_ratio_low} and {clip_ratio_high}; the ratio is held between "
            "1 - low and 1 + high. Give low from 0 to 1 and high of at least 0, such as 0.2 for both."
        )
    if clip_ratio_c is not None and not clip_ratio_c > 1:
        raise ConfigError(
            f"clip_ratio_c is {clip_ratio_c}; it bounds ratios above 1, so it must be more than that. "
            "Give 3.0, or None for no dual clip."
        )
    log_ratio = _bounded(logprob - anchor)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    gains = -advantages
    free, held = gains * ratio, gains * clipped
    losses = single = torch.max(free, held)
    most = torch.full_like(gains, torch.inf)
    if clip_ratio_c is not None:
        most = clip_ratio_c * gains.abs()
        losses = torch.min(losses, most)
    with torch.no_grad():
        return losses, {
            "proximal_ratio": ratio,
            "clipped_proximal_ratio": clipped,
            "clip_fraction": free < held,
            "dual_clip_fraction": most < single,
            "proximal_approx_kl": -log_ratio,
            "proximal_k3": _k3(log_ratio),
        }


@dataclass(frozen=True)
class _Counted:
    """Which rows count, and how many."""

    valid: Tensor | None
    number: Tensor | int
    """At least 1, to divide by."""

    @torch.no_grad()
    def means(self, rows: dict[str, Tensor]) -> Metrics:
        """Of finite rows, all at once: a metric each costs more than the loss itself."""
        stacked = torch.stack([array.flatten() for array in rows.values()])
        totals = stacked.sum(dim=1) if self.valid is None else stacked @ self.valid.flatten().to(stacked.dtype)
        return dict(zip(rows, (totals / self.number).unbind(), strict=True))


def _rows(valid: Tensor | None, **rows: Tensor) -> tuple[list[Tensor], _Counted]:
    """The rows, at least in single precision and 0 where they do not count; all but the first are constants."""
    first = next(iter(rows.values()))
    _check_shapes(first, **rows)
    found = [first, *(array.detach() for array in list(rows.values())[1:])]
    found = [array if array.dtype in (torch.float32, torch.float64) else array.float() for array in found]
    if valid is None:
        return found, _Counted(None, max(first.numel(), 1))
    _check_shapes(first, valid=valid)
    valid = valid.bool()
    return [torch.where(valid, array, 0.0) for array in found], _Counted(valid, valid.sum().clamp(min=1))


def _half_square(errors: Tensor, huber_delta: float | None) -> Tensor:
    squares = 0.5 * errors.square()
    if huber_delta is None:
        return squares
    size = errors.abs()
    return torch.where(size < huber_delta, squares, huber_delta * (size - 0.5 * huber_delta))


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _k3(log_ratio: Tensor) -> Tensor:
    """Schulman's estimate of KL(old || new), never negative (see `farstep.agents.distributions.kl_estimate`)."""
    return log_ratio.expm1() - log_ratio


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """The quotient, or 0 where there is nothing to divide by."""
    return torch.where(below > 0, above / below, 0.0)


def _upper_quantile(rows: Tensor, counted: _Counted, share: float) -> Tensor:
    """What `share` of the rows that count are above, interpolated as NumPy does; 0 for none. It is looked for among as
    many rows as it could be if all counted, since asking how many do would wait for the device."""
    if not rows.numel():
        return rows.sum()
    found = rows if counted.valid is None else torch.where(counted.valid, rows, 0.0)
    place = share * (torch.as_tensor(counted.number, device=rows.device) - 1)
    top = found.flatten().topk(min(rows.numel(), math.ceil(share * rows.numel()) + 1)).values
    ends = top.take(torch.stack([place.floor(), place.ceil()]).long())
    return ends[0].lerp(ends[1], place.frac().to(ends.dtype))


def _check_shapes(like: Tensor, **arrays: Tensor) -> None:
    for name, array in arrays.items():
        if array.shape != like.shape:
            raise ConfigError(
                f"{name} has shape {list(array.shape)}; expected {list(like.shape)}, that of all other rows. Nothing "
                "is broadcast: sum log-probabilities over an action's parts, flatten or expand the others."
            )


def _check_choice(name: str, got: str, known: tuple[str, ...]) -> None:
    if got not in known:
        raise ConfigError(unknown_name(name, got, known))


def _check_weight_bounds(lower: float | None, upper: float | None) -> None:
    if upper is not None and not upper > 0:
        raise ConfigError(
            f"behave_weight_threshold is {upper}; weights are ratios of probabilities, so no row would be left. "
            "Give a number above 1, such as 2.0, or None for no bound."
        )
    if lower is not None and not 0 <= lower <= (torch.inf if upper is None else upper):
        raise ConfigError(
            f"behave_weight_lower is {lower}; expected a number from 0 to behave_weight_threshold ({upper}), "
            "such as 0.5, or None for no bound."
        )
