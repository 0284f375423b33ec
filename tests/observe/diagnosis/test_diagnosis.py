"""Each rule of the diagnosis fires on the counters of its cause, and on no others."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from typing import Any

import pytest

from farstep.errors import ConfigError
from farstep.head.events import EventLog
from farstep.observe.diagnosis import Diagnosis, RunMonitor, Snapshot, Window, all_diagnoses, diagnose, with_options
from farstep.observe.diagnosis.causes import CAUSES, RULES
from farstep.resources import MachineUse, ProcessUse
from farstep.rollout.progress import ChunkProgress

GIB = 2**30
SECONDS = 10.0
HEALTHY = {"env": 0.4, "inference": 0.2, "tickets": 0.35, "send": 0.03, "weights": 0.02}
"""Shares of a worker's time."""


def stats(
    workers: list[Mapping[str, float]] | None = None, wait: float = 0.6, seconds: float = SECONDS, **more: Any
) -> dict[str, Any]:
    """The counters after `seconds` of a run in which workers spent these shares of their time."""
    shares = [HEALTHY] * 2 if workers is None else workers
    learner = {"wait": wait, "prepare": 0.02, "update": max(0.0, 0.96 - wait), "publish": 0.02}
    time = {
        "per_worker": [{part: share * seconds for part, share in worker.items()} for worker in shares],
        "learner": {part: share * seconds for part, share in learner.items()},
        "head": {"receive": 0.0, "held": more.pop("held", 0.0) * seconds * len(shares)},
    }
    found = {"steps": 10_000, "chunks": 200, "workers": {"alive": len(shares)}, "time": time, "dropped": {}}
    return found | {"versions": {"current": 100}, "pulls": {"total": 100}} | more


def machine(left: float = 8 * GIB, cores: int = 4, **processes: Any) -> MachineUse:
    """Each process: threads that ran or waited on average, and bytes; the run has taken `SECONDS`."""
    uses = {(name, 1): ProcessUse(threads * SECONDS, 0.0, int(size)) for name, (threads, size) in processes.items()}
    return MachineUse(cores, 16 * GIB, left, uses)


def window(after: dict[str, Any] | None = None, before: dict[str, Any] | None = None, **more: Any) -> Window:
    """A window of `SECONDS`; before it the run had delivered its first steps, and its processes used nothing."""
    used = more.get("machine")
    first = None
    if used is not None:
        first = MachineUse(4, 16 * GIB, 8 * GIB, {key: ProcessUse(0.0, 0.0, 0) for key in used.processes})
    start = Snapshot(time_s=100.0, stats={"steps": 1} if before is None else before, machine=first)
    return Window(start, Snapshot(time_s=100.0 + SECONDS, stats=stats() if after is None else after, **more))


def updates(number: int = 20, **metrics: float) -> list[dict[str, float]]:
    """Metrics of as many updates; names with `__` for `/`."""
    return [{name.replace("__", "/"): value for name, value in metrics.items()} for _ in range(number)]


def pulling(per_update: float, updates: int = 20, **more: Any) -> list[dict[str, float]]:
    return [{"sync/pulls_per_worker": per_update * k, "lag/versions_mean": float(k), **more} for k in range(updates)]


def publishing() -> dict[str, Any]:
    """A learner that spends most of its time in `publish`."""
    found = stats([IDLE, IDLE])
    found["time"]["learner"] = {"wait": 0.5, "prepare": 0.2, "update": 0.3, "publish": 9.0}
    return found


def worker(**shares: float) -> dict[str, float]:
    return dict.fromkeys(HEALTHY, 0.0) | shares


def workflow(**triggers: Mapping[str, Any]) -> dict[str, Any]:
    counts = {
        name: {"fired": 150, "waits_for": "DataKeyTrigger(n=1, size=8)"} | dict(c) for name, c in triggers.items()
    }
    return {"workflow": counts, "buffer": {"fill": 100, "capacity": 1000, "bytes": 10_000, "full_s": 0.0}}


def limiter(insert: float = 0.0, sample: float = 0.0) -> dict[str, Any]:
    blocked = {"insert": insert * SECONDS, "sample": sample * SECONDS}
    return {"limiter": {"ratio": 1.0, "blocked": blocked}}


def full(share: float) -> dict[str, Any]:
    return {"buffer": {"fill": 100, "capacity": 100, "bytes": 10_000, "full_s": share * SECONDS}}


