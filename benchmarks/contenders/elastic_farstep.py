"""The cases of elastic.py that run on farstep; each is one process, which prints its result.

python benchmarks/contenders/elastic_farstep.py '{"kind": "ppo", ...}'
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import _setup  # noqa: F401

# isort: split
import numpy as np
import torch
from costly import FixedAgent
from cpu_meter import descendants_s
from elastic_workload import WARM_UP, Workload, measured_updates, report, tree_cpu_s

import farstep
from farstep.elastic.coordinator.server import read_status
from farstep.elastic.monitor import WINDOW, WorkloadMonitor
from farstep.learners.loop.iteration import Iteration
from farstep.learners.loop.timing import Timer

Case = dict[str, Any]
Found = dict[str, Any]
TRACE_S = 0.01
"""Seconds between two looks at the number of slots."""
LAST_EPISODES = 100


@contextmanager
def started(workload: Workload, *, release_idle: bool = False, **launch: Any) -> Iterator[farstep.ClusterEnv]:
    """The environments of a workload; further arguments are options of `LocalConfig`."""
    source = farstep.EnvConfig(
        type="factory",
        env_name="costly:make",
        env_kwargs=workload.env_kwargs,
        envs_per_node=workload.num_envs,
        seed=workload.seed,
        release_idle=release_idle,
    )
    with farstep.ClusterEnv(source, farstep.LocalConfig(workers_per_node=workload.workers, **launch)) as env:
        yield env


def held_s(env: farstep.ClusterEnv) -> float:
    return float(env.stats()["slots"]["held_seconds"])


# ---- held ----


def calibrate(case: Case) -> Found:
    """Find the cost of a step with which sampling takes as long as learning."""
    workload = Workload(**case["workload"])
    with started(workload) as env:
        learner = workload.learner(env.launch())
        found = measured_updates(
            lambda: env.collect(learner.agent, workload.num_steps),
            learner,
            lambda: env.publish(learner.agent),
            case["updates"],
            lambda: 0.0,
        )
    steps = workload.num_steps * workload.envs_per_worker
    step_ms = 1e3 * max(0.0, found["learn_s"] - found["collect_s"]) / steps
    return {"step_ms": round(step_ms, 4), "learn_s": found["learn_s"], "collect_s": found["collect_s"]}


def ppo(case: Case) -> Found:
    """Time updates of PPO, with workers that are held or released, then record the slots of a few more updates."""
    workload = Workload(**case["workload"])
    with started(workload, release_idle=case["release_idle"]) as env:
        learner = workload.learner(env.launch())

        def collect() -> farstep.Batch:
            return env.collect(learner.agent, workload.num_steps)

        found = measured_updates(
            collect, learner, lambda: env.publish(learner.agent), case["updates"], lambda: held_s(env)
        )
        found["whole_slot_seconds"] = round(held_s(env), 3)
        found["used_seconds"] = round(float(env.stats()["slots"]["used_seconds"]), 3)
        found["trace"] = traced(env, lambda: one_update(env, learner, workload), case["traced"])
    return found


def one_update(env: farstep.ClusterEnv, learner: Any, workload: Workload) -> None:
    batch = env.collect(learner.agent, workload.num_steps)
    learner.update(batch, env.version, 0.0, Timer())
    env.publish(learner.agent)


def in_turn(case: Case) -> Found:
    """Time updates of one learner, which collects in turn from released and from held workers.

    In one process, because equal processes differ by several per cent. Each round starts with the other kind.
    """
    workload = Workload(**case["workload"])
    with started(workload, release_idle=True) as released, started(workload) as held:
        learner = workload.learner(held.launch())
        released.launch()
        times: dict[str, list[float]] = {"released_s": [], "held_s": []}
        turns = [(released, times["released_s"]), (held, times["held_s"])]
        for _ in range(WARM_UP + case["updates"]):
            for env, spent in turns:
                began = time.monotonic()
                one_update(env, learner, workload)
                spent.append(round(time.monotonic() - began, 5))
            turns.reverse()
    return {"updates": case["updates"], **{name: spent[WARM_UP:] for name, spent in times.items()}}


def traced(env: farstep.ClusterEnv, update: Any, updates: int) -> list[list[float]]:
    """The number of slots that are held over time, as pairs of seconds and slots, during some updates."""
    points: list[list[float]] = []
    ended, began = threading.Event(), time.monotonic()

    def watch() -> None:
        while not ended.wait(TRACE_S):
            held = env.stats()["slots"]["held"]
            if not points or points[-1][1] != held:
                points.append([round(time.monotonic() - began, 3), held])

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        for _ in range(updates):
            update()
    finally:
        ended.set()
        thread.join()
    points.append([round(time.monotonic() - began, 3), points[-1][1] if points else 0])
    return points


class Record:
    """The training loop of a learner that runs by itself: counts, and stops after some steps or seconds."""

    checkpoints = newest_checkpoint = None
    stopping = False
    fraction_done = 0.0

    def __init__(self, env: farstep.ClusterEnv, total_steps: int, seconds: float, target: float | None = None) -> None:
        self.timer = Timer()
        self._env, self.total_steps, self._seconds, self._target = env, total_steps, seconds, target
        self.steps = self.updates = 0
        self.returns: list[float] = []
        self.curve: list[list[float]] = []
        """Seconds, steps, updates, slot-seconds, workers of the update, and mean return of the last episodes."""
        self.reached = False
        self._began, self._held = time.monotonic(), held_s(env)
        self._workers = env.num_workers

    @property
    def steps_left(self) -> int:
        return max(0, self.total_steps - self.steps)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        yield

    def save_last(self) -> None:
        """There are no checkpoints."""

    def report(self, iteration: Iteration) -> bool:
        self.steps += iteration.steps
        self.updates += iteration.updates
        self.returns = [*self.returns, *iteration.returns][-LAST_EPISODES:]
        seconds = time.monotonic() - self._began
        if iteration.batch is not None:
            self._workers = iteration.batch.shape[1] * self._env.num_workers // self._env.num_envs
        mean = float(np.mean(self.returns)) if self.returns else 0.0
        point = [seconds, self.steps, self.updates, held_s(self._env) - self._held, self._workers, mean]
        self.curve.append([round(value, 3) for value in point])
        self.reached = self._target is not None and len(self.returns) == LAST_EPISODES and mean >= self._target
        self.stopping = self.reached or seconds > self._seconds or not self.steps_left
        return not self.stopping


def sac(case: Case) -> Found:
    """Measure SAC, whose workers roll while it learns and wait while its limiter admits no rows."""
    workload = Workload(**case["workload"])
    with started(workload, release_idle=case["release_idle"]) as env:
        learner = workload.sac(env.launch(), case["learning_starts"], case["updates_per_step"])
        before, cpu_s = env.stats()["slots"], tree_cpu_s()
        loop = Record(env, case["total_steps"], case["seconds_limit"])
        began = time.monotonic()
        learner.run(env, loop)
        seconds, slots, cpu_s = time.monotonic() - began, env.stats()["slots"], tree_cpu_s() - cpu_s
    return {
        "seconds": round(seconds, 3),
        "updates": loop.updates,
        "steps": loop.steps,
        "slot_seconds": round(slots["held_seconds"] - before["held_seconds"], 3),
        "used_seconds": round(slots["used_seconds"] - before["used_seconds"], 3),
        "cpu_seconds": round(cpu_s, 3),
    }


# ---- gpu ----


def gpu(case: Case) -> Found:
    """Train PPO on the GPU, if there is one, which it holds for the whole run or only during updates."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    workload = replace(Workload(**case["workload"]), device=device)
    with started(workload) as env:
        learner = workload.learner(env.launch())
        if case["release_device"]:
            learner.release_device()
        rows = workload.num_steps * workload.num_envs
        learner.run(env, Record(env, WARM_UP * rows, case["seconds_limit"]))
        loop, held = Record(env, case["updates"] * rows, case["seconds_limit"]), device_s(env)
        began = time.monotonic()
        learner.run(env, loop)
        seconds, held = time.monotonic() - began, device_s(env) - held
        times, memory = loop.timer.take(), torch.cuda.memory_reserved() if device == "cuda" else 0
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "parameters": sum(parameter.numel() for parameter in learner.agent.parameters()),
        "seconds": round(seconds, 4),
        "updates": loop.updates,
        "gpu_seconds": round(held if case["release_device"] else seconds, 4),
        "move_s": round(times.get("time/device_move", 0.0), 4),
        "memory_mib": round(memory / 2**20, 1),
    }


