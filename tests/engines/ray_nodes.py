"""A real Ray cluster: each node is `ray start --block` with all that it starts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.engines.guarded import Engine, EngineMissing, Guarded, free_ports, wait_until

QUIET = {
    "RAY_prestart_worker_first_driver": "0",  # one process per CPU, most of which no test uses
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_worker_niceness": "0",  # 15 by default: while other tests use all cores, actors and workers hardly run
}
"""Makes the processes of a Ray cluster use less CPU time, and lets its actors have their share of it."""
_ENVIRONMENT = {
    **QUIET,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # by default a head wants a token that other nodes do not have
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "5",
}
# Not the program `ray`, which is found only where a virtual environment is on the path. No test uses the server for Ray
# Client, which takes 1.4 s of CPU time to start.
_START = """
from ray.scripts import scripts
scripts.get_ray_client_dependency_error = lambda: "not needed"
scripts.main()
"""
_STORE_BYTES = 80 * 2**20


class RayCluster(Engine):
    """A head, which has number 0, and `nodes` more, numbered from 1.

    `python` is the interpreter that Ray is installed for. Node I has `cpus` CPUs and as much of a resource `nodeI`; the
    head has `head_cpus`.
    """

    def __init__(
        self,
        nodes: int = 2,
        *,
        python: str | Path = sys.executable,
        cpus: int = 2,
        head_cpus: int = 0,
        store_bytes: int = _STORE_BYTES,
    ) -> None:
        self._nodes, self._cpus, self._head_cpus = nodes, cpus, head_cpus
        self._python, self._store_bytes = Path(python), store_bytes
        self._running: dict[int, Guarded] = {}

    def _start(self) -> None:
        has_ray = "import importlib.util, sys; sys.exit(importlib.util.find_spec('ray') is None)"
        if subprocess.run([self._python, "-c", has_ray]).returncode != 0:
            raise EngineMissing(f"{self._python} has no Ray: {self._python} -m pip install 'ray[default]'")
        self._port = free_ports(1)[0]
        self.address = f"{_own_address()}:{self._port}"
        """For `ray.init`."""
        self.environment = {**_ENVIRONMENT, "RAY_ADDRESS": self.address, "RAY_TMPDIR": str(self.folder)}
        """What drivers need in their environment; `address="auto"` is this cluster then."""
        for number in range(self._nodes + 1):  # one after another: nodes that start at once get into each other's way
            self.start_node(number)

    def start_node(self, number: int) -> None:
        """Starts a node, one that was killed or a further one, and waits until it is there."""
        words = ["--block", "--node-ip-address", _own_address(), "--disable-usage-stats"]
        words += ["--log-color=false", "--include-log-monitor=false"]
        words += ["--object-store-memory", str(self._store_bytes), f'--resources={{"node{number}": {self._cpus}}}']
        words += ["--min-worker-port=0", "--max-worker-port=0"]  # any, or nodes of one machine want the same
        if number == 0:
            words += ["--head", "--port", str(self._port), "--include-dashboard=false", "--no-monitor"]
            words += ["--num-cpus", str(self._head_cpus)]
        else:
            words += ["--address", self.address, "--num-cpus", str(self._cpus)]
        command = [str(self._python), "-c", _START, "start", *words]
        log = self.folder / f"node{number}.log"
        # RAY_ADDRESS would make a head join itself.
        environment = {**os.environ, **self.environment, "PYTHONUNBUFFERED": "1"}
        del environment["RAY_ADDRESS"]
        with log.open("wb") as output:
            options: dict[str, Any] = {
                "stdin": subprocess.DEVNULL,
                "stdout": output,
                "stderr": output,
                "env": environment,
            }
            process = Guarded(command, **options)
        self._running[number] = self._guarded(process)
        wait_until(lambda: "Ray runtime started" in log.read_text(), f"Ray's node {number}", 90, [log], [process])

    def kill_node(self, number: int) -> None:
        """A power failure: Ray's daemons of a node and all its actors are killed."""
        self._running.pop(number).end()


def _own_address() -> str:
    # Ray replaces loopback addresses by this one, and then does not find itself.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return "127.0.0.1"  # it is the only one
        return str(probe.getsockname()[0])
