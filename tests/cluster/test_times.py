"""The times in `stats()` are those that environments, agents and learners measure themselves, on every path.

Environments return the seconds of a step as reward, and agents record those of `act`. Shares are compared, not
durations, so the load of the machine does not matter.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import farstep
from farstep.testing import CountingEnv, FaultyEnv, TableAgent
from tests.cluster.checks import assert_balanced, cluster, in_process

PARTS = {"env", "inference", "tickets", "send", "weights"}
ACTED: list[float] = []
"""Seconds of each `act` in this process."""
CLOSE = 0.06
"""Largest difference of two shares: recording rows takes time, too."""


def slept(seconds: float) -> float:
    """Sleep; returns how long it took."""
    start = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - start


class SleepyEnv(gymnasium.Env[Any, Any]):
    """The reward is the time of the step, and of the reset before it. Episodes have 7 steps."""

    def __init__(self, step_s: float = 0.002, reset_s: float = 0.004) -> None:
        self.observation_space = spaces.Box(-1.0, 1e9, (3,), np.float32)
        self.action_space = spaces.Discrete(3)
        self._step_s, self._reset_s = step_s, reset_s

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._count, self._before = 0, slept(self._reset_s)
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> Any:
        self._count += 1
        took, self._before = self._before + slept(self._step_s), 0.0
        return np.zeros(3, np.float32), took, self._count == 7, False, {}


def sleepy_vector(num_envs: int, **kwargs: Any) -> Any:
    return SyncVectorEnv([SleepyEnv] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


class SleepyAgent(TableAgent):
    """Records the time of each `act`."""

    def __init__(self, act_s: float = 0.003) -> None:
        super().__init__()
        self._act_s = act_s

    def act(self, obs: Any) -> dict[str, Any]:
        took = slept(self._act_s)
        ACTED.append(took)
        return {**super().act(obs), "took": np.full(len(obs), took)}


class RecurrentSleepyAgent(SleepyAgent):
    def initial_state(self, n: int) -> Any:
        return np.zeros((n, 2), np.float32)

    def act(self, obs: Any, state: Any = None, episode_start: Any = None) -> dict[str, Any]:
        return {**super().act(obs), "state": state + 1}


def told(batch: farstep.Batch, per_worker: int) -> tuple[float, float]:
    """The seconds in environments and in `act` of a batch; `act` is called once for all slots of a worker."""
    return float(batch["reward"].sum()), float(batch["took"][:, ::per_worker].sum())


PATHS: dict[str, dict[str, Any]] = {
    "in process": {"config": in_process(2)},
    "recurrent": {"config": in_process(2)},
    "vector": {"config": in_process(2), "env": sleepy_vector, "type": "vector"},
    "staggered": {"config": in_process(2), "stagger": {"horizon": 14, "groups": 2, "init": "policy"}},
    "shared memory": {"workers": 2},
    "network": {"workers": 2, "transport": "tcp", "transfer": {"size": 4}},
}


@pytest.mark.parametrize("path", PATHS)
def test_share_of_the_environments_is_what_they_measure(path: str) -> None:
    options = dict(PATHS[path])
    agent = RecurrentSleepyAgent() if path == "recurrent" else SleepyAgent()
    with cluster(options.pop("env", SleepyEnv), envs=4, **options) as env:
        env.collect(agent, steps=14)  # includes the first resets, and the steps that stagger environments
        before = env.stats()["time"]
        batches = [env.collect(agent, steps=14).copy() for _ in range(2)]
        after = env.stats()["time"]
    environment, acting = (sum(each) for each in zip(*(told(batch, 2) for batch in batches), strict=True))
    found = {part: after["workers"][part] - before["workers"][part] for part in PARTS}
    share = found["env"] / (found["env"] + found["inference"])
    assert share == pytest.approx(environment / (environment + acting), abs=CLOSE)
    assert after["workers"].keys() == PARTS
    for part in PARTS:
        assert sum(worker[part] for worker in after["per_worker"]) == pytest.approx(after["workers"][part])


def test_acting_while_environments_are_staggered_is_inference() -> None:
    stagger = {"horizon": 14, "groups": 2, "init": "policy"}
    with cluster(partial(SleepyEnv, 0.0, 0.0), envs=2, config=in_process(), stagger=stagger) as env:
        env.collect(SleepyAgent(0.004), steps=7)
        stats = env.stats()
    assert stats["stagger_steps"] == 7
    assert stats["time"]["workers"]["inference"] == pytest.approx(sum(ACTED[-14:]), rel=0.1)


def test_single_steps_are_timed() -> None:
    with cluster(SleepyEnv, envs=2, config=in_process()) as env:
        agent = SleepyAgent()
        steps = [env.step(agent) for _ in range(20)]
        times = env.stats()["time"]["workers"]
    environment = sum(step[1].sum() for step in steps)
    acting = sum(step[4]["took"][0] for step in steps)
    share = times["env"] / (times["env"] + times["inference"])
    assert share == pytest.approx(environment / (environment + acting), abs=CLOSE)


def test_steps_of_make_vec_are_timed() -> None:
    envs = farstep.make_vec(SleepyEnv, num_envs=4, config=in_process(2))
    try:
        envs.reset(seed=1)
        told_s = thinking_s = 0.0
        for _ in range(12):
            told_s += float(envs.step(np.zeros(4, np.int64))[1].sum())
            thinking_s += slept(0.005)
        told_s += float(envs.step(np.zeros(4, np.int64))[1].sum())
        times = envs.stats()["time"]
    finally:
        envs.close()
    workers = times["workers"]
    assert workers["inference"] == workers["weights"] == 0
    # Both workers are in this process, so each also waits while the other one steps.
    waiting = sum(each["tickets"] for each in times["per_worker"])
    expected = told_s / (2 * (told_s + thinking_s))
    assert workers["env"] / (workers["env"] + waiting) == pytest.approx(expected, abs=CLOSE)


def test_workers_wait_for_tickets_while_the_learner_updates() -> None:
    with cluster(SleepyEnv, envs=2, config=in_process()) as env:
        agent, updating = SleepyAgent(), 0.0
        for _ in range(5):
            env.collect(agent, steps=3)
            updating += slept(0.03)
        env.collect(agent, steps=3)
        times = env.stats()["time"]
    learner, worker = times["learner"], times["workers"]
    assert learner.keys() == {"wait", "prepare", "update", "publish"}
    rolling = worker["env"] + worker["inference"]
    expected = updating / (updating + rolling)
    assert learner["update"] / (learner["update"] + learner["wait"]) == pytest.approx(expected, abs=CLOSE)
    assert worker["tickets"] / (worker["tickets"] + rolling) == pytest.approx(expected, abs=CLOSE)


class SlowToLoad(SleepyAgent):
    def set_parameters(self, parameters: Any) -> None:
        time.sleep(0.05)


def test_loading_weights_is_measured() -> None:
    with cluster(SleepyEnv, envs=1, config=in_process()) as env:
        agent = SlowToLoad(0.0)
        for _ in range(3):
            env.publish(agent)
            env.collect(agent, steps=2)
        times = env.stats()["time"]["workers"]
    assert times["weights"] > times["env"] > 0


def test_evaluating_probes_of_aaps_is_inference() -> None:
    class Probed(TableAgent):
        def distribution(self, obs: Any) -> dict[str, Any]:
            time.sleep(0.03)
            return {"logits": np.zeros((len(obs), 3), np.float32)}

    with cluster(partial(CountingEnv, length=None), envs=1, config=in_process(), kl_threshold=0.1) as env:
        agent = Probed()
        for _ in range(4):
            env.collect(agent, steps=8)
            env.publish(agent)
        env.collect(agent, steps=8)
        times = env.stats()["time"]["workers"]
    assert times["inference"] > 2 * times["env"]


def test_times_of_a_replaced_worker_continue(tmp_path: Any) -> None:
    faulty = partial(FaultyEnv, "sigkill", "step", at=40, marker=str(tmp_path / "died"))
    with cluster(faulty, envs=2, workers=2) as env:
        agent = SleepyAgent()
        env.collect(agent, steps=12)
        before = env.stats()["time"]["per_worker"]
        while env.stats()["workers"]["restarts"] == 0:
            env.collect(agent, steps=12)
        env.collect(agent, steps=12)
        stats = env.stats()
        assert_balanced(stats)
    for earlier, later in zip(before, stats["time"]["per_worker"], strict=True):
        assert later["inference"] > earlier["inference"] and later["env"] > earlier["env"]


def test_times_in_a_stream_with_staleness() -> None:
    with cluster(SleepyEnv, envs=2, workers=2) as env:
        agent = SleepyAgent(0.001)
        stream = env.stream(agent, steps=7, max_staleness=1)
        for _ in range(5):
            next(stream)
            time.sleep(0.03)
            env.publish(agent)
        stats = env.stats()
        stream.close()
    learner = stats["time"]["learner"]
    assert learner["update"] > 0 and learner["publish"] > 0 and learner["wait"] > 0
    assert stats["time"]["workers"]["env"] > stats["time"]["workers"]["inference"]


def test_a_slow_worker_has_a_lower_rate(tmp_path: Any) -> None:
    marker = tmp_path / "slow"

    def one_slow() -> Any:
        try:
            marker.touch(exist_ok=False)
        except FileExistsError:
            return SleepyEnv(0.001, 0.0)
        return SleepyEnv(0.03, 0.0)

    with cluster(one_slow, envs=2, workers=2) as env:
        for _ in env.stream(SleepyAgent(0.0), steps=7, num_chunks=1):
            rates = env.stats()["workers"]["steps_per_second"]
            if all(rates):
                break
    assert max(rates) > 3 * min(rates)
