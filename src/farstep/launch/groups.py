"""Nodes that were asked of an engine, group by group: how they stand, and asking again for those that are over."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable

from farstep.errors import LaunchError
from farstep.launch.engine import Engine, Group, Standing
from farstep.launch_config import EngineConfig

log = logging.getLogger("farstep")
_LOOK_S = 2.0
_MOST_PAUSE_S = 60.0
"""Between asking for nodes and asking again for those that did not come."""


class Watched:
    """A group, asked now and then how it is by a thread: engines take their time to answer."""

    def __init__(self, group: Group, nodes: int) -> None:
        self.group = group
        self.standing = Standing("asked for", nodes)
        self.served = False
        """Whether an agent of it ever came."""
        self.lost = 0
        """Nodes of it that were lost, and have not come back."""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="farstep-engine")
        self._thread.start()

    @property
    def expected(self) -> int:
        """Nodes of it that are there, or may come without being asked for again."""
        return max(0, self.standing.nodes - self.lost)

    def welcomed(self) -> None:
        """An agent of it came, perhaps again: SLURM starts a job that lost its nodes once more."""
        self.served, self.lost = True, max(0, self.lost - 1)

    def _watch(self) -> None:
        while self.standing.nodes:
            try:
                self.standing = self.group.standing()
            except Exception as error:  # an engine that cannot be asked may still have nodes for us
                self.standing = Standing(f"the engine does not answer: {error}", self.standing.nodes)
            if self._end.wait(_LOOK_S):
                return

    def end(self) -> None:
        self._end.set()
        self.group.cancel()


class Groups:
    """All groups of a run, numbered in the order in which they were asked for."""

    def __init__(self, engine: Engine, config: EngineConfig, bootstrap: Callable[[int], bytes]) -> None:
        """`bootstrap` makes what agents of the group of that number are started with."""
        self._engine, self._config, self._bootstrap = engine, config, bootstrap
        self._asked: list[Watched] = []
        self.start_over()

    def start_over(self) -> None:
        """Whatever failed until now is not held against nodes that are asked for from now on."""
        self._retries, self._retry_at = 0, 0.0

    def __len__(self) -> int:
        return len(self._asked)

    def __getitem__(self, number: int) -> Watched:
        return self._asked[number]

    def ask(self, nodes: int) -> None:
        """Ask for a group of so many nodes."""
        group = self._engine.ask(nodes, self._bootstrap(len(self._asked)))
        self._asked.append(Watched(group, nodes))

    def ask_again(self, wanted: int, expected: int, now: float) -> None:
        """Nodes that are over are asked for again, unless none of their group ever came: then something is wrong."""
        missing = wanted - expected
        if not self._asked or missing <= 0:
            return
        too_few = expected < self._config.fewest_nodes
        given_up = math.isinf(self._retry_at)
        if now < self._retry_at and not (given_up and too_few):
            return
        over = [watched for watched in self._asked if not watched.standing.nodes]
        last = (over or self._asked)[-1]
        self._retry_at = now + min(_MOST_PAUSE_S, 2.0**self._retries)
        self._retries += 1
        out_of_budget = self._retries > self._config.restart_budget
        if too_few and (out_of_budget or not last.served):
            logs = last.group.logs()
            raise LaunchError(f"{last.standing.text}, and {missing} nodes are missing.\n{logs}".rstrip())
        if out_of_budget:
            log.warning("%s; going on with %d nodes", last.standing.text, expected)
            self._retry_at = math.inf
            return
        log.warning("%s; asking for %d nodes again", last.standing.text, missing)
        try:
            self.ask(missing)
        except LaunchError as error:  # an engine that was there may be there again soon
            log.warning("%s Going on with %d nodes for now.", error, expected)

    def expected(self) -> int:
        """Nodes of all of them that are there, or may come without being asked for again."""
        return sum(watched.expected for watched in self._asked)

    def standing(self) -> str:
        """What the engine says about those that are not over."""
        return "; ".join(watched.standing.text for watched in self._asked if watched.standing.nodes)

    def logs(self) -> str:
        """Where what nodes said is written, and the end of it."""
        return "\n".join(text for watched in self._asked if (text := watched.group.logs()))

    def end(self) -> None:
        for watched in self._asked:
            watched.end()
