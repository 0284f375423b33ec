"""Runs with one deliberate fault each, and healthy runs, for `diagnosis.py`; prints their diagnosis as JSON.

python benchmarks/diagnosis_cases.py straggler 12
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from children import run_script

import farstep
from farstep.buffer import FIFO, SampleToInsertRatio, Uniform
from farstep.testing import CountingEnv, FaultyEnv, TableAgent

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the ssh server of the tests

Loop = Callable[[], Any]


class TimeIsUp(Exception):
    """Ends a run."""


class Watch:
    """Diagnoses a run every 2.5 s, as `farstep train` does, and ends it when its time is up."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end_s, self._next_s = float("inf"), float("-inf")
        self.found: list[farstep.Diagnosis] = []

    def look(self, env: Any) -> None:
        """Called in the loop of a run."""
        if self.is_over(now := time.monotonic()):
            self.found.append(env.diagnose())
            raise TimeIsUp
        if now >= self._next_s:
            self._next_s = now + 2.5
            self.found.append(env.diagnose())

    def is_over(self, now: float) -> bool:
        """Whether the time since the first call has passed."""
        self._end_s = min(self._end_s, now + self._seconds)
        return now >= self._end_s

    def until_the_end(self, env: Any, loop: Loop) -> None:
        try:
            while True:
                loop()
                self.look(env)
        except TimeIsUp:
            pass


# ---- environments and agents ----


class SleepyEnv(CountingEnv):
    """Sleeps in every step."""

    def __init__(self, step_s: float) -> None:
        super().__init__(length=None)
        self._step_s = step_s

    def step(self, action: Any) -> Any:
        time.sleep(self._step_s)
        return super().step(action)


class OneSlowEnv(SleepyEnv):
    """Sleeps in the steps of one process, the first to make the file."""

    slow: bool | None = None

    def __init__(self, marker: str, step_s: float = 0.005) -> None:
        if OneSlowEnv.slow is None:
            try:
                os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
                OneSlowEnv.slow = True
            except FileExistsError:
                OneSlowEnv.slow = False
        super().__init__(step_s if OneSlowEnv.slow else step_s / 10)


class BusyEnv(CountingEnv):
    """Computes for a millisecond in every step."""

    def __init__(self) -> None:
        super().__init__(length=None)

    def step(self, action: Any) -> Any:
        end = time.thread_time() + 0.001
        while time.thread_time() < end:
            pass
        return super().step(action)


class ThreadedEnv(CountingEnv):
    """Computes in several threads in every step, as libraries for physics and images do."""

    def __init__(self) -> None:
        super().__init__(length=None)
        self._pool = ThreadPoolExecutor(12)
        self._rows = np.random.default_rng(0).random((12, 100_000))

    def step(self, action: Any) -> Any:
        list(self._pool.map(np.sort, self._rows))  # without the interpreter's lock
        return super().step(action)

    def close(self) -> None:
        self._pool.shutdown()


class LeakingEnv(SleepyEnv):
    """Keeps a megabyte of every step."""

    def __init__(self) -> None:
        super().__init__(0.02)
        self._kept: list[Any] = []

    def step(self, action: Any) -> Any:
        self._kept.append(np.ones(2**17))
        return super().step(action)


class WideEnv(CountingEnv):
    """Observations of 100 kB that cannot be compressed."""

    def __init__(self) -> None:
        super().__init__(length=None)
        self.observation_space = gymnasium.spaces.Box(0, 255, (100_000,), np.uint8)
        self._noise = np.random.default_rng(0).integers(0, 255, 100_000, np.uint8)

    def reset(self, **options: Any) -> Any:
        return self._noise, super().reset(**options)[1]

    def step(self, action: Any) -> Any:
        return self._noise, *super().step(action)[1:]


class SleepyAgent(TableAgent):
    """Sleeps in every `act`."""

    def act(self, obs: Any) -> dict[str, Any]:
        time.sleep(0.02)
        return super().act(obs)


def cluster(env: Any, envs: int = 4, workers: int = 2, launch: dict[str, Any] | None = None, **options: Any) -> Any:
    config = farstep.LocalConfig(workers_per_node=workers, **(launch or {}))
    return farstep.ClusterEnv({"type": "factory", "env_name": env, "envs_per_node": envs, "seed": 1, **options}, config)


def collecting(watch: Watch, env: Any, agent: Any, steps: int, update_s: float) -> None:
    with env:

        def loop() -> None:
            env.collect(agent, steps=steps)
            time.sleep(update_s)

        watch.until_the_end(env, loop)


# ---- the fifteen causes ----


def slow_environment(watch: Watch) -> None:
    collecting(watch, cluster(SleepyEnv, env_kwargs={"step_s": 0.002}), TableAgent(), 32, 0.005)


def slow_policy(watch: Watch) -> None:
    collecting(watch, cluster(CountingEnv), SleepyAgent(), 32, 0.005)


def straggler(watch: Watch) -> None:
    with tempfile.TemporaryDirectory() as folder:
        env = cluster(OneSlowEnv, 3, 3, env_kwargs={"marker": f"{folder}/slow"})
        collecting(watch, env, TableAgent(), 32, 0.01)


