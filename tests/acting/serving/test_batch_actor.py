"""The acting server's copy of the agent: answers that no worker used, and two batches in flight."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from farstep.acting import messages as am
from farstep.acting.mailbox import USED, MailboxLayout
from farstep.acting.serving.arena import Requests
from farstep.acting.serving.batch_actor import Batch, BatchActor, Group
from farstep.acting.serving.server_clients import Client
from farstep.agents.gpu.graph_policy import GRAPHS, GraphPolicy
from farstep.errors import SpaceError
from farstep.rollout.rows import Slots
from farstep.schema import space_schema
from farstep.testing import CountingEnv
from tests.agents.gpu.fake_graphs import FakeGraphs
from tests.cluster.served.agents import RandomAgent, RandomRecurrentAgent


@pytest.fixture(params=[RandomAgent, RandomRecurrentAgent])
def client_and_actor(request: pytest.FixtureRequest) -> Iterator[tuple[Client, BatchActor]]:
    env = CountingEnv()
    obs, obs_schema = space_schema(env.observation_space, "obs")
    _, action_schema = space_schema(env.action_space, "action")
    slots = Slots(0, [7, 7], [0, 0])
    actor = BatchActor(cloudpickle.dumps(request.param()), obs, slots)
    current = {name: np.zeros((2, *spec.shape), spec.dtype) for name, spec in obs_schema.items()}
    schema, state, _ = actor.dry_run(current, action_schema)
    actor.prepare(obs_schema, schema)
    link: Any = SimpleNamespace(close=lambda: None)
    client = Client(link)
    join = am.Join(0, 0, 0, [7, 7], [0, 0], b"", obs_schema, action_schema, [2], b"")
    client.attach(MailboxLayout([2], obs_schema, schema, state), [], join, actor)
    yield client, actor
    client.close()


def act_on(actor: BatchActor, client: Client, number: int) -> None:
    assert client.arena is not None
    one = np.ones(1, np.int64)
    batch = actor.start([Requests(client.arena, one > 0, number * one, one, one)])
    actor.finish(batch)
    batch.answer(actor.output_names)


def outputs(group: Group) -> dict[str, list[Any]]:
    arrays = group.mailbox.arrays
    return {name: arrays[name].tolist() for name in ("draw", "age") if name in arrays}


def test_an_unused_answer_is_repeated(client_and_actor: tuple[Client, BatchActor]) -> None:
    client, actor = client_and_actor
    (group,) = client.groups
    act_on(actor, client, 1)
    group.words[USED] = 1
    act_on(actor, client, 2)
    unused = outputs(group)
    act_on(actor, client, 3)
    assert outputs(group) == unused
    group.words[USED] = 3
    act_on(actor, client, 4)
    assert outputs(group) != unused


def test_a_saved_group_continues_before_its_unused_answer(client_and_actor: tuple[Client, BatchActor]) -> None:
    client, actor = client_and_actor
    (group,) = client.groups
    act_on(actor, client, 1)
    group.words[USED] = 1
    act_on(actor, client, 2)
    unused = outputs(group)
    saved = actor.save_groups([group])
    act_on(actor, client, 3)
    group.words[USED] = 3
    actor.restore_groups([group], saved)
    act_on(actor, client, 4)
    assert outputs(group) == unused


class SummingAgent(torch.nn.Module):
    """Its recurrent state is the sum of its observations in the episode."""

    def initial_state(self, n: int) -> Any:
        return torch.zeros(n, 1)

    def act(self, obs: Any, state: Any, episode_start: Any) -> dict[str, Any]:
        state = torch.where(episode_start[:, None], 0, state) + obs.reshape(len(obs), -1)[:, :1]
        return {"action": torch.zeros(len(obs), dtype=torch.int64), "total": state[:, 0] + 0, "state": state}

    def get_parameters(self) -> dict[str, Any]:
        return {}


class Summing:
    """Two workers of two groups, for which an agent sums on a fake GPU."""

    def __init__(self) -> None:
        env = CountingEnv()
        obs, self._obs = space_schema(env.observation_space, "obs")
        actions = space_schema(env.action_space, "action")[1]
        self.actor = BatchActor(cloudpickle.dumps(SummingAgent()), obs, Slots(0, [7] * 4, [0] * 4))
        graphs: Any = FakeGraphs()
        self.actor.policy = GraphPolicy(self.actor.policy.agent, None, graphs, 64)
        current = {name: np.zeros((4, *spec.shape), spec.dtype) for name, spec in self._obs.items()}
        schema, state, _ = self.actor.dry_run(current, actions)
        self.actor.prepare(self._obs, schema)
        self.clients = []
        arenas: list[Any] = []
        for worker in range(2):
            link: Any = SimpleNamespace(close=lambda: None)
            join = am.Join(worker, 0, 4 * worker, [7] * 4, [0] * 4, b"", self._obs, actions, [2, 2], b"")
            client = Client(link)
            client.attach(MailboxLayout([2, 2], self._obs, schema, state, num_mailboxes=2), arenas, join, self.actor)
            self.clients.append(client)
        (self._arena,) = arenas

    def start(self, number: int, seen: dict[int, float]) -> Batch:
        """Start a batch of the groups that are the keys of `seen`, which observe its values."""
        numbers = np.full(4, number)
        is_chosen = np.isin(np.arange(4), list(seen))
        for group, value in seen.items():
            for name in self._obs:
                self._arena.arrays[name][2 * group : 2 * group + 2] = value
        return self.actor.start([Requests(self._arena, is_chosen, numbers, numbers, numbers)])

    def finish(self, batch: Batch) -> None:
        """Finish and answer a batch, whose workers use the answers."""
        self.actor.finish(batch)
        batch.answer(self.actor.output_names)
        for requests in batch.requests:
            requests.arena.group_words[USED][requests.groups] = requests.numbers

    def totals(self) -> list[float]:
        """The last sum of each group."""
        found = self._arena.arrays["total"].reshape(4, 2)
        assert (found[:, 0] == found[:, 1]).all()
        return [float(total) for total in found[:, 0]]


@pytest.fixture
def summing() -> Iterator[Summing]:
    made = Summing()
    yield made
    assert made.actor.policy.note == GRAPHS
    for client in made.clients:
        client.close()


def test_recurrent_states_of_two_batches_in_flight_are_separate(summing: Summing) -> None:
    """The groups of a batch differ from step to step, and so do the sizes of batches."""
    totals, rng = np.zeros(4), np.random.default_rng(0)
    running: tuple[Batch, list[int]] | None = None
    for number in range(1, 40):
        groups = [group for group in range(4) if running is None or group not in running[1]]
        groups = sorted(rng.permutation(groups)[: rng.integers(1, 3)].tolist())
        seen = {group: float(rng.integers(10)) for group in groups}
        batch = summing.start(number, seen)
        if running is not None:
            summing.finish(running[0])
            found = summing.totals()
            assert [found[group] for group in running[1]] == totals[running[1]].tolist()
        for group, value in seen.items():
            totals[group] += value
        running = (batch, groups)
    assert running is not None
    summing.finish(running[0])
    assert summing.totals() == totals.tolist()


def test_a_request_that_replaces_one_in_flight_continues_from_the_same_state(summing: Summing) -> None:
    summing.finish(summing.start(1, {0: 3.0}))
    given_up, replacing = summing.start(2, {0: 5.0}), summing.start(3, {0: 7.0})
    summing.actor.finish(given_up)
    summing.finish(replacing)
    assert summing.totals()[0] == 10.0
    summing.finish(summing.start(4, {0: 1.0}))
    assert summing.totals()[0] == 11.0


def test_an_error_names_the_slots_of_its_own_batch(summing: Summing) -> None:
    first, second = summing.start(1, {1: np.nan}), summing.start(1, {3: 2.0})

    def fail() -> Any:
        raise ValueError("no result")

    first.launched = dataclasses.replace(first.launched, wait=fail)
    with pytest.raises(SpaceError, match="slots 2, 3 have NaN"):
        summing.actor.finish(first)
    summing.finish(second)
    assert summing.totals()[3] == 2.0
