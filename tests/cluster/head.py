"""A head to be ended: `python head.py PHASE END FOLDER`. A file in FOLDER marks it as ready; SIGUSR1 ends it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, cast

import farstep
from farstep.testing import TableAgent
from tests.cluster.faulty import BusyParentEnv


def main(phase: str, end: str, folder: str) -> None:
    signal.signal(signal.SIGUSR1, lambda *_: finish(end))
    here = Path(folder) / "here"
    stuck = {"launch": "construct", "gil": "step"}.get(phase, "")
    env = farstep.ClusterEnv(
        {
            "type": "factory",
            "env_name": BusyParentEnv,
            "env_kwargs": {"stuck": stuck, "marker": str(here)},
            "seed": 1,
        },
        farstep.LocalConfig(workers_per_node=1, timeouts=cast(Any, {"close_s": 0.5})),
    )
    agent = TableAgent()
    env.collect(agent, steps=4)  # in phases launch and gil it stays here
    match phase:
        case "collect":
            here.touch()
            while True:
                env.collect(agent, steps=4)
        case "stream":
            for _ in env.stream(agent, steps=4, max_staleness=2):
                here.touch()
        case "idle":
            here.touch()
            threading.Event().wait()


def finish(end: str) -> Any:
    match end:
        case "exception":
            raise RuntimeError("deliberate")
        case "sys.exit":
            sys.exit(3)
        case "os._exit":
            os._exit(3)


if __name__ == "__main__":
    main(*sys.argv[1:])
