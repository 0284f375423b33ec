"""An environment whose methods report about the node. The doctor calls them like methods of any environment."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from farstep.doctor.programs import Program
from farstep.launch.daemon.process import import_path
from farstep.resources import available_memory, core_ranges, usable_cpus


class Probe(gymnasium.Env[Any, Any]):
    """Reports about the node that it runs on."""

    observation_space = gymnasium.spaces.Discrete(1)
    action_space = gymnasium.spaces.Discrete(1)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        return np.int64(0), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.int64(0), 0.0, False, False, {}

    def about(self) -> dict[str, Any]:
        """Return host, Python and resources of the node."""
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "python": platform.python_version(),
            "executable": sys.executable,
            "cpus": usable_cpus(),
            "cores": core_ranges(os.sched_getaffinity(0)),
            "memory": float(available_memory()),
            "gpus": _gpus(),
        }

    def clock(self) -> float:
        return time.time()

    def ping(self) -> bool:
        return True

    def take(self, data: bytes) -> int:
        return len(data)

    def give(self, count: int) -> bytes:
        return bytes(count)

    def make(self, env: str, timeout_s: float) -> str:
        """Build and reset an environment in another process, so that crashes and hangs are also reported.

        Args:
            env: Fields of an `EnvConfig`, as JSON.
            timeout_s: Seconds after which the process is killed.

        Returns:
            The last lines of the process's output, with the reason; empty if it succeeded.
        """
        command = [sys.executable, "-P", "-m", "farstep.doctor.make_env", env]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(import_path())}
        status, output = Program(command, environment).end(time.monotonic() + timeout_s)
        if status == 0:
            return ""
        lines = output.splitlines()
        if status is None:
            lines.append(f"it took longer than {timeout_s:g} s")
        elif status < 0:
            lines.append(f"ended by signal {-status}")
        return "\n".join(lines[-8:]) or f"it exited with status {status}"


def _gpus() -> int:
    """Return the number of GPUs that the node daemon sees (a worker sees only one), or of all NVIDIA devices."""
    given = None
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
        given = next((word.partition(b"=")[2] for word in words if word.startswith(b"CUDA_VISIBLE_DEVICES=")), None)
    if given is not None:
        return len([name for name in given.split(b",") if name])
    return len([path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()])
