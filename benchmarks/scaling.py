"""Growth of farstep's cost with workers, environments and rollout length; and the time to start.

    python benchmarks/scaling.py [--seconds 3] [--rounds 3] [--out benchmarks/results/scaling.json]

Steps per second per worker should stay constant while there are cores, and the head's CPU time per step should fall
with longer chunks, because the head works per chunk. Runs are interleaved; the best of the rounds counts, because other
processes on the machine can only slow a run down.
"""

from __future__ import annotations

import json
import multiprocessing
import platform
import resource
import shlex
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any, Literal

import tyro
from children import run_script
from rich.console import Console
from rich.table import Table
from tables import table as markdown_table
from workload import Workload, make_policy

import farstep
from farstep.resources import usable_cpus

MODES = ("alone", "in step", "collect", "stream", "first come")
WORKERS = (1, 2, 4, 8, 14)
ENVS = (8, 16, 32, 64, 128, 256, 512, 1024)
STEPS = (16, 32, 64, 128, 256, 512, 1024)


@dataclass(kw_only=True)
class Args:
    """Measure how cost grows with workers, environments and rollout length."""

    env: str = "CartPole-v1"
    seconds: float = 3.0
    """seconds of one measurement"""
    rounds: int = 3
    """interleaved rounds, of which the best counts"""
    envs_per_worker: int = 32
    """environments per worker while the number of workers varies"""
    workers: tuple[int, ...] = WORKERS
    """numbers of workers, while that varies"""
    sweeps: tuple[Literal["workers", "environments", "rollout length"], ...] = (
        "workers",
        "environments",
        "rollout length",
    )
    """quantity to vary"""
    out: Path = Path(__file__).parent / "results" / "scaling.json"


