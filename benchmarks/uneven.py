"""Workers whose episodes take uneven time: asynchronous collection against a barrier, and both against closed forms.

    python benchmarks/uneven.py [--seconds 40] [--workers 8] [--simulated 8 32 96 192] [--markdown benchmarks/README.md]

The duration T of an episode is log-uniform over a factor of 100. Environments sleep, so that cores are not what is
measured. With W workers and one environment each, a barrier (`collect`: one episode of every worker per batch) reaches
W / E[max T] episodes per second, and workers that never wait (a `Workflow`) reach W / E[T],
the sum of their own rates. The last columns are the time that workers really spent in their environments, as a share of
their time until their last episode arrived.

Rows with more workers than the first are simulated (see `crowd.py`): one process has the connections of all workers and
answers each ticket after the episode's duration, so that the head is what is measured.
"""

from __future__ import annotations

import argparse
import math
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from children import run_script
from document import header, write_document, write_markdown
from gymnasium import spaces
from roster import BENCHMARKS
from scale import UnusedAgent
from tables import table

import farstep
from farstep.buffer import Uniform
from farstep.config.launch import SSHConfig

MARKS = ("<!-- uneven: begin -->", "<!-- uneven: end -->")
LOW_S, HIGH_S = 0.03, 3.0
"""Range of the duration of an episode."""
STEPS = 8
"""Steps of an episode, and of a chunk."""


