"""Warnings about runs that do not learn, derived from their metrics, each with a remedy.

A guard is a pure function of the metrics of the last 20 updates; `Guards` keeps these and issues each warning once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

Metrics = Mapping[str, float]
Guard = Callable[[Sequence[Metrics]], str | None]

_WINDOW = 20
"""Number of updates whose metrics a guard gets; no guard warns earlier."""
_MAX_SKIPPED, _MAX_CLIPPED, _MIN_ESS, _MAX_DIVERGENCE = 0.5, 0.5, 0.3, 0.5


def clip_saturated(window: Sequence[Metrics]) -> str | None:
    """Warn if most rows are outside the clip range, so that they contribute no gradient."""
    fraction = _mean(window, "train/actor/clip_fraction")
    if fraction is None or fraction <= _MAX_CLIPPED:
        return None
    if (_mean(window, "lag/versions_mean") or 0.0) >= 1 and not (_mean(window, "train/actor/behave_k3") or 0.0):
        return (
            f"clipping excludes {fraction:.0%} of the rows (train/actor/clip_fraction): workers act with older weights "
            "and the loss clips around those, so the learner stalls. Use --decoupled, or a smaller --kl-threshold, "
            "with which workers pull weights more often."
        )
    return (
        f"clipping excludes {fraction:.0%} of the rows (train/actor/clip_fraction): lower --learning-rate or "
        "--update-epochs, or set --target-kl."
    )


def effective_sample_size_low(window: Sequence[Metrics]) -> str | None:
    """Warn if behaviour weights differ so much that a few rows dominate an update."""
    ess = _mean(window, "train/actor/ess")
    if ess is None or ess >= _MIN_ESS:
        return None
    return (
        f"the effective sample size is {ess:.0%} of the rows (train/actor/ess), because older weights acted in them: "
        "lower --kl-threshold, the staleness or --learning-rate."
    )


def behaviour_diverged(window: Sequence[Metrics]) -> str | None:
    """Warn if the learner's policy is far from the policy that acted."""
    divergence = _mean(window, "train/actor/behave_k3")
    if divergence is None or divergence <= _MAX_DIVERGENCE:
        return None
    return (
        f"the KL divergence between the learner's policy and the policy that acted is {divergence:.2g} nats "
        "(train/actor/behave_k3): lower --kl-threshold, the staleness or --learning-rate."
    )


def weights_not_pulled(window: Sequence[Metrics]) -> str | None:
    """Warn if no worker pulled weights during the window, although the learner published after every update.

    During critic warm-up the policy does not change, so workers have nothing to pull.
    """
    if any("train/critic/warmup" in metrics for metrics in window):
        return None
    pulls = [metrics.get("sync/pulls_per_worker") for metrics in window]
    lag = window[-1].get("lag/versions_mean", 0.0)
    if pulls[0] is None or pulls[0] != pulls[-1] or lag < len(window) - 1:
        return None
    return (
        f"no worker has pulled weights for {lag:.0f} versions: the policy hardly changes, or --kl-threshold is too "
        "large. Lower --kl-threshold; if the return does not change either, raise --learning-rate."
    )


def steps_skipped(window: Sequence[Metrics]) -> str | None:
    """Warn if most gradients are not finite, so that their optimizer steps are skipped."""
    fraction = max(_mean(window, f"train/{part}/skipped_steps") or 0.0 for part in ("actor", "critic"))
    if fraction <= _MAX_SKIPPED:
        return None
    return (
        f"{fraction:.0%} of the optimizer steps were skipped, because their gradients were not finite: lower "
        "--learning-rate, or look for infinite rewards and observations."
    )


GUARDS: tuple[Guard, ...] = (
    steps_skipped,
    clip_saturated,
    effective_sample_size_low,
    behaviour_diverged,
    weights_not_pulled,
)


class Guards:
    """Issues each warning once per run.

    Args:
        guards: Functions of the metrics of the last 20 updates that return a warning or None.
    """

    def __init__(self, guards: Sequence[Guard] = GUARDS) -> None:
        self._guards = list(guards)
        self._window: deque[Metrics] = deque(maxlen=_WINDOW)

    def observe(self, metrics: Metrics) -> Iterator[str]:
        """Add the metrics of an update, and yield each warning whose condition holds for the first time."""
        self._window.append(metrics)
        if len(self._window) < _WINDOW:
            return
        window = tuple(self._window)
        for guard in tuple(self._guards):
            if (warning := guard(window)) is not None:
                self._guards.remove(guard)
                yield warning


def _mean(window: Sequence[Metrics], name: str) -> float | None:
    """Return the mean over the updates that have the metric; None if none has it."""
    values = [metrics[name] for metrics in window if name in metrics]
    return sum(values) / len(values) if values else None
