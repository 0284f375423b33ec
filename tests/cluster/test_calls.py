"""Calls of a cluster: Ctrl-C, concurrent threads, forks, other agents, and agents that cannot be used."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import farstep
from farstep.batch import ENDS
from farstep.config.launch import LaunchConfig
from farstep.testing import CountingEnv, FaultyEnv, TableAgent
from farstep.wire.codec import Limits
from tests.cluster.checks import BOTH, assert_balanced, assert_sound, cluster, eventually, in_process, together, within
from tests.cluster.faulty import SelfNamingEnv

TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp"])
SLOW = {"fault": "slow", "phase": "step", "at": 0, "slow_s": 0.02}


def interrupted(after_s: float, call: Callable[[], object]) -> None:
    """Ctrl-C during a call, a moment from now; on a busy machine that may be before it has begun."""
    timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT))  # SIGALRM is pytest-timeout's
    with pytest.raises(KeyboardInterrupt):
        try:
            timer.start()
            call()
        finally:
            timer.cancel()
            timer.join()


@BOTH
def test_a_cluster_is_usable_after_an_interrupted_call(config: LaunchConfig) -> None:
    with cluster(FaultyEnv, envs=2, env_kwargs=SLOW, config=config) as env:
        agent = TableAgent()
        last = env.collect(agent, steps=1).last_obs.copy()
        interrupted(0.3, lambda: env.collect(agent, steps=10_000))
        batch = env.collect(agent, steps=3)
        assert_sound(batch)
        assert not (batch.continues & (batch["obs"][0] != last).any(axis=1)).any()
        assert not batch.continues[0], "what was rolled before the interrupt is gone"
        assert env.stats()["dropped"] == {"cancelled": 2}
        assert_balanced(env.stats())


@BOTH
def test_interrupts_at_any_moment_neither_lose_nor_repeat_rows(config: LaunchConfig) -> None:
    rng = random.Random(1)
    with cluster(envs=4, config=config) as env:
        agent = TableAgent()
        env.collect(agent, steps=2)

        def go_on() -> None:
            while True:
                env.collect(agent, steps=2)

        for _ in range(40):
            interrupted(rng.uniform(0.0002, 0.02), go_on)
            assert_balanced(env.stats())
            assert_sound(env.collect(agent, steps=2))
    with cluster(envs=1, config=in_process(1)) as another:  # this process does not take itself for a worker
        assert_sound(another.collect(agent, steps=2))


def test_interrupted_launch_can_be_retried() -> None:
    kwargs = {"fault": "slow", "phase": "construct", "slow_s": 1.0}  # a launch may take less than 0.05 s
    with contextlib.closing(cluster(FaultyEnv, envs=2, workers=2, env_kwargs=kwargs)) as env:
        interrupted(0.05, env.launch)
        assert "not launched" in repr(env)
        assert within(lambda: env.collect(TableAgent(), steps=4)).shape == (4, 2)
    with pytest.raises(farstep.ClosedError):
        env.launch()


def test_close_completes_after_an_interrupted_close() -> None:
    limits = farstep.Timeouts(close_s=60.0)
    env = cluster(FaultyEnv, envs=1, env_kwargs={"fault": "hang", "phase": "close"}, timeouts=limits)
    env.collect(TableAgent(), steps=1)
    interrupted(0.3, env.close)
    env.close()  # the leak check sees to the rest


@TRANSPORTS
def test_another_thread_can_look_and_can_close_while_a_call_waits(transport: str) -> None:
    env = cluster(FaultyEnv, envs=1, env_kwargs={**SLOW, "slow_s": 0.1}, transport=transport)
    env.launch()
    outcome: list[BaseException] = []

    def collect() -> None:
        try:
            env.collect(TableAgent(), steps=100_000)
        except farstep.FarstepError as error:
            outcome.append(error)

    waiting = threading.Thread(target=collect, name="waiting", daemon=True)
    waiting.start()
    within(lambda: eventually(lambda: env.stats()["in_flight"] == 1))
    within(env.close)
    waiting.join(30)
    assert not waiting.is_alive()
    assert isinstance(outcome[0], farstep.ClosedError)


def test_a_publish_from_another_thread_reaches_a_call_that_waits() -> None:
    with cluster(FaultyEnv, envs=1, env_kwargs=SLOW, workers=1) as env:
        agent = TableAgent()
        stream = env.stream(agent, steps=10, max_staleness=0)
        next(stream)
        together({"publish": lambda: env.publish(agent), "next": lambda: next(stream), "look": env.stats})
        assert within(lambda: next(stream))["version"].max() == 1


@TRANSPORTS
def test_stream_that_starves_warns_once(transport: str, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr("farstep.head.warnings.user_warnings.STARVED_S", 0.0)
    with cluster(FaultyEnv, envs=1, env_kwargs=SLOW, transport=transport) as env:
        agent = TableAgent()
        stream = env.stream(agent, steps=4, max_staleness=0)
        next(stream)

        def publish() -> None:
            while env.stats()["dropped"].get("stale", 0) < 3:
                env.publish(agent)

        outcomes = together({"publish": publish, "next": lambda: next(stream)})
        for outcome in outcomes.values():
            outcome.get()
    said = [record.getMessage() for record in caplog.records if "too old" in record.getMessage()]
    assert len(said) == 1 and "meanwhile: 1." in said[0] and "Raise max_staleness" in said[0]


def test_a_call_from_another_thread_ends_the_one_under_way_with_a_clear_error() -> None:
    with cluster(FaultyEnv, envs=1, env_kwargs={**SLOW, "slow_s": 0.1}, workers=1) as env:
        agent = TableAgent()
        env.collect(agent, steps=1)
        outcome: list[BaseException] = []

        def collect() -> None:
            try:
                env.collect(agent, steps=100_000)
            except farstep.FarstepError as error:
                outcome.append(error)

        waiting = threading.Thread(target=collect, name="waiting", daemon=True)
        waiting.start()
        eventually(lambda: env.stats()["in_flight"] == 1)
        assert_sound(within(lambda: env.collect(agent, steps=2)))
        waiting.join(30)
        assert isinstance(outcome[0], farstep.ClosedError) and "another call" in str(outcome[0])
        assert_balanced(env.stats())


@pytest.mark.filterwarnings("ignore:os.fork")
@TRANSPORTS
def test_a_fork_of_the_head_neither_ends_the_workers_nor_keeps_them(transport: str) -> None:
    with cluster(SelfNamingEnv, envs=1, transport=transport) as env:
        agent = TableAgent()
        _, info = env.reset()
        child = os.fork()
        if not child:
            refused = []
            for call in (env.stats, env.reset, lambda: env.collect(agent)):
                try:
                    call()
                except farstep.ClosedError as error:
                    refused.append("fork" in str(error))
            env.close()  # as the interpreter's end would
            os._exit(0 if refused == [True] * 3 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert_sound(within(lambda: env.collect(agent, steps=3)))
        _, after = env.reset()
        assert after["pid"][0] == info["pid"][0]


def test_another_agent_ends_a_stream_with_a_clear_error() -> None:
    with cluster(workers=2) as env:
        first, second = TableAgent(), TableAgent()
        with pytest.raises(farstep.ClosedError, match="another call"):
            for batch in env.stream(first, steps=4):
                assert_sound(batch)
                env.publish(second)
        assert_sound(env.collect(second, steps=4))
        assert_balanced(env.stats())


class Stubborn(TableAgent):
    def act(self, obs: Any) -> Any:
        return {"value": np.zeros(len(obs))}


class Broken(TableAgent):
    def act(self, obs: Any) -> Any:
        raise ZeroDivisionError("nothing to divide by")


EVERY = [in_process(2), *(farstep.LocalConfig(workers_per_node=2, transport=name) for name in ("shm", "tcp"))]


@pytest.mark.parametrize("config", EVERY, ids=["in_process", "shm", "tcp"])
def test_refused_agent_has_no_effect_but_a_clear_error(config: LaunchConfig) -> None:
    with cluster(config=config) as env:
        with pytest.raises(farstep.AgentError, match=r"^act returned .* without 'action'"):
            env.collect(Stubborn(), steps=4)
        good = TableAgent()
        batch = env.collect(good, steps=4)
        assert_sound(batch)
        assert (batch["version"] == 0).all(), "the first version that anybody acted with"
        with pytest.raises(farstep.AgentError, match="without 'action'"):
            env.collect(Stubborn(), steps=4)
        with pytest.raises(ZeroDivisionError, match="nothing to divide by") as caught:
            env.publish(Broken())
        assert isinstance(caught.value, farstep.RemoteEnvError)
        assert "phase act" in str(caught.value)
        assert_sound(env.collect(good, steps=4))
        assert env.stats()["workers"]["restarts"] == 0


class Fickle(TableAgent):
    """Returns one value for all environments from the second call on."""

    calls = 0

    def act(self, obs: Any) -> Any:
        self.calls += 1
        return {**super().act(obs), "value": np.zeros(len(obs) if self.calls == 1 else 1, np.float32)}


@BOTH
def test_agent_whose_outputs_change_their_shape_is_an_error(config: LaunchConfig) -> None:
    with cluster(config=config, envs=4) as env, pytest.raises(farstep.AgentError, match="in its first call"):
        env.collect(Fickle(), steps=4)


class CountedEnv(CountingEnv):
    """Counts its steps over all episodes."""

    steps = 0

    def reset(self, **kwargs: Any) -> Any:
        obs, info = super().reset(**kwargs)
        return obs, {**info, "steps": self.steps}

    def step(self, action: Any) -> Any:
        self.steps += 1
        threading.Event().wait(0.001)
        return super().step(action)


@TRANSPORTS
def test_a_worker_drops_a_reclaimed_ticket(transport: str) -> None:
    with cluster(CountedEnv, envs=1, transport=transport) as env:
        agent = TableAgent()
        env.collect(agent, steps=1)
        interrupted(0.5, lambda: env.collect(agent, steps=20_000))
        _, info = env.reset()
        assert 1 < info["steps"][0] < 20_000


@TRANSPORTS
def test_large_answers_arrive(transport: Any) -> None:
    config = farstep.LocalConfig(workers_per_node=1, transport=transport)
    vec = farstep.make_vec("CartPole-v1", 32, config, env_kwargs={"render_mode": "rgb_array"})
    try:
        vec.reset(seed=1)
        frames = vec.render()
        assert frames is not None and len(frames) == 32
        assert sum(frame.nbytes for frame in frames) > 16 * 2**20
    finally:
        vec.close()


class TalkativeEnv(CountingEnv):
    def step(self, action: Any) -> Any:
        print("x" * 1000)
        return super().step(action)


def test_an_environment_may_print_as_much_as_it_likes() -> None:
    limits = farstep.Timeouts(step_s=10.0)
    with cluster(TalkativeEnv, envs=2, workers=2, timeouts=limits, restart_budget=0) as env:
        agent = TableAgent()
        for _ in range(20):  # 600 KB from each worker, ten times what a pipe holds
            within(lambda: env.collect(agent, steps=30))
    vec = farstep.make_vec(TalkativeEnv, 2, farstep.LocalConfig(workers_per_node=2, timeouts=limits))
    with contextlib.closing(vec):
        vec.reset(seed=1)
        for _ in range(200):
            vec.step(np.zeros(2, np.int64))


@BOTH
def test_continues_says_where_rows_are_missing(config: LaunchConfig) -> None:
    with cluster(config=config, envs=4) as env:
        agent = TableAgent()
        env.reset(seed=1)
        assert not env.collect(agent, steps=3).continues.any()
        assert env.collect(agent, steps=3).continues.all()
        env.reset(options={"reset_mask": np.array([True, False, False, True])})
        np.testing.assert_array_equal(env.collect(agent, steps=3).continues, [False, True, True, False])
        env.step(agent)
        assert env.collect(agent, steps=3).continues.all()
        for _ in env.stream(agent, steps=3, max_staleness=0):
            break
        assert env.collect(agent, steps=3).continues.all()
        env.reset()
        assert not env.collect(agent, steps=3).continues.any()


@BOTH
def test_cluster_is_usable_after_a_rollout_that_does_not_fit(config: LaunchConfig) -> None:
    with cluster(config=config) as env:
        agent = TableAgent()
        assert_sound(env.collect(agent, steps=2))
        with pytest.raises(farstep.ConfigError, match="GiB"):
            env.collect(agent, steps=10**12)
        assert_sound(env.collect(agent, steps=2))
        assert_sound(env.collect(agent, steps=20))


@BOTH
def test_an_environment_that_raises_does_not_end_a_vector(config: LaunchConfig) -> None:
    with contextlib.closing(farstep.make_vec(CountingEnv, 4, config)) as vec:
        vec.reset(seed=1)
        with pytest.raises(AssertionError) as caught:
            vec.step(np.array([0, 0, 9, 0]))
        assert isinstance(caught.value, farstep.RemoteEnvError)
        assert caught.value.where.slot == 2
        obs, _ = vec.reset(seed=1)
        np.testing.assert_array_equal(obs[:, 1], 0)
        obs, *_ = vec.step(np.zeros(4, np.int64))
        np.testing.assert_array_equal(obs[:, 1], 1)


class FinalAgent(TableAgent):
    def act(self, obs: Any) -> Any:
        return {**super().act(obs), "final_obs_value": obs[:, 0]}


@TRANSPORTS
def test_names_of_outputs_may_start_like_those_of_farstep(transport: str) -> None:
    with cluster(transport=transport) as env:
        batch = env.collect(FinalAgent(), steps=12)
        np.testing.assert_array_equal(batch["final_obs_value"], batch["obs"][..., 0])


def test_an_episode_may_end_in_every_single_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Limits, "HEADER_BYTES", 2**14)
    with cluster(envs=64, env_kwargs={"length": 1}) as env:
        batch = env.collect(TableAgent(), steps=9)
        assert len(batch.final_obs) == 64 * 9
        assert (batch.episodes["length"] == 1).all()
        assert len(batch.final_obs) * ENDS.itemsize > Limits.HEADER_BYTES, "more ends than a header has room for"


SCRIPT = """
import multiprocessing