BUSY = worker(env=0.9, tickets=0.1)
IDLE = worker(env=0.1, tickets=0.9)
LEFT, JOINED = worker(), worker(env=0.1, tickets=0.3)
CROWD: dict[str, Any] = {f"worker {i}": (0.9, 0) for i in range(10)}
CLIPPED: dict[str, Any] = {"train/actor/clip_fraction": 0.35}
WARMUP: dict[str, Any] = {"train/critic/warmup": 1.0}
FILLING: dict[str, Any] = {"buffer": {"fill": 900, "capacity": 1000, "bytes": 4 * GIB, "full_s": 0.0}}

FIRES: list[tuple[str, Window, str]] = [
    ("memory", window(machine=machine(left=0.5 * GIB)), "537 MB of 17.2 GB is left"),
    ("memory", window(machine=machine(head=(1, 0), worker=(1, 2 * GIB))), "in 40 s: .* most of it in worker"),
    ("restarting worker", window(restarts={0: 1, 3: 4}), "Worker 3 was restarted 4 times"),
    (
        "trigger never fires",
        window(stats(**workflow(learn={}, eval={"fired": 0, "waits_for": "ObjectKeyTrigger(key='e')"}))),
        r"'eval', ObjectKeyTrigger\(key='e'\), has never fired, while others fired up to 150 times",
    ),
    ("trigger never fires", window(stats(**workflow(eval={"fired": 0}))), "the buffer was filled 10 times"),
    ("gradients not finite", window(metrics=updates(train__actor__skipped_steps=0.9)), "90 % of the optimizer steps"),
    (
        "clip range",
        window(metrics=updates(train__actor__clip_fraction=0.8, lag__versions_mean=5.0)),
        "80 % of the rows .* 5.0 versions old, and the loss clips around those",
    ),
    (
        "clip range",
        window(metrics=updates(train__actor__clip_fraction=0.8, train__actor__behave_k3=0.1, lag__versions_mean=5.0)),
        "80 % of the rows .* stalls at its clip range",
    ),
    (
        "clip range",
        window(kl_threshold=0.05, metrics=pulling(0.0, **CLIPPED)),
        "35 % of the rows .* stalls at its clip range",
    ),
    (
        "clip range",
        window(stats(versions={"current": 5}, chunks=10), kl_threshold=0.05, metrics=pulling(0.0, 5, **CLIPPED)),
        "2.0 versions old, and the loss clips around those",
    ),
    ("off-policy rows", window(metrics=updates(5, train__actor__ess=0.1)), "effective sample size is 10 %"),
    ("off-policy rows", window(metrics=updates(train__actor__behave_k3=2.0)), "is 2 nats"),
    (
        "kl_threshold without effect",
        window(kl_threshold=0.5, metrics=pulling(0.0)),
        "No worker has pulled weights for 19 versions",
    ),
    ("kl_threshold without effect", window(kl_threshold=0.5, metrics=pulling(1.0)), "100 % of their opportunities"),
    ("kl_threshold without effect", window(stats(pulls={"total": 0}), kl_threshold=0.5), "for 100 versions"),
    ("kl_threshold without effect", window(stats(pulls={"total": 199}), kl_threshold=0.5), "at 100 %|at 99 %"),
    ("waiting for slots", window(stats(slots={"waited_seconds": 0.5 * SECONDS})), "50 % of the time for slots"),
    ("too many threads", window(machine=machine(head=(1, 0), a=(5, 0), b=(6, 0))), "12.0 threads .* 4 cores.*b runs 6"),
    (
        "too few cores",
        window(machine=machine(**CROWD)),
        "10 processes .* 4 cores: on average 9.0",
    ),
    ("limiter blocks", window(stats(**limiter(insert=0.9))), "makes workers wait 90 %"),
    ("limiter blocks", window(stats(**limiter(sample=0.9))), "makes the learner wait 90 %"),
    ("replay ratio", window(stats(**limiter(insert=0.9)), metrics=updates(replay__rows=9.0)), "workers wait 90 %"),
    ("replay ratio", window(stats(**limiter(sample=0.9)), metrics=updates(replay__rows=9.0)), "learner waits 90 %"),
    ("small buffer", window(stats(wait=0.4, **full(0.4))), "chunks wait 40 % of the time for room among its 100 rows"),
    ("staleness bound", window(stats(dropped={"stale": 100})), "33 % of the chunks are dropped as stale"),
    ("waiting for each other", window(stats([IDLE, IDLE], wait=0.7)), "workers 90 % and the learner 70 %"),
    (
        "lost node",
        window(stats([IDLE, IDLE], wait=0.7), lost_node=True),
        "lost node: in the last 10 s, the learner waited 70 % .* workers 90 %",
    ),
    (
        "replaced worker",
        window(stats([IDLE, IDLE], wait=0.7) | {"workers": {"alive": 2, "restarts": 1}}),
        r"restarted \(1 restart in the last 10 s\): the learner waits 70 % .* workers 90 %",
    ),
    ("straggler", window(stats([IDLE, BUSY, IDLE], wait=0.9)), "worker 1: it takes 9.0 times as long"),
    ("slow network", window(stats([worker(env=0.2, send=0.5, tickets=0.3)] * 2, wait=0.9)), "takes 50 % of the"),
    ("slow network", window(stats([worker(env=0.2, weights=0.5, tickets=0.3)] * 2, wait=0.9)), "rolling takes 20 %"),
    ("slow network", window(stats([IDLE] * 2, wait=0.9, held=0.8)), "takes 70 % of the workers' time"),
    ("slow learner", window(stats([IDLE, IDLE], wait=0.05)), "it updates 91 % .* wait for it 90 % of theirs"),
    ("slow learner", window(publishing()), "it publishes weights 90 % of the time"),
    (
        "slow policy",
        window(stats([worker(env=0.1, inference=0.8, tickets=0.1)] * 2, wait=0.96)),
        "80 % .* in the policy",
    ),
    ("slow environment", window(stats([BUSY, BUSY], wait=0.96)), "90 % of theirs in environments"),
]