def device_s(env: farstep.ClusterEnv) -> float:
    return float(env.stats()["devices"]["held_seconds"])


# ---- backends ----


def clock_source(workers: int, release_idle: bool = False, prewarm: bool = False) -> farstep.EnvConfig:
    return farstep.EnvConfig(
        type="factory",
        env_name="costly:Clock",
        envs_per_node=workers,
        seed=1,
        release_idle=release_idle,
        prewarm=prewarm,
    )


def first_batch(case: Case) -> Found:
    """Seconds until the first batch of a new cluster, with workers that import torch for their agent."""
    workload = Workload(workers=case["workers"], envs_per_worker=1, num_steps=2)
    began = time.monotonic()
    with started(workload, start_method=case["start_method"]) as env:
        learner = workload.learner(env.launch())
        env.collect(learner.agent, workload.num_steps)
        return {"waits_s": [round(time.monotonic() - began, 5)]}


def restarts(case: Case) -> Found:
    """Seconds from the request for a batch until the first step of a worker that had been killed."""
    config = farstep.LocalConfig(
        workers_per_node=case["workers"], start_method=case["start_method"], restart_budget=case["repeats"] + 1
    )
    waits, agent = [], FixedAgent()
    with farstep.ClusterEnv(clock_source(case["workers"]), config) as env:
        env.collect(agent, steps=2)
        for _ in range(case["repeats"]):
            os.kill(newest_process(), signal.SIGKILL)
            began = time.time()
            batch = env.collect(agent, steps=2)
            while batch.continues.all():  # the head had not seen yet that the worker was dead
                batch = env.collect(agent, steps=2)
            waits.append(first_step_s(batch, began))
    return {"waits_s": waits}