import farstep
from farstep.testing import CountingEnv, TableAgent

class MyEnv(CountingEnv):
    pass

class MyAgent(TableAgent):
    pass

def train():
    config = {"type": "factory", "env_name": MyEnv, "envs_per_node": 2}
    with farstep.ClusterEnv(config, farstep.LocalConfig(workers_per_node=1)) as env:
        print(env.collect(MyAgent(), steps=3).shape, flush=True)

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=train)
    child.start()
    child.join()
    raise SystemExit(child.exitcode)
"""


def test_a_head_in_a_process_that_multiprocessing_started_uses_classes_of_the_script(tmp_path: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "(3, 2)\n"), done.stderr


def test_error_says_why_a_worker_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Its connection closes before its process ends; what it prints in between must not be cut off."""
    (tmp_path / "late.py").write_text(
        "from farstep.testing import CountingEnv\nimport os, sys, time\n"
        "class Leaving(CountingEnv):\n"
        "    def reset(self, **options):\n"
        "        os.closerange(3, 1000)\n"
        "        time.sleep(0.2)\n"
        "        print('the licence server said no', flush=True)\n"
        "        os._exit(7)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with (
        pytest.raises(farstep.WorkerDied, match=r"exited with status 7(.|\n)*the licence server said no"),
        cluster("late:Leaving", envs=1, restart_budget=0) as env,
    ):
        env.collect(TableAgent(), steps=3)


