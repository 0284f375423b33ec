"""Versions of parameters: published, refused, and noticed when they changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from farstep.errors import AgentError
from farstep.head.weights.parameters import ParameterStore
from tests.agents.parameter_agents import (
    IteratorModule,
    JaxSetterAgent,
    ListModule,
    Module,
    NumpyAgent,
    SetterAgent,
    numbers,
    published_if_changed,
    pulled,
    store_of,
)

LARGE = 600_000  # elements: more bytes than are compared when counters say "unchanged"


# ---- versions ----


def test_the_first_version_is_zero_and_publish_always_makes_one() -> None:
    agent = Module()
    with store_of(agent) as store:
        assert store.version == 0
        assert [store.publish(agent), store.publish(agent)] == [1, 2]


def poison(agent: SetterAgent) -> None:
    agent.parameters["w"][1] = float("nan")


def poison_bits(agent: SetterAgent) -> None:
    agent.parameters["half"][0] = float("nan")


def poison_jax(agent: SetterAgent) -> None:
    agent.parameters["jax"] = jnp.full(2, jnp.nan, jnp.bfloat16)


def retype(agent: SetterAgent) -> None:
    agent.parameters["last"] = torch.full((1,), 3, dtype=torch.float64)


def empty(agent: SetterAgent) -> None:
    agent.parameters["last"] = torch.zeros(1, device="meta")


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
        (poison_bits, "'half' has a NaN"),
        (poison_jax, "'jax' has a NaN"),
        (retype, "'last' changed its dtype from float32 to float64"),
        (empty, "'last'.*no data"),
        (lose, r"missing \['w'\]"),
        (add, r"new \['extra'\]"),
        (reshape, r"'w' changed its shape from \[3\] to \[4\]"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("method", [ParameterStore.publish, ParameterStore.check, published_if_changed])
def test_a_bad_version_is_refused_by_name_and_the_old_one_stays(
    spoil: Callable[[SetterAgent], None], words: str, method: Callable[[ParameterStore, Any], Any]
) -> None:
    def agent() -> SetterAgent:
        made = SetterAgent()
        made.parameters |= {"half": torch.ones(2).bfloat16(), "jax": jnp.ones(2, jnp.bfloat16), "last": torch.ones(1)}
        return made

    learner, worker = agent(), agent()
    worker.parameters["w"] = torch.zeros(3)
    with store_of(learner) as store:
        learner.parameters["w"] += 1  # written before the bad one is met
        spoil(learner)
        for _ in range(5):  # as often as there are buffers, and once more
            with pytest.raises(AgentError, match=words):
                method(store, learner)
        assert store.version == 0
        assert pulled(store, worker) == 0
        for mine, theirs in zip(numbers(agent()), numbers(worker), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        assert store.publish(agent()) == 1  # and the store is still usable


@pytest.mark.parametrize("method", [ParameterStore.publish, published_if_changed])
def test_parameters_may_come_in_another_order(method: Callable[[ParameterStore, Any], Any]) -> None:
    learner, worker = SetterAgent(), SetterAgent()
    with store_of(learner) as store:
        learner.parameters["w"] += 1
        learner.parameters = dict(reversed(learner.parameters.items()))
        assert method(store, learner)
        assert not store.changed(learner)
        assert pulled(store, worker) == 1
    assert list(worker.parameters) != list(learner.parameters)
    learner.parameters = {name: learner.parameters[name] for name in worker.parameters}
    for mine, theirs in zip(numbers(learner), numbers(worker), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_first_version_that_is_refused_leaves_none() -> None:
    agent = SetterAgent()
    poison(agent)
    with pytest.raises(AgentError, match="'w' has a NaN; it was not published"):
        ParameterStore(agent, 1, 1)
    with pytest.raises(AgentError, match="'w' has a NaN; version 6 stays in force"):
        ParameterStore(agent, 2, 1, first_version=7)


def raising() -> Any:
    raise ZeroDivisionError("deliberate")


def raising_late() -> Any:
    yield np.zeros(1)
    raise ZeroDivisionError("deliberate")


@pytest.mark.parametrize("get_parameters", [raising, raising_late])
def test_get_parameters_that_raises_is_named(get_parameters: Callable[[], Any]) -> None:
    agent = NumpyAgent()
    said = r"get_parameters\(\) of NumpyAgent raised ZeroDivisionError: deliberate"
    with store_of(agent) as store:
        agent.get_parameters = get_parameters  # type: ignore[method-assign]
        for call in (store.publish, store.changed, store.check, lambda agent: ParameterStore(agent, 1, 1)):
            with pytest.raises(AgentError, match=said) as caught:
                call(agent)
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert store.version == 0


@pytest.mark.parametrize("value", [float("inf"), -float("inf")])
def test_infinite_parameters_are_accepted(value: float) -> None:
    learner: Any = Module()
    worker: Any = Module()
    learner.scale[0] = value  # as in a mask of attention
    with store_of(learner) as store:
        pulled(store, worker)
        assert not published_if_changed(store, learner)
        learner.scale[1] = value
        assert published_if_changed(store, learner)
        pulled(store, worker)
    assert worker.scale.tolist() == [value, value]


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
@pytest.mark.slow
def test_a_changed_torch_module_is_noticed_once(make: Callable[[], Module], change: Callable[[Module], None]) -> None:
    agent, worker = make(), make()
    with store_of(agent) as store:
        assert not published_if_changed(store, agent)
        change(agent)
        assert published_if_changed(store, agent) and store.version == 1
        assert not published_if_changed(store, agent)
        pulled(store, worker)
    assert torch.equal(worker.net.weight, agent.net.weight)


class CloningModule(Module):
    """A new copy each time, likely at the address where the last one was."""

    def get_parameters(self) -> Any:
        return {name: value.clone() for name, value in self.state_dict().items()}


class DataModule(Module):
    """Returns aliases with separate version counters."""

    def get_parameters(self) -> Any:
        return [parameter.data for parameter in self.parameters()]


@pytest.mark.parametrize("make", [Module, ListModule, CloningModule, DataModule], ids=lambda make: make.__name__)
def test_a_large_module_is_noticed_too(make: Callable[[int], Module]) -> None:
    agent = make(LARGE)
    with store_of(agent) as store:
        assert not published_if_changed(store, agent)
        optimizer_step(agent)
        assert published_if_changed(store, agent)
        assert not published_if_changed(store, agent)


def test_tensors_of_inference_mode_have_no_counter() -> None:
    agent = SetterAgent()
    with torch.inference_mode():
        agent.parameters = {"w": torch.arange(3.0)}
    with store_of(agent) as store:
        assert not published_if_changed(store, agent)
        with torch.inference_mode():
            agent.parameters["w"] += 1
        assert published_if_changed(store, agent)


def test_numpy_is_noticed_in_place() -> None:
    agent = NumpyAgent()
    with store_of(agent) as store:
        assert not published_if_changed(store, agent)
        agent.weights["w"][0, 0] = 42.0
        assert published_if_changed(store, agent)
        assert not published_if_changed(store, agent)


@pytest.mark.parametrize("size", [3, LARGE], ids=["small", "large"])
def test_jax_is_noticed_by_a_new_array(size: int) -> None:
    agent = JaxSetterAgent(size)
    with store_of(agent) as store:
        assert not published_if_changed(store, agent)
        agent.w = agent.w + 0.0  # another array, the same numbers: no new version
        assert not published_if_changed(store, agent)
        agent.w = agent.w.at[1].set(5.0)
        assert published_if_changed(store, agent)


class TensorWithCallback(torch.Tensor):
    """Calls a function whenever its values are read."""

    on_read: Callable[[], object]

    def numpy(self, *, force: bool = False) -> Any:
        self.on_read()
        return super().numpy(force=force)


@pytest.mark.parametrize("read", ["publish", "changed"])
def test_a_change_while_parameters_are_read_is_noticed_later(read: str) -> None:
    """Another thread trains on: its changes after the values were read still count."""
    agent: Any = SetterAgent()
    first, last = torch.zeros(LARGE).add_(1), torch.zeros(1).add_(1).as_subclass(TensorWithCallback)
    agent.parameters, last.on_read = {"first": first, "last": last}, lambda: None
    with store_of(agent) as store:
        first.add_(0)  # its counter moves, so that contents are compared
        last.on_read = lambda: first.add_(1)
        getattr(store, read)(agent)
        last.on_read = lambda: None
        assert store.changed(agent)
