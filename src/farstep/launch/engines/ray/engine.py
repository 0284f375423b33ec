"""Starts node daemons as actors of a Ray cluster.

farstep sends rollouts and weights over its own connections, not through Ray's object store.
"""

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
from farstep.launch.engines.engine import EngineLost, Group, RequestStatus
from farstep.launch.engines.engine_processes import file_tail

_DIAL_S, _CONNECT_S, _ANSWER_S, _ENDING_S, _CLOSE_S = 5.0, 120.0, 10.0, 5.0, 10.0
GONE_S = 30.0
"""Seconds of silence after which Ray's head node, and so the whole cluster, is declared lost."""


class RayEngine:
    """Starts actors, preferably on different machines. Each actor reserves the resources of one node."""

    grace_s = 20.0

    def __init__(self, config: RayConfig, workers_per_node: int) -> None:
        self._config = config
        self._needs = {"CPU": float(workers_per_node * config.cpus_per_worker), **config.resources_per_node}
        if config.gpus_per_node:
            self._needs["GPU"] = float(config.gpus_per_node)
        self._driver: Driver | None = None
        self._silent_since: float | None = None
        """Since when Ray's head node has not answered; None if it answered the last check."""

    def listen_on(self) -> Sequence[str]:
        if self._config.head_address:
            return self._config.head_address
        driver = self._connected()
        if driver.local:
            return ["127.0.0.1"]
        return sorted(own_addresses(), key=lambda address: address != driver.address)

    def request(self, nodes: int, bootstrap: bytes) -> Actors:
        driver = self._connected()
        number = driver.post("request", nodes=nodes, needs=self._needs, bootstrap=bootstrap.decode())
        return Actors(self, driver, number)

    def _connected(self) -> Driver:
        """Return the driver. Start it if necessary, also if the old driver has ended."""
        if self._driver is None or self._driver.ended:
            capacity = {name: amount * self._config.most_nodes for name, amount in self._needs.items()}
            if self._driver is not None:
                self.check(self._driver)
                self._driver.close()
            self._driver = Driver(self._config, capacity)
        return self._driver

    def check(self, driver: Driver) -> None:
        """Raise `LaunchError` if Ray's head node does not answer, and `EngineLost` after `GONE_S` seconds of
        silence."""
        if driver.local or _answers(driver.gcs):  # a new driver restarts a cluster that farstep started
            self._silent_since = None
            return
        now = time.monotonic()
        self._silent_since = self._silent_since or now
        if now - self._silent_since > GONE_S:
            raise EngineLost(f"Ray's head node, {driver.gcs}, has not answered for {GONE_S:g} s: its cluster is lost")
        raise LaunchError(
            f"Ray's head node, {driver.gcs}, does not answer. The other nodes keep working until Ray ends them, by "
            "default after a minute."
        )

    @property
    def is_silent(self) -> bool:
        """Whether Ray's head node failed to answer the last check."""
        return self._silent_since is not None

    def close(self) -> None:
        if self._driver is not None:
            self._driver.close(0.0 if self.is_silent else _CLOSE_S)


