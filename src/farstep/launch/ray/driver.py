"""The process that talks to Ray for a head: orders come as lines of JSON through stdin, answers go to stdout.

It is not the head's own process, because Ray ends a process that has lost the cluster's first node, and sets signal
handlers and the process group of one that starts a cluster: none of that should happen to a learner. It ends with the
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

from farstep.launch.ray.actor import Agent

_STORE_BYTES = 80 * 2**20
"""Of the object store, which is not used: about the least that Ray takes."""
_LEAVE_S = 2.0
"""Agents that were told to leave have so long before their actors are killed."""
_END_S = 8.0
"""Within the lease, this process and all that it started are gone."""
_SHORT = 600
_OF_RAY = ("CPU", "GPU", "memory")
"""Resources that are not custom ones."""
Needs = dict[str, float]


@dataclass
class Actor:
    """An actor that was asked for."""

    handle: Any
    placed: Any
    """Becomes the name of its host."""
    over: Any
    """Becomes the reason why the agent ended."""
    host: str = ""
    reason: str | None = None

    def look(self) -> None:
        if self.reason is not None:
            return
        try:
            if not self.host and ray.wait([self.placed], timeout=0)[0]:
                self.host = ray.get(self.placed)
            if ray.wait([self.over], timeout=0)[0]:
                self.reason = ray.get(self.over) or "its agent ended"
        except ray.exceptions.RayError as error:
            self.reason = _in_short(error)
        if self.reason is not None:
            ray.kill(self.handle)  # gives its resources back


@dataclass
class Group:
    """Actors that were asked for together."""

    needs: Needs
    actors: list[Actor]
    refused: str = ""
    """Why Ray did not take the order."""

    def look(self) -> tuple[list[Actor], list[Actor], list[Actor]]:
        """Those that wait, run and are over."""
        for actor in self.actors:
            actor.look()
        going_on = [actor for actor in self.actors if actor.reason is None]
        return (
            [actor for actor in going_on if not actor.host],
            [actor for actor in going_on if actor.host],
            [actor for actor in self.actors if actor.reason is not None],
        )


class RayDriver:
    """One method per order."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._folder = self._session = ""

    def connect(self, address: str, room: Needs, folder: str, **shared: Any) -> dict[str, Any]:
        """Join a cluster, or start one on this machine, in that folder, that has at least so much room."""
        self._folder = folder
        shared |= {"log_to_driver": False, "logging_level": logging.ERROR}
        if address == "local":
            shared |= {
                "num_cpus": max(os.cpu_count() or 1, math.ceil(room["CPU"])),
                "resources": {name: amount for name, amount in room.items() if name not in _OF_RAY},
                "include_dashboard": False,
                "object_store_memory": _STORE_BYTES,
                "_temp_dir": f"{folder}/r",  # which Ray opens to everybody; the one around it is ours alone
            }
        self._session = ray.init(address=address, **shared).address_info["session_dir"]
        return {"address": ray.util.get_node_ip_address(), "gcs": ray.get_runtime_context().gcs_address}

    def request(self, number: int, nodes: int, needs: Needs, bootstrap: str) -> None:
        """A new group; whether that works says its status."""
        group = self._groups[number] = Group(needs, [])
        try:
            agent: Any = ray.remote(
                num_cpus=needs["CPU"],
                num_gpus=needs.get("GPU", 0),
                memory=needs.get("memory"),
                resources={name: amount for name, amount in needs.items() if name not in _OF_RAY},
                scheduling_strategy="SPREAD",
                max_concurrency=2,  # one thread is the agent's, the other answers
                max_restarts=0,  # the head asks again, within its budget
            )(Agent)
            for _ in range(nodes):
                handle = agent.options(name=f"farstep-{os.urandom(8).hex()}").remote()
                group.actors.append(Actor(handle, handle.where.remote(), handle.run.remote(bootstrap)))
        except Exception as error:
            group.refused = f"Ray does not take actors: {_in_short(error)}"

    def status(self, group: int) -> dict[str, Any]:
        waiting, running, over = self._groups[group].look()
        parts = [refused] if (refused := self._groups[group].refused) else []
        if running:
            parts.append(f"Ray runs agents on {', '.join(sorted(actor.host for actor in running))}")
        if waiting:
            parts.append(f"{_agents(len(waiting))} for a place in Ray's cluster ({_room(self._groups[group].needs)})")
        for reason in dict.fromkeys(actor.reason for actor in over):
            parts.append(f"an agent on Ray is over: {reason}")
        return {"text": "; ".join(parts), "nodes": len(waiting) + len(running)}

    def logs(self, group: int) -> str:
        _, running, over = self._groups[group].look()
        parts = [f"{actor.host or 'an actor'}: {actor.reason}" for actor in over]
        for actor in running:
            try:
                parts.append(f"{actor.host}:\n{ray.get(actor.handle.tail.remote(), timeout=2.0)}")
            except (ray.exceptions.RayError, TimeoutError) as error:
                parts.append(f"{actor.host} says nothing: {_in_short(error)}")
        return "\n".join([*parts, f"Ray's own logs are in {Path(self._session, 'logs')} of each node."])

    def cancel(self, group: int) -> None:
        _, running, _ = self._groups[group].look()
        if running:
            ray.wait([actor.over for actor in running], num_returns=len(running), timeout=_LEAVE_S)
        for actor in self._groups[group].actors:
            ray.kill(actor.handle)

    def close(self) -> None:
        ray.shutdown()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def _agents(count: int) -> str:
    return "1 agent waits" if count == 1 else f"{count} agents wait"


