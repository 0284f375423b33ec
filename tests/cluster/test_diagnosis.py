"""`diagnose` names the causes of real runs: the cheapest injections; benchmarks/diagnosis.py has all of them."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import farstep
from farstep.buffer import SampleToInsertRatio, Uniform
from farstep.head.warnings import slow_calls
from farstep.testing import CountingEnv, FaultyEnv, TableAgent
from farstep.workflow.triggers import DataKeyTrigger, ObjectKeyTrigger, TimeTrigger
from tests.cluster.checks import DEADLINE_S, cluster, eventually, in_process, within
from tests.cluster.flows import full
from tests.cluster.tables import ENDLESS


@pytest.fixture
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("run_monitor", "diagnosis", "rules"):
        monkeypatch.setattr(f"farstep.observe.diagnosis.{module}.MIN_WINDOW_S", 0.2)


class OneSlowEnv(CountingEnv):
    """Sleeps in each step of one process: the first to make the file."""

    def __init__(self, marker: str) -> None:
        super().__init__(length=None)
        try:
            Path(marker).touch(exist_ok=False)
            self._slow = True
        except FileExistsError:
            self._slow = False

    def step(self, action: Any) -> Any:
        if self._slow:
            time.sleep(0.02)
        return super().step(action)


def diagnosed(env: farstep.ClusterEnv, cause: str, step: Callable[[], object]) -> farstep.Diagnosis:
    """Continue a run until its diagnosis has this cause."""
    deadline = time.monotonic() + DEADLINE_S
    while (found := env.diagnose()).cause != cause:
        assert time.monotonic() < deadline, f"not {cause}, but {found}"
        step()
    return found


def test_run_that_has_just_started_is_diagnosed_as_such() -> None:
    with cluster(envs=1, config=in_process(), env_kwargs=ENDLESS) as env:
        env.collect(TableAgent(), steps=4)
        found = env.diagnose()
    assert found.cause == "unknown" and not found.is_problem and "at least 5 s" in found.text


class GatedStepEnv(CountingEnv):
    """Waits in its fourth step until the file is there."""

    def __init__(self, gate: str) -> None:
        super().__init__(length=None)
        self._gate, self._steps = Path(gate), 0

    def step(self, action: Any) -> Any:
        self._steps += 1
        while self._steps == 4 and not self._gate.exists():
            time.sleep(0.01)
        return super().step(action)


def test_first_rollout_that_takes_long_shows_its_progress(
    tmp_path: Path, short_windows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_calls, "FIRST_S", 0.5)
    gate, done = tmp_path / "gate", r"worker 0 has taken 3 of 8 steps in each of its 2 environments \(.* s per step"
    with cluster(GatedStepEnv, envs=2, workers=1, env_kwargs={"gate": str(gate)}) as env:
        collecting = threading.Thread(target=env.collect, args=[TableAgent(), 8])
        collecting.start()
        try:
            eventually(lambda: re.search(done, env.diagnose().text))
            found = env.diagnose()
            eventually(lambda: any(re.search(done, event.text) for event in env.events("warned")))
        finally:
            gate.touch()
            collecting.join(DEADLINE_S)
    assert found.cause == "unknown" and re.search("needs about .* s more", found.text)
    assert found.numbers["steps_done"] == 3 and "shorter chunks" in found.remedy


def test_a_straggler_is_named(tmp_path: Path, short_windows: None) -> None:
    with cluster(OneSlowEnv, envs=3, workers=3, env_kwargs={"marker": str(tmp_path / "slow")}) as env:
        found = diagnosed(env, "straggler", lambda: env.collect(TableAgent(), steps=16))
        times = env.stats()["time"]["per_worker"]
    slowest = max(range(3), key=lambda worker: float(times[worker]["env"]))
    assert found.numbers["worker"] == slowest and f"waits for worker {slowest}" in found.text
    assert found.is_problem and "num_chunks" in found.remedy


def test_a_worker_that_restarts_again_and_again_is_named() -> None:
    crash = {"fault": "exit", "phase": "step", "at": 6}
    with cluster(FaultyEnv, envs=1, env_kwargs=crash, restart_budget=100) as env:
        found = diagnosed(env, "restarting worker", lambda: env.collect(TableAgent(), steps=4))
    assert found.text.startswith("Worker 0 was restarted 3 times") and "env.events" in found.remedy


def test_a_trigger_that_never_fires_is_named() -> None:
    found: list[farstep.Diagnosis] = []
    with cluster(envs=1, config=in_process(), env_kwargs=ENDLESS) as env:
        flow = farstep.Workflow(env, TableAgent(), full(64), steps=1, max_staleness=4)
        flow.on(DataKeyTrigger(n=1, size=1), lambda message: found.append(env.diagnose()), name="learn")
        flow.on(ObjectKeyTrigger("evaluation"), print, name="evaluate")
        within(lambda: flow.run(total_steps=120))
    assert found[50].cause == "unknown" and found[-1].cause == "trigger never fires"
    assert "'evaluate', ObjectKeyTrigger(key='evaluation')" in found[-1].text


def test_a_limiter_that_blocks_is_named(short_windows: None) -> None:
    found: list[farstep.Diagnosis] = []
    buffer = farstep.Buffer(256, Uniform(), limiter=SampleToInsertRatio(1.0, 32, 32.0))
    with cluster(envs=2, env_kwargs=ENDLESS) as env, buffer:
        flow = farstep.Workflow(env, TableAgent(), buffer, steps=8)

        def look(message: Any) -> None:
            found.append(env.diagnose())
            if found[-1].cause == "limiter blocks":
                flow.stop()
            elif len(found) % 10 == 0:
                buffer.sample(1)

        flow.on(TimeTrigger(0.1), look)
        within(flow.run)
    assert "makes workers wait" in found[-1].text and "samples_per_insert" in found[-1].remedy


def test_lock_step_environments_are_diagnosed(short_windows: None) -> None:
    envs = farstep.make_vec(lambda: FaultyEnv("slow", "step", at=0, slow_s=0.02), 1, {"workers_per_node": 1})
    try:
        envs.reset(seed=1)
        deadline = time.monotonic() + DEADLINE_S
        while (found := envs.diagnose()).cause != "slow environment":
            assert time.monotonic() < deadline, found
            for _ in range(10):
                envs.step(envs.action_space.sample())
    finally:
        envs.close()
    assert "in environments" in found.text