def newest_process() -> int:
    """The descendant that started last: a worker."""
    return max(descendants_s(), key=lambda process: (process[1], process[0]))[0]


def invocations(case: Case) -> Found:
    """Seconds from the request for a batch until the first step of the slowest worker, after each update.

    `how` says what workers did during the update: they waited (`held`), were suspended because the run had no rollout
    in progress (`released`), also resumed before the predicted end of the update (`prewarmed`), or parked by
    `env.scale`, all but one (`parked`). The transport `criu` means: through a node daemon, and parked on disk.
    """
    how, workers, agent = case["how"], case["workers"], FixedAgent()
    is_on_disk = case["transport"] == "criu"
    waits = []
    source = clock_source(workers, how in ("released", "prewarmed"), how == "prewarmed")
    with farstep.ClusterEnv(source, on_disk(workers) if is_on_disk else local(workers, case["transport"])) as env:
        env.collect(agent, steps=2)
        for _ in range(case["repeats"] + (WINDOW + 1) * (how == "prewarmed")):
            if how == "parked":
                env.scale(workers=1)
                wait_until_parked(env, workers - 1, is_on_disk)
            time.sleep(case["update_s"])
            agent.weights += 1
            env.publish(agent)
            began = time.time()
            if how == "parked":
                env.scale(workers=workers)
            if is_on_disk:
                wait_until(env, lambda: env.stats()["workers"]["alive"] == workers)
            batch = env.collect(agent, steps=2)
            waits.append(first_step_s(batch, began))
    return {"waits_s": waits[-case["repeats"] :]}  # the first updates of `prewarmed` are not predicted


