"""What the status page shows, computed from the counters, metrics and events of a run. Pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farstep.errors import UNKNOWN_HOST
from farstep.event import RUN_FAILED, RUN_RESUMED, RUN_STOPPING, Event
from farstep.observe.diagnosis import Diagnosis

SHOWN_EVENTS = 200
WAITING = {"starting": "starting", "no slots": "waiting for slots", "no nodes": "waiting for nodes"}
"""The causes for which no worker rolls, and the state of the run then."""
_TRACEBACK_CHARACTERS = 20_000


def workers_view(stats: Mapping[str, Any], unconnected_nodes: str = "") -> dict[str, Any]:
    """Return the state of every worker, one list per quantity, and the number of restarts. The quantities of policies
    are None for workers without chunks, and for `make_vec`, whose workers have no policy. The host of a worker without
    a node is None; `unconnected_nodes` says what is known about such nodes."""
    workers, divergence = stats["workers"], stats.get("divergence", {})
    histograms = stats["versions"]["lag_histogram"] if "versions" in stats else [{}] * len(workers["states"])
    return {
        "state": workers["states"],
        "host": [None if host == UNKNOWN_HOST else host for host in workers["hosts"]],
        "unconnected_nodes": unconnected_nodes or "no node",
        "rate": [_rounded(rate) for rate in workers["steps_per_second"]],
        "lag": [_rounded(_mean_lag(lags)) for lags in histograms],
        "divergence": [_rounded(divergence.get(worker)) for worker in range(len(workers["states"]))],
        "restarts": workers["restarts"],
    }


def acting_view(stats: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every acting server, numbered after the workers as in events; empty if workers act themselves. The host
    of a server that has not started is None."""
    return [
        {
            "number": number,
            "host": None if server["host"] == UNKNOWN_HOST else server["host"],
            "rate": _rounded(server["rows_per_second"]),
            "batch_size": _rounded(server["batch_size"]),
            "wait_ms": _rounded(server["wait_ms"]),
            "restarts": server["restarts"],
        }
        for number, server in enumerate(stats.get("acting", ()), len(stats["workers"]["states"]))
    ]


def hosts_view(stats: Mapping[str, Any]) -> list[str]:
    """Return the hosts of the connected nodes, each once. Some may have only acting servers."""
    return list(dict.fromkeys(node["host"] for node in stats["nodes"]))


