"""The acting server's copy of the agent: what it does with answers that no worker used."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pytest

from farstep.acting import messages as am
from farstep.acting.mailbox import USED, MailboxLayout
from farstep.acting.serving.arena import Requests
from farstep.acting.serving.batch_actor import BatchActor, Group
from farstep.acting.serving.server_clients import Client
from farstep.rollout.rows import Slots
from farstep.schema import space_schema
from farstep.testing import CountingEnv
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