@pytest.mark.parametrize(("cause", "seen", "text"), FIRES, ids=[f"{cause} {i}" for i, (cause, *_) in enumerate(FIRES)])
def test_a_cause_is_named_with_its_numbers_and_its_remedy(cause: str, seen: Window, text: str) -> None:
    found = diagnose(seen)
    assert found.cause == cause
    assert re.search(text, found.text), found.text
    assert found.is_problem or cause in ("slow learner", "lost node", "replaced worker", "replay ratio")
    assert found.numbers and found.remedy.endswith(".")
    assert found.text.endswith(".") and found.remedy in str(found)


def test_each_cause_has_a_case_here() -> None:
    assert {cause for cause, *_ in FIRES} == set(CAUSES)
    assert len(CAUSES) >= 15


HEALTHY_WINDOWS: dict[str, Window] = {
    "balanced": window(),
    "memory for hours": window(machine=machine(head=(1, 0), worker=(1, 100 * 2**20))),
    "memory of a buffer that fills": window(stats(**FILLING), machine=machine(head=(1, 3 * GIB))),
    "memory of a start": window(machine=machine(worker=(1, 2 * GIB)), before={}),
    "two restarts": window(restarts={0: 2, 1: 2}),
    "a trigger with a period": window(stats(**workflow(learn={}, save={"fired": 0, "waits_for": None}))),
    "a workflow that has just begun": window(stats(steps=500, **workflow(a={"fired": 9}, b={"fired": 0}))),
    "few updates": window(metrics=updates(4, train__actor__clip_fraction=0.9, train__actor__ess=0.1)),
    "held weights for few versions": window(kl_threshold=0.05, metrics=pulling(0.0, updates=19)),
    "normal learning": window(
        metrics=updates(train__actor__clip_fraction=0.2, train__actor__ess=0.9, train__actor__behave_k3=0.02)
    ),
    "one bad update": window(metrics=[*updates(19, train__actor__ess=1.0), *updates(1, train__actor__ess=0.01)]),
    "AAPS that pulls sometimes": window(kl_threshold=0.05, metrics=pulling(0.3)),
    "old rows that are pulled sometimes": window(kl_threshold=0.05, metrics=pulling(0.3, **CLIPPED)),
    "critic warm-up": window(kl_threshold=0.05, metrics=pulling(0.0, **WARMUP)),
    "every version without a threshold": window(stats(pulls={"total": 200})),
    "one process per core and the head": window(machine=machine(head=(1, 0), a=(1, 0), b=(1, 0), c=(1, 0), d=(1, 0))),
    "a limiter that blocks sometimes": window(stats(**limiter(insert=0.3, sample=0.2))),
    "a full buffer of a busy learner": window(stats(wait=0.1, **full(0.5))),
    "few stale chunks": window(stats(dropped={"stale": 5})),
    "uneven workers": window(stats([worker(env=0.7, tickets=0.3), worker(env=0.5, tickets=0.5)], wait=0.6)),
    "a straggler that no call waits for": window(stats([BUSY, worker(env=0.8, tickets=0.2)], wait=0.1)),
    "a network that is not waited for": window(stats([worker(env=0.3, send=0.4, tickets=0.3)] * 2, wait=0.2)),
    "synchronous PPO": window(stats([worker(env=0.2, inference=0.15, tickets=0.65)] * 2, wait=0.35)),
    "workers that left, and one that joined": window(
        stats([worker(env=0.6, tickets=0.4), LEFT, LEFT, JOINED], wait=0.5) | {"workers": {"alive": 2}}
    ),
    "a restart that no call waits for": window(stats(wait=0.1) | {"workers": {"alive": 2, "restarts": 1}}),
    "metrics that are not finite": window(metrics=updates(train__actor__skipped_steps=math.nan)),
    "environments half of the time": window(stats([worker(env=0.6, tickets=0.4)] * 2, wait=0.6)),
}