def slots_view(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many slots are held and how well they are used, and what the coordinator has granted."""
    slots, states = stats["slots"], stats["workers"]["states"]
    return {
        "held": slots["held"],
        "released": states.count("released"),
        "parked": states.count("parked"),
        "held_seconds": _rounded(slots["held_seconds"]),
        "used_seconds": _rounded(slots["used_seconds"]),
        "gpu_seconds": _rounded(slots["gpu_seconds"]),
        "coordinator": stats.get("coordinator") or None,
    }


def lags_view(stats: Mapping[str, Any]) -> list[list[int]]:
    """Return the number of delivered chunks for each version lag, over all workers."""
    total: Counter[int] = Counter()
    for lags in stats["versions"]["lag_histogram"]:
        total.update({int(lag): chunks for lag, chunks in lags.items()})
    return [[lag, chunks] for lag, chunks in sorted(total.items())]


@dataclass(frozen=True)
class WeightCounts:
    """Counters of weights when the page was started: the run may have been resumed, or have run before."""

    version: int = 0
    pulls: int = 0
    bytes_sent: int = 0

    @classmethod
    def of(cls, stats: Mapping[str, Any]) -> WeightCounts:
        return cls(stats["versions"]["current"], stats["pulls"]["total"], stats["bytes"]["weights_sent"])


def weights_view(stats: Mapping[str, Any], before: WeightCounts) -> dict[str, Any]:
    """Return pulls and bytes of weights since the page was started, and bytes saved because workers skipped versions.

    A worker that pulled every version would have pulled as often as there were versions. What it saved is estimated by
    the mean size of the pulls. Workers that have never pulled, such as parked ones, do not count.
    """
    now = WeightCounts.of(stats)
    pulls, sent = now.pulls - before.pulls, now.bytes_sent - before.bytes_sent
    pullers = len(stats["acting"]) or sum(count > 0 for count in stats["pulls"]["per_worker"])
    possible = (now.version - before.version + (before.pulls == 0)) * pullers
    saved = sent / pulls * max(0, possible - pulls) if pulls else 0.0
    return {
        "version": stats["versions"]["current"],
        "pulls": pulls,
        "possible": possible,
        "bytes_sent": sent,
        "bytes_saved": round(saved),
    }


def buffer_view(stats: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return fill and ratio of the replay buffer; None if the run has none."""
    buffer = stats.get("buffer")
    if not buffer or not buffer.get("capacity"):
        return None
    return {
        "fill": buffer["fill"],
        "capacity": buffer["capacity"],
        "bytes": buffer.get("bytes"),
        "ratio": _rounded(stats.get("limiter", {}).get("ratio")),
    }


def times_view(seconds: Mapping[str, float]) -> list[list[Any]]:
    """Return the share of each activity, the largest first."""
    total = sum(seconds.values())
    shares = [[name, _rounded(value / total)] for name, value in seconds.items() if value > 0] if total else []
    return sorted(shares, key=lambda share: -share[1])


def difference(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each activity since an earlier moment."""
    return {name: max(0.0, value - before.get(name, 0.0)) for name, value in now.items()}


def state_view(diagnoses: Sequence[Diagnosis]) -> str:
    """Return what a run does, in a few words."""
    return WAITING.get(diagnoses[0].cause if diagnoses else "", "running")


def diagnosis_view(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return a diagnosis as plain data."""
    return {
        "cause": diagnosis.cause,
        "text": diagnosis.text,
        "remedy": diagnosis.remedy,
        "is_problem": diagnosis.is_problem,
        "numbers": {name: _rounded(value) for name, value in diagnosis.numbers.items()},
    }


def events_view(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return the newest events, the newest first."""
    return [
        {
            "time": event.time,
            "kind": event.kind,
            "text": event.text,
            "worker": event.worker,
            "node": event.node,
            "traceback": event.traceback[-_TRACEBACK_CHARACTERS:],
        }
        for event in reversed(events[-SHOWN_EVENTS:])
    ]


def ending(events: Sequence[Event]) -> str:
    """Return how a run ended that has not reached its last step."""
    for event in reversed(events):
        if event.text.startswith(RUN_FAILED):
            return "failed"
        signal, is_stop, _ = event.text.partition(RUN_STOPPING)
        if event.kind == "warned" and is_stop:
            return f"stopped by {signal}"
        if event.kind == "loaded" and event.text.startswith(RUN_RESUMED):
            break
    return "killed"


def failure_view(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return why a run failed, as a diagnosis; empty if it did not fail."""
    if ending(events) != "failed":
        return []
    text = next(event.text for event in reversed(events) if event.text.startswith(RUN_FAILED))
    remedy = "The newest events have its traceback."
    return [{"cause": "failed", "text": text, "remedy": remedy, "is_problem": True, "numbers": {}}]


def metrics_view(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers among the metrics of an update."""
    found = {name: _rounded(value) for name, value in metrics.items() if isinstance(value, int | float)}
    return {name: value for name, value in found.items() if value is not None}


def _mean_lag(lags: Mapping[Any, int]) -> float | None:
    """Return the mean version lag of a worker's chunks; None if there are none."""
    chunks = sum(lags.values())
    return sum(int(lag) * count for lag, count in lags.items()) / chunks if chunks else None


def _rounded(value: float | None) -> float | None:
    """Return a number with five significant digits; None if it is not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def shown_options(config: Mapping[str, Any], names: Iterable[str]) -> list[list[str]]:
    """Return the chosen options of a run, as pairs of name and value."""
    return [[name.replace("_", " "), str(config[name])] for name in names if config.get(name) not in (None, False, "")]
