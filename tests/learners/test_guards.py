"""Guards: warnings from metrics alone, each once, none on a healthy run."""

from __future__ import annotations

import pytest

from farstep.learners.loop.guards import Guards

HEALTHY = {
    "train/actor/clip_fraction": 0.1,
    "train/actor/ess": 0.95,
    "train/actor/behave_k3": 0.02,
    "lag/versions_mean": 1.0,
}


def warnings(updates: int = 60, pulls_every: int = 3, **changes: float) -> list[str]:
    guards = Guards()
    found: list[str] = []
    for k in range(updates):
        metrics = {**HEALTHY, "sync/pulls_per_worker": float(k // pulls_every)}
        metrics |= {name.replace("__", "/"): value for name, value in changes.items()}
        if pulls_every > updates:
            metrics["lag/versions_mean"] = float(k)
        found += guards.observe(metrics)
    return found


def test_a_healthy_run_gets_no_warning() -> None:
    assert warnings() == []


def test_a_run_without_these_metrics_gets_no_warning() -> None:
    guards = Guards()
    assert [warning for _ in range(60) for warning in guards.observe({"step": 1.0})] == []


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"train__actor__clip_fraction": 0.8}, "--learning-rate"),
        (
            {"train__actor__clip_fraction": 0.8, "train__actor__behave_k3": 0.0, "lag__versions_mean": 5.0},
            "--decoupled",
        ),
        ({"train__actor__skipped_steps": 0.9}, "not finite"),
        ({"train__actor__ess": 0.1}, "--kl-threshold"),
        ({"train__actor__behave_k3": 2.0}, "--kl-threshold"),
        ({"pulls_every": 1000}, "no worker has pulled"),
    ],
)
def test_each_cause_is_named_once_with_its_remedy(changes: dict[str, float], remedy: str) -> None:
    (warning,) = warnings(**changes)  # type: ignore[arg-type]
    assert remedy in warning


def test_one_bad_update_is_not_enough() -> None:
    guards = Guards()
    found = [w for k in range(60) for w in guards.observe({**HEALTHY, "train/actor/ess": 0.01 if k == 30 else 1.0})]
    assert found == []


def test_no_warning_if_workers_pull_nothing_during_critic_warmup() -> None:
    assert warnings(pulls_every=1000, train__critic__warmup=1.0) == []