@pytest.mark.parametrize("name", HEALTHY_WINDOWS)
def test_no_alarm_on_healthy_counters(name: str) -> None:
    found = diagnose(HEALTHY_WINDOWS[name])
    assert found.cause == "healthy", found
    assert not found.is_problem and not found.remedy


@pytest.mark.parametrize(("pulls", "change"), [(0.0, "Lower"), (1.0, "Raise")])
def test_a_remedy_of_one_case_names_options_too(pulls: float, change: str) -> None:
    found = diagnose(window(kl_threshold=0.5, metrics=pulling(pulls)))
    assert found.remedy.startswith(f"{change} kl_threshold") and "--" not in found.remedy
    assert with_options(found).remedy.startswith(f"{change} --kl-threshold")


def test_remedies_that_name_workers_name_the_option_of_a_cluster_too() -> None:
    named = [rule.options_remedy for rule in RULES if re.search(r"--workers\b(?!-)", rule.options_remedy)]
    assert named and all("--workers-per-node" in remedy for remedy in named)


def test_remedy_of_a_case_is_not_replaced_by_the_options_of_its_rule() -> None:
    found = diagnose(window(metrics=updates(train__actor__clip_fraction=0.8, lag__versions_mean=5.0)))
    assert found.remedy.startswith("Use the decoupled loss") and with_options(found) == found


def test_independent_causes_are_all_named_and_consequences_are_not() -> None:
    crowded = machine(**CROWD)
    metrics = updates(train__actor__ess=0.1)
    found = all_diagnoses(window(stats([BUSY, BUSY], wait=0.9), machine=crowded, restarts={1: 3}, metrics=metrics))
    assert [each.cause for each in found] == ["restarting worker", "off-policy rows", "too few cores"]


def test_a_bottleneck_is_named_before_it_is_a_problem() -> None:
    """Something limits every run: a learner that is always busy is healthy."""
    limited = {"slow environment": stats([BUSY, BUSY], wait=0.85), "slow learner": stats([IDLE, IDLE], wait=0.02)}
    for cause, counters in limited.items():
        found = diagnose(window(counters))
        assert found.cause == cause and not found.is_problem and found.remedy


def test_too_little_data_is_reported() -> None:
    start = Snapshot(time_s=0.0, stats={})
    short = diagnose(Window(start, Snapshot(time_s=2.0, stats=stats([BUSY, BUSY], wait=0.9, seconds=2.0))))
    silent = diagnose(Window(start, Snapshot(time_s=60.0, stats=stats([BUSY, BUSY], wait=0.9))))
    nothing = diagnose(Window(start, Snapshot(time_s=60.0, stats={})))
    assert [each.cause for each in (short, silent, nothing)] == ["unknown"] * 3
    assert "at least 5 s" in short.text and "few or no chunks" in silent.text
    assert not any(each.is_problem for each in (short, silent, nothing))


