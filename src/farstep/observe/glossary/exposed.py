"""What the status page gives to Prometheus, in addition to the metrics of `farstep train` and `ClusterEnv.stats`."""

from __future__ import annotations

from functools import partial

from farstep.observe.glossary.metric import Metric, Namespace

_head = partial(Metric, source="head")

EXPOSED_GROUPS = (
    Namespace(
        "run/",
        "What the run is.",
        (_head("run/title", "learner and environment, such as `ppo on CartPole-v1`", kind="info"),),
    ),
    Namespace(
        "diagnosis/",
        "What the run is waiting for, as `env.diagnose()` says it ([causes](waiting.md)).",
        (
            _head(
                "diagnosis/causes/<rank>",
                "name of a cause, such as `slow environment`; `starting` before workers run, `no slots` while the run "
                "waits for its coordinator, `no nodes` while a call waits for missing nodes. "
                "Rank 0 is the most important cause; the others are independent of it",
                kind="info",
            ),
            _head("diagnosis/problems", "number of causes to warn about", unit="causes", healthy="0"),
        ),
    ),
)
"""All of them, by prefix."""

EXPOSED = {metric.name: metric for group in EXPOSED_GROUPS for metric in group.metrics}
"""The same, by name."""
