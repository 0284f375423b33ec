"""Contract check of launchers."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

from farstep.cluster_env import ClusterEnv
from farstep.config.launch import LaunchConfig
from farstep.errors import ClosedError, ConfigError, LaunchError, RemoteEnvError, WorkerDied
from farstep.launch.daemon.process import import_path
from farstep.rollout.seeds import episode_seed
from farstep.testing.envs import CountingEnv, TableAgent

MakeConfig = Callable[..., LaunchConfig]
"""Makes a launch configuration from options of `LaunchConfig` (`workers_per_node`, `timeouts`, ...)."""

_SEED = 11
_GONE_S = 20.0
"""Seconds for workers to end: `lease_s`, which is 10 by default, and as much again on a busy machine."""
_DEADLINE_S = 60.0
_PAUSE_S = 0.05
"""Between batches while a node starts or ends; without a pause, collecting would use all CPU time."""
_LAST_WORDS = "these are my last words"


class ProbeEnv(CountingEnv):
    """Environment that reports its process and host, and fails in the fifth step of episodes with `fatal_seeds`.

    Episodes do not end. With the fault `chat`, it does not fail, but a thread prints continuously.
    """

    def __init__(self, fatal_seeds: Sequence[int] = (), fault: str = "exit") -> None:
        super().__init__(length=None)
        self._fatal_seeds, self._fault, self._fatal = fatal_seeds, fault, False
        if fault == "chat":
            threading.Thread(target=_chat, daemon=True).start()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = super().reset(seed=seed, options=options)
        self._fatal = seed in self._fatal_seeds
        return obs, {**info, "pid": os.getpid(), "host": socket.gethostname(), "threads": _threads()}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._fatal and self.count == 4:
            if self._fault == "raise":
                raise LookupError(_LAST_WORDS)
            os.write(1, f"{_LAST_WORDS}\n".encode())
            if self._fault == "exit":
                os._exit(7)
            time.sleep(3600)
        return super().step(action)


def _chat() -> None:
    while True:
        os.write(1, b"and another thing\n")
        time.sleep(0.001)


def _threads() -> int:
    return int(os.environ.get("OMP_NUM_THREADS", "0"))


def check_launcher(
    make_config: MakeConfig,
    *,
    processes: bool = True,
    kill_node: Callable[[dict[str, Any]], None] | None = None,
    scarce: MakeConfig | None = None,
    missing: Callable[[], AbstractContextManager[object]] | None = None,
) -> None:
    """Check that a launcher starts workers, replaces them, reports failures, and leaves no process behind.

    Args:
        make_config: Makes a launch configuration; see `MakeConfig`.
        processes: Whether workers are processes, which can be killed; default True. Processes on this host are checked
            by their ids.
        kill_node: For launchers with nodes: a function that kills one of `stats()["nodes"]` without warning. None: skip
            these checks.
        scarce: Makes configurations that request more nodes than are available. None: skip this check.
        missing: Makes a context in which the engine is not available. None: skip this check.

    Raises:
        AssertionError: The launcher breaks the contract; the message says how.
    """
    _check_unknown_option(make_config)
    if missing is not None:
        _check_missing_engine(make_config, missing)
    _check_start(make_config, processes)
    _check_exception(make_config)
    if processes:
        _check_crash(make_config)
        _check_cancel(make_config)
        _check_killed_head(make_config)
    if scarce is not None:
        _check_partial_start(scarce)
    if kill_node is not None:
        _check_nodes(make_config, kill_node)


def _cluster(config: LaunchConfig, fault: str = "") -> ClusterEnv:
    fatal = [episode_seed(_SEED, 0, episode) for episode in (0, 2)]
    kwargs = {"fatal_seeds": fatal, "fault": fault} if fault else {}
    return ClusterEnv(
        {"type": "factory", "env_name": ProbeEnv, "env_kwargs": kwargs, "envs_per_node": 3, "seed": _SEED}, config
    )


def _check_unknown_option(make_config: MakeConfig) -> None:
    try:
        make_config(workers_per_nod=2)
    except ConfigError as error:
        assert "workers_per_node" in str(error), error
        return
    raise AssertionError("an unknown option must raise a ConfigError that names the nearest known one")


def _check_missing_engine(make_config: MakeConfig, missing: Callable[[], AbstractContextManager[object]]) -> None:
    """Check that the error is one sentence that says what to install or start."""
    with missing(), contextlib.closing(_cluster(make_config(workers_per_node=1))) as env:
        try:
            env.launch()
        except LaunchError as error:
            assert len(str(error).splitlines()) == 1 and str(error).endswith("."), error
            return
    raise AssertionError("the engine is not available, but launch() did not raise LaunchError")


def _check_partial_start(scarce: MakeConfig) -> None:
    """Check that a run starts with `min_nodes` nodes, without waiting for the others."""
    with _cluster(scarce(min_nodes=1, workers_per_node=1)) as env:
        env.launch()
        _assert_whole(env.collect(TableAgent(), steps=4))
        stats = env.stats()
        assert stats["nodes"] and stats["workers"]["queued"], stats


def _check_start(make_config: MakeConfig, processes: bool) -> None:
    """Check that all workers start, can be parked, and end with `close`. `close` may be called twice."""
    env = _cluster(make_config(workers_per_node=3))
    try:
        env.launch()
        _, info = env.reset()
        pids = [int(pid) for pid in info["pid"]]
        assert (len(set(pids)) == 3) == processes, f"three workers, but slots are in the processes {pids}"
        assert (os.getpid() not in pids) == processes
        agent = TableAgent()
        _assert_whole(env.collect(agent, steps=8))
        assert env.stats()["workers"]["alive"] == 3
        _check_parking(env, agent)
    finally:
        env.close()
        env.close()
    if processes:
        _assert_gone(info, 0.0)
    try:
        env.launch()
    except ClosedError:
        return
    raise AssertionError("launch() after close() must raise ClosedError")


def _check_parking(env: ClusterEnv, agent: TableAgent) -> None:
    """Check that three workers can be parked and unparked during collection, and that no step is lost."""
    for workers in (1, 3, 2, 3):
        env.scale(workers=workers)
        batch = env.collect(agent, steps=4)
        assert batch.slots.tolist() == list(range(workers)), "only workers that are not parked contribute"
        assert batch.continues.all(), "a parked worker must continue where it was"
        assert env.stats()["workers"]["parked"] == 3 - workers
    assert not env.stats()["dropped"], "tickets that a parked worker has not started must return to the head"


def _check_exception(make_config: MakeConfig) -> None:
    """Check that the head raises an environment's exception with worker, slot, host and traceback."""
    with _cluster(make_config(workers_per_node=2, restart_budget=0), "raise") as env:
        try:
            env.collect(TableAgent(), steps=8)
        except RemoteEnvError as error:
            assert error.where.worker == error.where.slot == 0, error
            assert error.where.host not in ("", "?"), error
            assert str(error).count(f"raise LookupError({'_LAST_WORDS'})") == 1, error
            return
        raise AssertionError("an environment raised with restart_budget=0, but collect() did not raise")


