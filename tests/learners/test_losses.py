"""Losses against published and hand-worked numbers, against row-by-row references, and by properties."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from farstep.errors import ConfigError
from farstep.learners.losses import (
    clipped_ppo,
    decoupled_ppo,
    interpolate_proximal,
    masked_mean,
    normalize,
    value_loss,
)

seeds = st.integers(0, 10**6)
CLIP: dict[str, Any] = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
PUBLISHED: dict[str, Any] = {**CLIP, "clip_ratio_c": 3.0, "behave_weight_threshold": 2.0, "denominator": "kept"}
"""The rules of the published system."""

BEHAVE = torch.tensor([-1, -1, -2, -0.5, -1.5])
LOGPROB = torch.tensor([-0.6, -1.5, -0.5, -0.4, -1.5])
ADVANTAGES = torch.tensor([1, -1, 0.5, 2, -0.3])
VALID = torch.tensor([True, True, True, True, False])


def numbers(metrics: dict[str, Tensor]) -> dict[str, float]:
    assert all(metric.ndim == 0 and not metric.requires_grad for metric in metrics.values())
    return {name: float(metric) for name, metric in metrics.items()}


def random_rows(seed: int, scale: float = 0.5, size: int = 40) -> dict[str, Any]:
    """Log-probabilities of three policies, advantages and a mask; masked rows hold values that must not be used."""
    generator = torch.Generator().manual_seed(seed)
    behave = -torch.rand(size, generator=generator) * 3
    moves = [scale * torch.randn(size, generator=generator) for _ in range(2)]
    rows = {
        "logprob": behave + moves[0] + moves[1],
        "behave_logprob": behave,
        "proximal_logprob": behave + moves[0],
        "advantages": torch.randn(size, generator=generator),
    }
    valid = torch.rand(size, generator=generator) < 0.8
    wrong = torch.tensor([math.nan, math.inf, -math.inf])[torch.randint(3, (4, size), generator=generator)]
    rows = {name: torch.where(valid, a, b) for (name, a), b in zip(rows.items(), wrong, strict=True)}
    return {**rows, "valid": valid}


def valid_rows(seed: int) -> dict[str, Any]:
    rows = random_rows(seed)
    return {name: array[rows["valid"]] for name, array in rows.items()}


def plain_rows(rows: dict[str, Tensor]) -> dict[str, Any]:
    """The arguments of plain PPO."""
    return {
        "logprob": rows["logprob"],
        "old_logprob": rows["behave_logprob"],
        "advantages": rows["advantages"],
        "valid": rows["valid"],
    }


def reference(
    rows: dict[str, Tensor], low: float, high: float, c: float | None, bounds: tuple[float, float], mode: str, over: str
) -> dict[str, float]:
    """Spec async_ppo 1.2 and 1.6, one row after the other."""
    found: dict[str, list[float]] = {}

    def note(**values: float) -> None:
        for name, value in values.items():
            found.setdefault(name, []).append(value)

    total, kept = 0.0, 0
    for now, b, p, a, valid in zip(*(array.double().tolist() for array in rows.values()), strict=True):
        if not valid:
            continue
        r, w = math.exp(now - p), math.exp(p - b)
        held = min(max(r, 1 - low), 1 + high)
        loss = max(-a * r, -a * held)
        note(
            proximal_ratio=r,
            clipped_proximal_ratio=held,
            clip_fraction=-a * r < -a * held,
            dual_clip_fraction=c is not None and c * abs(a) < loss,
            proximal_approx_kl=p - now,
            proximal_k3=r - 1 - (now - p),
            behave_k3=w - 1 - (p - b),
            weight=w,
            behav_clip_fraction=not bounds[0] <= w <= bounds[1],
        )
        loss = min(loss, c * abs(a)) if c is not None else loss
        if mode == "truncate" or bounds[0] <= w <= bounds[1]:
            kept += 1
            note(behav_approx_kl=b - p)
            total += loss * min(max(w, bounds[0]), bounds[1])
    weights = np.array(found.pop("weight"))
    return {
        **{name: float(np.mean(values)) for name, values in found.items()},
        "policy_loss": total / (kept if over == "kept" else len(weights)),
        "ess": weights.sum() ** 2 / (len(weights) * (weights**2).sum()),
        "behave_weight_p95": float(np.quantile(weights, 0.95)),
    }


# PPO.


def test_the_published_vector_with_given_proximal_logprobs() -> None:
    """Spec async_ppo 1.7, T1."""
    proximal = torch.tensor([-0.8, -1.2, -1, -0.5, -1.6])
    loss, metrics = decoupled_ppo(LOGPROB, BEHAVE, proximal, ADVANTAGES, VALID, **PUBLISHED)
    found = numbers(metrics)
    assert loss.item() == pytest.approx(-1.007014, abs=1e-6)
    expected = {
        "policy_loss": -1.007014,
        "proximal_ratio": (1.221403 + 0.740818 + 1.648721 + 1.105171) / 4,
        "clipped_proximal_ratio": (1.2 + 0.8 + 1.2 + 1.105171) / 4,
        "clip_fraction": 0.75,
        "dual_clip_fraction": 0.0,
        "proximal_approx_kl": -0.125,
        "behav_approx_kl": 0.0,
        "behav_clip_fraction": 0.25,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    loss, _ = decoupled_ppo(LOGPROB, BEHAVE, proximal, ADVANTAGES, VALID, **{**PUBLISHED, "denominator": "valid"})
    assert loss.item() == pytest.approx(-0.755260, abs=1e-6)


@pytest.mark.slow
def test_the_published_vector_with_interpolated_proximal_logprobs() -> None:
    """Spec async_ppo 1.7, T2."""
    versions = torch.tensor([3, 2, 1, 0, 3])
    proximal = interpolate_proximal(LOGPROB, BEHAVE, versions, 4)
    torch.testing.assert_close(proximal, torch.tensor([-1, -1.25, -1, -0.425, -1.5]))
    loss, metrics = decoupled_ppo(LOGPROB, BEHAVE, proximal, ADVANTAGES, VALID, **PUBLISHED, versions=versions)
    expected = {
        "policy_loss": -0.929100,
        "clip_fraction": 0.75,
        "proximal_approx_kl": -0.16875,
        "behav_approx_kl": 0.058333,
        "behav_clip_fraction": 0.25,
        "average_version": 1.5,
    }
    found = numbers(metrics)
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert loss.item() == pytest.approx(-0.929100, abs=1e-6)


def test_the_published_vector_of_the_dual_clip() -> None:
    """Spec async_ppo 1.7, T3: a ratio of 4.48 with an advantage of -2 costs 6, not 8.96, and pulls no further."""
    one, logprob = torch.tensor([True]), torch.tensor([1.5], requires_grad=True)
    zero, advantages = torch.zeros(1), torch.tensor([-2.0])
    loss, metrics = decoupled_ppo(logprob, zero, zero, advantages, one, **PUBLISHED)
    assert (loss.item(), numbers(metrics)["dual_clip_fraction"]) == (6.0, 1.0)
    assert numbers(metrics)["proximal_ratio"] == pytest.approx(4.481689)
    loss.backward()
    assert logprob.grad is not None and logprob.grad.item() == 0
    loss, metrics = clipped_ppo(logprob, zero, advantages, one, **CLIP)
    expected: Any = (pytest.approx(2 * 4.481689), 0.0)
    assert (loss.item(), numbers(metrics)["dual_clip_fraction"]) == expected


def test_a_row_without_advantage_is_not_clipped() -> None:
    _, metrics = clipped_ppo(LOGPROB, BEHAVE, torch.zeros(5), VALID, **CLIP, clip_ratio_c=3.0)
    found = numbers(metrics)
    assert (found["clip_fraction"], found["dual_clip_fraction"]) == (0, 0)


@settings(max_examples=100, deadline=None, derandomize=True)  # single precision may see a row on a bound otherwise
@given(
    seeds,
    st.sampled_from([None, 1.5, 3.0]),
    st.sampled_from([(0.0, math.inf), (0.0, 1.3), (0.7, 1.5), (0.8, math.inf)]),
    st.sampled_from(["mask", "truncate"]),
    st.sampled_from(["valid", "kept"]),
)
def test_decoupled_ppo_is_the_formula_row_by_row(
    seed: int, c: float | None, bounds: tuple[float, float], mode: Any, over: Any
) -> None:
    rows = random_rows(seed)
    loss, metrics = decoupled_ppo(
        **rows,
        clip_ratio_low=0.1,
        clip_ratio_high=0.3,
        clip_ratio_c=c,
        behave_weight_threshold=None if bounds[1] == math.inf else bounds[1],
        behave_weight_lower=bounds[0] or None,
        behave_weight_mode=mode,
        denominator=over,
    )
    expected = reference(rows, 0.1, 0.3, c, bounds, mode, over)
    assert numbers(metrics) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert loss.item() == pytest.approx(expected["policy_loss"], rel=1e-4, abs=1e-5)


@settings(max_examples=60, deadline=None)
@given(seeds, st.sampled_from([None, 3.0]), st.sampled_from(["mask", "truncate"]), st.sampled_from(["valid", "kept"]))
def test_fresh_rows_make_it_plain_ppo_bit_for_bit(seed: int, c: float | None, mode: Any, over: Any) -> None:
    rows = random_rows(seed)
    rows["proximal_logprob"] = rows["behave_logprob"].clone()
    gradients: list[Any] = []
    losses, reported = [], []
    for make in ("clipped", "decoupled"):
        logprob = rows["logprob"].clone().requires_grad_()
        if make == "clipped":
            loss, metrics = clipped_ppo(**{**plain_rows(rows), "logprob": logprob}, **CLIP, clip_ratio_c=c)
        else:
            loss, metrics = decoupled_ppo(
                **{**rows, "logprob": logprob},
                **CLIP,
                clip_ratio_c=c,
                behave_weight_threshold=2.0,
                behave_weight_lower=0.5,
                behave_weight_mode=mode,
                denominator=over,
            )
        loss.backward()
        gradients.append(logprob.grad)
        losses.append(loss)
        reported.append(numbers(metrics))
    assert torch.equal(*losses) and torch.equal(*gradients)
    # Metrics may be added up in another order, by CPUs that do many at once.
    assert {name: reported[1][name] for name in reported[0]} == pytest.approx(reported[0], rel=1e-5, abs=1e-7)
    weights = {"behav_approx_kl": 0, "behav_clip_fraction": 0, "behave_k3": 0, "ess": 1, "behave_weight_p95": 1}
    assert {name: reported[1][name] for name in weights} == pytest.approx(weights, abs=1e-6)


def test_the_gradient_of_plain_ppo_is_that_of_the_formula() -> None:
    """Written out as CleanRL has it, without masks."""
    rows = valid_rows(3)
    logprob = rows["logprob"].clone().requires_grad_()
    ratio = (logprob - rows["behave_logprob"]).exp()
    advantages = rows["advantages"]
    expected = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).mean()
    (gradient,) = torch.autograd.grad(expected, logprob)
    for valid in (rows["valid"], rows["valid"].float(), None):
        loss, _ = clipped_ppo(logprob, rows["behave_logprob"], advantages, valid, **CLIP)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(torch.autograd.grad(loss, logprob)[0], gradient)


@settings(max_examples=40, deadline=None)
@given(seeds, st.sampled_from([0.1, 30.0, 1e4]))
def test_masked_and_extreme_rows_cause_no_nan(seed: int, scale: float) -> None:
    rows = random_rows(seed, scale)
    options: list[Any] = [(None, "mask", None), (2.0, "mask", 3.0), (2.0, "truncate", None)]
    for threshold, mode, c in options:
        logprob = rows["logprob"].clone().requires_grad_()
        loss, metrics = decoupled_ppo(
            **{**rows, "logprob": logprob},
            **CLIP,
            clip_ratio_c=c,
            behave_weight_threshold=threshold,
            behave_weight_mode=mode,
        )
        loss.backward()
        assert all(math.isfinite(number) for number in numbers(metrics).values())
        assert logprob.grad is not None and logprob.grad.isfinite().all()
        assert (logprob.grad[~rows["valid"]] == 0).all()
        found = numbers(metrics)
        for name in ("clip_fraction", "dual_clip_fraction", "behav_clip_fraction", "ess"):
            assert 0 <= found[name] <= 1 + 1e-6


def test_loss_is_finite_for_an_action_that_became_impossible() -> None:
    logprob = torch.tensor([-math.inf, -1.0], requires_grad=True)
    behave, both = torch.tensor([-1.0, -1.0]), torch.tensor([True, True])
    proximal = interpolate_proximal(logprob, behave, torch.tensor([0, 0]), 2)
    loss, metrics = decoupled_ppo(logprob, behave, proximal, torch.tensor([-1.0, 1.0]), both, **PUBLISHED)
    loss.backward()
    assert logprob.grad is not None and logprob.grad.isfinite().all()
    assert all(math.isfinite(number) for number in numbers(metrics).values())


@pytest.mark.parametrize("over", ["valid", "kept"])
def test_no_rows_to_learn_from_give_a_loss_of_zero(over: Any) -> None:
    rows = random_rows(1)
    dropped = rows["behave_logprob"] - 5  # each weight is exp(5), and none is kept
    cases = [
        ({**rows, "valid": torch.zeros_like(rows["valid"])}, 0.0),
        ({**rows, "behave_logprob": dropped, "proximal_logprob": rows["behave_logprob"]}, 1.0),
        ({name: array[:0] for name, array in rows.items()}, 0.0),
    ]
    for case, share in cases:
        logprob = case["logprob"].clone().requires_grad_()
        loss, metrics = decoupled_ppo(**{**case, "logprob": logprob}, **{**PUBLISHED, "denominator": over})
        loss.backward()
        assert loss.item() == 0 and logprob.grad is not None and not logprob.grad.any()
        found = numbers(metrics)
        assert found["behav_clip_fraction"] == pytest.approx(share) and not any(map(math.isnan, found.values()))


def test_rows_of_any_one_shape_and_valid_of_none() -> None:
    rows = {name: array[:24] for name, array in valid_rows(2).items()}
    flat = decoupled_ppo(**rows, **PUBLISHED)
    square = decoupled_ppo(**{name: array.reshape(4, 6) for name, array in rows.items()}, **PUBLISHED)
    unmasked = decoupled_ppo(**{**rows, "valid": None}, **PUBLISHED)
    for loss, metrics in (square, unmasked):
        torch.testing.assert_close(loss, flat[0])
        assert numbers(metrics) == pytest.approx(numbers(flat[1]), rel=1e-5, abs=1e-6)


def test_only_the_policy_is_learned() -> None:
    """Proximal log-probabilities and advantages that still hang on a graph are constants."""
    rows = {name: array[VALID] for name, array in {"l": LOGPROB, "b": BEHAVE, "a": ADVANTAGES}.items()}
    arrays = [rows[name].clone().requires_grad_() for name in "lbba"]
    loss, _ = decoupled_ppo(arrays[0], arrays[1], arrays[2], arrays[3], VALID[:4], **PUBLISHED)
    loss.backward()
    assert arrays[0].grad is not None and all(array.grad is None for array in arrays[1:])


def test_half_precision_is_computed_in_single() -> None:
    logprob, behave, advantages = (array.bfloat16() for array in (LOGPROB, BEHAVE, ADVANTAGES))
    loss, metrics = clipped_ppo(logprob, behave, advantages, VALID, **CLIP)
    assert loss.dtype == metrics["proximal_ratio"].dtype == torch.float32


# Proximal policies between two versions.


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(1, 2**31))
def test_interpolation_goes_by_age(seed: int, current: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logprob, behave = torch.randn(2, 30, generator=generator, dtype=torch.float64)
    versions = current - 1 - torch.randint(-2, 9, (30,), generator=generator)
    found = interpolate_proximal(logprob.requires_grad_(), behave, versions, current)
    assert not found.requires_grad
    for k, version in enumerate(versions.tolist()):
        gap = current - version
        alpha = min(max((current - 1 - version) / gap, 0.0), 1.0) if gap > 0 and version >= 0 else 0.0
        expected = behave[k] + alpha * (logprob[k].detach() - behave[k])
        assert float(found[k]) == pytest.approx(float(expected), rel=1e-9)
    fresh = versions >= current - 1
    assert torch.equal(found[fresh], behave[fresh]), "staleness 0 is plain PPO"


# The value loss.


def test_the_published_value_vector() -> None:
    values, old, returns = torch.tensor([[1, 2, 0.5], [0.5, 1.9, 1.5], [2, 1, 1]])
    for delta in (10.0, None):
        loss, metrics = value_loss(
            values, old, returns, torch.ones(3, dtype=torch.bool), value_clip=0.2, huber_delta=delta
        )
        assert loss.item() == pytest.approx(0.49)
        assert numbers(metrics)["value_loss"] == loss.item()
    # Only the first row costs more for being clipped: at 0.7 it is 1.3 away, not 1.
    assert numbers(metrics)["value_clip_ratio"] == pytest.approx(1 / 3)
    loss, metrics = value_loss(values, old * math.nan, returns, None, value_clip=None)
    assert loss.item() == pytest.approx((0.5 + 0.5 + 0.125) / 3)
    assert numbers(metrics)["value_clip_ratio"] == 0


def test_the_huber_loss_is_linear_beyond_delta() -> None:
    values = torch.tensor([0.0, 0.0], requires_grad=True)
    loss, _ = value_loss(values, values, torch.tensor([0.5, 10.0]), None, value_clip=None, huber_delta=2.0)
    assert loss.item() == pytest.approx((0.125 + 2 * (10 - 1)) / 2)
    loss.backward()
    assert values.grad is not None and values.grad.tolist() == [-0.25, -1.0]


@settings(max_examples=100, deadline=None, derandomize=True)  # as above
@given(seeds, st.sampled_from([None, 0.2, 5.0]), st.sampled_from([None, 0.7]))
def test_the_value_loss_row_by_row(seed: int, clip: float | None, delta: float | None) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(3, 30, generator=generator)
    valid = torch.rand(30, generator=generator) < 0.8
    rows = torch.where(valid, rows, torch.tensor([math.nan, math.inf, -math.inf])[:, None])
    values = rows[0].clone().requires_grad_()

    def cost(error: float) -> float:
        far = delta is not None and abs(error) >= delta
        return delta * (abs(error) - 0.5 * delta) if far and delta is not None else 0.5 * error**2

    costs, clipped = [], []
    for v, old, target in rows[:, valid].T.double().tolist():
        moved = v if clip is None else old + min(max(v - old, -clip), clip)
        costs.append(max(cost(target - v), cost(target - moved)))
        clipped.append(cost(target - moved) > cost(target - v) + 1e-6)
    loss, metrics = value_loss(values, rows[1], rows[2], valid, value_clip=clip, huber_delta=delta)
    found = numbers(metrics)
    assert loss.item() == pytest.approx(np.mean(costs), rel=1e-5)
    assert found["value_clip_ratio"] == pytest.approx(np.mean(clipped))
    kept = rows[:, valid].double().numpy()
    expected = 1 - np.var(kept[2] - kept[0]) / np.var(kept[2])
    assert found["explained_variance"] == pytest.approx(expected, rel=1e-4, abs=1e-4)
    loss.backward()
    assert values.grad is not None and values.grad.isfinite().all() and not values.grad[~valid].any()


def test_explained_variance_of_constant_returns_is_zero() -> None:
    values, returns = torch.randn(100), torch.full((100,), 0.1)
    returns[::2] = torch.nextafter(returns[::2], torch.ones(50))  # rounding is no variation
    for valid in (None, torch.ones(100, dtype=torch.bool), torch.zeros(100, dtype=torch.bool)):
        assert numbers(value_loss(values, values, returns, valid, value_clip=0.2)[1])["explained_variance"] == 0


# Means and normalization.


def test_the_published_normalizations() -> None:
    """Spec async_ppo 1.7: once with the unbiased deviation, then once more with the biased one."""
    advantages = torch.tensor([[2.302847, -0.2], [1.495850, 1.674576], [1.7, 0.192]])
    every = torch.ones(3, 2, dtype=torch.bool)
    once = normalize(advantages, every, eps=1e-5)
    expected = [[1.136839, -1.429682], [0.309312, 0.492585], [0.518655, -1.027709]]
    torch.testing.assert_close(once, torch.tensor(expected), rtol=0, atol=2e-6)
    twice = normalize(once, every, correction=0, eps=1e-5)
    expected = [[1.245344, -1.566137], [0.338834, 0.539599], [0.568158, -1.125798]]
    torch.testing.assert_close(twice, torch.tensor(expected), rtol=0, atol=2e-6)


def test_normalization_is_over_valid_rows() -> None:
    rows = random_rows(5)
    advantages, valid = rows["advantages"], rows["valid"]
    found = normalize(advantages, valid)
    kept = advantages[valid]
    torch.testing.assert_close(found[valid], (kept - kept.mean()) / (kept.std() + 1e-8))
    torch.testing.assert_close(normalize(kept, None), found[valid])
    assert found.dtype == torch.float32 and (found[~valid] == 0).all()
    for number in (0, 1):
        few = torch.arange(len(valid)) < number
        assert (normalize(torch.where(few, 3.0, math.nan), few) == 0).all()


def test_a_masked_mean_can_be_learned() -> None:
    entropy = torch.tensor([1.0, math.nan, 3.0], requires_grad=True)
    mean = masked_mean(entropy, torch.tensor([True, False, True]))
    mean.backward()
    assert mean.item() == 2.0
    assert entropy.grad is not None and entropy.grad.tolist() == [0.5, 0.0, 0.5]
    assert masked_mean(entropy, torch.zeros(3, dtype=torch.bool)).item() == 0


# Refusals.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clip_ratio_low": 1.5}, "clip_ratio_low and clip_ratio_high are 1.5 and 0.2; .* such as 0.2 for both"),
        ({"clip_ratio_high": -0.1}, "are 0.2 and -0.1"),
        ({"clip_ratio_c": 1.0}, "clip_ratio_c is 1.0; .* Use 3.0, or None"),
        ({"behave_weight_threshold": 0.0}, "behave_weight_threshold is 0.0; .* or None for no bound"),
        ({"behave_weight_lower": 3.0}, r"behave_weight_lower is 3.0; .* behave_weight_threshold \(2.0\)"),
        ({"behave_weight_mode": "truncated"}, "unknown behave_weight_mode 'truncated'. Did you mean 'truncate'"),
        ({"denominator": "all"}, "unknown denominator 'all'.* Known: kept, valid"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        decoupled_ppo(LOGPROB, BEHAVE, BEHAVE, ADVANTAGES, VALID, **{**PUBLISHED, **options})


@pytest.mark.parametrize("options", [{"value_clip": 0.0}, {"value_clip": 0.2, "huber_delta": -1.0}], ids=str)
def test_wrong_value_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected a number above 0, or None"):
        value_loss(LOGPROB, BEHAVE, ADVANTAGES, VALID, **options)


@pytest.mark.parametrize("name", ["behave_logprob", "proximal_logprob", "advantages", "valid", "versions"])
def test_a_wrong_shape_is_refused_and_not_broadcast(name: str) -> None:
    rows: dict[str, Any] = {**random_rows(1), "versions": torch.zeros(40)}
    rows[name] = rows[name][:, None]
    with pytest.raises(ConfigError, match=rf"{name} has shape \[40, 1\]; expected \[40\].*Losses do not broadcast"):
        decoupled_ppo(**rows, **PUBLISHED)
