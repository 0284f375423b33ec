"""Cost of a growing number of workers for one head, up to its limit.

    python benchmarks/scale.py [--workers 10 100 300 1000] [--seconds 10] [--out benchmarks/results/scale.json]
    python benchmarks/scale.py --relay [--nodes 200] [--workers 1000 2000 10000] [--seconds 10] [--lease-s 10]

Workers are simulated (see `crowd.py`): they have the connections of real workers and send the same messages, encrypted
and with heartbeats, but have no environments, so that the head is what is measured. They run in two processes of this
machine. With `--relay`, they are workers of 200 simulated nodes whose daemons relay for them, so that the head has two
connections per node instead of three per worker. Each row has chunks per second, CPU seconds of the head per thousand
chunks and per idle second, its memory, and the duration of a round from the first ticket to the last chunk.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import resource
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
from children import run_script
from document import header, machines, write_document, write_markdown
from roster import BENCHMARKS
from tables import table

import farstep
from farstep.config.launch import SSHConfig

MARKS = ("<!-- scale: begin -->", "<!-- scale: end -->")
RELAY_MARKS = ("<!-- scale-relay: begin -->", "<!-- scale-relay: end -->")
PROCESSES = 2
"""Processes that simulate workers. Without a relay, each is a node."""


class UnusedAgent:
    """An agent that is never called."""

    def act(self, obs: Any) -> Any:
        return np.zeros(len(obs), np.int64)

    def get_parameters(self) -> dict[str, Any]:
        return {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", help="default: 10 100 300 1000; --relay: 1000 2000 10000")
    parser.add_argument("--relay", action="store_true", help="node daemons relay for their workers")
    parser.add_argument("--nodes", type=int, default=200, help="simulated nodes, with --relay")
    parser.add_argument(
        "--lease-s", type=float, default=SSHConfig.lease_s, help="lease of the nodes (default: that of farstep)"
    )
    parser.add_argument("--envs", type=int, default=8, help="environments of each worker")
    parser.add_argument("--steps", type=int, default=128, help="steps of each environment per chunk")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of each measurement")
    parser.add_argument("--out", type=Path, help="default: results/scale.json; with --relay: results/scale-relay.json")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to this file, between its marks")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    document: dict[str, Any] = {**header("scale.py"), "rows": []}
    out = options.out or BENCHMARKS / "results" / ("scale-relay.json" if options.relay else "scale.json")
    for workers in options.workers or ([1000, 2000, 10_000] if options.relay else [10, 100, 300, 1000]):
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as crowds:
            nodes = options.nodes if options.relay else PROCESSES
            shell = Path(folder, "crowd")
            shell.write_text(_shell(Path(folder), options.relay))
            shell.chmod(stat.S_IRWXU)
            if options.relay:
                command = [sys.executable, str(BENCHMARKS / "crowd.py"), "relay", folder]
                for _ in range(PROCESSES):
                    crowds.callback(_end, subprocess.Popen(command))
            found = measure(str(shell), nodes, workers, options)
            document["rows"].append(found)
            print(found, flush=True)
            write_document(out, document)
    text = relay_summary(document) if options.relay else summary(document)
    print(text)
    if options.markdown:
        write_markdown(options.markdown, text, RELAY_MARKS if options.relay else MARKS)
    return 0


def _shell(folder: Path, relay: bool) -> str:
    """What is started in place of ssh for each node."""
    if not relay:
        return f"#!/bin/sh\nexec {sys.executable} {BENCHMARKS / 'crowd.py'}\n"
    file = f'"{folder}/$$"'
    return f"#!/bin/sh\numask 077\ncat > {file}.new\nmv {file}.new {file}.json\nexec sleep 3600\n"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def measure(shell: str, nodes: int, workers: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one number of workers."""
    relay, envs, steps, seconds = options.relay, options.envs, options.steps, options.seconds
    per_node = -(-workers // nodes)
    config = SSHConfig(
        hosts=[f"crowd{i}" for i in range(nodes)],
        relay=relay,
        lease_s=options.lease_s,
        ssh=[shell],
        workers_per_node=per_node,
        head_address="127.0.0.1",
        timeouts={"connect_s": 600.0, "construct_s": 600.0, "load_s": 600.0, "idle_s": 600.0},
    )
    began = time.monotonic()
    agent = UnusedAgent()
    source = {"env_name": "CartPole-v1", "envs_per_node": envs * per_node, "seed": 1, "compression": "none"}
    with farstep.ClusterEnv(source, config) as env:
        env.launch()
        launched = time.monotonic() - began
        for _ in range(3):
            env.collect(agent, steps=steps)
        cpu, clock = _cpu_s(), time.monotonic()
        time.sleep(min(5.0, seconds))
        idle = (_cpu_s() - cpu) / (time.monotonic() - clock)
        rounds = []
        cpu, clock = _cpu_s(), time.monotonic()
        while time.monotonic() - clock < seconds:
            start = time.monotonic()
            batch = env.collect(agent, steps=steps)
            rounds.append(time.monotonic() - start)
        elapsed, cpu = time.monotonic() - clock, _cpu_s() - cpu
        stats = env.stats()
        chunks = len(rounds) * per_node * nodes
        row_bytes = sum(array[0, 0].nbytes for array in batch.arrays.values())
        return {
            "workers": per_node * nodes,
            "nodes": nodes,
            "relay": relay,
            "lease_s": options.lease_s,
            "envs": envs,
            "steps": steps,
            "launch_s": round(launched, 1),
            "chunks_per_second": round(chunks / elapsed, 1),
            "megabytes_per_second": round(chunks * steps * envs * row_bytes / elapsed / 1e6, 1),
            "cpu_ms_per_chunk": round(cpu / chunks * 1e3, 3),
            "head_cores": round(cpu / elapsed, 2),
            "idle_cores": round(idle, 3),
            "memory_mb": round(_rss_mb()),
            "round_s": round(median(rounds), 3),
            "round_p95_s": round(quantiles(rounds, n=20)[-1], 3) if len(rounds) > 1 else None,
            "restarts": stats["workers"]["restarts"],
            "lost": stats["dropped"],
        }


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def summary(document: dict[str, Any]) -> str:
    rows = [
        [
            f"{row['workers']:,}",
            f"{row['launch_s']:.1f}",
            f"{row['chunks_per_second']:,.0f}",
            f"{row['megabytes_per_second']:,.0f}",
            f"{row['cpu_ms_per_chunk']:.2f}",
            f"{row['head_cores']:.2f}",
            f"{row['idle_cores']:.3f}",
            f"{row['memory_mb']:,}",
            f"{row['round_s']:.3f} ({row['round_p95_s'] or 0:.3f})",
        ]
        for row in document["rows"]
    ]
    names = [
        "workers",
        "launch, s",
        "chunks/s",
        "MB/s",
        "CPU ms/chunk",
        "cores used",
        "cores used while idle",
        "memory, MB",
        "round, s (p95)",
    ]
    return table(names, rows)


def relay_summary(document: dict[str, Any]) -> str:
    """The section of benchmarks/README.md about workers that send through node daemons."""
    rows = [
        [
            f"{row['workers']:,}",
            f"{row['nodes']:,}",
            f"{row['chunks_per_second']:,.0f}",
            f"{row['cpu_ms_per_chunk']:.2f}",
            f"{row['idle_cores']:.3f}",
            f"{row['memory_mb']:,}",
            f"{row['lease_s']:g}",
            str(row["restarts"]),
        ]
        for row in document["rows"]
    ]
    first = document["rows"][0]
    names = ["workers", "nodes", "chunks/s", "CPU ms/chunk", "cores used while idle", "memory, MB", "`lease_s`"]
    where = f"On {machines(document)}, chunks of {first['steps']} steps of {first['envs']} environments"
    return f"{where} (`results/scale-relay.json`):\n\n{table([*names, 'restarts'], rows)}"


if __name__ == "__main__":
    run_script(main)
