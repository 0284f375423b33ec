"""A small run that shares a coordinator's slots: `python -m tests.cluster.sharing_run COORDINATOR OUT [LOCK]`.

After each rollout it appends the time to OUT. Every step locks the file LOCK, and fails if another step has locked it.
"""

import fcntl
import os
import sys
import time
from pathlib import Path

import farstep
from farstep.testing import CountingEnv, TableAgent


def main(coordinator: str, out: str, lock: str = "") -> None:
    class ExclusiveEnv(CountingEnv):
        def step(self, action):
            with Path(lock or os.devnull).open("ab") as stream:
                if lock:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                time.sleep(0.001)
                return super().step(action)

    source = {"type": "factory", "env_name": ExclusiveEnv, "envs_per_node": 2, "seed": 1}
    agent = TableAgent()
    with (
        Path(out).open("a", buffering=1) as stream,
        farstep.ClusterEnv(source, farstep.LocalConfig(workers_per_node=2, coordinator=coordinator)) as env,
    ):
        while True:
            env.collect(agent, steps=8)
            stream.write(f"{time.monotonic()}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