def slow_network(watch: Watch) -> None:
    """In a network namespace of its own, whose loopback `diagnosis.py` has slowed down."""
    collecting(watch, cluster(WideEnv, 2, 2, {"transport": "tcp"}), WideAgent(), 8, 0.01)


class WideAgent(TableAgent):
    def act(self, obs: Any) -> dict[str, Any]:
        return {"action": np.zeros(len(obs), np.int64)}


def slow_learner(watch: Watch) -> None:
    collecting(watch, cluster(CountingEnv), TableAgent(), 32, 0.5)


def small_buffer(watch: Watch) -> None:
    with cluster(SleepyEnv, 4, 2, env_kwargs={"step_s": 0.002}) as env:
        workflow(watch, env, farstep.Buffer(4 * 32, FIFO()), 4, 32, 0.15)


def workflow(watch: Watch, env: Any, buffer: Any, steps: int, size: int, update_s: float) -> None:
    with buffer:
        flow = farstep.Workflow(env, TableAgent(), buffer, steps=steps, max_staleness=4)

        def learn(message: Any) -> None:
            flow.batch(message)
            time.sleep(update_s)
            flow.publish()

        def look(message: Any) -> None:
            try:
                watch.look(env)
            except TimeIsUp:
                flow.stop()

        flow.on(farstep.DataKeyTrigger(n="all", size=size), learn, thread=True)
        flow.on(farstep.TimeTrigger(0.5), look)
        flow.run()


def limiter_blocks(watch: Watch) -> None:
    buffer = farstep.Buffer(10_000, Uniform(), limiter=SampleToInsertRatio(4.0, 128, 2000.0))
    with cluster(CountingEnv) as env, buffer:
        flow = farstep.Workflow(env, TableAgent(), buffer, steps=32)

        def learn(message: Any) -> None:
            for _ in range(2):
                buffer.sample(16)
                time.sleep(0.1)

        def look(message: Any) -> None:
            try:
                watch.look(env)
            except TimeIsUp:
                flow.stop()

        flow.on(farstep.DataKeyTrigger(n=1, size=32, consume=False, min_new=32), learn, thread=True)
        flow.on(farstep.TimeTrigger(0.5), look)
        flow.run()


def staleness_bound(watch: Watch) -> None:
    agent, stop = TableAgent(), threading.Event()
    with cluster(SleepyEnv, env_kwargs={"step_s": 0.001}) as env:
        stream = env.stream(agent, steps=8, max_staleness=1)

        def publish() -> None:
            while not stop.wait(0.02):
                env.publish(agent)

        next(stream)
        thread = threading.Thread(target=publish)
        thread.start()
        try:
            watch.until_the_end(env, lambda: next(stream))
        finally:
            stop.set()
            thread.join()


def too_many_threads(watch: Watch) -> None:
    collecting(watch, cluster(ThreadedEnv, 2, 2), TableAgent(), 16, 0.01)


def too_few_cores(watch: Watch) -> None:
    collecting(watch, cluster(BusyEnv, 24, 6 * (os.cpu_count() or 1)), TableAgent(), 32, 0.01)


def trigger_never_fires(watch: Watch) -> None:
    buffer = farstep.Buffer(1024, FIFO())
    with cluster(CountingEnv) as env, buffer:
        flow = farstep.Workflow(env, TableAgent(), buffer, steps=16, max_staleness=4)

        def learn(message: Any) -> None:
            flow.batch(message)
            time.sleep(0.01)
            try:
                watch.look(env)
            except TimeIsUp:
                flow.stop()

        flow.on(farstep.DataKeyTrigger(n="all", size=16), learn)
        flow.on(farstep.ObjectKeyTrigger("evaluation"), print, name="evaluate")
        flow.run()


def restarting_worker(watch: Watch) -> None:
    env = cluster(FaultyEnv, 2, 2, {"restart_budget": 1000}, env_kwargs={"fault": "sigkill", "phase": "step", "at": 40})
    collecting(watch, env, TableAgent(), 16, 0.01)


def memory(watch: Watch) -> None:
    collecting(watch, cluster(LeakingEnv, 2, 2), TableAgent(), 16, 0.01)


def train(name: str, *, env: Any = None, launch: Any = None, **options: Any) -> Callable[[Watch], None]:
    """A run of one of farstep's learners."""

    def run(watch: Watch) -> None:
        import torch

        from farstep.learners.loop.training import Limits, Training
        from farstep.learners.networks.nets import NetConfig, make_agent

        torch.set_num_threads(1)
        torch.manual_seed(1)
        learner, config = learners()[name]
        net = NetConfig(**options.pop("net", {}))
        made = config(net=net, **options)
        chosen = {"env_name": "CartPole-v1", "envs_per_node": 16, "seed": 1, **(env or {})}
        with farstep.ClusterEnv(chosen, launch() if callable(launch) else launch) as cluster:
            agent = make_agent(*cluster.launch(), net, made.gamma)
            training = Training(learner(agent, made, 1), cluster, Limits(total_steps=10**9), sink=Sink(watch))
            training.diagnosis.on_diagnosis = watch.found.append
            try:
                training.run()
            except TimeIsUp:
                pass

    return run