class Errand(gym.Env[Any, Any]):
    """An episode of `STEPS` steps that takes a log-uniform time; the rewards of an episode sum to its duration."""

    observation_space = spaces.Box(-1.0, 1.0, (8,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step_s = LOW_S * (HIGH_S / LOW_S) ** self.np_random.random() / STEPS
        self._steps = 0
        return np.zeros(8, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        began = time.monotonic()
        time.sleep(self._step_s)
        self._steps += 1
        return np.zeros(8, np.float32), time.monotonic() - began, self._steps == STEPS, False, {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0, help="seconds of each measurement")
    parser.add_argument("--workers", type=int, default=8, help="real workers, each in its own process")
    parser.add_argument("--simulated", type=int, nargs="*", default=[8, 32, 96, 192], help="simulated workers")
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results" / "uneven.json")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to this file, between its marks")
    options = parser.parse_args()
    document: dict[str, Any] = {**header("uneven.py"), "low_s": LOW_S, "high_s": HIGH_S, "rows": []}
    for workers, is_real in [(options.workers, True), *((number, False) for number in options.simulated)]:
        with real(workers) if is_real else simulated(workers) as env:
            row: dict[str, Any] = {"workers": workers, "simulated": not is_real}
            for name, collect in (("barrier", with_barrier), ("asynchronous", without_barrier)):
                print(f"{workers} workers, {name}: {options.seconds:.0f} s", flush=True)
                row[name] = measured(env, collect, options.seconds)
            document["rows"].append(row)
            write_document(options.out, document)
    text = summary(document)
    print(text)
    if options.markdown:
        write_markdown(options.markdown, text, MARKS)
    return 0


# ---- workers ----


@contextmanager
def real(workers: int) -> Iterator[farstep.ClusterEnv]:
    source = {"type": "factory", "env_name": Errand, "envs_per_node": workers, "seed": 1}
    with farstep.ClusterEnv(source, {"workers_per_node": workers}) as env:
        env.launch()
        yield env


@contextmanager
def simulated(workers: int) -> Iterator[farstep.ClusterEnv]:
    with tempfile.TemporaryDirectory() as folder:
        shell = Path(folder, "crowd")
        shell.write_text(f"#!/bin/sh\nexec {sys.executable} {BENCHMARKS / 'crowd.py'} {LOW_S} {HIGH_S}\n")
        shell.chmod(stat.S_IRWXU)
        limits = {"connect_s": 600.0, "construct_s": 600.0, "load_s": 600.0, "idle_s": 600.0}
        config = SSHConfig(
            hosts=["crowd"], ssh=[str(shell)], workers_per_node=workers, head_address="127.0.0.1", timeouts=limits
        )
        source = {"env_name": "CartPole-v1", "envs_per_node": workers, "seed": 1, "compression": "none"}
        with farstep.ClusterEnv(source, config) as env:
            env.launch()
            yield env


# ---- collecting ----


@dataclass(frozen=True)
class Episode:
    """An episode that arrived."""

    worker: int
    duration_s: float
    arrived_at: float


def with_barrier(env: farstep.ClusterEnv, seconds: float) -> list[Episode]:
    """Collect one episode of every worker at a time."""
    agent, end, found = UnusedAgent(), time.monotonic() + seconds, []
    while time.monotonic() < end:
        durations = env.collect(agent, steps=STEPS)["reward"].sum(axis=0).tolist()
        found += [Episode(worker, duration, time.monotonic()) for worker, duration in enumerate(durations)]
    return found


def without_barrier(env: farstep.ClusterEnv, seconds: float) -> list[Episode]:
    """Let workers roll one episode after another into a buffer; at least one must arrive."""
    found: list[Episode] = []
    end = time.monotonic() + seconds

    def add(message: Any) -> None:
        (worker,) = message["actor_ids"]
        found.append(Episode(worker, float(flow.batch(message)["reward"].sum()), time.monotonic()))

    with farstep.Buffer(env.num_envs * STEPS * 16, Uniform()) as buffer:
        flow = farstep.Workflow(env, UnusedAgent(), buffer, steps=STEPS)
        flow.on(farstep.DataKeyTrigger(n=1, size=STEPS), add, updates=False)
        flow.run(until=lambda: bool(found) and time.monotonic() > end)
    return found


def measured(
    env: farstep.ClusterEnv, collect: Callable[[farstep.ClusterEnv, float], list[Episode]], seconds: float
) -> dict[str, float]:
    env.collect(UnusedAgent(), steps=STEPS)
    began = time.monotonic()
    episodes = collect(env, seconds)
    last = {episode.worker: episode.arrived_at for episode in episodes}
    return {
        "episodes_per_second": round(len(episodes) / (max(last.values()) - began), 3),
        "busy": round(sum(episode.duration_s for episode in episodes) / sum(at - began for at in last.values()), 4),
        "episodes": len(episodes),
    }


# ---- closed forms ----


def mean_s() -> float:
    """The mean of a log-uniform duration."""
    return (HIGH_S - LOW_S) / math.log(HIGH_S / LOW_S)


def mean_longest_s(workers: int) -> float:
    """The mean of the longest of `workers` durations: the integral of 1 - F(t) ** workers."""
    t = np.geomspace(LOW_S, HIGH_S, 100_001)
    beyond = 1 - (np.log(t / LOW_S) / math.log(HIGH_S / LOW_S)) ** workers
    return LOW_S + float(np.trapezoid(beyond, t))


def summary(document: dict[str, Any]) -> str:
    rows = []
    for row in document["rows"]:
        workers, barrier, free = row["workers"], row["barrier"], row["asynchronous"]
        expected = workers / mean_longest_s(workers), workers / mean_s()
        rows.append(
            [
                f"{workers}{' (simulated)' if row['simulated'] else ''}",
                f"{barrier['episodes_per_second']:.1f} ({expected[0]:.1f})",
                f"{free['episodes_per_second']:.1f} ({expected[1]:.1f})",
                f"{free['episodes_per_second'] / barrier['episodes_per_second']:.2f} ({expected[1] / expected[0]:.2f})",
                f"{barrier['busy']:.3f}",
                f"{free['busy']:.3f}",
            ]
        )
    head = [
        "workers",
        "barrier, episodes/s",
        "asynchronous, episodes/s",
        "ratio",
        "barrier, busy",
        "asynchronous, busy",
    ]
    text = (
        f"Episodes take {document['low_s']:g} to {document['high_s']:g} s. In brackets: the theoretical value. *Busy* "
        "is the share of their time that workers spend in environments; without any waiting it is 1."
    )
    return f"{text}\n\n{table(head, rows)}"


if __name__ == "__main__":
    run_script(main)
