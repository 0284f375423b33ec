"""Nodes of a Ray cluster: an actor on each runs the agent. Rollouts and weights travel over farstep's own connections,
never through Ray's object store."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farstep.config.launch import RayConfig
from farstep.errors import LaunchError
from farstep.launch.addresses import own_addresses
from farstep.launch.daemon.process import import_path
from farstep.launch.engine import EngineLost, Group, RequestStatus
from farstep.launch.engine_processes import file_tail

_KNOCK_S, _CONNECT_S, _ANSWER_S, _ENDING_S, _CLOSE_S = 5.0, 120.0, 10.0, 5.0, 10.0
_GONE_S = 30.0
"""Seconds of silence after which Ray's first node, and with it the cluster, is declared lost."""


class RayEngine:
    """Actors, each with the resources of one node, preferably on different machines."""

    grace_s = 20.0

    def __init__(self, config: RayConfig, workers_per_node: int) -> None:
        self._config = config
        self._needs = {"CPU": float(workers_per_node * config.cpus_per_worker), **config.resources_per_node}
        if config.gpus_per_node:
            self._needs["GPU"] = float(config.gpus_per_node)
        self._driver: Driver | None = None
        self._silent_since: float | None = None
        """When Ray's first node first failed to answer; reset when it answers."""

    def listen_on(self) -> Sequence[str]:
        if self._config.head_address:
            return self._config.head_address
        driver = self._connected()
        if driver.local:
            return ["127.0.0.1"]
        return sorted(own_addresses(), key=lambda address: address != driver.address)

    def request(self, nodes: int, bootstrap: bytes) -> Actors:
        driver = self._connected()
        number = driver.post("ask", nodes=nodes, needs=self._needs, bootstrap=bootstrap.decode())
        return Actors(self, driver, number)

    def _connected(self) -> Driver:
        """Reconnects if the driver process has ended."""
        if self._driver is None or self._driver.ended:
            room = {name: amount * self._config.most_nodes for name, amount in self._needs.items()}
            if self._driver is not None:
                self.check(self._driver)
                self._driver.close()
            self._driver = Driver(self._config, room)
        return self._driver

    def check(self, driver: Driver) -> None:
        """Raise if Ray's first node does not answer: `EngineLost` once it has been silent for `_GONE_S`."""
        if driver.local or _answers(driver.gcs):  # a cluster of our own is restarted with its driver
            self._silent_since = None
            return
        now = time.monotonic()
        self._silent_since = self._silent_since or now
        if now - self._silent_since > _GONE_S:
            raise EngineLost(f"Ray's first node, {driver.gcs}, has not answered for {_GONE_S:g} s: its cluster is lost")
        raise LaunchError(
            f"Ray's first node, {driver.gcs}, does not answer. The other nodes keep working until Ray ends them, by "
            "default after a minute."
        )

    @property
    def is_silent(self) -> bool:
        """Whether Ray's first node failed to answer the last check."""
        return self._silent_since is not None

    def close(self) -> None:
        if self._driver is not None:
            self._driver.close(0.0 if self.is_silent else _CLOSE_S)


