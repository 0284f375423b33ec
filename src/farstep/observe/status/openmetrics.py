"""Metrics for Prometheus: the numbers of the glossary, named as OpenMetrics requires."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from farstep.observe.extras import require
from farstep.observe.glossary import EXPOSED, METRICS, STATS, Metric

_UNITS = ("seconds", "bytes")
"""Units that OpenMetrics writes at the end of a name."""
_Sample: TypeAlias = tuple[Metric, dict[str, str], float | dict[str, str]]
"""A metric, the labels of one of its samples, and the number, or for an info `{"value": text}`."""


def exposition(stats: Mapping[str, Any], metrics: Mapping[str, float], exposed: Mapping[str, Any] | None = None) -> str:
    """Return numbers and texts in OpenMetrics' text form.

    Args:
        stats: The counters of a run, as `ClusterEnv.stats`; may be empty.
        metrics: The latest metrics of `farstep train`; may be empty.
        exposed: What only Prometheus gets, nested like `stats`; None: nothing.

    Returns:
        The text.

    Raises:
        ConfigError: The package prometheus-client is not installed.
    """
    text = require("prometheus_client.openmetrics.exposition", "prometheus-client", "/metrics", "generate_latest")
    registry = require("prometheus_client", "prometheus-client", "/metrics", "CollectorRegistry").CollectorRegistry()
    samples = [*_matched(STATS, _flat(stats)), *_matched(METRICS, metrics.items())]
    registry.register(_Families([*samples, *_matched(EXPOSED, _flat(exposed or {}))]))
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


def sample_name(metric: Metric) -> str:
    """Return the name of a metric in queries: the one in OpenMetrics with the suffix of its kind.

    Args:
        metric: An entry of the glossary.

    Returns:
        The name, e.g. `farstep_time_workers_env_seconds_total`.
    """
    suffix = {"counter": "_total", "info": "_info"}.get(metric.kind, "")
    return openmetrics_name(metric).removesuffix("_total") + suffix


class _Families:
    """The families of samples of one moment, as prometheus-client collects them."""

    def __init__(self, samples: Iterable[_Sample]) -> None:
        self._samples = samples

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "info": InfoMetricFamily}
        families: dict[str, tuple[Metric, Any]] = {}
        for metric, labels, value in self._samples:
            name = openmetrics_name(metric)
            if name not in families:  # statistics come first: `train` repeats some of them
                family = kinds[metric.kind](name.removesuffix("_total"), metric.meaning, labels=sorted(labels))
                families[name] = (metric, family)
            described, family = families[name]
            if described is metric:
                family.add_metric([labels[key] for key in sorted(labels)], value)
        yield from (family for _, family in families.values())


def _matched(glossary: Mapping[str, Metric], values: Iterable[tuple[str, Any]]) -> Iterator[_Sample]:
    patterns: defaultdict[str, list[Metric]] = defaultdict(list)  # by the part before the first slash
    for name, pattern in glossary.items():
        if "<" in name:
            patterns[name.partition("/")[0]].append(pattern)
    for name, value in values:
        if (metric := glossary.get(name)) is not None:
            yield from _sample(metric, {}, value)
            continue
        for pattern in patterns[name.partition("/")[0]]:
            if (labels := pattern.labels(name)) is not None:
                yield from _sample(pattern, labels, value)
                break


def _sample(metric: Metric, labels: dict[str, str], value: Any) -> Iterator[_Sample]:
    """Yield a finite number, or the text of an info; nothing if there is none."""
    if metric.kind == "info":
        if value not in (None, ""):
            text = str(value).encode(errors="replace").decode()  # the names of files may have lone surrogates
            yield metric, labels, {"value": text}
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        yield metric, labels, float(value)


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings and lists, with their keys joined by slashes."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield name, value
        return
    for key, leaf in items:
        yield from _flat(leaf, f"{name}/{key}" if name else str(key))