def starts(case: Case) -> Found:
    """Seconds from the request for a batch until the first step of the slowest worker, all but one of which start.

    During each update, all but one worker are parked. With the methods `cold` and `zygote`, parked workers are then
    killed, so that new ones start; with `criu`, they are on disk. With `prewarm`, `env.scale` is called when
    `WorkloadMonitor` says so, otherwise at the end of the update. The first updates, which the monitor does not
    predict, are left out.
    """
    method, workers, agent = case["method"], case["workers"], FixedAgent()
    budget = workers * (WINDOW + case["repeats"])
    config = on_disk(workers) if method == "criu" else local(workers, start_method=method, restart_budget=budget)
    monitor, waits, start_s, early = WorkloadMonitor(), [], 0.0, 0
    with farstep.ClusterEnv(clock_source(workers), config) as env:
        env.collect(agent, steps=2)
        for _ in range(WINDOW + case["repeats"]):
            env.scale(workers=1)
            wait_until_parked(env, workers - 1, method == "criu")
            if method != "criu":
                kill_parked(env, workers - 1)
            update_began = time.monotonic()
            after_s = monitor.start_after() if case["prewarm"] else None
            if after_s is not None:
                time.sleep(min(after_s, case["update_s"]))
                env.scale(workers=workers)
                early += 1
            time.sleep(max(0.0, update_began + case["update_s"] - time.monotonic()))
            agent.weights += 1
            env.publish(agent)
            began = time.time()
            env.scale(workers=workers)
            wait_until(env, lambda: env.stats()["workers"]["alive"] == workers)
            waits.append(first_step_s(env.collect(agent, steps=2), began))
            start_s = waits[-1] if after_s is None else start_s
            monitor.add(start_s, case["update_s"], workers)
    return {"waits_s": waits[WINDOW:], "early": early}


def local(workers: int, transport: Literal["shm", "ipc", "tcp"] = "shm", **options: Any) -> farstep.LocalConfig:
    return farstep.LocalConfig(workers_per_node=workers, transport=transport, **options)


def on_disk(workers: int) -> farstep.SSHConfig:
    """A node daemon on this machine that parks workers on disk."""
    shell = ("sh", "-c", 'exec sh -c "$*"')
    return farstep.SSHConfig(hosts=["here"], ssh=shell, workers_per_node=workers, relay=True, park_method="criu")


def kill_parked(env: farstep.ClusterEnv, workers: int) -> None:
    """Kill the suspended workers, and wait until the head has noticed it."""
    lost = len(env.events("lost"))
    wait_until(env, lambda: len(suspended()) == workers)
    for pid in suspended():
        os.kill(pid, signal.SIGKILL)
    wait_until(env, lambda: len(env.events("lost")) == lost + workers)


def suspended() -> list[int]:
    """The descendants that are stopped."""
    found = []
    for pid, _ in descendants_s():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                found.append(pid)
    return found


def wait_until_parked(env: farstep.ClusterEnv, workers: int, is_on_disk: bool = False) -> None:
    wait_until(env, lambda: env.stats()["workers"]["on_disk" if is_on_disk else "parked"] >= workers)