@pytest.mark.parametrize("offset_s", [0.0, 0.001])
def test_cluster_works_after_threads_set_agents_at_the_same_time(offset_s: float) -> None:
    for _ in range(3):
        with cluster(envs=4, workers=2) as env:
            agent = TableAgent()
            calls = [threading.Thread(target=quietly, args=(lambda: env.collect(agent, steps=16),)) for _ in range(2)]
            for call in calls:
                call.start()
                time.sleep(offset_s)
            for call in calls:
                call.join()
            version = env.publish(agent)
            assert (within(lambda: env.collect(agent, steps=4))["version"] == version).all()
            assert within(lambda: next(env.stream(agent, steps=4)))["version"].min() == version


@BOTH
def test_threads_whose_calls_are_the_first_launch_once(config: LaunchConfig) -> None:
    agent = TableAgent()
    with contextlib.closing(cluster(envs=4, config=config)) as env:
        outcomes = together(
            {"collect": lambda: env.collect(agent, steps=4), "publish": lambda: env.publish(agent), "look": env.stats}
        )
        assert outcomes["collect"].get().shape == (4, 4) and outcomes["publish"].get() <= 1
        assert outcomes["look"].get()["workers"]["alive"] == 2


def quietly(call: Any) -> None:
    with contextlib.suppress(farstep.ClosedError):  # another call ended it
        call()


