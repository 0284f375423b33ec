"""Runs that return their slots to a coordinator between rollouts: which run gets them, and how a wait for them ends."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import farstep
from farstep.cluster_env import collector_for
from farstep.elastic.coordinator.run_share import RunShare
from farstep.head.slots.worker_slots import WorkerSlots
from farstep.learners.loop.checkpoints.journal import Journal
from farstep.testing import TableAgent
from tests.cluster.checks import arrays_of, assert_same, within
from tests.cluster.sharing import (
    PATIENCE_S,
    SOURCE,
    held,
    runs,
    serving,
    started,
    started_coordinator,
    times,
    turns_of,
    wait_until,
)


def releasing(name: str, workers: int = 2, *, prewarm: bool = False, **options: Any) -> farstep.ClusterEnv:
    config = farstep.LocalConfig(workers_per_node=workers, coordinator=name, **options)
    return farstep.ClusterEnv({**SOURCE, "release_idle": True, "prewarm": prewarm}, config)


def keeping(name: str, workers: int = 2, **options: Any) -> farstep.ClusterEnv:
    config = farstep.LocalConfig(workers_per_node=workers, coordinator=name, **options)
    return farstep.ClusterEnv(SOURCE, config)


@contextlib.contextmanager
def waiting(env: farstep.ClusterEnv, name: str) -> Any:
    """Context manager: a thread collects with `env`, and waits for slots. Yields what it raises."""
    raised: list[BaseException] = []

    def collect() -> None:
        try:
            env.collect(TableAgent(), steps=2)
        except farstep.FarstepError as error:
            raised.append(error)

    thread = threading.Thread(target=collect)
    thread.start()
    wait_until(lambda: any("queue" in run.state or "waiting" in run.state for run in runs(name)))
    try:
        yield raised
    finally:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_slots_are_held_only_during_rollouts_and_scaling_changes_the_next_request(tmp_path: Path) -> None:
    agent = TableAgent()
    with serving(tmp_path / "c", slots=4) as name, releasing(name, workers=4) as env:
        wait_until(lambda: held(name) == [0])
        assert len(env.collect(agent, steps=4).slots) == 4
        wait_until(lambda: held(name) == [0])
        assert runs(name)[0].state == "wants no slots"
        env.scale(workers=1)
        assert len(env.collect(agent, steps=4).slots) == 1
        env.scale(workers=3)
        assert len(env.collect(agent, steps=4).slots) == 3
        stream = env.stream(agent, steps=4)
        next(stream)
        assert held(name) == [3]
        env.scale(workers=2)
        wait_until(lambda: held(name) == [2])
        stream.close()
        wait_until(lambda: held(name) == [0])
        assert not env.events(["lost", "stuck", "warned"])
        assert env.stats()["slots"]["waited_seconds"] >= 0


def test_stream_with_slots_that_were_requested_early_gets_more_later(tmp_path: Path) -> None:
    agent = TableAgent()
    with serving(tmp_path / "c", slots=4) as name, releasing(name, workers=4, prewarm=True) as env:
        env.scale(workers=2)
        updates = itertools.count(1)

        def requested_early() -> bool:
            env.collect(agent, steps=2)
            wait_until(lambda: held(name) == [0])
            # Most updates take the same time, so that it can be predicted; some take longer, so that slots are seen.
            ends = time.monotonic() + (0.3 if next(updates) % 8 else 2.0)
            while time.monotonic() < ends and held(name) == [0]:
                time.sleep(0.01)
            return held(name) == [2]

        wait_until(requested_early)
        stream = env.stream(agent, steps=2)
        next(stream)
        assert held(name) == [2]
        env.scale(workers=4)
        wait_until(lambda: held(name) == [4])
        stream.close()


def test_run_that_keeps_its_slots_lends_a_share_for_each_rollout(tmp_path: Path) -> None:
    agent = TableAgent()
    with serving(tmp_path / "c", slots=2) as name, keeping(name) as other, releasing(name) as env:
        stream = other.stream(agent, steps=2)
        next(stream)
        for _ in range(2):
            wait_until(lambda: held(name) == [2, 0])
            assert env.collect(agent, steps=2).slots.tolist() == [0, 1]  # one worker
            next(stream)
        stream.close()


@pytest.mark.parametrize("launched", [keeping, releasing])
def test_workflow_waits_while_another_run_has_all_slots(tmp_path: Path, launched: Any) -> None:
    updates_after_waits: set[tuple[int, float]] = set()
    with (
        serving(tmp_path / "c", slots=1, turn_s=0.3) as name,
        launched(name, workers=1) as env,
        keeping(name, workers=1) as other,
    ):
        other.collect(TableAgent(), steps=2)  # it has the slot now
        flow = farstep.Workflow(env, TableAgent(), farstep.Buffer(4 * 64, farstep.FullBatch()))

        def update(message: Any) -> None:
            flow.batch(message)
            flow.publish()
            pauses = sum("paused" in event.text for event in env.events("scaled"))
            updates_after_waits.add((pauses, env.stats()["slots"]["waited_seconds"]))

        flow.on(farstep.DataKeyTrigger(n=1, size=8), update)
        within(lambda: flow.run(until=lambda: len(updates_after_waits) > 2))


def test_close_ends_a_wait_for_slots(tmp_path: Path) -> None:
    with serving(tmp_path / "c", slots=1) as name, releasing(name, workers=1) as env, keeping(name, workers=1):
        with waiting(env, name) as raised:
            assert urllib.request.urlopen(env.status_url, timeout=PATIENCE_S).status == 200
            wait_until(lambda: "waiting for 1 slot" in "".join(event.text for event in env.events("warned")))
            assert env.stats()["slots"]["waited_seconds"] > 0
            env.close()
        assert isinstance(raised[0], farstep.ClosedError)
        wait_until(lambda: held(name) == [1])


def test_ctrl_c_ends_a_wait_for_slots_and_the_next_rollout_waits_again(tmp_path: Path) -> None:
    agent = TableAgent()
    with serving(tmp_path / "c", slots=1) as name, releasing(name, workers=1) as env:
        with keeping(name, workers=1):
            interrupt = threading.Thread(target=_interrupt_when_waiting, args=[name])
            interrupt.start()
            with pytest.raises(KeyboardInterrupt):
                env.collect(agent, steps=2)
            interrupt.join(PATIENCE_S)
            wait_until(lambda: runs(name)[0].state == "wants no slots")
        assert len(env.collect(agent, steps=2).slots) == 4


def _interrupt_when_waiting(name: str) -> None:
    wait_until(lambda: "queue" in runs(name)[0].state)
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_while_a_launch_waits_lets_the_next_run_start(tmp_path: Path) -> None:
    with (
        serving(tmp_path / "c", slots=2) as name,
        keeping(name, workers=1),
        contextlib.closing(keeping(name, min_workers=2)) as env,
        contextlib.closing(keeping(name, workers=1)) as other,
    ):
        interrupt = threading.Thread(target=_interrupt_when_both_wait, args=[name, other])
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            env.launch()
        wait_until(lambda: held(name) == [1, 1])
        interrupt.join(PATIENCE_S)
        assert not interrupt.is_alive()


def _interrupt_when_both_wait(name: str, other: farstep.ClusterEnv) -> None:
    """Launch a run that waits for one in the main thread, then interrupt that one."""
    launch = threading.Thread(target=other.launch)
    wait_until(lambda: len(runs(name)) == 2)
    launch.start()
    wait_until(lambda: ["queue" in run.state for run in runs(name)] == [False, True, True])
    os.kill(os.getpid(), signal.SIGINT)
    launch.join(PATIENCE_S)
    assert not launch.is_alive()


def test_ctrl_c_while_a_run_registers_removes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class InterruptedShare(RunShare):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            os.kill(os.getpid(), signal.SIGINT)

    with serving(tmp_path / "c", slots=1) as name, contextlib.closing(keeping(name, workers=1)) as env:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr("farstep.run.launched_run.RunShare", InterruptedShare)
            env.launch()
        wait_until(lambda: runs(name) == [])
        assert len(env.collect(TableAgent(), steps=2).slots) == 4


@pytest.mark.parametrize("call", ["collect", "parts", "stream", "reset"])
def test_ctrl_c_while_slots_are_requested_returns_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    agent, begin_session = TableAgent(), WorkerSlots.begin_session

    def begin_and_interrupt(slots: WorkerSlots, *, one_batch: bool) -> None:
        begin_session(slots, one_batch=one_batch)
        os.kill(os.getpid(), signal.SIGINT)

    with serving(tmp_path / "c", slots=1) as name, releasing(name, workers=1) as env:
        calls = {
            "collect": lambda: env.collect(agent, steps=2),
            "parts": lambda: next(env.parts(agent, steps=2)),
            "stream": lambda: next(env.stream(agent, steps=2)),
            "reset": env.reset,
        }
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(WorkerSlots, "begin_session", begin_and_interrupt)
            calls[call]()
        wait_until(lambda: runs(name)[0].state == "wants no slots")
        assert len(env.collect(agent, steps=2).slots) == 4


@pytest.mark.parametrize("name_of_context", ["kept", "all_unparked"])
def test_slots_are_not_kept_after_ctrl_c(name_of_context: str, tmp_path: Path) -> None:
    agent = TableAgent()
    with serving(tmp_path / "c", slots=1) as name, releasing(name, workers=1) as env:
        slots = collector_for(env, agent).server.slots
        locked = slots.locked

        @contextlib.contextmanager
        def locked_and_interrupted() -> Iterator[None]:
            slots.locked = locked
            with locked():
                os.kill(os.getpid(), signal.SIGINT)
                yield

        slots.locked = locked_and_interrupted
        with pytest.raises(KeyboardInterrupt), getattr(slots, name_of_context)():
            pass
        env.collect(agent, steps=2)
        wait_until(lambda: runs(name)[0].state == "wants no slots")


def all_beyond(outs: list[Path], before: list[int]) -> bool:
    """Whether each run has made more than two rollouts since `before`."""
    return all(len(times(out)) > number + 2 for out, number in zip(outs, before, strict=True))


def test_runs_continue_after_the_coordinator_was_killed_and_restarted(tmp_path: Path) -> None:
    folder, outs = tmp_path / "c", [tmp_path / "a", tmp_path / "b"]
    with contextlib.ExitStack() as stack:
        coordinator = stack.enter_context(started_coordinator(folder, "--slots", 1))
        assert coordinator.stdout is not None and "1 slot" in coordinator.stdout.readline()
        words = [("tests.cluster.sharing_run", folder, out, tmp_path / "lock", 1) for out in outs]
        processes = [stack.enter_context(started(*each)) for each in words]
        for _ in range(2):
            before = [len(times(out)) for out in outs]
            wait_until(functools.partial(all_beyond, outs, before))
            coordinator.kill()
            coordinator.wait()
            coordinator = stack.enter_context(started_coordinator(folder, "--slots", 1))
            assert coordinator.stdout is not None and "restored 2 runs" in coordinator.stdout.readline()
        length = len(turns_of(outs))
        wait_until(lambda: turns_of(outs)[length:].count("01") > 2)
        assert [process.poll() for process in processes] == [None, None]  # otherwise too many steps at the same time


def test_share_of_a_run_is_not_part_of_its_checkpoint(tmp_path: Path) -> None:
    agent, journal = TableAgent(), Journal(4)
    with serving(tmp_path / "c", slots=2) as name, keeping(name), keeping(name) as env:
        wait_until(lambda: held(name) == [1, 1])
        batch = env.collect(agent, steps=3)
        assert batch.slots.tolist() == [0, 1]
        journal.add(batch)
        saved, actions = env.save(), journal.actions()
    with farstep.ClusterEnv(SOURCE, farstep.LocalConfig(workers_per_node=2)) as env:
        env.resume(agent, saved, actions)
        assert env.collect(agent, steps=3).slots.tolist() == [0, 1, 2, 3]


def test_refusal_ends_with_the_coordinator_that_refused(tmp_path: Path) -> None:
    agent = TableAgent()
    with contextlib.ExitStack() as stack:
        with serving(tmp_path / "c", slots=2) as name:
            env = stack.enter_context(releasing(name, min_workers=2))
            env.collect(agent, steps=2)
        with serving(tmp_path / "c", slots=1):  # too few, but the run is learning
            wait_until(lambda: reconnections(env) >= 1)  # twice if the ending coordinator has accepted one
            runs(name)  # answered after the run was refused
        with serving(tmp_path / "c", slots=2):
            wait_until(lambda: reconnections(env) >= 2)
            other = stack.enter_context(keeping(name))
            with waiting(env, name) as raised:
                other.close()
            assert raised == []


def reconnections(env: farstep.ClusterEnv) -> int:
    return sum("again" in event.text and "connected" in event.text for event in env.events("warned"))


def test_run_that_releases_is_resumed_by_one_that_does_not(tmp_path: Path) -> None:
    agent, journal = TableAgent(), Journal()
    with serving(tmp_path / "c", slots=2) as name:
        with releasing(name) as env:
            journal.add(env.collect(agent, steps=3))
            saved, actions = env.save(), journal.actions()
            assert held(name) == [0]
            expected = arrays_of(env.collect(agent, steps=3))
        with keeping(name) as env:
            env.resume(agent, saved, actions)
            assert_same(arrays_of(env.collect(agent, steps=3)), expected)
