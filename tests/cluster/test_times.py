"""The times in `stats()` are those that environments, agents and learners measure themselves, on every path.

Environments return the seconds of a step as reward, and agents record those of `act`. In this process they move a
virtual clock, so that the load of the machine does not matter; in processes of workers they sleep.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import farstep
import tests
from farstep.testing import CountingEnv, FaultyEnv, TableAgent
from tests.cluster.checks import assert_balanced, cluster, in_process

PARTS = {"env", "inference", "tickets", "send", "weights"}
ACTED: list[float] = []
"""Seconds of each `act` in this process."""


class VirtualClock:
    """Replaces the clock of workers in this process."""

    current: VirtualClock | None = None

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


@pytest.fixture(autouse=True)
def by_reference() -> Iterator[None]:
    """Environments in this process use this module's clock, not a copy of it."""
    cloudpickle.unregister_pickle_by_value(tests)
    yield
    cloudpickle.register_pickle_by_value(tests)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualClock]:
    clock = VirtualClock()
    monkeypatch.setattr(VirtualClock, "current", clock)
    monkeypatch.setattr(time, "perf_counter_ns", clock)
    yield clock


def spent(seconds: float) -> float:
    """Move the virtual clock, or sleep if there is none; returns how long it took."""
    if VirtualClock.current is not None:
        VirtualClock.current.ns += round(seconds * 1e9)
        return seconds
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
        self._count, self._before = 0, spent(self._reset_s)
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> Any:
        self._count += 1
        took, self._before = self._before + spent(self._step_s), 0.0
        return np.zeros(3, np.float32), took, self._count == 7, False, {}


def sleepy_vector(num_envs: int, **kwargs: Any) -> Any:
    return SyncVectorEnv([SleepyEnv] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


class SleepyAgent(TableAgent):
    """Records the time of each `act`."""

    def __init__(self, act_s: float = 0.003) -> None:
        super().__init__()
        self._act_s = act_s

    def act(self, obs: Any) -> dict[str, Any]:
        took = spent(self._act_s)
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
    "rows": {},
    "recurrent": {},
    "vector": {"env": sleepy_vector, "type": "vector"},
    "staggered": {"stagger": {"horizon": 14, "groups": 2, "init": "policy"}},
}
OTHER_PROCESSES: dict[str, dict[str, Any]] = {
    "shared memory": {},
    "network": {"transport": "tcp", "transfer": {"size": 4}},
}


def measured(agent: Any, env: Any = SleepyEnv, **options: Any) -> tuple[dict[str, float], float, float]:
    """The times of workers during two rollouts, and the seconds that environments and the agent measured."""
    with cluster(env, envs=4, **options) as found:
        found.collect(agent, steps=14)  # includes the first resets, and the steps that stagger environments
        before = found.stats()["time"]["workers"]
        batches = [found.collect(agent, steps=14).copy() for _ in range(2)]
        after = found.stats()["time"]
    for part in PARTS:
        assert sum(worker[part] for worker in after["per_worker"]) == pytest.approx(after["workers"][part])
    environment, acting = (sum(each) for each in zip(*(told(batch, 2) for batch in batches), strict=True))
    return {part: after["workers"][part] - before[part] for part in PARTS}, environment, acting


@pytest.mark.parametrize("path", PATHS)
def test_times_are_those_that_environments_and_agent_measure(path: str, clock: VirtualClock) -> None:
    agent = RecurrentSleepyAgent() if path == "recurrent" else SleepyAgent()
    found, environment, acting = measured(agent, config=in_process(2), **PATHS[path])
    assert found["env"] == pytest.approx(environment)
    assert found["inference"] == pytest.approx(acting)
    assert found["tickets"] > 0.99 * (environment + acting), "each worker waits while the other one rolls"
    assert found["send"] == found["weights"] == 0


