"""The head's Ray client: a separate process that reads JSON requests from stdin and writes answers to stdout.

Ray kills a client that has lost Ray's head node. It also changes the signal handlers and the process group of a client
that starts a cluster. Neither must happen to a learner, so the client is a separate process. It ends with farstep's
head, and Ray then ends its actors.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from farstep.errors import counted
from farstep.launch.engines.ray.actor import DaemonActor

_STORE_BYTES = 80 * 2**20
"""Size of the object store in bytes: about the minimum that Ray accepts, because farstep does not use it."""
_LEAVE_S = 2.0
"""Seconds for node daemons to exit before their actors are killed."""
_END_S = 8.0
"""This process kills itself and its children this many seconds after the head has ended; shorter than the lease."""
_MAX_ERROR_CHARACTERS = 600
_BUILT_IN = ("CPU", "GPU", "memory")
"""Resources that Ray does not treat as custom resources."""
Needs = dict[str, float]


@dataclass
class Actor:
    """A requested actor."""

    handle: Any
    host_ref: Any
    """Future of the name of its host."""
    end_ref: Any
    """Future of the reason why its daemon ended."""
    host: str = ""
    reason: str | None = None

    def update(self) -> None:
        if self.reason is not None:
            return
        try:
            if not self.host and ray.wait([self.host_ref], timeout=0)[0]:
                self.host = ray.get(self.host_ref)
            if ray.wait([self.end_ref], timeout=0)[0]:
                self.reason = ray.get(self.end_ref) or "its node daemon ended"
        except ray.exceptions.RayError as error:
            self.reason = _in_short(error)
        if self.reason is not None:
            ray.kill(self.handle)  # frees its resources


@dataclass
class Group:
    """Actors that were requested together."""

    needs: Needs
    actors: list[Actor]
    refused: str = ""
    """Why Ray refused the request; empty if Ray accepted it."""

    def update(self) -> tuple[list[Actor], list[Actor], list[Actor]]:
        """Three lists of actors: waiting for resources, running, and ended."""
        for actor in self.actors:
            actor.update()
        alive = [actor for actor in self.actors if actor.reason is None]
        return (
            [actor for actor in alive if not actor.host],
            [actor for actor in alive if actor.host],
            [actor for actor in self.actors if actor.reason is not None],
        )


class RayDriver:
    """Implements one method per request of the head."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._folder = self._session = ""

    def connect(self, address: str, capacity: Needs, folder: str, **options: Any) -> dict[str, Any]:
        """Join the cluster at `address`. If `address` is `local`, start a cluster on this machine.

        Args:
            address: As for `ray.init`.
            capacity: Minimum resources of a cluster that this call starts.
            folder: Folder for the files of a cluster that this call starts.
            options: Further options of `ray.init`.
        """
        self._folder = folder
        options |= {"log_to_driver": False, "logging_level": logging.ERROR}
        if address == "local":
            options |= {
                "num_cpus": max(os.cpu_count() or 1, math.ceil(capacity["CPU"])),
                "resources": {name: amount for name, amount in capacity.items() if name not in _BUILT_IN},
                "include_dashboard": False,
                "object_store_memory": _STORE_BYTES,
                "_temp_dir": f"{folder}/r",  # readable for all users, but only this user can enter `folder`
            }
        self._session = ray.init(address=address, **options).address_info["session_dir"]
        return {"address": ray.util.get_node_ip_address(), "gcs": ray.get_runtime_context().gcs_address}

    def request(self, number: int, nodes: int, needs: Needs, bootstrap: str) -> None:
        """Create a group of actors; errors appear in its status."""
        group = self._groups[number] = Group(needs, [])
        try:
            remote: Any = ray.remote(
                num_cpus=needs["CPU"],
                num_gpus=needs.get("GPU", 0),
                memory=needs.get("memory"),
                resources={name: amount for name, amount in needs.items() if name not in _BUILT_IN},
                scheduling_strategy="SPREAD",
                max_concurrency=2,  # one thread runs the daemon, the other answers calls
                max_restarts=0,  # the head requests replacements itself, within its restart budget
            )(DaemonActor)
            for _ in range(nodes):
                handle = remote.options(name=f"farstep-{os.urandom(8).hex()}").remote()
                group.actors.append(Actor(handle, handle.host.remote(), handle.run.remote(bootstrap)))
        except Exception as error:
            group.refused = f"Ray refused to create actors: {_in_short(error)}"

    def status(self, group: int) -> dict[str, Any]:
        waiting, running, ended = self._groups[group].update()
        parts = [refused] if (refused := self._groups[group].refused) else []
        if running:
            parts.append(f"Ray runs node daemons on {', '.join(sorted(actor.host for actor in running))}")
        if waiting:
            subject = "1 node daemon waits" if len(waiting) == 1 else f"{len(waiting)} node daemons wait"
            parts.append(f"{subject} for resources of Ray's cluster ({_resources(self._groups[group].needs)})")
        for reason in dict.fromkeys(actor.reason for actor in ended):
            parts.append(f"a node daemon on Ray has ended: {reason}")
        return {"text": "; ".join(parts), "nodes": len(waiting) + len(running)}

    def logs(self, group: int) -> str:
        _, running, ended = self._groups[group].update()
        parts = [f"{actor.host or 'an actor'}: {actor.reason}" for actor in ended]
        for actor in running:
            try:
                parts.append(f"{actor.host}:\n{ray.get(actor.handle.tail.remote(), timeout=2.0)}")
            except (ray.exceptions.RayError, TimeoutError) as error:
                parts.append(f"{actor.host} does not answer: {_in_short(error)}")
        return "\n".join([*parts, f"Ray's own logs are in {Path(self._session, 'logs')} of each node."])

    def cancel(self, group: int) -> None:
        _, running, _ = self._groups[group].update()
        if running:
            ray.wait([actor.end_ref for actor in running], num_returns=len(running), timeout=_LEAVE_S)
        for actor in self._groups[group].actors:
            ray.kill(actor.handle)

    def close(self) -> None:
        ray.shutdown()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def _resources(needs: Needs) -> str:
    """Describe the resources that an actor needs, and the resources of the cluster."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    total = {name: sum(node.get(name, 0.0) for node in nodes) for name in needs}
    free = {name: ray.available_resources().get(name, 0.0) for name in needs}
    fits = any(all(node.get(name, 0.0) >= amount for name, amount in needs.items()) for node in nodes)
    return (
        f"each needs {_amounts(needs)}; the cluster has {counted(len(nodes), 'machine')} with {_amounts(total)} in "
        f"total, of which {_amounts(free)} are free{'' if fits else '; no machine is large enough for one of them'}"
    )


def _amounts(of: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in of.items())


def _in_short(error: BaseException) -> str:
    """Shorten an error of Ray to one line: the last exception. Ray's errors quote tracebacks of other processes."""
    text = re.sub(r"\x1b\[[\d;]*m", "", f"{error}\n{error.__cause__ or ''}")
    raised = re.findall(r"^\s*[\w.]+(?:Error|Exception): .*", text, re.M)
    short = " ".join((raised[-1] if raised else text).split())[:_MAX_ERROR_CHARACTERS] or type(error).__name__
    return f"{short} on its nodes; install farstep there" if short.endswith("No module named 'farstep'") else short


def _listen(requests: queue.SimpleQueue[dict[str, Any] | None], head: int) -> None:
    """Queue requests until the head has ended, then end this process.

    A fork of the head may hold the pipe open, so this function also checks the parent's process id. A call of Ray may
    never return, so it kills this process after `_END_S` seconds.
    """
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        while line := sys.stdin.readline():
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    while os.getppid() == head:
        try:
            line = lines.get(timeout=0.5)
        except queue.Empty:
            continue
        if not line:
            break
        requests.put(json.loads(line))
    requests.put(None)
    time.sleep(_END_S)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the head handles Ctrl-C
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # separates Ray's own output from the answers
        requests: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=_listen, args=(requests, int(sys.argv[1])), daemon=True).start()
        driver = RayDriver()
        while (request := requests.get()) is not None:
            answer: dict[str, Any] = {"number": (number := request.pop("number"))}
            try:
                match request.pop("method"):
                    case "request":
                        driver.request(number, **request)  # the number of the request is also the id of the group
                    case other:
                        answer["result"] = getattr(driver, other)(**request)
            except Exception as error:
                answer["error"] = _in_short(error)
            try:
                answers.write(json.dumps(answer) + "\n")
                answers.flush()
            except BrokenPipeError:
                break
        driver.close()
