"""Metrics for Prometheus: the numbers of the glossary, named as OpenMetrics requires."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from farstep.observe.extras import require
from farstep.observe.glossary import METRICS, STATS, Metric

_UNITS = ("seconds", "bytes")
"""Units that OpenMetrics writes at the end of a name."""


def exposition(stats: Mapping[str, Any], metrics: Mapping[str, float]) -> str:
    """Return numbers in OpenMetrics' text form.

    Args:
        stats: The counters of a run, as `ClusterEnv.stats`; may be empty.
        metrics: The latest metrics of `farstep train`; may be empty.

    Returns:
        The text.

    Raises:
        ConfigError: The package prometheus-client is not installed.
    """
    text = require("prometheus_client.openmetrics.exposition", "prometheus-client", "/metrics", "generate_latest")
    registry = require("prometheus_client", "prometheus-client", "/metrics", "CollectorRegistry").CollectorRegistry()
    registry.register(_Families(stats, metrics))
    return str(text.generate_latest(registry).decode())


def openmetrics_name(metric: Metric) -> str:
    """Return the name of a metric in OpenMetrics, without the suffix of a counter.

    Args:
        metric: An entry of the glossary.

    Returns:
        The name, e.g. `farstep_time_workers_env_seconds`.
    """
    parts = [part for part in metric.name.split("/") if not part.startswith("<")]
    name = re.sub(r"\W", "_", "_".join(["farstep", *parts]))
    unit = metric.unit if metric.unit in _UNITS and not name.endswith(f"_{metric.unit}") else ""
    return f"{name}_{unit}" if unit else name


class _Families:
    """The families of samples of one moment, as prometheus-client collects them."""

    def __init__(self, stats: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        self._stats, self._metrics = stats, metrics

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        samples: defaultdict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        described: dict[str, Metric] = {}
        for metric, labels, value in [*_matched(STATS, _flat(self._stats)), *_matched(METRICS, self._metrics.items())]:
            name = openmetrics_name(metric)
            if described.setdefault(name, metric) is metric:  # statistics come first: `train` repeats some of them
                samples[name].append((labels, value))
        for name, metric in described.items():
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            keys = sorted(samples[name][0][0])
            family = kind(name.removesuffix("_total"), metric.meaning, labels=keys)
            for labels, value in samples[name]:
                family.add_metric([labels[key] for key in keys], value)
            yield family


def _matched(glossary: Mapping[str, Metric], values: Any) -> Iterator[tuple[Metric, dict[str, str], float]]:
    patterns: defaultdict[str, list[Metric]] = defaultdict(list)  # by the part before the first slash
    for name, pattern in glossary.items():
        if "<" in name:
            patterns[name.partition("/")[0]].append(pattern)
    for name, value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            continue
        if (metric := glossary.get(name)) is not None:
            yield metric, {}, float(value)
            continue
        for pattern in patterns[name.partition("/")[0]]:
            if (labels := pattern.labels(name)) is not None:
                yield pattern, labels, float(value)
                break


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings and lists, with their keys joined by slashes."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield name, value
        return
    for key, leaf in items:
        yield from _flat(leaf, f"{name}/{key}" if name else str(key))
