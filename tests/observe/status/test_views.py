"""The data of the status page, computed from counters, metrics and events."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest

from farstep.event import Event
from farstep.observe.diagnosis import Diagnosis
from farstep.observe.glossary import METRICS, STATS
from farstep.observe.status import view
from farstep.observe.status.openmetrics import exposition, openmetrics_name
from farstep.observe.status.series import Series
from farstep.observe.status.view import WeightCounts

STATS_NOW = {
    "steps": 10,
    "steps_per_second": 5.0,
    "workers": {
        "states": ["alive", "lost"],
        "hosts": ["a", "b"],
        "steps_per_second": [5.0, 0.0],
        "restarts": 1,
        "alive": 1,
        "cores": ["0", ""],
    },
    "versions": {"current": 10, "lag_histogram": [{0: 3, 2: 1}, {}]},
    "divergence": {0: 0.01},
    "pulls": {"total": 4, "per_worker": [4, 0]},
    "bytes": {"weights_sent": 400},
    "acting": [],
    "slots": {"held": 1, "held_seconds": 8.0, "used_seconds": 2.0, "gpu_seconds": 0.0},
    "time": {"per_worker": [{"env": 1.5}, {"env": 0.5}]},
}


def test_workers_have_one_entry_per_column() -> None:
    workers = view.workers_view(STATS_NOW)
    assert workers == {
        "state": ["alive", "lost"],
        "host": ["a", "b"],
        "unconnected_nodes": "no node",
        "rate": [5.0, 0.0],
        "lag": [0.5, None],
        "divergence": [0.01, None],
        "restarts": 1,
    }


def test_workers_without_a_node_have_the_state_of_the_launch() -> None:
    states = {"states": ["alive", "queued"], "hosts": ["a", "?"], "steps_per_second": [5.0, 0.0], "restarts": 0}
    workers = view.workers_view(STATS_NOW | {"workers": states}, "1 of 2 nodes not connected yet: requested")
    assert workers["host"] == ["a", None]
    assert workers["unconnected_nodes"] == "1 of 2 nodes not connected yet: requested"


def test_workers_without_a_policy_have_no_lag() -> None:
    """As with `make_vec`."""
    stats = {name: STATS_NOW[name] for name in ("steps", "workers", "slots", "time")}
    assert view.workers_view(stats)["lag"] == [None, None]


def test_acting_servers_are_numbered_after_the_workers() -> None:
    entry = {"rows_per_second": 1234.567, "batch_size": 8.0, "wait_ms": math.nan, "restarts": 1}
    servers = view.acting_view(STATS_NOW | {"acting": [entry | {"host": "gpu"}, entry | {"host": "?"}]})
    shown = {"rate": 1234.6, "batch_size": 8.0, "wait_ms": None, "restarts": 1}
    assert servers == [{"number": 2, "host": "gpu"} | shown, {"number": 3, "host": None} | shown]
    assert view.acting_view(STATS_NOW) == []


def test_hosts_of_nodes_are_listed_once() -> None:
    assert view.hosts_view({"nodes": [{"host": "a"}, {"host": "gpu"}, {"host": "a"}]}) == ["a", "gpu"]


def test_slots_are_counted_by_state() -> None:
    stats = STATS_NOW | {"workers": {"states": ["alive", "released", "parked", "parked"]}}
    slots = view.slots_view(stats)
    assert (slots["held"], slots["released"], slots["parked"], slots["coordinator"]) == (1, 1, 2, None)
    granted = {"name": "default", "granted": 1, "wanted": 2}
    assert view.slots_view(stats | {"coordinator": granted})["coordinator"] == granted


def test_lags_are_summed_over_workers() -> None:
    assert view.lags_view(STATS_NOW) == [[0, 3], [2, 1]]


def test_saved_bytes_are_those_of_the_pulls_that_workers_skipped() -> None:
    found = view.weights_view(STATS_NOW, WeightCounts())  # versions 0 to 10; the second worker has never pulled
    assert (found["possible"], found["pulls"]) == (11, 4)
    assert found["bytes_saved"] == 7 * 100


def test_pulls_of_every_version_have_saved_nothing() -> None:
    stats = STATS_NOW | {"pulls": {"total": 11, "per_worker": [11, 0]}}
    assert view.weights_view(stats, WeightCounts())["bytes_saved"] == 0


def test_versions_before_the_page_do_not_count() -> None:
    """A resumed run continues with its version, but its counters begin at 0."""
    found = view.weights_view(STATS_NOW, WeightCounts(version=7))
    assert (found["possible"], found["bytes_saved"]) == (4, 0)
    found = view.weights_view(STATS_NOW, WeightCounts(version=5, pulls=2, bytes_sent=200))
    assert (found["possible"], found["pulls"], found["bytes_saved"]) == (5, 2, 300)


def test_no_pull_has_saved_nothing() -> None:
    stats = STATS_NOW | {"pulls": {"total": 0, "per_worker": [0, 0]}, "bytes": {"weights_sent": 0}}
    assert view.weights_view(stats, WeightCounts())["bytes_saved"] == 0


def test_acting_servers_pull_for_their_workers() -> None:
    assert view.weights_view(STATS_NOW | {"acting": [{}]}, WeightCounts())["possible"] == 11


def test_times_are_shares_of_what_passed_since() -> None:
    seconds = view.difference({"env": 5.0, "send": 2.0, "tickets": 1.0}, {"env": 2.0, "tickets": 1.0})
    assert view.times_view(seconds) == [["env", 0.6], ["send", 0.4]]
    assert view.times_view({"env": 0.0}) == []


def test_buffer_is_absent_without_a_workflow() -> None:
    assert view.buffer_view(STATS_NOW) is None
    stats = {"buffer": {"fill": 5, "capacity": 10, "bytes": 80}, "limiter": {"ratio": math.nan}}
    assert view.buffer_view(stats) == {"fill": 5, "capacity": 10, "bytes": 80, "ratio": None}


def test_events_are_the_newest_first_and_bounded() -> None:
    events = [Event(time=i, kind="lost", text=str(i), worker=i, traceback="x" * 100_000) for i in range(500)]
    shown = view.events_view(events)
    assert [event["text"] for event in shown[:2]] == ["499", "498"]
    assert len(shown) == view.SHOWN_EVENTS and len(shown[0]["traceback"]) == 20_000


def test_data_are_strict_json_even_if_metrics_are_not_finite() -> None:
    diagnosis = Diagnosis(cause="slow", text="slow", numbers={"a": math.inf})
    data = [view.metrics_view({"a": math.nan, "b": 1.0, "c": "text"}), view.diagnosis_view(diagnosis)]
    assert json.loads(json.dumps(data, allow_nan=False))[0] == {"b": 1.0}


def test_series_stays_small_and_keeps_its_ends() -> None:
    series = Series()
    for i in range(100_000):
        series.add(i, 2.0 * i)
    series.add(math.nan, 1.0)
    points = series.rounded()
    assert len(points) <= 401 and points[0][0] < 1_000 and points[-1][0] > 99_000
    assert all(left[0] < right[0] for left, right in pairwise(points))


def test_metrics_have_labels_for_workers() -> None:
    text = exposition(STATS_NOW, {"env/return_mean": 3.0, "rate/steps_per_second": math.nan})
    lines = text.splitlines()
    assert 'farstep_time_per_worker_env_seconds_total{worker="0"} 1.5' in lines
    assert 'farstep_time_per_worker_env_seconds_total{worker="1"} 0.5' in lines
    assert "farstep_steps_total 10.0" in lines and "farstep_env_return_mean 3.0" in lines
    assert 'farstep_workers_states_info{value="lost",worker="1"} 1.0' in lines
    assert 'farstep_workers_cores_info{value="0",worker="0"} 1.0' in lines
    assert text.count("farstep_workers_cores_info{") == 1  # the other worker has no text
    assert lines[-1] == "# EOF" and "nan" not in text.lower()


@pytest.mark.parametrize("metric", [*STATS.values(), *METRICS.values()], ids=lambda metric: metric.name)
def test_every_name_of_the_glossary_is_valid(metric: object) -> None:
    assert openmetrics_name(metric).replace("_", "a").isalnum()  # type: ignore[arg-type]


def test_text_that_is_not_unicode_is_exposed() -> None:
    assert 'farstep_run_title_info{value="caf?"} 1.0' in exposition({}, {}, {"run": {"title": "caf\udce9"}})
