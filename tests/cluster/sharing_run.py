"""A small run that shares a coordinator's slots: `python -m tests.cluster.sharing_run COORDINATOR OUT [LOCK [SLOTS]]`.

After each rollout it appends the time to OUT. Every step locks the file LOCK, and fails if another step has locked it.
With SLOTS, there are as many such files, a step needs one of them, and workers are released between rollouts.
"""

import contextlib
import fcntl
import os
import sys
import time
from pathlib import Path

import farstep
from farstep.testing import CountingEnv, TableAgent


def main(coordinator: str, out: str, lock: str = "", slots: str = "") -> None:
    class ExclusiveEnv(CountingEnv):
        def step(self, action):
            with contextlib.ExitStack() as stack:
                files = [Path(f"{lock}{index}" if lock else os.devnull) for index in range(int(slots or 1))]
                streams = [stack.enter_context(file.open("ab")) for file in files]
                if lock and not any(map(is_locked, streams)):
                    raise RuntimeError("more steps at the same time than there are slots")
                time.sleep(0.001)
                return super().step(action)

    def is_locked(stream):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True

    source = {"type": "factory", "env_name": ExclusiveEnv, "envs_per_node": 2, "seed": 1, "release_idle": bool(slots)}
    agent = TableAgent()
    with (
        Path(out).open("a", buffering=1) as stream,
        farstep.ClusterEnv(
            source, farstep.LocalConfig(workers_per_node=2, coordinator=coordinator, restart_budget=0)
        ) as env,
    ):
        while True:
            env.collect(agent, steps=8)
            stream.write(f"{time.monotonic()}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