class FailingRule:
    def should_pull(self, state: Any) -> bool:
        if state.newest > 1:
            raise ZeroDivisionError("deliberate")
        return True


@BOTH
def test_a_sync_rule_that_raises_ends_the_run(config: LaunchConfig) -> None:
    with cluster(envs=4, sync=farstep.sync.MaxLag(5) | FailingRule(), config=config) as env:
        agent = TableAgent()
        env.collect(agent, steps=2)
        for _ in range(2):
            env.publish(agent)
        said = r"^the sync rule MaxLag \| FailingRule raised ZeroDivisionError: deliberate for SyncState\(held="
        with pytest.raises(farstep.WorkerError, match=said):
            within(lambda: env.collect(agent, steps=2))


class RootedRule(FailingRule):
    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_objects_that_cannot_be_sent_are_named() -> None:
    lock = threading.Lock()
    with pytest.raises(farstep.ConfigError, match=r"^the sync rule RootedRule cannot be sent to workers: TypeError"):
        cluster(sync=RootedRule(), config=in_process(1)).launch()
    with pytest.raises(farstep.ConfigError, match=r"^the predicate weights\.only cannot be sent"):
        cluster(weights={"only": lambda name: lock.locked()}, config=in_process(1)).launch()
    with pytest.raises(farstep.ConfigError, match=r"^the environment's factory"):
        cluster(lambda: lock, config=in_process(1)).launch()


def test_none_in_place_of_an_agent_is_refused() -> None:
    with cluster(config=in_process(1)) as env, pytest.raises(farstep.AgentError, match=r"NoneType has no act\(\)"):
        env.collect(None, steps=2)  # type: ignore[arg-type]


def test_excessive_staleness_is_refused() -> None:
    with cluster(config=in_process(1)) as env, pytest.raises(farstep.ConfigError, match="at most 1000"):
        env.stream(TableAgent(), steps=2, max_staleness=10**6)