class Driver:
    """Starts the process of `driver.py` and exchanges requests and answers with it."""

    def __init__(self, config: RayConfig, capacity: dict[str, float]) -> None:
        if importlib.util.find_spec("ray") is None:
            raise LaunchError("Ray is not installed here; install it with `pip install farstep[ray]`.")
        options = {"address": config.address, "namespace": config.namespace, **_joined_by_user(config)}
        address = _resolved(options.pop("address"))
        self._write_lock, self._call_lock = threading.Lock(), threading.Lock()
        self._requests, self._unread = 0, b""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(import_path())}
        if address == "local":  # other users of this machine must not join a new cluster
            environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.urandom(32).hex()}
        self._log = tempfile.TemporaryFile(prefix="farstep-ray-")  # noqa: SIM115 - closed by `close`
        self._process = subprocess.Popen(
            # Do not use -m: Ray's workers would then import from the folder of the file, which contains a module `ray`.
            [sys.executable, "-c", "from farstep.launch.engines.ray.driver import main; main()", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
            env=environment,
        )
        # Do not use TMPDIR: its name may be long, and the path of a socket has at most 107 bytes.
        self._folder = tempfile.mkdtemp(prefix="farstep-ray-", dir="/tmp") if address == "local" else ""
        try:
            result = self.call(
                "connect", _CONNECT_S, address=address, capacity=capacity, folder=self._folder, **options
            )
        except BaseException as error:
            self.close()
            if isinstance(error, LaunchError):
                raise LaunchError(_cannot(address, str(error))) from None
            raise
        self.address, self.gcs = str(result["address"]), str(result["gcs"])

    @property
    def local(self) -> bool:
        """Whether the driver started a cluster on this machine."""
        return bool(self._folder)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def post(self, method: str, **arguments: Any) -> int:
        """Send a request without waiting for its answer. Return the number of the request."""
        with self._write_lock:
            self._requests += 1
            line = json.dumps({"number": self._requests, "method": method, **arguments}).encode() + b"\n"
            try:
                assert self._process.stdin is not None
                self._process.stdin.write(line)
                self._process.stdin.flush()
            except (OSError, ValueError):  # the driver has ended, or was closed
                raise LaunchError(self._ending()) from None
            return self._requests

    def call(self, method: str, timeout_s: float = _ANSWER_S, **arguments: Any) -> Any:
        """Send a request and return its result.

        Raises:
            LaunchError: The request failed, or its answer did not arrive within `timeout_s` seconds.
        """
        with self._call_lock:
            number = self.post(method, **arguments)
            answer = self._answer(number, time.monotonic() + timeout_s)
        if "error" in answer:
            raise LaunchError(answer["error"])
        return answer["result"]

    def _answer(self, number: int, deadline: float) -> dict[str, Any]:
        """Read the answer to a request. Drop answers to other requests, which timed out or were posted."""
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
        """The last lines that Ray printed in the process of the driver."""
        return "" if self._log.closed else file_tail(self._log)

    def close(self, patience_s: float = _CLOSE_S) -> None:
        """End the process; if it still runs after `patience_s` seconds, kill it. Ray then ends its actors."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._write_lock, contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        with self._call_lock:  # by now, a thread that waits for an answer has read the end of the stream
            self._process.stdout.close()
            self._log.close()
        if self.local:
            shutil.rmtree(self._folder, ignore_errors=True)


class Actors(Group):
    """Actors that were requested together."""

    def __init__(self, engine: RayEngine, driver: Driver, number: int) -> None:
        self._engine, self._driver, self._number = engine, driver, number

    def status(self) -> RequestStatus:
        self._engine.check(self._driver)
        try:
            result = self._driver.call("status", group=self._number)
        except LaunchError:
            if self._driver.ended:
                return RequestStatus("the connection to Ray has ended", 0)
            raise
        return RequestStatus(str(result["text"]), int(result["nodes"]))

    def logs(self) -> str:
        if not self._engine.is_silent:
            with contextlib.suppress(LaunchError):
                return str(self._driver.call("logs", group=self._number))
        return self._driver.tail()

    def cancel(self) -> None:
        with contextlib.suppress(LaunchError):  # the driver and therefore its actors have ended
            self._driver.post("cancel", group=self._number)


def _joined_by_user(config: RayConfig) -> dict[str, Any]:
    """Options to join the same cluster as the user's program, with its files and packages."""
    ray = sys.modules.get("ray")
    if config.address is not None or ray is None or not ray.is_initialized():
        return {}
    context = ray.get_runtime_context()
    return {
        "address": context.gcs_address,
        "namespace": config.namespace or context.namespace,
        "runtime_env": dict(context.runtime_env),
    }


def _resolved(address: str | None) -> str:
    """The address for `ray.init`. Raise `LaunchError` if there is no answer, because Ray would retry for minutes."""
    named = os.environ.get("RAY_ADDRESS") if address in (None, "auto") else address
    if named in (None, "", "auto"):
        named = _latest()
        if address is None and not _answers(named):
            return "local"
    if named and named != "local" and not _answers(named):
        raise LaunchError(_cannot(named, "there is no answer."))
    return named if named == "local" else address or "auto"


def _latest() -> str:
    """The address of the last cluster that was started on this machine, from the file that Ray itself reads."""
    file = Path(os.environ.get("RAY_TMPDIR") or "/tmp", "ray", "ray_current_cluster")
    return file.read_text().strip() if file.exists() else ""


def _answers(address: str) -> bool:
    """Whether a connection to the address succeeds. True for an address without a port, because it cannot be tested."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdigit():
        return bool(address)
    try:
        socket.create_connection((host.strip("[]"), int(port)), _DIAL_S).close()
    except OSError:
        return False
    return True


def _cannot(address: str, why: str) -> str:
    if address == "local":
        return f"Ray cannot be started on this machine: {why}"
    return (
        f"the Ray cluster at {address!r} cannot be joined: {why} Start a cluster with `ray start --head`, or let "
        "farstep start one on this machine with RayConfig(address='local')."
    )