class Sink:
    """Ends a run of farstep's learners when its time is up."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def log(self, step: int, metrics: Any) -> None:
        if self._watch.is_over(time.monotonic()) and self._watch.found:
            raise TimeIsUp


def learners() -> dict[str, Any]:
    from farstep import learners as found

    return {
        "ppo": (found.PPO, found.PPOConfig),
        "async-ppo": (found.AsyncPPO, found.AsyncPPOConfig),
        "impala": (found.Impala, found.ImpalaConfig),
    }


# ---- healthy runs ----


def healthy_workflow(watch: Watch) -> None:
    with cluster(CountingEnv, 8, 2) as env:
        workflow(watch, env, farstep.Buffer(8 * 256 * 4, FIFO()), 256, 256, 0.02)


def healthy_make_vec(watch: Watch) -> None:
    envs = farstep.make_vec("CartPole-v1", 16, {"workers_per_node": 2})
    weights = np.random.default_rng(0).normal(size=(256, 256))
    with_rows = np.ones((64, 256))
    envs.reset(seed=1)

    def loop() -> None:
        for _ in range(16):
            np.tanh(with_rows @ weights)  # the learner's work
            envs.step(envs.action_space.sample())

    try:
        watch.until_the_end(envs, loop)
    finally:
        envs.close()


def healthy_ssh(watch: Watch) -> None:
    from tests.engines.ssh_hosts import SshServer

    with SshServer(["one", "two"]) as server:
        ssh = ("ssh", "-T", "-o", "BatchMode=yes", *server.options)
        config = farstep.SSHConfig(ssh=ssh, hosts=["one", "two"], nodes=2, workers_per_node=1)
        train("ppo", env={"envs_per_node": 8}, launch=config)(watch)


@dataclass(frozen=True)
class Case:
    """One run."""

    run: Callable[[Watch], None]
    prefix: tuple[str, ...] = ()
    """The command that starts its process, e.g. in a network namespace."""
    seconds: float = 1.0
    """Factor of its time."""


SLOW_LOOPBACK = 'ip link set lo up && tc qdisc add dev lo root tbf rate 40mbit burst 256kb latency 500ms && exec "$@"'
IN_SLOW_NETWORK = ("unshare", "--net", "sh", "-c", SLOW_LOOPBACK, "sh")
CASES: dict[str, Case] = {
    "slow environment": Case(slow_environment),
    "slow policy": Case(slow_policy),
    "straggler": Case(straggler),
    "slow network": Case(slow_network, IN_SLOW_NETWORK),
    "slow learner": Case(slow_learner),
    "small buffer": Case(small_buffer),
    "limiter blocks": Case(limiter_blocks),
    "staleness bound": Case(staleness_bound),
    "too many threads": Case(too_many_threads),
    "too few cores": Case(too_few_cores),
    "trigger never fires": Case(trigger_never_fires),
    "kl_threshold without effect": Case(
        train("ppo", env={"kl_threshold": 1e-6}, num_steps=32, update_epochs=2), seconds=2
    ),
    "clip range": Case(train("ppo", env={"kl_threshold": 0.05}, decoupled=False, num_steps=64), seconds=3),
    "restarting worker": Case(restarting_worker, seconds=2),
    "memory": Case(memory),
}
"""One run per cause, whose name it has."""
HEALTHY: dict[str, Case] = {
    "ppo": Case(train("ppo"), seconds=3),
    "async-ppo": Case(train("async-ppo")),
    "impala": Case(train("impala")),
    "workflow": Case(healthy_workflow),
    "make_vec": Case(healthy_make_vec),
    "ssh nodes": Case(healthy_ssh),
    "one core": Case(train("ppo"), ("taskset", "--cpu-list", "0")),
    "many environments": Case(train("ppo", env={"envs_per_node": 256})),
    "AAPS": Case(train("ppo", env={"kl_threshold": 0.05}, num_steps=64), seconds=3),
    "recurrent": Case(train("ppo", net={"recurrent": "gru"})),
}
RUNS = CASES | {f"healthy {name}": case for name, case in HEALTHY.items()}


def main() -> None:
    logging.getLogger("farstep").setLevel(logging.ERROR)
    name, seconds = sys.argv[1], float(sys.argv[2])
    watch = Watch(seconds * RUNS[name].seconds)
    RUNS[name].run(watch)
    twice = [a.cause for a, b in itertools.pairwise(watch.found) if a.cause == b.cause and a.is_problem]
    last = watch.found[-1]
    numbers = {key: round(float(value), 4) for key, value in last.numbers.items()}
    print(
        json.dumps(
            {
                "cause": last.cause,
                "text": last.text,
                "remedy": last.remedy,
                "numbers": numbers,
                "is_problem": last.is_problem,
                "warned": sorted(set(twice)),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    run_script(main)
