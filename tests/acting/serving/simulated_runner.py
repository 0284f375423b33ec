"""A `BatchRunner` on a simulated GPU, with simulated workers whose requests the test writes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np

from farstep.acting import messages as am
from farstep.acting.mailbox import ANSWER, CONTINUES, REQUEST, TICKET, VERSION, WAITS, MailboxLayout
from farstep.acting.serving.arena import Arena
from farstep.acting.serving.batch_actor import BatchActor
from farstep.acting.serving.batch_runner import BatchRunner
from farstep.acting.serving.server_clients import Client
from farstep.agents.policy import Launched, Policy
from farstep.rollout.rows import Slots
from farstep.schema import space_schema
from farstep.testing import CountingEnv
from farstep.worker.weights.weight_sync import PullTotals


class EchoAgent:
    """Returns what it observes."""

    def act(self, obs: Any) -> dict[str, Any]:
        return {"action": np.zeros(len(obs), np.int64), "seen": np.array(obs).reshape(len(obs), -1)[:, 0]}

    def get_parameters(self) -> dict[str, Any]:
        return {}


class SlowPolicy(Policy):
    """Like a policy on the GPU: returns before the outputs are complete. Records its calls."""

    overlaps = True

    def __init__(self, agent: Any, log: list[str]) -> None:
        super().__init__(agent, "eager", False)
        self._log = log
        self.while_running: deque[Callable[[], object]] = deque()
        """What to do at each poll while a batch runs. A batch is done as soon as nothing is left."""
        self.wait_error: Exception | None = None
        """What the next wait for outputs raises."""

    def launch(self, *arguments: Any) -> Launched:
        self._log.append("start")
        copies: list[Any] = [np.array(array) if isinstance(array, np.ndarray) else array for array in arguments]

        def wait() -> dict[str, Any]:
            self._log.append("finish")
            if error := self.wait_error:
                self.wait_error = None
                raise error
            return self(*copies)

        return Launched(wait, self._is_done)

    def _is_done(self) -> bool:
        if not self.while_running:
            return True
        self.while_running.popleft()()
        return False


class Sync(SimpleNamespace):
    """A sync rule that wants one pull when `newest` is above the actor's version."""

    def needs_pull(self, ticket: Any, actor: Any) -> bool:
        return bool(self.newest > actor.version)

    def pull_if_needed(self, ticket: Any, actor: Any) -> None:
        if self.needs_pull(ticket, actor):
            self.log.append("pull")
            actor.version = self.newest


class Served:
    """A runner with two workers of two groups each, whose requests the test writes."""

    def __init__(self, group_size: int = 2) -> None:
        self._group_size = group_size
        self.log: list[str] = []
        self.actor = self._make_actor()
        self.sync = Sync(
            weights=object(), probing=None, passed=-1, divergence=None, newest=1, log=self.log, take_totals=PullTotals
        )
        self.arenas: list[Arena] = []
        self.clients = [self.make_client(worker) for worker in range(2)]
        self.words = memoryview(bytearray(8 * 64)).cast("q")
        self.runner = self.make_runner(is_local=True)

    def make_runner(self, is_local: bool, clock: Callable[[], float] = time.monotonic) -> BatchRunner:
        sync: Any = self.sync
        runner = BatchRunner(self.arenas, sync, self.words, is_local, clock)
        runner.actor = self.actor
        return runner

    @property
    def policy(self) -> Any:
        return self.actor.policy

    def run(self, until: float = float("inf")) -> float:
        return self.runner.run(until)

    def _make_actor(self) -> BatchActor:
        env = CountingEnv()
        obs, self._obs = space_schema(env.observation_space, "obs")
        self._actions = space_schema(env.action_space, "action")[1]
        actor = BatchActor(cloudpickle.dumps(EchoAgent()), obs, Slots(0, [7] * 4, [0] * 4))
        current = {name: np.zeros((4, *spec.shape), spec.dtype) for name, spec in self._obs.items()}
        self._outputs, self._state, _ = actor.dry_run(current, self._actions)
        actor.prepare(self._obs, self._outputs)
        actor.policy = SlowPolicy(EchoAgent(), self.log)
        actor.version = 1
        return actor

    def make_client(self, worker: int) -> Client:
        """Let a worker join. An arena has three mailboxes."""
        link: Any = SimpleNamespace(close=lambda: None)
        client = Client(link)
        groups = [self._group_size] * 2
        count = sum(groups)
        layout = MailboxLayout(groups, self._obs, self._outputs, self._state, num_mailboxes=3)
        join = am.Join(worker, 0, count * worker, [7] * count, [0] * count, b"", self._obs, self._actions, groups, b"")
        client.attach(layout, self.arenas, join, self.actor)
        client.doorbell = SimpleNamespace(  # type: ignore[assignment]
            ring=lambda: self.log.append("answer"), close=lambda: None
        )
        return client

    def request(
        self,
        worker: int,
        index: int,
        number: int,
        seen: float,
        ticket: int = 1,
        waits: bool = True,
        continues: bool = False,
    ) -> None:
        """Write a request, as a worker does."""
        group = self.clients[worker].groups[index]
        for name in self._obs:
            group.arrays[name][...] = seen
        group.words[TICKET], group.words[WAITS], group.words[CONTINUES] = ticket, waits, continues
        group.words[REQUEST] = number

    def answer(self, worker: int, index: int) -> tuple[int, int, set[float]]:
        """The number and version of a group's answer, and what the policy saw."""
        group = self.clients[worker].groups[index]
        return group.words[ANSWER], group.words[VERSION], set(group.arrays["seen"].tolist())