def _check_crash(make_config: MakeConfig) -> None:
    """Check that a worker that dies is replaced while the others continue, and how the last failure is reported."""
    with _cluster(make_config(workers_per_node=2, cpus_per_worker=2, restart_budget=1), "exit") as env:
        _, before = env.reset()
        assert before["pid"][0] == before["pid"][1], "slots 0 and 1 belong to the first worker"
        assert list(before["threads"]) == [2] * 3, "cpus_per_worker must reach the worker"
        agent = TableAgent()
        _assert_whole(env.collect(agent, steps=2))
        batch = env.collect(agent, steps=8)
        _assert_whole(batch)
        assert list(batch["episode_start"][0]) == [True, True, False], "worker 0's slots must start the next episode"
        assert env.stats()["workers"]["restarts"] == 1
        _, after = env.reset()
        assert after["pid"][0] != before["pid"][0]
        assert after["pid"][2] == before["pid"][2]
        try:
            env.collect(agent, steps=8)
        except WorkerDied as error:
            where = error.where
            assert (where.worker, where.host, where.pid) == (0, after["host"][0], after["pid"][0]), error
            assert "status 7" in str(error), error
            assert _LAST_WORDS in error.output, error
            return
        raise AssertionError("a worker died twice with restart_budget=1, but collect() did not raise")


def _check_cancel(make_config: MakeConfig) -> None:
    """Check that `close` ends a worker that does not respond."""
    env = _cluster(make_config(workers_per_node=2, timeouts={"close_s": 0.5}), "hang")
    _, info = env.reset()
    stream = env.stream(TableAgent(), steps=2, max_staleness=3)
    next(stream)  # later tickets reach the hanging step
    closing = threading.Thread(target=env.close, daemon=True)
    closing.start()
    closing.join(_DEADLINE_S)
    assert not closing.is_alive(), "close() does not return while an environment hangs"
    _assert_gone(info, 0.0)