def measure(env_id: str, workers: int, num_envs: int, steps: int, seconds: float, mode: str) -> dict[str, Any]:
    """Collect for `seconds`; returns steps per second and the head's CPU time."""
    if mode in ("alone", "in step"):
        return alone(env_id, workers, num_envs // workers, steps, seconds, mode)
    policy = make_policy(Workload(env=env_id, num_envs=num_envs, steps=steps, seconds=seconds, sampler="eager"))
    began = time.monotonic()
    config = farstep.LocalConfig(workers_per_node=workers)
    with farstep.ClusterEnv({"env_name": env_id, "envs_per_node": num_envs, "seed": 1}, config) as env:
        launched = time.monotonic()
        env.collect(policy, steps=steps)
        first = time.monotonic()
        start = env.stats()["start"]
        streams = {"stream": None, "first come": workers}  # chunks per batch; None: one of each worker
        batches = env.stream(policy, steps=steps, num_chunks=streams[mode]) if mode in streams else None
        cpu, clock, count = _cpu_s(), time.monotonic(), 0
        while time.monotonic() - clock < seconds:
            next(batches) if batches is not None else env.collect(policy, steps=steps)
            count += steps * num_envs
        elapsed = time.monotonic() - clock
        return {
            "mode": mode,
            "workers": workers,
            "num_envs": num_envs,
            "steps": steps,
            "steps_per_second": count / elapsed,
            "steps_per_second_per_worker": count / elapsed / workers,
            "head_cpu_s_per_million_steps": (_cpu_s() - cpu) / count * 1e6,
            "start_s": {**start, "launch": launched - began, "first_batch": first - launched, "total": first - began},
        }


def alone(env_id: str, workers: int, num_envs: int, steps: int, seconds: float, mode: str) -> dict[str, Any]:
    """The limit of the machine: the same number of independent processes, each with the work of a worker.

    "In step", all wait for the slowest after each rollout, as `collect` must.
    """
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(workers), context.Queue()
    arguments = (env_id, num_envs, steps, seconds, barrier, results, mode == "in step")
    processes = [context.Process(target=_alone, args=arguments) for _ in range(workers)]
    for process in processes:
        process.start()
    rates = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    return {
        "mode": mode,
        "workers": workers,
        "num_envs": num_envs * workers,
        "steps": steps,
        "steps_per_second": sum(rates),
        "steps_per_second_per_worker": sum(rates) / workers,
        "steps_per_second_of_the_slowest": min(rates),
    }


def _alone(env_id: str, num_envs: int, steps: int, seconds: float, barrier: Any, results: Any, in_step: bool) -> None:
    policy = make_policy(Workload(env=env_id, num_envs=num_envs, steps=steps, seconds=seconds, sampler="eager"))
    config = farstep.InProcessConfig(workers_per_node=1)
    with farstep.ClusterEnv({"env_name": env_id, "envs_per_node": num_envs, "seed": 1}, config) as env:
        env.collect(policy, steps=steps)
        barrier.wait(120)
        clock, count = time.monotonic(), 0
        with suppress(BrokenBarrierError):  # the first process whose time is over ends the measurement for all
            while time.monotonic() - clock < seconds:
                env.collect(policy, steps=steps)
                if in_step:
                    barrier.wait(120)
                count += steps * num_envs
            if in_step:
                barrier.abort()
        results.put(count / (time.monotonic() - clock))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def threads_per_core() -> int:
    """Hardware threads per core; more processes than real cores slow each other down."""
    siblings = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
    text = siblings.read_text().strip() if siblings.exists() else "0"
    return len(text.replace("-", ",").split(","))


def best(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The best round, which was disturbed least."""
    return max(runs, key=lambda run: run["steps_per_second"])


def main(args: Args) -> None:
    console = Console()
    cores = usable_cpus()
    counts = [count for count in args.workers if count <= max(cores, 2)]
    cases = {
        "workers": [(w, w * args.envs_per_worker, 128, mode) for w in counts for mode in MODES],
        "environments": [(min(2, cores), n, 128, "collect") for n in ENVS],
        "rollout length": [(min(2, cores), 64, t, "collect") for t in STEPS],
    }
    cases = {what: cases[what] for what in args.sweeps}
    results: dict[str, list[dict[str, Any]]] = {}
    for what, sizes in cases.items():
        runs: dict[tuple[int, int, int, str], list[dict[str, Any]]] = {size: [] for size in sizes}
        for _ in range(args.rounds):
            for size in sizes:
                workers, num_envs, steps, mode = size
                runs[size].append(measure(args.env, workers, num_envs, steps, args.seconds, mode))
                found = runs[size][-1]["steps_per_second"]
                console.print(f"{what}: workers, environments, length {size}: {found:,.0f} steps/s")
        results[what] = [best(found) for found in runs.values()]
    for what, rows in results.items():
        console.print(table(what, rows))
    for row in results.get("workers", []):
        if row["workers"] == min(2, cores) and row["mode"] == "collect":
            console.print("start until the first batch, s:", {k: round(v, 2) for k, v in row["start_s"].items()})
    args.out.parent.mkdir(parents=True, exist_ok=True)
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "cores": cores,
        "threads_per_core": threads_per_core(),
        "python": platform.python_version(),
    }
    document = {
        "command": shlex.join(["python", "benchmarks/scaling.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine,
        "results": results,
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n")


def summary(document: dict[str, Any]) -> str:
    """A Markdown table of thousand steps per second per worker, by mode and number of workers."""
    runs = {(row["mode"], row["workers"]): row for row in document["results"]["workers"]}
    modes, counts = (list(dict.fromkeys(key[i] for key in runs)) for i in (0, 1))

    def cell(mode: str, workers: int) -> str:
        run = runs[mode, workers]
        slowest = run.get("steps_per_second_of_the_slowest") if mode == "alone" and workers > 1 else None
        rate = f"{run['steps_per_second_per_worker'] / 1e3:.0f}"
        return f"{rate} ({slowest / 1e3:.0f})" if slowest else rate

    titles = {"alone": "alone, mean (slowest)"}
    rows = [[titles.get(mode, mode), *(cell(mode, count) for count in counts)] for mode in modes]
    names = [f"{count} worker{'s' if count > 1 else ''}" for count in counts]
    return markdown_table([f"{document['machine']['cores']} cores", *names], rows)


def table(what: str, rows: list[dict[str, Any]]) -> Table:
    """The table of one sweep."""
    first = {row["mode"]: row["steps_per_second_per_worker"] for row in reversed(rows)}
    shown = Table("", "workers", "envs", "T", "steps/s", "per worker", "of the first", "slowest", "head CPU s/1e6")
    shown.title = f"as {what} grow{'s' if what == 'rollout length' else ''}"
    for row in rows:
        rate, slowest = row["steps_per_second_per_worker"], row.get("steps_per_second_of_the_slowest")
        head = row.get("head_cpu_s_per_million_steps")
        shown.add_row(
            row["mode"],
            str(row["workers"]),
            str(row["num_envs"]),
            str(row["steps"]),
            f"{row['steps_per_second']:,.0f}",
            f"{rate:,.0f}",
            f"{rate / first[row['mode']]:.2f}",
            f"{slowest / first[row['mode']]:.2f}" if slowest else "",
            f"{head:.3f}" if head is not None else "",
        )
    return shown


if __name__ == "__main__":
    run_script(lambda: main(tyro.cli(Args)))
