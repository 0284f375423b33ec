"""`env.scale(workers=k)`: workers are parked and unparked while anything runs, and no step is lost or repeated."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import farstep
from farstep.buffer import SampleToInsertRatio, Uniform
from farstep.errors import ConfigError
from farstep.learners.loop.checkpoints.journal import Journal
from farstep.rollout.seeds import episode_seed
from farstep.testing import CountingEnv, TableAgent
from farstep.workflow.triggers import DataKeyTrigger, TimeTrigger
from tests.cluster.checks import (
    arrays_of,
    assert_balanced,
    assert_same,
    cluster,
    eventually,
    in_process,
    within,
    worker_pids,
)
from tests.cluster.flows import full
from tests.cluster.parking import Trajectories, changed, collect_while_scaling, scaling_at_random, settled, state_of
from tests.cluster.tables import ENDLESS, TRANSPORTS, helper, launch, ppo
from tests.cluster.test_stagger import CyclingAgent

TIMES = 70  # changes with all parameters: collect 140, stream 105, Workflow 68, on demand 35; on nodes 100 more


def endless(workers: int = 4, *, transport: str = "shm", envs: int | None = None, **options: Any) -> farstep.ClusterEnv:
    return cluster(envs=envs or workers, config=launch(transport, workers), env_kwargs=ENDLESS, **options)


# ---- scaling at random while something runs ----


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_collect_continues_while_workers_are_parked_and_unparked(transport: str) -> None:
    with endless(transport=transport) as env:
        seen, agent = Trajectories(), TableAgent()
        collect_while_scaling(env, agent, seen, TIMES)
        env.scale(workers=4)
        seen.add(env.collect(agent, steps=4))
        assert seen.columns[-1] == 4 and set(seen.columns) == {1, 2, 3, 4}
        stats = settled(env, parked=0)
        assert_balanced(stats)
        assert not stats["dropped"] and not stats["workers"]["restarts"]


@pytest.mark.parametrize(
    "options",
    [{"max_staleness": 0}, {"max_staleness": 2}, {"max_staleness": 1, "num_chunks": 6}],
    ids=["strict", "ahead", "in order of arrival"],
)
def test_stream_continues_while_workers_are_parked_and_unparked(options: dict[str, Any]) -> None:
    in_order_of_arrival = "num_chunks" in options  # so a chunk of a slow worker may become too old
    with endless() as env:
        seen, agent = Trajectories(may_skip=in_order_of_arrival), TableAgent()
        stream = env.stream(agent, steps=4, **options)
        with helper(scaling_at_random(env, seen, TIMES // 2, 2)) as scaler:
            for batch in stream:
                assert env.version - batch["version"].min() <= options["max_staleness"]
                if in_order_of_arrival:  # a worker may contribute several chunks: check them one by one
                    assert_balanced(env.stats())
                    for part in chunks_of(batch):
                        seen.add(part)
                else:
                    seen.add(batch)
                env.publish(agent)
                if not scaler.is_alive():
                    break
        assert_balanced(env.stats())
        num_stale = env.stats()["dropped"].get("stale", 0)
        assert seen.num_skipped <= num_stale and (in_order_of_arrival or not num_stale)
        stream.close()


def chunks_of(batch: farstep.Batch) -> list[Any]:
    """The chunks of a batch with one environment per worker, as objects that `Trajectories` can check."""
    return [Column(batch, i) for i in range(len(batch.slots))]


class Column:
    def __init__(self, batch: farstep.Batch, column: int) -> None:
        self._batch, self._columns = batch, slice(column, column + 1)
        self.slots, self.continues = batch.slots[self._columns], batch.continues[self._columns]

    def __getitem__(self, key: str) -> Any:
        return self._batch[key][:, self._columns]


@pytest.mark.parametrize("size", [4, 8], ids=["one chunk", "two chunks"])
@pytest.mark.parametrize("max_staleness", [None, 1])
def test_workflow_continues_while_workers_are_parked_and_unparked(size: int, max_staleness: int | None) -> None:
    """Also within windows of several chunks, which are completed first if rows could become too old."""
    with endless() as env:
        seen, lags = Trajectories(), list[int]()
        flow = farstep.Workflow(env, TableAgent(), full(4 * 64), steps=4, max_staleness=max_staleness)

        def learn(message: Any) -> None:
            batch = flow.batch(message)
            lags.append(env.version - int(batch["version"].min()))
            seen.add(batch)
            flow.publish()

        flow.on(DataKeyTrigger(n="all", size=size), learn)
        with helper(scaling_at_random(env, seen, TIMES // 4, 3)) as scaler:
            within(lambda: flow.run(until=lambda: not scaler.is_alive()), 120)
        stats = env.stats()
        assert_balanced(stats)
        assert not {"stale", "worker_left", "worker_lost"} & stats["dropped"].keys()
        assert max_staleness is None or max(lags) <= max_staleness


def test_rollouts_on_demand_are_of_the_newest_version_while_workers_are_parked_and_unparked() -> None:
    """A worker that is about to be parked rolls what was requested of it, and the trigger waits for it."""
    with endless() as env:
        seen, agent = Trajectories(), TableAgent()
        flow, learner = ppo(env, agent, full(4 * 16), size=8, steps=4)
        lags = list[int]()

        def note() -> None:
            lags.append(env.version - int(learner.batches[-1]["version"].min()))
            seen.add(learner.batches.pop())
            flow.publish()

        learner.then = note
        with helper(scaling_at_random(env, seen, TIMES // 2, 4)) as scaler:
            within(lambda: flow.run(until=lambda: not scaler.is_alive()), 120)
        assert set(lags) == {0} and len(set(seen.columns)) > 1
        assert_balanced(env.stats())


def test_replay_with_a_limiter_continues_with_fewer_workers() -> None:
    limiter = SampleToInsertRatio(samples_per_insert=2.0, min_size=16, error_buffer=64.0)
    with endless() as env, farstep.Buffer(256, Uniform(), limiter=limiter, seed=1) as buffer:
        flow, sampled = farstep.Workflow(env, TableAgent(), buffer, steps=4), list[int]()

        def learn(message: Any) -> None:
            sampled.append(len(buffer.sample(16)[0]["reward"]))
            env.scale(workers=1 + len(sampled) % 4)

        flow.on(TimeTrigger(8, unit="env_steps"), learn, samples=16)
        within(lambda: flow.run(until=lambda: len(sampled) >= 40))
        assert_balanced(env.stats())


# ---- one worker after the other ----


@TRANSPORTS
def test_parked_worker_keeps_its_episodes_and_uses_no_core(transport: str) -> None:
    with endless(3, transport=transport) as env:
        agent, seen = TableAgent(), Trajectories()
        seen.add(env.collect(agent, steps=3))
        env.scale(workers=1)
        for _ in range(3):
            seen.add(env.collect(agent, steps=3))
        stats = settled(env, parked=2)
        assert stats["workers"]["steps_per_second"][1:] == [0.0, 0.0]
        if transport != "in_process":
            eventually(lambda: sorted(state_of(pid) == "T" for pid in worker_pids()) == [False, True, True])
        parked = env.events("parked")
        assert [event.worker for event in sorted(parked, key=lambda event: event.worker or 0)] == [1, 2]
        env.scale(workers=3)
        seen.add(env.collect(agent, steps=3))
        assert seen.columns == [3, 1, 1, 1, 3]
        assert [event.text for event in env.events("scaled")] == [
            "scaled from 3 to 1 worker",
            "scaled from 1 to 3 workers",
        ]


def test_worker_that_is_parked_in_the_middle_of_a_step_delivers_its_chunk_and_others_do_not_wait(
    tmp_path: Path,
) -> None:
    last = int(CountingEnv().reset(seed=episode_seed(5, 2, 0))[0][0])  # the episode of slot 2
    with cluster(Held, envs=3, workers=3, env_kwargs={"episode": last, "folder": str(tmp_path)}) as env:
        stream = env.stream(TableAgent(), steps=4, max_staleness=8, num_chunks=1)
        next(stream)
        eventually((tmp_path / "there").exists)
        env.scale(workers=2)
        assert {int(next(stream).slots[0]) for _ in range(20)} == {0, 1}
        assert env.stats()["workers"]["parked"] == 0
        (tmp_path / "gate").touch()
        settled(env, parked=1)
        slots = [int(next(stream).slots[0]) for _ in range(20)]
        assert slots.count(2) == 1  # the chunk that it was rolling
        assert_balanced(env.stats())
        stream.close()


class Held(CountingEnv):
    """Waits in one step of one episode for the file `gate`."""

    def __init__(self, episode: int, folder: str, at: int = 2) -> None:
        super().__init__(length=None)
        self._held, self._folder, self._at = episode, Path(folder), at

    def step(self, action: Any) -> Any:
        if self.episode == self._held and self.count == self._at:
            (self._folder / "new").write_text(str(os.getpid()))
            (self._folder / "new").rename(self._folder / "there")
            eventually((self._folder / "gate").exists)
        return super().step(action)


@pytest.mark.parametrize("transport", ["in_process", "shm"])
def test_tickets_that_a_parked_worker_has_not_started_return_to_the_pool(transport: str) -> None:
    with endless(2, transport=transport) as env:
        agent, seen = TableAgent(), Trajectories()
        stream = env.stream(agent, steps=2, max_staleness=5)
        seen.add(next(stream))
        env.scale(workers=1)
        for _ in range(12):
            seen.add(next(stream))
        settled(env, parked=1)
        assert seen.columns[-1] == 1
        env.scale(workers=2)
        for batch in stream:
            seen.add(batch)
            if seen.columns[-3:] == [2, 2, 2]:
                break
        assert not env.stats()["dropped"]
        stream.close()


def test_few_workers_fill_large_batches_in_order_of_arrival() -> None:
    """The lanes of one worker are too few for a batch of 9 chunks: complete chunks are copied."""
    with endless(3) as env:
        seen, stream = Trajectories(), env.stream(TableAgent(), steps=2, max_staleness=1, num_chunks=9)
        for part in chunks_of(next(stream)):
            seen.add(part)
        env.scale(workers=1)
        for batch in itertools.islice(stream, 4):
            for part in chunks_of(batch):
                seen.add(part)
        settled(env, parked=2)
        batch = within(lambda: next(stream))
        assert set(batch.slots.tolist()) == {0} and batch.shape == (2, 9)
        stream.close()


# ---- what a parked worker misses ----


@pytest.mark.parametrize(
    ("transport", "options"),
    [("tcp", {}), ("shm", {}), ("shm", {"kl_threshold": 0.05}), ("in_process", {"kl_threshold": float("inf")})],
)
def test_unparked_worker_pulls_missed_versions_before_it_acts(transport: str, options: dict[str, Any]) -> None:
    """Unless the sync rule never pulls: versions without a probe count as too far."""
    with endless(2, transport=transport, **options) as env:
        agent = TableAgent()
        env.collect(agent, steps=4)
        env.scale(workers=1)
        env.collect(agent, steps=4)
        settled(env, parked=1)
        for _ in range(3):
            env.collect(changed(agent), steps=4)
        env.scale(workers=2)
        batch = env.collect(agent, steps=4)
        assert batch.slots.tolist() == [0, 1]
        never = options.get("kl_threshold") == float("inf")
        assert batch["version"][0].tolist() == ([0, 0] if never else [env.version] * 2)
        assert env.version == 3


def test_staleness_bound_applies_to_the_first_ticket_of_an_unparked_worker() -> None:
    with endless(2, sync=farstep.sync.EverySeconds(1e9)) as env:
        agent = TableAgent()
        stream = env.stream(agent, steps=2, max_staleness=1)
        next(stream)
        env.scale(workers=1)
        settled(env, parked=1)
        for _ in range(6):
            next(stream)
            env.publish(changed(agent))
        env.scale(workers=2)
        columns = 0
        for batch in itertools.islice(stream, 8):
            assert env.version - batch["version"].min() <= 1
            columns = max(columns, batch.shape[1])
            env.publish(changed(agent))
        assert columns == 2 and "stale" not in env.stats()["dropped"]
        stream.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_unparked_worker_acts_with_the_agent_and_the_layout_that_came_meanwhile(transport: str) -> None:
    with endless(2, transport=transport) as env:
        env.collect(first := TableAgent(), steps=2)
        env.scale(workers=1)
        env.collect(first, steps=2)
        settled(env, parked=1)
        agent = CyclingAgent()
        env.collect(agent, steps=9)
        env.scale(workers=2)
        batch = env.collect(agent, steps=9)
        np.testing.assert_array_equal(batch["seen"][:, 1], np.arange(9))
        np.testing.assert_array_equal(batch["obs"][:, 1, 1], np.arange(2, 11))


def test_recurrent_state_survives_parking() -> None:
    with endless(2) as env:
        agent = CyclingAgent()
        env.collect(agent, steps=5)
        env.scale(workers=1)
        env.collect(agent, steps=5)
        settled(env, parked=1)
        env.scale(workers=2)
        np.testing.assert_array_equal(env.collect(agent, steps=3)["seen"], [[10, 5], [11, 6], [12, 7]])


@pytest.mark.parametrize("transport", ["in_process", "shm"])
def test_reset_also_concerns_parked_workers(transport: str) -> None:
    with endless(3, transport=transport) as env, endless(3, transport=transport) as other:
        agent = TableAgent()
        for workers in (3, 1):
            env.scale(workers=workers)
            env.collect(agent, steps=4)
        settled(env, parked=2)
        obs, _ = env.reset(seed=11)
        assert obs.shape == (1, 3)
        env.reset(options={"reset_mask": np.array([False, True, False])})
        env.scale(workers=3)
        other.reset(seed=11)
        other.reset(options={"reset_mask": np.array([False, True, False])})
        assert_same(arrays_of(env.collect(agent, steps=4)), arrays_of(other.collect(agent, steps=4)))


class ScalingEnv(CountingEnv):
    """Calls the next of `calls` in `reset`, in the thread of the head if its worker runs in-process."""

    calls: ClassVar[list[Callable[[], None]]] = []

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        if self.calls:
            self.calls.pop()()
        return super().reset(**options)


def test_reset_also_concerns_a_worker_that_is_unparked_meanwhile() -> None:
    options: dict[str, Any] = {"envs": 2, "config": in_process(2), "env_kwargs": ENDLESS}
    with cluster(ScalingEnv, **options) as env, cluster(**options) as other:
        agent = TableAgent()
        env.collect(agent, steps=4)
        env.scale(workers=1)
        env.collect(agent, steps=4)
        settled(env, parked=1)
        ScalingEnv.calls.append(functools.partial(env.scale, workers=2))
        obs, _ = env.reset(seed=11)
        assert obs.shape == (1, 3) and not ScalingEnv.calls  # the others had begun without it
        other.reset(seed=11)
        assert_same(arrays_of(env.collect(agent, steps=4)), arrays_of(other.collect(agent, steps=4)))


@pytest.mark.parametrize("init", ["advance", "clock"])
def test_unparked_slots_re_enter_at_the_phase_that_is_due(init: str) -> None:
    horizon = 12
    with endless(2, envs=8, stagger={"horizon": horizon, "groups": 4, "init": init}) as env:
        agent = TableAgent()
        env.collect(agent, steps=3)
        env.scale(workers=1)
        for _ in range(2):
            batch = env.collect(agent, steps=5)
        settled(env, parked=1)
        assert sorted(np.bincount(batch.slots % 4)) == [1, 1, 1, 1]  # every part of the horizon is thinned evenly
        env.scale(workers=2)
        found = [env.collect(agent, steps=6).copy() for _ in range(4)]
        assert found[0].continues[4:].all() == (init == "clock")
        for k, batch in enumerate(found):
            phases = (batch["obs"][:, :, 1] - np.arange(6)[:, None]) % horizon
            due = (13 + 6 * k + np.arange(8) % 4 * 3) % horizon
            if init == "advance" or k >= 2:  # with "clock", episodes in progress end when the next ones are due
                np.testing.assert_array_equal(phases[-1], due % horizon)


# ---- failures and ends ----


def test_parked_worker_that_is_killed_is_restarted_when_it_is_unparked() -> None:
    with cluster(envs=3, workers=3, env_kwargs=ENDLESS, restart_budget=1) as env:
        agent = TableAgent()
        env.collect(agent, steps=2)
        env.scale(workers=1)
        settled(env, parked=2)
        for pid in worker_pids()[1:]:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: len(env.events("lost")) == 2)
        assert all("it is parked" in event.text for event in env.events("lost"))
        env.collect(agent, steps=2)
        assert env.stats()["workers"]["parked"] == 2 and not env.stats()["workers"]["restarts"]
        env.scale(workers=2)
        assert env.collect(agent, steps=2).slots.tolist() == [0, 1], "waits for the replacement"
        assert env.stats()["workers"]["restarts"] == 1
        with pytest.raises(farstep.WorkerDied, match="restart_budget=1 is used up"):
            env.scale(workers=3)
            within(lambda: [env.collect(agent, steps=2) for _ in range(1000)])


def test_worker_that_dies_while_it_completes_a_window_is_replaced_and_then_parked(tmp_path: Path) -> None:
    """The trigger waits for the window, so the replacement has to complete it."""
    last = int(CountingEnv().reset(seed=episode_seed(5, 1, 0))[0][0])  # the episode of slot 1
    with cluster(Held, envs=2, workers=2, env_kwargs={"episode": last, "folder": str(tmp_path), "at": 5}) as env:
        flow, learner = ppo(env, TableAgent(), full(64), size=8, steps=4)
        flow.on(
            TimeTrigger(0.05), lambda message: None
        )  # so that it is not reported as a deadlock while no worker rolls
        with helper(lambda: flow.run(until=lambda: len(learner.batches) >= 4)) as runner:
            eventually((tmp_path / "there").exists)
            pid = int((tmp_path / "there").read_text())
            env.scale(workers=1)
            os.kill(pid, signal.SIGKILL)
            settled(env, parked=1)
            runner.join(60)
        assert [batch.shape[1] for batch in learner.batches] == [2, 1, 1, 1]
        assert env.stats()["workers"]["restarts"] == 1
        assert_balanced(env.stats())


@pytest.mark.parametrize(
    "config", [farstep.InProcessConfig(workers_per_node=2), farstep.LocalConfig(workers_per_node=2)]
)
def test_scaling_nodes_of_a_launcher_without_nodes_names_the_workers(config: Any) -> None:
    env = farstep.ClusterEnv({"env_name": "CartPole-v1", "envs_per_node": 2}, config)
    with pytest.raises(ConfigError, match=r"scale got nodes=2, but .*Config has no nodes.*scale\(workers=2\)"):
        env.scale(2)


def test_trigger_that_needs_parked_workers_is_a_deadlock_that_names_them() -> None:
    with endless(2, transport="in_process") as env:
        flow = farstep.Workflow(env, TableAgent(), full(64), steps=4)
        flow.on(DataKeyTrigger(n=2, size=4), lambda message: env.scale(workers=1))
        with pytest.raises(
            farstep.FarstepError, match=r"deadlock.*1 worker is parked; env\.scale\(workers=2\) unparks"
        ):
            within(flow.run)


@pytest.mark.parametrize(("transport", "parked"), [("shm", True), ("tcp", True), ("shm", False)])
def test_close_ends_parked_workers_by_themselves(transport: str, parked: bool, tmp_path: Path) -> None:
    """Also those that are about to be parked."""
    kwargs = {"folder": str(tmp_path)}
    with cluster(Closing, envs=2, config=launch(transport), env_kwargs=kwargs) as env:
        env.collect(TableAgent(), steps=2)
        env.scale(workers=1)
        if parked:
            settled(env, parked=1)
        pids = worker_pids()
    assert len(list(tmp_path.iterdir())) == 2  # both environments were closed
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


class Closing(CountingEnv):
    """Leaves a file when it is closed."""

    def __init__(self, folder: str) -> None:
        super().__init__(length=None)
        self._file = Path(folder) / f"closed by {os.getpid()}"

    def close(self) -> None:
        self._file.touch()


@pytest.mark.parametrize("transport", ["in_process", "shm"])
def test_saved_run_resumes_with_parked_workers_bit_for_bit(transport: str) -> None:
    launcher = launch(transport, 4)
    source = {"type": "factory", "env_name": functools.partial(CountingEnv, length=50), "envs_per_node": 4, "seed": 7}
    agent = TableAgent()
    with farstep.ClusterEnv(source, launcher) as env:
        journal = Journal()
        for workers in (4, 2):
            env.scale(workers=workers)
            journal.add(env.collect(agent, steps=5))
        settled(env, parked=2)
        saved, actions = env.save(), journal.actions()
        assert saved["active_workers"] == 2
        expected = [arrays_of(env.collect(agent, steps=5))]
        env.scale(workers=4)
        expected.append(arrays_of(env.collect(agent, steps=5)))
    with farstep.ClusterEnv(source, launcher) as env:
        env.resume(agent, saved, actions)
        assert_same(arrays_of(env.collect(agent, steps=5)), expected[0])
        settled(env, parked=2)
        env.scale(workers=4)
        assert_same(arrays_of(env.collect(agent, steps=5)), expected[1])


def test_time_in_which_a_worker_was_parked_is_not_time_that_it_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    real, skipped = time.perf_counter_ns, [0]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: real() + skipped[0])
    with endless(2, transport="in_process") as env:
        agent = TableAgent()
        env.collect(agent, steps=2)
        env.scale(workers=1)
        env.collect(agent, steps=2)
        assert env.stats()["workers"]["parked"] == 1
        skipped[0] = 10**15
        env.scale(workers=2)
        env.collect(agent, steps=2)
        assert env.stats()["time"]["per_worker"][1]["tickets"] < 10**5


def test_parked_worker_is_neither_stuck_nor_waited_for() -> None:
    limits: Any = {"idle_s": 2.0, "step_s": 10.0}
    with cluster(envs=2, workers=2, env_kwargs=ENDLESS, timeouts=limits) as env:
        agent = TableAgent()
        env.collect(agent, steps=2)
        env.scale(workers=1)
        settled(env, parked=1)
        ends = time.monotonic() + 2.5  # longer than the limit of a worker that is not parked
        while time.monotonic() < ends:
            env.collect(agent, steps=2)
            time.sleep(0.05)
        stats = settled(env, parked=1)
        assert not stats["workers"]["restarts"] and not stats["workers"]["lost"]
        assert not env.events(["lost", "stuck", "warned"])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"workers": 0}, "workers"),
        ({"workers": 3}, "expected 1 to 2"),
        ({}, "expected one of them"),
        ({"nodes": 1, "workers": 1}, "expected one of them"),
        ({"workers": True}, "workers"),
    ],
)
def test_scale_refuses_other_numbers_of_workers(arguments: dict[str, Any], reason: str) -> None:
    with endless(2, transport="in_process") as env, pytest.raises(ConfigError, match=reason):
        env.scale(**arguments)


def test_make_vec_refuses_to_scale() -> None:
    env = farstep.make_vec("CartPole-v1", num_envs=2, config=in_process(2))
    with contextlib.closing(env), pytest.raises(ConfigError, match="make_vec steps all environments together"):
        env.scale(workers=1)


def test_any_thread_may_scale() -> None:
    with endless(2) as env:
        agent = TableAgent()
        threads = [threading.Thread(target=lambda k=k: env.scale(workers=1 + k % 2)) for k in range(8)]
        for thread in threads:
            thread.start()
        for _ in range(5):
            env.collect(agent, steps=2)
        for thread in threads:
            thread.join()
        env.scale(workers=2)
        assert settled(env, parked=0)
