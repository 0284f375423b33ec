"""Parameters: flattened, published, noticed, and loaded into an agent of any kind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from farstep.agents.parameters import ParameterLoader, ParameterSchema, leaves_of
from farstep.errors import AgentError
from farstep.head.parameters import ParameterStore
from farstep.worker.weights import SharedWeights

LARGE = 600_000  # elements: more bytes than are compared when counters say "unchanged"


class Base:
    def act(self, obs: Any) -> Any:
        return obs


class Module(torch.nn.Module, Base):
    """By name, buffers included."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.net = torch.nn.Linear(size, 2)
        self.register_buffer("scale", torch.ones(2))

    def get_parameters(self) -> Any:
        return self.state_dict()


class ListModule(Module):
    def get_parameters(self) -> Any:
        return list(self.parameters())


class IteratorModule(Module):
    def get_parameters(self) -> Any:
        return self.parameters()


class NumpyAgent(Base):
    """Written in place."""

    def __init__(self) -> None:
        self.weights = {"w": np.arange(6.0).reshape(2, 3), "layers": [np.zeros(2, np.float32), np.ones((), np.int64)]}

    def get_parameters(self) -> Any:
        return self.weights


class SetterAgent(Base):
    """Gets what `get_parameters` returns, in the same types."""

    def __init__(self) -> None:
        self.parameters = {"w": torch.arange(3.0), "n": (np.arange(2), 1.5), "count": 3}

    def get_parameters(self) -> Any:
        return self.parameters

    def set_parameters(self, parameters: Any) -> None:
        self.parameters = parameters


class JaxAgent(Base):
    def __init__(self, size: int = 3) -> None:
        self.w = jnp.arange(float(size))

    def get_parameters(self) -> Any:
        return {"w": self.w}


class JaxSetterAgent(JaxAgent):
    def set_parameters(self, parameters: Any) -> None:
        self.w = jnp.asarray(parameters["w"])


@contextmanager
def store_of(agent: Any) -> Iterator[ParameterStore]:
    with closing(ParameterStore(agent, agent_id=1, workers=2)) as store:
        yield store


def pulled(store: ParameterStore, agent: Any) -> int:
    """What a worker of this host does: load the newest version into its copy of the agent."""
    message = store.message()
    with closing(SharedWeights(os.dup(store.memory.fd), message.nbytes, message.buffers)) as weights:
        assert weights.newest() == store.version
        return weights.load(ParameterLoader(agent))


def numbers(agent: Any) -> list[Any]:
    return [
        np.asarray(leaf.detach() if torch.is_tensor(leaf) else leaf) for _, leaf in leaves_of(agent.get_parameters())
    ]


AGENTS: list[Callable[[], Any]] = [Module, ListModule, IteratorModule, NumpyAgent, SetterAgent, JaxSetterAgent]


@pytest.mark.parametrize("make", AGENTS, ids=lambda make: make.__name__)
def test_a_workers_copy_gets_the_learners_parameters(make: Callable[[], Any]) -> None:
    learner, worker = make(), make()
    for array in numbers(worker):
        if array.flags.writeable and array.shape:
            array += 1  # different from the learner's
    with store_of(learner) as store:
        assert pulled(store, worker) == 0
    for mine, theirs in zip(numbers(learner), numbers(worker), strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        np.testing.assert_array_equal(mine, theirs)


def test_a_setter_gets_the_types_it_gave() -> None:
    learner, worker = SetterAgent(), SetterAgent()
    learner.parameters["w"] = torch.tensor([7.0, 8.0, 9.0])
    learner.parameters["count"] = 11
    with store_of(learner) as store:
        pulled(store, worker)
        store.publish(SetterAgent())  # the buffer goes on to other versions; the worker's copy does not
    assert torch.equal(worker.parameters["w"], learner.parameters["w"])
    assert isinstance(worker.parameters["n"], tuple) and type(worker.parameters["count"]) is int
    assert worker.parameters["count"] == 11


def test_bfloat16_travels_as_its_bits() -> None:
    learner, worker = Module().to(torch.bfloat16), Module().to(torch.bfloat16)
    with store_of(learner) as store:
        pulled(store, worker)
    assert worker.net.weight.dtype == torch.bfloat16 and torch.equal(worker.net.weight, learner.net.weight)


def test_leaves_are_named_and_aligned() -> None:
    schema = ParameterSchema.of(leaves_of(NumpyAgent().get_parameters()))
    assert schema.names == ("w", "layers.0", "layers.1")
    views = schema.views(np.zeros(schema.nbytes, np.uint8))
    offsets = [view.__array_interface__["data"][0] - views[0].__array_interface__["data"][0] for view in views]
    assert offsets == [0, 64, 128] and schema.nbytes == 192


# ---- agents that cannot work ----


class CopyingAgent(NumpyAgent):
    def get_parameters(self) -> Any:
        return {"w": self.weights["w"].copy()}  # type: ignore[attr-defined]


class FrozenAgent(NumpyAgent):
    def __init__(self) -> None:
        super().__init__()
        self.weights["w"].flags.writeable = False  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [JaxAgent, CopyingAgent, FrozenAgent], ids=lambda make: make.__name__)
def test_weights_that_could_not_reach_the_agent_are_refused_with_advice(make: Callable[[], Any]) -> None:
    with pytest.raises(AgentError, match=r"'w'.*Add set_parameters\(parameters\)"):
        ParameterLoader(make())


