"""The order in which an acting server acts on batches, answers them and pulls weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pytest

from farstep.acting import messages as am
from farstep.acting.mailbox import ANSWER, HELD, REQUEST, TICKET, VERSION, WAITS, MailboxLayout
from farstep.acting.serving.answers import Answers
from farstep.acting.serving.arena import Arena
from farstep.acting.serving.batch_actor import BatchActor
from farstep.acting.serving.batch_runner import BatchRunner
from farstep.acting.serving.server_clients import Client
from farstep.agents.policy import Policy
from farstep.config.inference import ServedInference
from farstep.rollout.rows import Slots
from farstep.schema import space_schema
from farstep.testing import CountingEnv
from farstep.wire.channels.doorbell import Fence
from farstep.worker.weights.weight_sync import PullTotals


class EchoAgent:
    """Returns what it observes."""

    def act(self, obs: Any) -> dict[str, Any]:
        return {"action": np.zeros(len(obs), np.int64), "seen": np.array(obs).reshape(len(obs), -1)[:, 0]}

    def get_parameters(self) -> dict[str, Any]:
        return {}


class SlowPolicy(Policy):
    """Like a policy on the GPU: returns before the outputs are there. Records what happens."""

    overlaps = True

    def __init__(self, agent: Any, log: list[str]) -> None:
        super().__init__(agent, "eager", False)
        self._log = log

    def launch(self, *arguments: Any) -> Any:
        self._log.append("start")

        def wait() -> dict[str, Any]:
            self._log.append("finish")
            return self(*arguments)

        return wait


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

    def __init__(self) -> None:
        self.log: list[str] = []
        self.actor = self._make_actor()
        self.sync = Sync(
            weights=object(), probing=None, passed=-1, divergence=None, newest=1, log=self.log, take_totals=PullTotals
        )
        self.arenas: list[Arena] = []
        self.clients = [self.make_client(worker) for worker in range(2)]
        sync: Any = self.sync
        self.runner = BatchRunner(self.arenas, sync, memoryview(bytearray(8 * 64)).cast("q"), is_local=True)
        self.runner.actor = self.actor

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
        layout = MailboxLayout([2, 2], self._obs, self._outputs, self._state, num_mailboxes=3)
        join = am.Join(worker, 0, 4 * worker, [7] * 4, [0] * 4, b"", self._obs, self._actions, [2, 2], b"")
        client.attach(layout, self.arenas, join, self.actor)
        client.doorbell = SimpleNamespace(  # type: ignore[assignment]
            ring=lambda: self.log.append("answer"), close=lambda: None
        )
        return client

    def request(self, worker: int, index: int, number: int, seen: float, ticket: int = 1, waits: bool = True) -> None:
        """Write a request, as a worker does."""
        group = self.clients[worker].groups[index]
        for name in self._obs:
            group.arrays[name][...] = seen
        group.words[TICKET], group.words[REQUEST], group.words[WAITS] = ticket, number, waits

    def answer(self, worker: int, index: int) -> tuple[int, int, set[float]]:
        """The number and version of a group's answer, and what the policy saw."""
        group = self.clients[worker].groups[index]
        return group.words[ANSWER], group.words[VERSION], set(group.arrays["seen"].tolist())


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    for client in made.clients:
        client.close()


def during_the_first_batch(served: Served, action: Callable[[], None]) -> None:
    """Run `action` once, while the policy acts on the first batch."""
    policy: Any = served.actor.policy
    launch = policy.launch

    def launch_once(*arguments: Any) -> Any:
        policy.launch = launch
        wait = launch(*arguments)
        action()
        return wait

    policy.launch = launch_once


def test_the_next_batch_starts_before_the_last_one_is_answered(served: Served) -> None:
    served.request(0, 0, 1, seen=3)
    during_the_first_batch(served, lambda: served.request(1, 0, 1, seen=5))
    served.run()
    assert served.log == ["start", "finish", "start", "answer", "finish", "answer"]
    assert served.answer(0, 0) == (1, 1, {3})
    assert served.answer(1, 0) == (1, 1, {5})


def test_without_a_next_batch_answers_do_not_wait(served: Served) -> None:
    served.request(0, 0, 1, seen=3)
    assert served.run() == 0.0
    assert served.log == ["start", "finish", "answer"]


def test_messages_are_handled_in_time_although_requests_keep_coming(served: Served) -> None:
    served.request(0, 0, 1, seen=3)
    during_the_first_batch(served, lambda: served.request(1, 0, 1, seen=5))
    served.run(until=0.0)
    assert served.log == ["start", "finish", "answer"]


