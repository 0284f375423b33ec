"""Contract check of start backends: how worker processes are started, and how they are kept while they are parked."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from farstep.cluster_env import ClusterEnv
from farstep.testing.envs import CountingEnv
from farstep.testing.launcher import MakeConfig

_DEADLINE_S = 60.0
_WORKERS = 3


class _PidEnv(CountingEnv):
    """Endless environment that reports its process, and holds some memory."""

    def __init__(self) -> None:
        super().__init__(length=None)
        self.memory = np.ones(1 << 20)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = super().reset(seed=seed, options=options)
        return obs, {**info, "pid": os.getpid()}


class _RecurrentAgent:
    """Agent whose state is the number of steps in the episode."""

    def initial_state(self, n: int) -> Any:
        return np.zeros((n, 1), np.float32)

    def act(self, obs: Any, state: Any, episode_start: Any) -> dict[str, Any]:
        state = np.where(np.asarray(episode_start)[:, None], 0, state) + 1
        return {"action": np.zeros(len(obs), np.int64), "acted": state[:, 0].astype(np.float32), "state": state}

    def get_parameters(self) -> dict[str, Any]:
        return {}


def check_start_backend(make_config: MakeConfig, *, keeps_memory: bool = True) -> None:
    """Check that a start backend starts workers, parks and resumes them, replaces killed ones, and leaves nothing.

    Args:
        make_config: Makes a launch configuration whose workers are processes of this machine.
        keeps_memory: Whether a parked worker keeps its process, and with it its memory; default True. Otherwise it must
            have no process.

    Raises:
        AssertionError: The backend breaks the contract; the message says how.
    """
    with contextlib.closing(_cluster(make_config)) as env:  # the first run may open files that stay open
        env.launch()
    del env
    gc.collect()
    before = _open_files()
    env = _cluster(make_config)
    try:
        pids = _check_start(env)
        _check_parked(env, pids, keeps_memory)
        _check_killed(env, keeps_memory)
        _, info = env.reset()
        last = [int(pid) for pid in info["pid"]]
    finally:
        env.close()
    del env
    gc.collect()
    left = [pid for pid in {*pids, *last} if _state(pid) not in ("", "Z")]
    assert not left, f"close() must end all workers; these still run: {left}"
    after = _open_files()
    assert len(after) <= len(before), f"close() must close all files and shared memory: {sorted(after)} are open"


def _cluster(make_config: MakeConfig) -> ClusterEnv:
    source = {"type": "factory", "env_name": _PidEnv, "envs_per_node": _WORKERS, "seed": 3}
    return ClusterEnv(source, make_config(workers_per_node=_WORKERS))


def _check_start(env: ClusterEnv) -> list[int]:
    """Check that all workers become ready, each in a process of its own. Return the process ids."""
    env.launch()
    _, info = env.reset()
    pids = [int(pid) for pid in info["pid"]]
    assert len(set(pids)) == _WORKERS and os.getpid() not in pids, f"each worker must be a process of its own: {pids}"
    assert env.stats()["workers"]["alive"] == _WORKERS
    return pids


def _check_parked(env: ClusterEnv, pids: list[int], keeps_memory: bool) -> None:
    """Check that parked workers use no CPU time, and that environments and agent continue where they were."""
    agent = _RecurrentAgent()
    _assert_continues(env.collect(agent, steps=4), 0)
    _scale(env, 1)
    held = env.stats()["slots"]["held"]
    assert held == 1, f"only the running worker may hold a slot, not {held}"
    if not keeps_memory:
        _wait(lambda: not any(map(_state, pids[1:])), "the processes of parked workers must end")
    used = {pid: _cpu_ticks(pid) for pid in pids[1:] if _state(pid)}
    assert bool(used) == keeps_memory, f"processes of the parked workers: {list(used)}"
    for first in (4, 8):
        _assert_continues(env.collect(agent, steps=4), first)
    for pid, ticks in used.items():
        assert _state(pid) == "T", f"the process {pid} of a parked worker is in state {_state(pid)!r}; expected 'T'"
        assert _cpu_ticks(pid) == ticks, f"the process {pid} of a parked worker has used CPU time"
        assert _resident_bytes(pid) > 1 << 23, f"the process {pid} of a parked worker must keep its memory"
    _scale(env, _WORKERS)
    batch = env.collect(agent, steps=4)
    assert batch["obs"][0, :, 1].tolist() == [12, 4, 4], "environments must continue where they were parked"
    assert batch["acted"][0].tolist() == [13, 5, 5], "the state of the agent must continue with its environments"
    assert batch.continues.all(), "no rows were dropped"


def _check_killed(env: ClusterEnv, keeps_memory: bool) -> None:
    """Check that a killed worker is replaced: at once if it runs, or when it is unparked."""
    agent = _RecurrentAgent()
    _, info = env.reset()
    first, second, third = (int(pid) for pid in info["pid"])
    env.collect(agent, steps=4)
    os.kill(first, signal.SIGKILL)
    _collect_until(env, agent, 1)
    _, info = env.reset()
    assert info["pid"][0] != first and info["pid"][1:].tolist() == [second, third], "only the killed one is replaced"
    env.collect(agent, steps=4)
    if keeps_memory:
        _scale(env, 2)
        os.kill(third, signal.SIGKILL)
        _wait(lambda: _state(third) in ("", "Z"), "a killed parked worker must end")
        _scale(env, _WORKERS)
        _collect_until(env, agent, 2)
        _, info = env.reset()
        assert info["pid"][2] != third and info["pid"][1] == second, "a parked worker that was killed is replaced"
    stats = env.stats()
    total = stats["delivered"] + sum(stats["dropped"].values()) + stats["buffered"] + stats["in_flight"]
    assert stats["rolled"] == total, f"tickets do not balance: {stats['rolled']} rolled, {total} accounted for"


def _assert_continues(batch: Any, first: int) -> None:
    assert batch["obs"][:, 0, 1].tolist() == list(range(first, first + 4)), "the running worker must continue"


def _scale(env: ClusterEnv, workers: int) -> None:
    env.scale(workers=workers)

    def is_settled() -> bool:
        found = env.stats()["workers"]
        return bool(found["parked"] == _WORKERS - workers and found["alive"] == workers)

    _wait(is_settled, f"{workers} workers must run and the others be parked")


def _collect_until(env: ClusterEnv, agent: _RecurrentAgent, restarts: int) -> None:
    """Collect until workers were restarted this many times and all are present."""

    def is_complete() -> bool:
        batch = env.collect(agent, steps=4)
        return env.stats()["workers"]["restarts"] == restarts and len(batch.slots) == _WORKERS

    _wait(is_complete, "a killed worker must be replaced")


def _wait(condition: Any, expectation: str) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"{expectation}; this did not happen within {_DEADLINE_S:g} s"
        time.sleep(0.01)


def _fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _state(pid: int) -> str:
    return (_fields(pid) or [""])[0]


def _cpu_ticks(pid: int) -> int:
    return sum(map(int, _fields(pid)[11:13]))


def _resident_bytes(pid: int) -> int:
    return int(_fields(pid)[21]) * os.sysconf("SC_PAGE_SIZE")


def _open_files() -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(entry.readlink()))
    return found