@pytest.mark.parametrize(("parameters", "words"), [({}, "nothing"), ({"net": {"w": "text"}}, "str at 'net.w'")])
def test_what_are_no_parameters_is_refused(parameters: Any, words: str) -> None:
    agent = SetterAgent()
    agent.parameters = parameters
    with pytest.raises(AgentError, match=words):
        ParameterStore(agent, 1, 1)


# ---- versions ----


def test_the_first_version_is_zero_and_publish_always_makes_one() -> None:
    agent = Module()
    with store_of(agent) as store:
        assert store.version == 0
        assert [store.publish(agent), store.publish(agent)] == [1, 2]


def poison(agent: SetterAgent) -> None:
    agent.parameters["w"][1] = float("nan")


def overflow(agent: SetterAgent) -> None:
    agent.parameters["w"][1] = float("inf")


def lose(agent: SetterAgent) -> None:
    del agent.parameters["w"]


def add(agent: SetterAgent) -> None:
    agent.parameters["extra"] = torch.zeros(1)


def reshape(agent: SetterAgent) -> None:
    agent.parameters["w"] = torch.zeros(4)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (poison, "'w' has a NaN"),
        (overflow, "'w' has a NaN or an infinity"),
        (lose, r"missing \['w'\]"),
        (add, r"new \['extra'\]"),
        (reshape, r"'w' changed its shape from \[3\] to \[4\]"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("method", ["publish", "publish_if_changed"])
def test_a_bad_version_is_refused_by_name_and_the_old_one_stays(
    spoil: Callable[[SetterAgent], None], words: str, method: str
) -> None:
    learner, worker = SetterAgent(), SetterAgent()
    worker.parameters["w"] = torch.zeros(3)
    with store_of(learner) as store:
        spoil(learner)
        for _ in range(5):  # as often as there are buffers, and once more
            with pytest.raises(AgentError, match=words):
                getattr(store, method)(learner)
        assert store.version == 0
        assert pulled(store, worker) == 0
        assert store.publish(SetterAgent()) == 1  # and the store goes on
    assert torch.equal(worker.parameters["w"], torch.arange(3.0))


# ---- noticing changes ----


def optimizer_step(agent: Module) -> None:
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.1)
    agent.net(torch.ones(1, agent.net.in_features)).sum().backward()
    optimizer.step()


def data_write(agent: Module) -> None:
    agent.net.weight.data[0, 0] += 1.0


def new_state(agent: Module) -> None:
    agent.load_state_dict({name: value + 1 for name, value in agent.state_dict().items()})


def new_tensor(agent: Module) -> None:
    agent.net.weight = torch.nn.Parameter(agent.net.weight.detach() + 1)


@pytest.mark.parametrize("change", [optimizer_step, data_write, new_state, new_tensor], ids=lambda f: f.__name__)
@pytest.mark.parametrize("make", [Module, ListModule, IteratorModule], ids=lambda make: make.__name__)
def test_a_changed_torch_module_is_noticed_once(make: Callable[[], Module], change: Callable[[Module], None]) -> None:
    agent, worker = make(), make()
    with store_of(agent) as store:
        assert not store.publish_if_changed(agent)
        change(agent)
        assert store.publish_if_changed(agent) and store.version == 1
        assert not store.publish_if_changed(agent)
        pulled(store, worker)
    assert torch.equal(worker.net.weight, agent.net.weight)


class CloningModule(Module):
    """A new copy each time, likely at the address where the last one was."""

    def get_parameters(self) -> Any:
        return {name: value.clone() for name, value in self.state_dict().items()}


class DataModule(Module):
    """Aliases whose version counters are their own."""

    def get_parameters(self) -> Any:
        return [parameter.data for parameter in self.parameters()]


@pytest.mark.parametrize("make", [Module, ListModule, CloningModule, DataModule], ids=lambda make: make.__name__)
def test_a_large_module_is_noticed_too(make: Callable[[int], Module]) -> None:
    agent = make(LARGE)
    with store_of(agent) as store:
        assert not store.publish_if_changed(agent)
        optimizer_step(agent)
        assert store.publish_if_changed(agent)
        assert not store.publish_if_changed(agent)


def test_tensors_of_inference_mode_have_no_counter() -> None:
    agent = SetterAgent()
    with torch.inference_mode():
        agent.parameters = {"w": torch.arange(3.0)}
    with store_of(agent) as store:
        assert not store.publish_if_changed(agent)
        with torch.inference_mode():
            agent.parameters["w"] += 1
        assert store.publish_if_changed(agent)


def test_numpy_is_noticed_in_place() -> None:
    agent = NumpyAgent()
    with store_of(agent) as store:
        assert not store.publish_if_changed(agent)
        agent.weights["w"][0, 0] = 42.0  # type: ignore[call-overload]
        assert store.publish_if_changed(agent)
        assert not store.publish_if_changed(agent)


@pytest.mark.parametrize("size", [3, LARGE], ids=["small", "large"])
def test_jax_is_noticed_by_a_new_array(size: int) -> None:
    agent = JaxSetterAgent(size)
    with store_of(agent) as store:
        assert not store.publish_if_changed(agent)
        agent.w = agent.w + 0.0  # another array, the same numbers: no new version
        assert not store.publish_if_changed(agent)
        agent.w = agent.w.at[1].set(5.0)
        assert store.publish_if_changed(agent)
