"""Warnings about a run that does not learn, derived from its metrics, each with its remedy.

A guard is a pure function of the last updates' metrics; `Guards` keeps these and gives each warning once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

Metrics = Mapping[str, float]
Guard = Callable[[Sequence[Metrics]], str | None]

_WINDOW = 20
"""Updates that a guard sees; no guard warns earlier."""
_SKIPPED, _CLIPPED, _WORTH, _DIVERGED = 0.5, 0.5, 0.3, 0.5


def clip_saturated(window: Sequence[Metrics]) -> str | None:
    """Most rows are outside the clip range, update after update, so they contribute no gradient."""
    share = _mean(window, "train/actor/clip_fraction")
    if share is None or share <= _CLIPPED:
        return None
    if (_mean(window, "lag/versions_mean") or 0.0) >= 1 and not (_mean(window, "train/actor/behave_k3") or 0.0):
        return (
            f"clipping leaves out {share:.0%} of the rows: workers act with older weights and the loss clips around "
            "those, so the learner stalls. Use --decoupled, or pull weights more often (a smaller "
            "--kl-threshold)."
        )
    return f"clipping leaves out {share:.0%} of the rows: lower --learning-rate or --update-epochs, or set --target-kl."


def samples_worthless(window: Sequence[Metrics]) -> str | None:
    """Behaviour weights differ so much that a few rows decide an update."""
    share = _mean(window, "train/actor/ess")
    if share is None or share >= _WORTH:
        return None
    return (
        f"rows of older weights are worth {share:.0%} of as many fresh ones (train/actor/ess): lower --kl-threshold, "
        "the staleness or --learning-rate."
    )


def behaviour_diverged(window: Sequence[Metrics]) -> str | None:
    """The learner's policy is far from the one that acted."""
    divergence = _mean(window, "train/actor/behave_k3")
    if divergence is None or divergence <= _DIVERGED:
        return None
    return (
        f"the learner is {divergence:.2g} nats from the policy that acted (train/actor/behave_k3): lower "
        "--kl-threshold, the staleness or --learning-rate."
    )


def weights_held(window: Sequence[Metrics]) -> str | None:
    """Warn if no worker pulled during the window, although the learner published throughout.

    During critic warm-up the policy does not change, so workers have nothing to pull.
    """
    if any("train/critic/warmup" in metrics for metrics in window):
        return None
    pulls = [metrics.get("sync/weight_syncs") for metrics in window]
    lag = window[-1].get("lag/versions_mean", 0.0)
    if pulls[0] is None or pulls[0] != pulls[-1] or lag < len(window) - 1:
        return None
    return (
        f"no worker has pulled weights for {lag:.0f} versions: the policy hardly changes, or --kl-threshold is too "
        "large. Lower the threshold; if the return does not change either, raise --learning-rate."
    )


def steps_skipped(window: Sequence[Metrics]) -> str | None:
    """Most gradients are not finite, so the optimizer leaves them out."""
    share = _mean(window, "train/actor/skipped_steps")
    if share is None or share <= _SKIPPED:
        return None
    return (
        f"{share:.0%} of the optimizer steps were skipped, since their gradients were not finite: lower "
        "--learning-rate, or look for infinite rewards and observations."
    )


GUARDS: tuple[Guard, ...] = (steps_skipped, clip_saturated, samples_worthless, behaviour_diverged, weights_held)


class Guards:
    """Gives each warning once per run."""

    def __init__(self, guards: Sequence[Guard] = GUARDS) -> None:
        self._guards = list(guards)
        self._window: deque[Metrics] = deque(maxlen=_WINDOW)

    def observe(self, metrics: Metrics) -> Iterator[str]:
        """Add the metrics of an update; yields the warnings that apply for the first time."""
        self._window.append(metrics)
        if len(self._window) < _WINDOW:
            return
        window = tuple(self._window)
        for guard in tuple(self._guards):
            if (warning := guard(window)) is not None:
                self._guards.remove(guard)
                yield warning


def _mean(window: Sequence[Metrics], name: str) -> float | None:
    """Mean over the updates that have the metric; None if none has it."""
    values = [metrics[name] for metrics in window if name in metrics]
    return sum(values) / len(values) if values else None