def test_answers_do_not_wait_for_a_pull(served: Served) -> None:
    served.request(0, 0, 1, seen=3)

    def publish() -> None:
        served.sync.newest = 2
        served.request(1, 0, 1, seen=5)

    during_the_first_batch(served, publish)
    served.run()
    served.run()
    assert served.log == ["start", "finish", "answer", "pull", "start", "finish", "answer"]
    assert (served.answer(0, 0)[1], served.answer(1, 0)[1]) == (1, 2)


def test_a_chunk_of_one_version_keeps_it_in_overlapping_batches(served: Served) -> None:
    mailbox = served.clients[0].mailbox
    assert mailbox is not None
    mailbox.words[HELD] = 1
    served.request(0, 0, 1, seen=3)

    def publish() -> None:
        served.sync.newest = 2
        served.request(0, 1, 1, seen=5)

    during_the_first_batch(served, publish)
    served.run()
    assert "pull" not in served.log
    assert (served.answer(0, 0)[1], served.answer(0, 1)[1]) == (1, 1)


def test_a_request_that_replaces_another_one_is_acted_on(served: Served) -> None:
    served.request(0, 0, 1, seen=3)
    during_the_first_batch(served, lambda: served.request(0, 0, 2, seen=5, ticket=2))
    served.run()
    assert served.answer(0, 0) == (2, 1, {5})


def test_an_error_in_the_next_batch_does_not_affect_the_last_one(served: Served) -> None:
    served.request(0, 0, 1, seen=3)
    policy: Any = served.actor.policy
    launch = policy.launch

    def fail(*arguments: Any) -> Any:
        raise ValueError("no actions")

    def launch_once(*arguments: Any) -> Any:
        policy.launch = fail
        served.request(1, 0, 1, seen=5)
        return launch(*arguments)

    policy.launch = launch_once
    served.run()
    assert served.answer(0, 0) == (1, 1, {3})
    assert served.clients[0].failure is None
    failure = served.clients[1].failure
    assert failure is not None and "no actions" in failure.message


def test_one_batch_has_requests_of_several_arenas(served: Served) -> None:
    served.clients += [served.make_client(worker) for worker in (2, 3)]
    assert [client.mailbox_index for client in served.clients] == [0, 1, 2, 0] and len(served.arenas) == 2
    for worker in (3, 0, 2):
        served.request(worker, 1, 1, seen=worker)
    served.run()
    assert served.log == ["start", "finish", *["answer"] * 3]
    assert [served.answer(worker, 1) for worker in (0, 2, 3)] == [(1, 1, {0}), (1, 1, {2}), (1, 1, {3})]
    assert served.answer(1, 1) == (0, 0, {0})


def test_an_arena_is_removed_with_its_last_worker(served: Served) -> None:
    first, second = served.clients
    first.close()
    assert len(served.arenas) == 1
    second.close()
    assert served.arenas == []


def test_a_request_that_did_not_fit_is_older_than_the_next_ones(served: Served) -> None:
    served.runner.options = ServedInference(max_batch=2)
    for worker in range(2):
        served.request(worker, 0, 1, seen=3)
    served.run(until=0.0)
    served.request(0, 0, 2, seen=3)
    served.run(until=0.0)
    assert [served.answer(worker, 0)[0] for worker in range(2)] == [1, 1]
    served.run(until=0.0)
    assert served.answer(0, 0)[0] == 2


def test_only_workers_that_wait_are_woken(served: Served) -> None:
    served.request(0, 0, 1, seen=3)
    served.request(1, 0, 1, seen=5, waits=False)
    served.run()
    assert served.log == ["start", "finish", "answer"]
    assert [served.answer(worker, 0)[0] for worker in range(2)] == [1, 1]


def test_a_worker_that_begins_to_wait_while_its_answer_is_written_is_woken(served: Served) -> None:
    served.request(0, 0, 1, seen=3, waits=False)
    words = served.clients[0].groups[0].words
    calls: list[None] = []

    def fence() -> None:
        calls.append(None)
        if len(calls) == 2:
            words[WAITS] = 1

    answering: Any = fence
    Answers([served.arenas[0].pending(Fence())], version=1, counts_as=1).send([], 0, None, answering)
    assert served.log == ["answer"]


def test_a_request_is_refused_once_if_weights_cannot_be_loaded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(ticket: Any, actor: Any) -> None:
        raise ValueError("no weights")

    monkeypatch.setattr(served.sync, "pull_if_needed", fail)
    served.request(0, 0, 1, seen=3)
    for _ in range(2):
        served.run()
    assert served.log == ["answer"] and served.answer(0, 0)[0] == 1
    failure = served.clients[0].failure
    assert failure is not None and "no weights" in failure.message