@pytest.mark.parametrize("path", OTHER_PROCESSES)
def test_times_of_workers_in_other_processes(path: str) -> None:
    found, environment, acting = measured(SleepyAgent(), workers=2, **OTHER_PROCESSES[path])
    assert found["env"] >= 0.99 * environment and found["inference"] >= 0.99 * acting
    share = found["env"] / (found["env"] + found["inference"])
    assert share == pytest.approx(environment / (environment + acting), abs=0.15)
    assert (found["send"] > 0.0) and found.keys() == PARTS


def test_acting_while_environments_are_staggered_is_inference(clock: VirtualClock) -> None:
    stagger = {"horizon": 14, "groups": 2, "init": "policy"}
    with cluster(partial(SleepyEnv, 0.001, 0.0), envs=2, config=in_process(), stagger=stagger) as env:
        env.collect(SleepyAgent(0.004), steps=7)
        stats = env.stats()
    assert stats["stagger_steps"] == 7
    assert stats["time"]["workers"]["inference"] == pytest.approx(14 * 0.004)
    assert stats["time"]["workers"]["env"] == pytest.approx((7 + 2 * 7) * 0.001)


def test_single_steps_are_timed(clock: VirtualClock) -> None:
    with cluster(SleepyEnv, envs=2, config=in_process()) as env:
        agent = SleepyAgent()
        env.step(agent)
        before = env.stats()["time"]["workers"]
        steps = [env.step(agent) for _ in range(14)]
        after = env.stats()["time"]["workers"]
    assert after["env"] - before["env"] == pytest.approx(sum(step[1].sum() for step in steps))
    assert after["inference"] - before["inference"] == pytest.approx(sum(step[4]["took"][0] for step in steps))


def test_steps_of_make_vec_are_timed(clock: VirtualClock) -> None:
    envs = farstep.make_vec(SleepyEnv, num_envs=4, config=in_process(2))
    try:
        envs.reset(seed=1)
        told_s = float(envs.step(np.zeros(4, np.int64))[1].sum())
        for _ in range(5):
            spent(0.01)  # the learner's own inference
            told_s += float(envs.step(np.zeros(4, np.int64))[1].sum())
        times = envs.stats()["time"]
    finally:
        envs.close()
    workers = times["workers"]
    assert workers["env"] == pytest.approx(told_s)
    assert workers["inference"] == workers["weights"] == 0
    assert all(worker["tickets"] > 5 * 0.01 for worker in times["per_worker"])


def test_workers_wait_for_tickets_while_the_learner_updates(clock: VirtualClock) -> None:
    with cluster(SleepyEnv, envs=2, config=in_process()) as env:
        agent = SleepyAgent()
        env.collect(agent, steps=3)
        before = env.stats()["time"]["workers"]["tickets"]
        for _ in range(5):
            spent(0.03)
            env.collect(agent, steps=3)
        assert env.stats()["time"]["workers"]["tickets"] - before == pytest.approx(5 * 0.03)


SLOW_PARTS = {"env": (0.001, 0.0, 0.0), "inference": (0.0, 0.001, 0.0), "tickets": (0.0, 0.0, 0.001)}
"""The slow part: seconds of a step of one environment, of `act`, and of the learner after each batch."""


@pytest.mark.parametrize("slow", SLOW_PARTS)
def test_parts_of_a_worker_add_up_to_the_elapsed_time(slow: str, clock: VirtualClock) -> None:
    """Each part takes 10 us where it is not the slow one, and all of the time belongs to one part."""
    step_s, act_s, learn_s = (seconds or 1e-5 for seconds in SLOW_PARTS[slow])
    with cluster(partial(SleepyEnv, step_s, 0.0), envs=1, config=in_process()) as env:
        agent = SleepyAgent(act_s)
        env.collect(agent, steps=7)
        before, start = env.stats()["time"]["workers"], clock.ns
        for _ in range(5):
            spent(learn_s)
            env.collect(agent, steps=7)
        after, elapsed_s = env.stats()["time"]["workers"], (clock.ns - start) / 1e9
    found = {part: after[part] - before[part] for part in PARTS}
    assert found["env"] == pytest.approx(35 * step_s)
    assert found["inference"] == pytest.approx(35 * act_s)
    assert found["tickets"] == pytest.approx(5 * learn_s)
    assert sum(found.values()) == pytest.approx(elapsed_s)
    assert max(found, key=lambda part: found[part]) == slow


