"""The base of an agent: tensors that never change, sent once and named by their content hash."""

from __future__ import annotations

import copy
import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import farstep
from farstep.agents.base_weights import base_hash, base_weights, received_base, unpickle_agent
from farstep.agents.policy import ship
from farstep.errors import WireError
from farstep.wire.channels.memory import write_immutable
from tests.cluster.checks import cluster, in_process


class Frozen(nn.Module):
    """A frozen layer, twice in the module, and a trained bias."""

    def __init__(self, value: float = 1.0, dtype: Any = torch.float32) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, bias=False).requires_grad_(False)
        nn.init.constant_(self.layer.weight, value)
        self.layer.to(dtype)
        self.same_layer = self.layer
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(2))

    def base_parameters(self) -> dict[str, Any]:
        return {"layer.weight": self.layer.weight, "scale": self.scale}

    def get_parameters(self) -> dict[str, Any]:
        return {"bias": self.bias}

    def act(self, obs: Any) -> dict[str, Any]:
        value = self.layer.weight.float().sum() * self.scale.float() + self.bias.sum()
        return {"action": torch.zeros(len(obs), dtype=torch.int64), "value": value.expand(len(obs))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unpickled_agents_share_one_base(dtype: Any) -> None:
    agent = Frozen(value=3.0, dtype=dtype)
    base = base_weights(agent)
    assert base is not None
    payload = ship(agent, base)
    first, second = unpickle_agent(payload, base.payload), unpickle_agent(payload, base.payload)
    for loaded in (first, second):
        torch.testing.assert_close(loaded.state_dict(), agent.state_dict(), rtol=0, atol=0)
        assert loaded.layer is loaded.same_layer and not loaded.layer.weight.requires_grad and loaded.bias.requires_grad
    assert first.layer.weight.data_ptr() == second.layer.weight.data_ptr() != agent.layer.weight.data_ptr()
    assert first.bias.data_ptr() != second.bias.data_ptr()


def test_hash_covers_values_names_and_dtypes() -> None:
    class Renamed(Frozen):
        def base_parameters(self) -> dict[str, Any]:
            return {f"other.{name}": tensor for name, tensor in super().base_parameters().items()}

    agents = [Frozen(), Frozen(value=1.5), Frozen(dtype=torch.bfloat16), Renamed()]
    assert len({base_hash(agent) for agent in agents}) == 4
    same = Frozen()
    same.bias.data.fill_(7)  # not a part of the base
    found = base_weights(same)
    assert found is not None and found.content_hash == base_hash(same) == base_hash(Frozen())
    assert base_hash(nn.Linear(2, 2)) == ""


def test_parameters_that_are_views_of_one_vector_are_pickled_without_it() -> None:
    agent = nn.Linear(1, 1)
    agent.weight.data = torch.zeros(1_000_000)[:1].view(1, 1)
    assert len(ship(agent)) < 10_000


def test_a_base_in_shared_memory_is_private_to_each_worker_that_writes_to_it() -> None:
    fds = [write_immutable([bytes(range(200))])]
    fds.append(os.dup(fds[0]))
    first, second = (received_base(200, [], [fd]) for fd in fds)
    first[0] = 99
    assert first[0] == 99 and bytes(second) == bytes(range(200))
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    with pytest.raises(WireError, match="200 bytes; its frame table says 300"):
        received_base(300, [], [write_immutable([bytes(200)])])
    assert bytes(received_base(0, [b"ab"], [])) == b"ab"


def test_base_is_sent_again_only_when_it_changes() -> None:
    def values(agent: Any) -> tuple[float, int]:
        batch = env.collect(agent, steps=2)
        assert len(np.unique(batch["value"])) == 1
        return float(batch["value"][0, 0]), env.stats()["bytes"]["base_sent"]

    with cluster(config=in_process(2)) as env:
        agent = Frozen()
        first, sent = values(agent)
        assert first == 12.0 and 7 * 4 < sent < 600
        agent.bias.data.fill_(1)
        assert values(agent) == (14.0, sent)
        other = Frozen()
        other.bias.data.fill_(2)
        assert values(other) == (16.0, sent)  # another agent on the same base
        assert values(Frozen(value=2.0)) == (24.0, 2 * sent)
        assert values(Frozen()) == (12.0, 3 * sent)


def test_a_base_that_changes_is_refused_and_a_moved_one_is_not() -> None:
    with cluster(config=in_process(1)) as env:
        agent = Frozen()
        env.collect(agent, steps=2)
        agent.layer.weight.data = agent.layer.weight.data.clone()  # as `agent.to(device)` does
        env.collect(agent, steps=2)
        with torch.no_grad():
            agent.layer.weight.add_(1)
        for call in (lambda: env.collect(agent, steps=2), lambda: env.publish(agent)):
            with pytest.raises(farstep.AgentError, match="base parameters of Frozen have changed"):
                call()
        value = env.collect(copy.deepcopy(agent), steps=2)["value"]
        assert (value == 2 * 6 * 2).all()


def test_base_parameters_must_be_tensors_by_name() -> None:
    class Listed(Frozen):
        def base_parameters(self) -> Any:
            return [self.layer.weight]

    with cluster(config=in_process(1)) as env, pytest.raises(farstep.AgentError, match="expected a mapping of names"):
        env.collect(Listed(), steps=2)