def test_chunk_in_progress_shows_that_a_run_is_slow_and_not_stuck() -> None:
    start = Snapshot(time_s=0.0, stats={})

    def found(*chunk: float) -> Diagnosis:
        progress = ChunkProgress(*chunk)  # type: ignore[arg-type]
        return diagnose(Window(start, Snapshot(time_s=18.0, stats={}, slowest_chunk=progress)))

    slow = found(1, 4, 9, 256, 18.0)
    assert slow.text == (
        "Too little data: workers have completed few or no chunks in the last 18 s; worker 1 has taken 9 of 256 steps "
        "in each of its 4 environments (2 s per step of all 4), and needs about 494 s more."
    )
    assert "--num-steps" in with_options(slow).remedy and "--" not in slow.remedy
    assert found(0, 1, 0, 256, 0.1).text.endswith("has not completed the first of 256 steps in its environment.")


def test_time_in_which_workers_are_released_is_not_missing() -> None:
    """With `release_idle`, workers have no times to report while the learner updates."""
    counters = stats([BUSY, BUSY], wait=0.2, seconds=SECONDS / 5)
    assert diagnose(window(counters)).cause == "unknown"
    released = counters | {"slots": {"held_seconds": 2 * SECONDS / 5}}
    assert diagnose(window(released)).cause == "healthy"


def test_counters_of_lock_step_environments_are_enough() -> None:
    """`make_vec` does not measure the learner: it waits while the busiest worker steps."""
    times = stats([BUSY, BUSY])["time"]["per_worker"]
    assert diagnose(window({"time": {"per_worker": times}}, before={})).cause == "slow environment"
    idle = stats([IDLE, IDLE])["time"]["per_worker"]
    assert diagnose(window({"time": {"per_worker": idle}}, before={})).cause == "slow learner"


def test_the_window_is_the_last_half_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("farstep.observe.diagnosis.run_monitor.time.monotonic", lambda: now[0])
    monitor = RunMonitor(EventLog(), 990.0, machine())

    def after(seconds: float, **parts: float) -> Diagnosis:
        """Workers spend these seconds more."""
        now[0] += seconds
        for part, more in parts.items():
            total[part] += more
        counters = stats([total, total], seconds=1.0)
        counters["time"]["learner"] = {"wait": total["env"], "update": total["tickets"]}
        return monitor.diagnoses(counters, machine())[0]

    total = dict.fromkeys(HEALTHY, 0.0)
    assert after(0.0).cause == "unknown"
    assert after(10.0, env=10.0).cause == "slow environment"
    assert after(10.0, tickets=10.0).cause == "healthy", "half of each"
    for _ in range(3):
        last = after(10.0, tickets=10.0)
    assert last.cause == "slow learner", "the slow environments are forgotten"
    assert after(600.0, env=600.0).cause == "slow environment", "a rare call looks back to the one before"


def test_time_without_a_lost_node_is_not_waiting_for_each_other() -> None:
    events = EventLog()
    turns = stats([IDLE, IDLE], wait=0.7)

    def cause() -> str:
        return RunMonitor(events, time.monotonic() - SECONDS, machine()).diagnoses(turns, machine())[0].cause

    events.emit("joined", "node 0 connected", node="here")
    events.emit("lost", "worker 0 ended", worker=0, node="here")
    assert cause() == "waiting for each other"
    events.emit("lost", "node 0 is silent", node="here")
    assert cause() == "lost node"


def test_rules_have_texts_for_the_docs() -> None:
    for rule in RULES:
        assert rule.symptom and not rule.symptom.endswith(".")
        assert rule.remedy.endswith(".")


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (3, "got int as metrics; expected a list"),
        ({"train/actor/ess": 0.1}, "got dict as metrics"),
        ([0.1], "got float as the metrics of an update"),
        ([{"train/actor/ess": None}], "the metric 'train/actor/ess' as NoneType"),
        ([{"train/actor/ess": "0.1"}], "the metric 'train/actor/ess' as str"),
    ],
)
def test_metrics_of_a_wrong_type_are_named(metrics: Any, message: str) -> None:
    monitor = RunMonitor(EventLog(), 0.0, machine())
    assert monitor.diagnoses(stats(), machine(), metrics=[{"a name of the user": "CartPole"}])  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=message):
        monitor.diagnoses(stats(), machine(), metrics=metrics)
