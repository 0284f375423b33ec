"""A Grafana dashboard for runs that a Prometheus reads: rows, panels and queries, with units and descriptions of the
glossary."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from farstep.observe.glossary import EXPOSED, METRICS, STATS, Metric
from farstep.observe.status.openmetrics import sample_name

_GLOSSARY = EXPOSED | METRICS | STATS
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT = 24, 8
"""Columns of Grafana's grid, and rows of a panel."""
_UNITS = {"seconds": "s", "bytes": "decbytes", "fraction": "percentunit", "ms": "ms", "": "none"}
_RATE_UNITS = {"seconds": "percentunit", "bytes": "Bps"}
"""Grafana's names of units; it shows others as they are."""
_METRIC = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        title: Its heading.
        queries: By legend, in PromQL, with names of the glossary in backticks. `[range]` is Grafana's interval for
            rates.
        kind: Grafana's type of panel.
        unit: Grafana's unit; empty: that of the metrics, or none if they differ.
        stacked: Whether to stack the curves, as they are or as shares.
    """

    title: str
    queries: Mapping[str, str]
    kind: Literal["timeseries", "stat", "bargauge", "state-timeline"] = "timeseries"
    unit: str = ""
    stacked: Literal["", "normal", "percent"] = ""

    @property
    def metrics(self) -> list[Metric]:
        """The metrics in its queries, each once."""
        return [_GLOSSARY[name] for name in dict.fromkeys(_METRIC.findall(" ".join(self.queries.values())))]


def _each(*names: str) -> dict[str, str]:
    """Queries of the numbers with these names."""
    return {_GLOSSARY[name].short_name: f"`{name}`" for name in names}


def _rates(*names: str) -> dict[str, str]:
    """Queries of the rates of counters with these names."""
    return {_GLOSSARY[name].short_name: f"rate(`{name}`[range])" for name in names}


def _under(key: str) -> list[str]:
    """The names of all entries of `ClusterEnv.stats` under this key."""
    return [name for name in STATS if name.startswith(f"{key}/")]


_STATES = [f"workers/{state}" for state in ("alive", "starting", "queued", "parked", "lost")]
_PHASES = [name for name, metric in METRICS.items() if re.fullmatch("time/[a-z_]+", name) and name != "time/step"]
_HOSTS = 'label_replace(`workers/hosts/<worker>`, "host", "$1", "value", "(.*)")'
_PULLERS = (
    "(count by (instance, job) (`acting/<server>/rows`) or count by (instance, job) (`pulls/per_worker/<worker>` > 0))"
)
_SAVED = (
    f"clamp_min(deriv(`versions/current`[range]) * on (instance, job) {_PULLERS} - on (instance, job) "
    "rate(`pulls/total`[range]), 0) * on (instance, job) (`bytes/weights_sent` / `pulls/total`)"
)
"""Bytes that workers did not pull, per second: the versions that they skipped times the mean size of a pull."""

ROWS: dict[str, tuple[Panel, ...]] = {
    "What the run waits for": (
        Panel("Causes", {"{{value}}": "`diagnosis/causes/<rank>`"}, "state-timeline"),
        Panel(
            "Now",
            _each("diagnosis/problems", "steps_per_second", "episodes/return_mean", "workers/alive"),
            "stat",
            "none",
        ),
    ),
    "Throughput and where the time goes": (
        Panel("Recent steps per second", {"steps": "`steps_per_second`"}),
        Panel("Time of workers", _rates(*_under("time/workers")), stacked="percent"),
        Panel(
            "Time of the learner",
            _rates(*_under("time/learner")),
            stacked="percent",
        ),
        Panel("Phases of an update", _each(*_PHASES), stacked="normal"),
        Panel("Recent steps per second of each worker", {"worker {{worker}}": "`workers/steps_per_second/<worker>`"}),
        Panel("Received rollouts", {"bytes": "rate(`bytes/rollouts_received`[range])"}),
        Panel("Rows of acting servers", {"server {{server}}": "`acting/<server>/rows_per_second`"}),
        Panel("Batches of acting servers", {"server {{server}}": "`acting/<server>/batch_size`"}),
    ),
    "Workers": (
        Panel("Workers by state", _each(*_STATES), stacked="normal"),
        Panel(
            "Workers by host and state",
            {
                "{{host}}: {{value}}": "count by (host, value) (`workers/states/<worker>` * on (instance, job, worker) "
                f"group_left (host) {_HOSTS})"
            },
            "bargauge",
            "none",
        ),
        Panel(
            "Slots",
            {"held": "`slots/held`", "used": "rate(`slots/used_seconds`[range])"},
            unit="suffix:slots",
        ),
    ),
    "Staleness and versions": (
        Panel("Version", {"newest": "`versions/current`", "oldest that acted": "`versions/oldest_consumed`"}),
        Panel("Version lag", _each("versions/lag_mean", "versions/lag_max", "lag/versions_mean", "lag/versions_max")),
        Panel(
            "Chunks by version lag",
            {"{{lag}} versions": "sum by (lag) (`versions/lag_histogram/<worker>/<lag>`)"},
            "bargauge",
        ),
        Panel("Divergence of each worker", {"worker {{worker}}": "`divergence/<worker>`"}),
    ),
    "Weights": (
        Panel("Pulls", {"pulls per second": "rate(`pulls/total`[range])"}),
        Panel(
            "Bytes sent",
            {"weights": "rate(`bytes/weights_sent`[range])", "probes": "rate(`bytes/probes_sent`[range])"},
        ),
        Panel("Bytes saved, because workers skipped versions", {"saved": _SAVED}, unit="Bps"),
    ),
    "Replay buffer": (
        Panel("Rows", {"fill": "`buffer/fill`", "capacity": "`buffer/capacity`"}),
        Panel("Rows sampled per row inserted", {"ratio": "`limiter/ratio`"}),
        Panel(
            "Time blocked by the limiter",
            {
                "inserting": "rate(`limiter/blocked/insert`[range])",
                "sampling": "rate(`limiter/blocked/sample`[range])",
                "buffer full": "rate(`buffer/full_s`[range])",
            },
        ),
    ),
    "Learner and returns": (
        Panel(
            "Return",
            {"training": "`episodes/return_mean`", "evaluation": "`eval/return_mean`"},
        ),
        Panel("Length of episodes", _each("episodes/length_mean")),
        Panel("Losses", _each("train/actor/policy_loss", "train/critic/value_loss", "train/actor/entropy_loss")),
        Panel(
            "Policy change",
            _each(
                "train/actor/proximal_approx_kl",
                "train/actor/behav_approx_kl",
                "train/actor/clip_fraction",
                "train/actor/ess",
            ),
        ),
        Panel("Values", _each("train/critic/explained_variance", "train/critic/q_mean", "train/critic/td_error")),
        Panel("Norm of gradients", {"actor": "`train/actor/grad_norm`", "critic": "`train/critic/grad_norm`"}),
    ),
    "Failures": (
        Panel("Restarts", {"workers": "`workers/restarts`", "server {{server}}": "`acting/<server>/restarts`"}),
        Panel("Dropped chunks", _each(*_under("dropped"))),
        Panel(
            "Skipped optimizer steps",
            {"actor": "`train/actor/skipped_steps`", "critic": "`train/critic/skipped_steps`"},
        ),
    ),
}
"""The panels of each row of the dashboard."""


def dashboard() -> dict[str, Any]:
    """Return the dashboard as JSON values, for Grafana's import."""
    return {
        "title": "farstep",
        "uid": "farstep",
        "tags": ["farstep"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_source_variable(), _run_variable()]},
        "panels": [panel | {"id": number} for number, panel in enumerate(_placed(), 1)],
    }


