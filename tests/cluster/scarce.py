"""A head that may open only a few more files: `python scarce.py launch|replace local|in_process|tcp COUNT...`.

Prints a JSON object: the outcome for each number of descriptors that were left.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import farstep
from farstep.errors import FarstepError
from farstep.testing import CountingEnv, TableAgent
from tests.cluster.checks import worker_pids

HARD = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
CONFIGS: dict[str, Any] = {
    "in_process": farstep.InProcessConfig,
    "local": farstep.LocalConfig,
    "tcp": lambda **options: farstep.LocalConfig(transport="tcp", **options),
}


def open_files() -> set[int]:
    return {int(entry.name) for entry in list(Path("/proc/self/fd").iterdir()) if entry.exists()}


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def set_left(count: int) -> None:
    """Let this process open `count` more files."""
    used, limit = open_files(), 0
    while count or limit in used:
        count -= limit not in used
        limit += 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, HARD))


@contextmanager
def left(count: int) -> Iterator[None]:
    set_left(count)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (HARD, HARD))


def make(config: str, **options: Any) -> farstep.ClusterEnv:
    env_config = {"type": "factory", "env_name": CountingEnv, "envs_per_node": 1, "seed": 5}
    return farstep.ClusterEnv(env_config, CONFIGS[config](**options))


def outcome(call: Any) -> str:
    try:
        call()
    except FarstepError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    except BaseException as error:
        return f"UNTYPED {type(error).__name__}: {error}"
    return "ok"


def launch(config: str, count: int) -> str:
    env = make(config)
    with left(count):
        result = outcome(lambda: env.collect(TableAgent(), steps=4))
        env.close()
    return result


class Retries(logging.Handler):
    """Raises the limit again after a failed start."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "Retrying" in record.getMessage():
            self.seen.set()
            resource.setrlimit(resource.RLIMIT_NOFILE, (HARD, HARD))


def replace(config: str, count: int) -> str:
    """Kill the worker while few descriptors are left; the limit is raised once a restart has failed."""
    retries = Retries()
    logging.getLogger("farstep").addHandler(retries)
    # Over tcp, a zygote's worker frees as many descriptors as its replacement needs.
    env = make(config, restart_budget=1, start_method="cold" if config == "tcp" else "zygote")
    try:
        agent = TableAgent()
        env.collect(agent, steps=4)
        (worker,) = worker_pids()
        with left(count):
            os.kill(worker, signal.SIGKILL)
            result = outcome(lambda: env.collect(agent, steps=4))
        workers = env.stats()["workers"] if result == "ok" else {}
        return f"{result}, retried={retries.seen.is_set()}, restarts={workers.get('restarts')}"
    finally:
        logging.getLogger("farstep").removeHandler(retries)
        env.close()


def main() -> None:
    what, config, *counts = sys.argv[1:]
    launch(config, 1000)  # all that is imported and opened once
    before, found = open_files(), {}
    for count in map(int, counts):
        found[count] = {"launch": launch, "replace": replace}[what](config, count)
        leaked = open_files() - before
        if leaked or children():
            found[count] += f", LEFT {len(leaked)} descriptors and {len(children())} processes"
    print(json.dumps(found))


if __name__ == "__main__":
    main()