def _check_killed_head(make_config: MakeConfig) -> None:
    """Check that workers and node daemons end when their head is killed."""
    code = "import sys, cloudpickle; cloudpickle.load(sys.stdin.buffer)()"
    head = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(import_path())},
    )
    assert head.stdin is not None and head.stdout is not None
    with head, contextlib.ExitStack() as cleanup:
        cleanup.callback(head.kill)
        head.stdin.write(cloudpickle.dumps(functools.partial(_stay, make_config)))
        head.stdin.close()
        info = json.loads(head.stdout.readline())
        head.kill()
        head.wait()
        _assert_gone(info, _GONE_S)


def _check_nodes(make_config: MakeConfig, kill_node: Callable[[dict[str, Any]], None]) -> None:
    """Check that nodes can be lost, released and added during collection.

    Collection continues while `min_nodes` remain, and includes a lost node after it has rejoined. If the last node is
    lost, collection waits for another.
    """
    with _cluster(make_config(nodes=2, min_nodes=1, max_nodes=2, workers_per_node=1, restart_budget=5)) as env:
        agent = TableAgent()
        _collect_until(env, agent, 6)
        kill_node(env.stats()["nodes"][1])
        _collect_until(env, agent, 3)
        _collect_until(env, agent, 6)
        assert len(env.stats()["nodes"]) == 2
        _, info = env.reset()
        dropped = env.stats()["dropped"]
        env.scale(1)
        _collect_until(env, agent, 3)
        last = {key: info[key][3:] for key in ("pid", "host")}
        _assert_gone(last, _GONE_S)
        assert env.stats()["dropped"] == dropped, "a released node must finish and send its chunks"
        deadline = time.monotonic() + _DEADLINE_S
        while len(env.stats()["nodes"]) > 1:
            assert time.monotonic() < deadline, "a released node must leave"
            time.sleep(_PAUSE_S)
        (lost,) = env.stats()["nodes"]
        kill_node(lost)
        _collect_until(env, agent, 3)
        while env.stats()["nodes"] in ([], [lost]):  # chunks of the lost node may still arrive
            _collect_until(env, agent, 3)
        assert len(env.stats()["nodes"]) == 1
        env.scale(2)
        _collect_until(env, agent, 6)


def _collect_until(env: ClusterEnv, agent: TableAgent, columns: int) -> None:
    """Collect until a batch has this many columns; check every batch."""
    deadline = time.monotonic() + 2 * _DEADLINE_S
    while True:
        batch = env.collect(agent, steps=4)
        _assert_whole(batch)
        if batch["obs"].shape[1] == columns:
            return
        assert time.monotonic() < deadline, f"no batch of {columns} columns: {env.stats()['workers']}"
        time.sleep(_PAUSE_S)


def _stay(make_config: MakeConfig) -> None:
    """Run a head that prints where its workers and node daemons are, then waits to be killed."""
    env = _cluster(make_config(workers_per_node=2), "chat")
    _, info = env.reset()
    nodes = env.stats()["nodes"]
    pids = [*map(int, info["pid"]), *(node["pid"] for node in nodes)]
    hosts = [*map(str, info["host"]), *(node["host"] for node in nodes)]
    os.write(1, (json.dumps({"pid": pids, "host": hosts}) + "\n").encode())
    signal.pause()


def _assert_whole(batch: Any) -> None:
    count = batch["obs"][..., 1]
    assert count.shape[1] == len(batch.slots) and count.shape[1] % 3 == 0
    assert (batch["episode_start"] == (count == 0)).all(), "episode_start must be True in first rows of episodes only"
    continues = ~batch["episode_start"][1:]
    assert (np.diff(count, axis=0)[continues] == 1).all(), "rows of an episode must be consecutive"


def _assert_gone(info: dict[str, Any], seconds: float) -> None:
    """Check that the processes on this host have ended, after at most `seconds`."""
    mine = [int(pid) for pid, host in zip(info["pid"], info["host"], strict=True) if host == socket.gethostname()]
    deadline = time.monotonic() + seconds
    while left := [pid for pid in mine if _alive(pid)]:
        assert time.monotonic() < deadline, f"processes still run: {left}"
        time.sleep(0.01)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")