class Driver:
    """The process that talks to Ray (see `ray_driver.py`)."""

    def __init__(self, config: RayConfig, room: dict[str, float]) -> None:
        if importlib.util.find_spec("ray") is None:
            raise LaunchError("Ray is not installed here; install it with `pip install farstep[ray]`.")
        joined = {"address": config.address, "namespace": config.namespace, **_joined_by_user(config)}
        address = _found(joined.pop("address"))
        self._writing, self._calling = threading.Lock(), threading.Lock()
        self._orders, self._unread = 0, b""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(import_path())}
        if address == "local":  # a cluster of one's own, into which nobody else is let
            environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.urandom(32).hex()}
        self._log = tempfile.TemporaryFile(prefix="farstep-ray-")  # noqa: SIM115 - closed by `close`
        self._process = subprocess.Popen(
            # Not with -m: Ray would have all its workers look for modules beside the file, where `ray` is another one.
            [sys.executable, "-c", "from farstep.launch.ray.driver import main; main()", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
            env=environment,
        )
        # Not in TMPDIR: the path of a socket in it has at most 107 bytes.
        self._folder = tempfile.mkdtemp(prefix="farstep-ray-", dir="/tmp") if address == "local" else ""
        try:
            said = self.call("connect", _CONNECT_S, address=address, room=room, folder=self._folder, **joined)
        except BaseException as error:
            self.close()
            if isinstance(error, LaunchError):
                raise LaunchError(_cannot(address, str(error))) from None
            raise
        self.address, self.gcs = str(said["address"]), str(said["gcs"])

    @property
    def local(self) -> bool:
        """Whether it started a cluster of its own, on this machine."""
        return bool(self._folder)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def post(self, order: str, **details: Any) -> int:
        """Give an order, without waiting for an answer; its number."""
        with self._writing:
            self._orders += 1
            line = json.dumps({"number": self._orders, "order": order, **details}).encode() + b"\n"
            try:
                assert self._process.stdin is not None
                self._process.stdin.write(line)
                self._process.stdin.flush()
            except (OSError, ValueError):  # it has ended, or was closed
                raise LaunchError(self._ending()) from None
            return self._orders

    def call(self, order: str, timeout_s: float = _ANSWER_S, **details: Any) -> Any:
        """What it answers to an order; raises `LaunchError` if that is an error, or nothing in time."""
        with self._calling:
            number = self.post(order, **details)
            answer = self._answer(number, time.monotonic() + timeout_s)
        if "error" in answer:
            raise LaunchError(answer["error"])
        return answer["said"]

    def _answer(self, number: int, deadline: float) -> dict[str, Any]:
        """To that order; for other ones nobody waits, or not any more."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        ready = select.poll()
        ready.register(fd, select.POLLIN)
        while True:
            line, newline, rest = self._unread.partition(b"\n")
            if newline:
                self._unread = rest
                answer = dict(json.loads(line))
                if answer["number"] == number:
                    return answer
                continue
            if not ready.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise LaunchError(f"Ray did not answer in time. {self.tail()}".strip())
            if not (part := os.read(fd, 65536)):
                raise LaunchError(self._ending())
            self._unread += part

    def _ending(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_S)
        return f"the connection to Ray has ended. {self.tail()}".strip()

    def tail(self) -> str:
        """The end of what Ray had to say in that process."""
        return "" if self._log.closed else file_tail(self._log)

    def close(self, patience_s: float = _CLOSE_S) -> None:
        """Ray ends the actors of a driver that has gone."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._writing, contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        with self._calling:  # whoever waits for an answer has read the end by now
            self._process.stdout.close()
            self._log.close()
        if self.local:
            shutil.rmtree(self._folder, ignore_errors=True)


class Actors(Group):
    """Actors that were asked for together."""

    def __init__(self, engine: RayEngine, driver: Driver, number: int) -> None:
        self._engine, self._driver, self._number = engine, driver, number

    def status(self) -> RequestStatus:
        self._engine.check(self._driver)
        try:
            said = self._driver.call("status", group=self._number)
        except LaunchError:
            if self._driver.ended:
                return RequestStatus("the connection to Ray has ended", 0)
            raise
        return RequestStatus(str(said["text"]), int(said["nodes"]))

    def logs(self) -> str:
        if not self._engine.is_silent:
            with contextlib.suppress(LaunchError):
                return str(self._driver.call("logs", group=self._number))
        return self._driver.tail()

    def cancel(self) -> None:
        with contextlib.suppress(LaunchError):  # they end with the driver
            self._driver.post("cancel", group=self._number)


def _joined_by_user(config: RayConfig) -> dict[str, Any]:
    """The cluster that the user's program has joined itself, with the files and packages that it brought there."""
    ray = sys.modules.get("ray")
    if config.address is not None or ray is None or not ray.is_initialized():
        return {}
    context = ray.get_runtime_context()
    return {
        "address": context.gcs_address,
        "namespace": config.namespace or context.namespace,
        "runtime_env": dict(context.runtime_env),
    }


def _found(address: str | None) -> str:
    """The address to give to Ray; raises if nobody answers there, where Ray itself would try for minutes."""
    named = os.environ.get("RAY_ADDRESS") if address in (None, "auto") else address
    if named in (None, "", "auto"):
        named = _latest()
        if address is None and not _answers(named):
            return "local"
    if named and named != "local" and not _answers(named):
        raise LaunchError(_cannot(named, "nobody answers there."))
    return named if named == "local" else address or "auto"


def _latest() -> str:
    """Of the cluster that was started last on this machine, as Ray itself finds it."""
    note = Path(os.environ.get("RAY_TMPDIR") or "/tmp", "ray", "ray_current_cluster")
    return note.read_text().strip() if note.exists() else ""


def _answers(address: str) -> bool:
    """Whether somebody listens there, as far as one can tell."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdigit():
        return bool(address)
    try:
        socket.create_connection((host.strip("[]"), int(port)), _KNOCK_S).close()
    except OSError:
        return False
    return True


def _cannot(address: str, why: str) -> str:
    if address == "local":
        return f"Ray cannot be started on this machine: {why}"
    return (
        f"Ray at {address!r} cannot be joined: {why} Start one with `ray start --head`, or let farstep start one "
        "on this machine with RayConfig(address='local')."
    )
