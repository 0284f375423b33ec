"""A head with parked workers, to be killed: `python parking_head.py SHELL FILE [PARK_METHOD]`.

Without a SHELL, workers are local. It writes the ids of its processes to FILE once two of its three workers are
suspended, or on disk.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import farstep
from farstep.testing import CountingEnv, TableAgent
from tests.cluster.checks import eventually
from tests.cluster.parking import settled, state_of


class TellingEnv(CountingEnv):
    """Its info has the id of its process."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        *rest, _ = super().step(action)
        return *rest, {"pid": os.getpid()}


def main(shell: str, file: str, park_method: Any = "suspend") -> None:
    config: Any = farstep.LocalConfig(workers_per_node=3)
    if shell:
        options: Any = {"relay": park_method == "criu", "park_method": park_method}
        config = farstep.SSHConfig(hosts=["host0"], ssh=(shell,), workers_per_node=3, lease_s=4, **options)
    env = farstep.ClusterEnv({"type": "factory", "env_name": TellingEnv, "envs_per_node": 3, "seed": 1}, config)
    pids = [int(pid) for pid in env.step(TableAgent())[4]["pid"]]
    env.scale(workers=1)
    settled(env, parked=2)
    if park_method == "criu":
        eventually(lambda: env.stats()["workers"]["on_disk"] == 2)
    else:
        eventually(lambda: [state_of(pid) for pid in pids[1:]] == ["T", "T"])
    daemons = [node["pid"] for node in env.stats()["nodes"]]
    Path(f"{file}.new").write_text(json.dumps({"workers": pids, "daemons": daemons}))
    Path(f"{file}.new").rename(file)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