def test_parts_of_the_learner_add_up() -> None:
    with cluster(SleepyEnv, envs=2, config=in_process()) as env:
        agent, updating = SleepyAgent(), 0.0
        env.publish(agent)
        published, start = env.stats()["time"]["learner"]["publish"], time.monotonic()
        batches = []
        for _ in range(4):
            batches.append(env.collect(agent, steps=3).copy())
            updating += spent(0.03)
        batches.append(env.collect(agent, steps=3).copy())
        whole = time.monotonic() - start
        times = env.stats()["time"]["learner"]
    rolling = sum(sum(told(batch, 2)) for batch in batches[1:])  # the first reset was before
    assert times["update"] >= updating and times["wait"] >= rolling and times["prepare"] > 0
    assert sum(times.values()) - published <= whole


class SlowToLoad(SleepyAgent):
    def set_parameters(self, parameters: Any) -> None:
        spent(0.05)


def test_loading_weights_is_measured(clock: VirtualClock) -> None:
    with cluster(SleepyEnv, envs=1, config=in_process()) as env:
        agent = SlowToLoad(0.0)
        for _ in range(3):
            env.publish(agent)
            env.collect(agent, steps=2)
        stats = env.stats()
    assert stats["time"]["workers"]["weights"] == pytest.approx(0.05 * stats["pulls"]["total"])
    assert stats["pulls"]["total"] == 3


def test_evaluating_probes_of_aaps_is_inference(clock: VirtualClock) -> None:
    class Probed(TableAgent):
        def distribution(self, obs: Any) -> dict[str, Any]:
            spent(0.03)
            return {"logits": np.zeros((len(obs), 3), np.float32)}

    with cluster(partial(CountingEnv, length=None), envs=1, config=in_process(), kl_threshold=0.1) as env:
        agent = Probed()
        for _ in range(4):
            env.collect(agent, steps=8)
            env.publish(agent)
        env.collect(agent, steps=8)
        times = env.stats()["time"]["workers"]
    assert times["env"] == 0
    probes = round(times["inference"] / 0.03)
    assert probes >= 3 and times["inference"] == pytest.approx(0.03 * probes)


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


@pytest.mark.parametrize("inference", ["auto", "eager"])
def test_torch_policies_are_timed(inference: str) -> None:
    """A wide network and an environment that does nothing: the worker infers most of the time."""
    torch = pytest.importorskip("torch")

    class Wide(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(3, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 1024))

        def act(self, obs: Any) -> dict[str, Any]:
            return {"action": self.layers(obs)[:, :3].argmax(-1)}

        def get_parameters(self) -> Any:
            return self.state_dict()

    with cluster(partial(CountingEnv, length=None), envs=2, config=in_process(), inference=inference) as env:
        agent = Wide()
        for _ in range(3):
            env.collect(agent, steps=64)
        times = env.stats()["time"]["workers"]
    assert times["inference"] > 2 * times["env"] > 0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_remote_workers_hold_tickets_for_at_least_as_long_as_they_roll(transport: str) -> None:
    """The difference to the rolling time is the transfer time of messages."""
    with cluster(SleepyEnv, envs=2, workers=2, transport=transport) as env:
        stream = env.stream(TableAgent(), steps=7, max_staleness=1)
        for _ in range(3):
            next(stream)
        stream.close()
        times = env.stats()["time"]
    rolled = times["workers"]["env"] + times["workers"]["inference"]
    assert times["head"]["held"] == 0 if transport == "shm" else times["head"]["held"] > 0.9 * rolled > 0