def _source_variable() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _run_variable() -> dict[str, Any]:
    """Lists the runs of the time range: their titles to choose from, their addresses for queries."""
    return {
        "name": "run",
        "label": "Run",
        "type": "query",
        "datasource": _SOURCE,
        "query": f"query_result(last_over_time({sample_name(EXPOSED['run/title'])}[$__range]))",
        "regex": '/instance="(?<value>[^"]+)|value="(?<text>[^"]+)/g',
        "refresh": 2,  # when the time range changes
    }


def _placed() -> Iterator[dict[str, Any]]:
    """Yield rows and their panels, each with its place in the grid."""
    y = 0
    for title, panels in ROWS.items():
        yield {"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": _place(_WIDTH, 1, 0, y)}
        y += 1
        in_line = 3 if len(panels) % 3 == 0 else 4 if len(panels) % 4 == 0 else 2
        width = _WIDTH // in_line
        for number, panel in enumerate(panels):
            column, line = number % in_line, number // in_line
            yield _panel(panel) | {"gridPos": _place(width, _HEIGHT, width * column, y + line * _HEIGHT)}
        y += -(-len(panels) // in_line) * _HEIGHT


def _place(width: int, height: int, x: int, y: int) -> dict[str, int]:
    return {"w": width, "h": height, "x": x, "y": y}


def _panel(panel: Panel) -> dict[str, Any]:
    style: dict[str, Any] = {}
    if panel.stacked:
        style = {"custom": {"stacking": {"mode": panel.stacked, "group": "A"}, "fillOpacity": 30}}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": "\n\n".join(f"`{metric.name}`: {_plain(metric.meaning)}" for metric in panel.metrics),
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit or _unit(panel), **style}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": _SOURCE, "expr": _promql(query), "legendFormat": legend}
            for i, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def _promql(query: str) -> str:
    named = _METRIC.sub(lambda name: sample_name(_GLOSSARY[name[1]]) + '{instance="$run"}', query)
    return named.replace("[range]", "[$__rate_interval]")


def _unit(panel: Panel) -> str:
    unit, *others = {metric.unit for metric in panel.metrics}
    if others:
        return "none"
    if "rate(" in next(iter(panel.queries.values())):
        return _RATE_UNITS.get(unit, f"suffix:{unit}/s")
    return _UNITS.get(unit, f"suffix:{unit}")


def _plain(text: str) -> str:
    """Return Markdown without its links: they point to pages that Grafana does not have."""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text)