def wait_until(env: farstep.ClusterEnv, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"not within 60 s: {env.stats()['workers']}"
        time.sleep(0.002)


def first_step_s(batch: farstep.Batch, began: float) -> float:
    """Seconds from `began`, a `time.time()`, to the first step of the slowest worker. Its observations are in row 1."""
    return round(float(batch["obs"][1].max()) - began, 5)


# ---- batch ----


def adaptive(case: Case) -> Found:
    """Train PPO with a fixed number of workers or with a scaling rule, until its target or its time limit."""
    workload = Workload(**case["workload"])
    with started(workload) as env:
        learner = workload.learner(env.launch(), case["scaling"])
        env.collect(learner.agent, 1)
        loop = Record(env, 10**9, case["seconds_limit"], case["target"])
        learner.run(env, loop)
    last = loop.curve[-1]
    every = max(1, len(loop.curve) // 150)
    kept = [*loop.curve[:-1:every], last]
    names = ("seconds", "steps", "updates", "slot_seconds", "workers", "return")
    return {**dict(zip(names, last, strict=True)), "reached": loop.reached, "curve": kept}


# ---- shared ----


def workload_of_coordinator(case: Case) -> Found:
    """Update for some seconds after a line arrived on the standard input; runs in a process of its own."""
    workload = Workload(**case["workload"])
    with started(workload, release_idle=case["release_idle"], coordinator=case["coordinator"]) as env:
        learner = workload.learner(env.launch())
        for _ in range(WARM_UP):
            one_update(env, learner, workload)
        print("ready", flush=True)
        sys.stdin.readline()
        began, held = time.monotonic(), held_s(env)
        times: list[float] = []
        rows: list[int] = []
        while time.monotonic() - began < case["seconds"]:
            start = time.monotonic()
            batch = env.collect(learner.agent, workload.num_steps)
            rows.append(batch.shape[0] * batch.shape[1])
            learner.update(batch, env.version, 0.0, Timer())
            env.publish(learner.agent)
            times.append(time.monotonic() - start)
        slot_seconds = held_s(env) - held
    return {"update_s": [round(value, 5) for value in times], "rows": rows, "slot_seconds": round(slot_seconds, 3)}


def shared(case: Case) -> Found:
    """Run one or two workloads on the same cores with one coordinator; the second starts `offset_s` later."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: case["cores"]])
    with tempfile.TemporaryDirectory() as folder, coordinator(case["slots"], f"{folder}/lab") as name:
        runs = []
        try:
            for index in range(case["runs"]):
                workload = replace(Workload(**case["workload"]), seed=index + 1)
                options = {"kind": "workload", "coordinator": name, "workload": workload.to_dict()}
                words = [sys.executable, __file__, json.dumps({**case, **options})]
                runs.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for run in runs:
                assert run.stdout is not None and run.stdout.readline().strip() == "ready", "a workload did not start"
            for index, run in enumerate(runs):
                time.sleep(case["offset_s"] * index)
                assert run.stdin is not None
                run.stdin.write("go\n")
                run.stdin.flush()
            found = [json.loads(run.communicate(timeout=case["seconds"] + 120)[0].splitlines()[-1]) for run in runs]
        finally:
            for run in runs:
                run.kill()
                run.wait()
    return {"workloads": [{name: run[name] for name in ("update_s", "rows", "slot_seconds")} for run in found]}


@contextmanager
def coordinator(slots: int, name: str) -> Iterator[str]:
    """A running coordinator; `name` is the path of its folder."""
    words = [sys.executable, "-m", "farstep", "coordinator", "start", "--slots", str(slots), "--name", name]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not is_running(name):
            assert process.poll() is None and time.monotonic() < deadline, "the coordinator did not start"
            time.sleep(0.05)
        yield name
    finally:
        process.terminate()
        process.wait()


def is_running(name: str) -> bool:
    try:
        read_status(name)
    except farstep.FarstepError:
        return False
    return True


KINDS = {
    "calibrate": calibrate,
    "ppo": ppo,
    "in-turn": in_turn,
    "sac": sac,
    "gpu": gpu,
    "first-batch": first_batch,
    "restarts": restarts,
    "invocations": invocations,
    "starts": starts,
    "adaptive": adaptive,
    "workload": workload_of_coordinator,
    "shared": shared,
}


def main() -> None:
    logging.getLogger("farstep").setLevel(logging.WARNING)
    case = json.loads(sys.argv[1])
    report("farstep", KINDS[case["kind"]](case))


if __name__ == "__main__":
    main()
