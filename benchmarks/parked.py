"""How soon a worker steps again, and the memory that it holds until then: started, forked, suspended, or on disk.

    python benchmarks/parked.py                 # ten samples of each; FARSTEP_CRIU may name criu
    python benchmarks/parked.py --repeats 3 --methods zygote suspend --out parked.json

The node daemon is on this machine and relays for two workers, which act with a policy of torch in CartPole-v1. `cold`
and `zygote`: the second worker is killed, and a new one starts. `suspend` and `criu`: it is parked and unparked. Times
are those from the request for a batch until the batch of both workers, of two steps, is complete. If criu does not work
here, it is left out.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import gymnasium
import torch
from children import run_script
from document import header, machines, write_document
from roster import BENCHMARKS
from tables import table

import farstep
from farstep.launch.daemon.criu import working_criu
from farstep.learners.networks.nets import NetConfig, make_agent

DEADLINE_S = 60.0
SHELL = ("sh", "-c", 'exec sh -c "$*"')


class TellingEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole-v1 that says in which process it is."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = super().reset(**options)
        return obs, {**info, "pid": os.getpid()}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        *rest, info = super().step(action)
        return *rest, {**info, "pid": os.getpid()}


def pss_bytes(pid: int) -> int:
    """The memory of a process; shared pages count in parts. 0 if there is no such process."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def why_no_criu() -> str:
    """Why criu does not work here; empty if it does."""
    try:
        working_criu().close()
    except farstep.LaunchError as error:
        return str(error)
    return ""


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:g} s"
        time.sleep(0.002)


class Measured:
    """The samples of one method."""

    def __init__(self, method: str, repeats: int) -> None:
        self.method, self.waits_s, self.running, self.parked = method, list[float](), list[int](), list[int]()
        self.disk_bytes = 0
        options: dict[str, Any] = {"park_method": "criu"} if method == "criu" else {}
        options["start_method"] = "cold" if method == "cold" else "zygote"
        config = farstep.SSHConfig(
            hosts=["here"], ssh=SHELL, workers_per_node=2, relay=True, restart_budget=repeats + 1, **options
        )
        source = {"type": "factory", "env_name": TellingEnv, "envs_per_node": 2, "seed": 1}
        with farstep.ClusterEnv(source, config) as env:
            torch.manual_seed(1)
            self._env, self._agent = env, make_agent(*env.launch(), NetConfig(), 0.99)
            env.collect(self._agent, steps=2)
            for _ in range(repeats):
                self._sample()

    def _sample(self) -> None:
        pid = int(self._env.step(self._agent)[4]["pid"][1])
        self.running.append(pss_bytes(pid))
        if self.method in ("cold", "zygote"):
            os.kill(pid, signal.SIGKILL)
        else:
            self._env.scale(workers=1)
            wait_until(lambda: self._is_parked(pid))
            self.parked.append(pss_bytes(pid))
            self.disk_bytes = self._env.stats()["workers"]["disk_bytes"]
        began = time.monotonic()
        self._env.scale(workers=2)
        batch = self._env.collect(self._agent, steps=2)
        while batch.shape[1] < 2 or (not self.parked and batch.continues.all()):  # it has not ended, or not started
            batch = self._env.collect(self._agent, steps=2)
        self.waits_s.append(time.monotonic() - began)

    def _is_parked(self, pid: int) -> bool:
        if self.method == "criu":
            return not Path(f"/proc/{pid}").exists() and bool(self._env.stats()["workers"]["on_disk"])
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def found(self) -> dict[str, Any]:
        """The samples, for the results file."""
        return {
            "method": self.method,
            "waits_s": [round(wait, 5) for wait in self.waits_s],
            "running_bytes": self.running,
            "parked_bytes": self.parked,
            "disk_bytes": self.disk_bytes,
        }


def summary(document: dict[str, Any]) -> str:
    """The section of docs/elasticity_measurements.md."""
    names = {"cold": "killed", "zygote": "killed", "suspend": "parked", "criu": "parked"}
    rows = []
    for run in document["runs"]:
        waits = [f"{1e3 * value:.0f}" for value in (statistics.median(run["waits_s"]), max(run["waits_s"]))]
        sizes = [statistics.median(run["running_bytes"]), statistics.median(run["parked_bytes"] or [0])]
        mebibytes = [f"{size / 2**20:.0f}" for size in (*sizes, run["disk_bytes"])]
        rows.append([f'{names[run["method"]]}, `"{run["method"]}"`', *waits, *mebibytes, str(len(run["waits_s"]))])
    header = ["worker", "median, ms", "longest, ms", "running, MiB", "killed or parked, MiB", "on disk, MiB", "samples"]
    others = "" if "criu" in {run["method"] for run in document["runs"]} else " criu was not measured."
    return f"On {machines(document)} (`results/parked.json`).{others}\n\n{table(header, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10, help="samples of each method")
    parser.add_argument("--methods", nargs="+", default=["cold", "zygote", "suspend", "criu"], help="what to measure")
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results" / "parked.json", help="results file")
    options = parser.parse_args()
    logging.getLogger("farstep").setLevel(logging.ERROR)
    document: dict[str, Any] = {**header("parked.py"), "runs": []}
    for method in options.methods:
        if method == "criu" and (reason := why_no_criu()):
            print(f"criu is left out: {reason}")
            continue
        document["runs"].append(Measured(method, options.repeats).found())
        write_document(options.out, document)
    print(summary(document))


if __name__ == "__main__":
    run_script(main)