def _room(needs: Needs) -> str:
    """What an actor needs and what there is."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    has = {name: sum(node.get(name, 0.0) for node in nodes) for name in needs}
    free = {name: ray.available_resources().get(name, 0.0) for name in needs}
    fits = any(all(node.get(name, 0.0) >= amount for name, amount in needs.items()) for node in nodes)
    return (
        f"{_amounts(needs)} each; the cluster has {_amounts(has)} on {len(nodes)} node{'s' * (len(nodes) != 1)}, "
        f"{_amounts(free)} free{'' if fits else '; no node is large enough'}"
    )


def _amounts(of: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in of.items())


def _in_short(error: BaseException) -> str:
    """Ray's errors go on for a page, with tracebacks of other processes in them; what was raised there comes last."""
    text = re.sub(r"\x1b\[[\d;]*m", "", f"{error}\n{error.__cause__ or ''}")
    raised = re.findall(r"^\s*[\w.]+(?:Error|Exception): .*", text, re.M)
    short = " ".join((raised[-1] if raised else text).split())[:_SHORT] or type(error).__name__
    return f"{short} on its nodes; install it there, too" if short.endswith("No module named 'farstep'") else short


def _listen(orders: queue.SimpleQueue[dict[str, Any] | None], head: int) -> None:
    """Until the head is gone, even if a fork of it still holds the pipe, and even while Ray does not come back."""
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
        orders.put(json.loads(line))
    orders.put(None)
    time.sleep(_END_S)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the head's to handle
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what Ray prints is no answer
        orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=_listen, args=(orders, int(sys.argv[1])), daemon=True).start()
        driver = RayDriver()
        while (order := orders.get()) is not None:
            answer: dict[str, Any] = {"number": (number := order.pop("number"))}
            try:
                match order.pop("order"):
                    case "ask":
                        driver.request(number, **order)  # a group has the number of the order that asked for it
                    case other:
                        answer["said"] = getattr(driver, other)(**order)
            except Exception as error:
                answer["error"] = _in_short(error)
            try:
                answers.write(json.dumps(answer) + "\n")
                answers.flush()
            except BrokenPipeError:
                break
        driver.close()
