"""Parameters: flattened, and loaded into an agent of any kind."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from farstep.agents.parameters import ParameterLoader, ParameterSchema, leaves_of
from farstep.agents.policy import ship
from farstep.config.env import WeightsConfig
from farstep.errors import AgentError
from farstep.head.weights.parameters import ParameterStore
from farstep.rollout.weight_headers import check_digest
from farstep.worker.weights.sources import RemoteWeights, SharedWeights
from tests.agents.parameter_agents import (
    AGENTS,
    Base,
    JaxAgent,
    Module,
    NumpyAgent,
    SetterAgent,
    numbers,
    published_if_changed,
    pulled,
    store_of,
)


@pytest.mark.parametrize("make", AGENTS, ids=lambda make: make.__name__)
def test_worker_loads_the_parameters_of_the_learner(make: Callable[[], Any]) -> None:
    learner, worker = make(), make()
    for array in numbers(worker):
        if array.flags.writeable and array.shape:
            array += 1  # different from the learner's
    with store_of(learner) as store:
        assert pulled(store, worker) == 0
    for mine, theirs in zip(numbers(learner), numbers(worker), strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        np.testing.assert_array_equal(mine, theirs)


def test_set_parameters_gets_the_types_that_get_parameters_returned() -> None:
    learner, worker = SetterAgent(), SetterAgent()
    learner.parameters["w"] = torch.tensor([7.0, 8.0, 9.0])
    learner.parameters["count"] = 11
    with store_of(learner) as store:
        pulled(store, worker)
        store.publish(SetterAgent())  # the buffer gets another version; the worker's copy keeps its own
    assert torch.equal(worker.parameters["w"], learner.parameters["w"])
    assert isinstance(worker.parameters["n"], tuple) and type(worker.parameters["count"]) is int
    assert worker.parameters["count"] == 11


def test_bfloat16_parameters_are_sent_bit_for_bit() -> None:
    learner, worker = Module().to(torch.bfloat16), Module().to(torch.bfloat16)
    with store_of(learner) as store:
        pulled(store, worker)
    assert worker.net.weight.dtype == torch.bfloat16 and torch.equal(worker.net.weight, learner.net.weight)


class Layer(NamedTuple):
    weight: Any
    bias: Any


def test_a_setter_of_jax_gets_its_containers_and_bfloat16() -> None:
    learner, worker = SetterAgent(), SetterAgent()
    learner.parameters = {"layer": Layer(jnp.arange(3, dtype=jnp.bfloat16), np.float32(1.5))}
    worker.parameters = {"layer": Layer(jnp.zeros(3, jnp.bfloat16), np.float32(0))}
    with store_of(learner) as store:
        pulled(store, worker)
    layer = worker.parameters["layer"]
    assert isinstance(layer, Layer) and layer.weight.dtype == jnp.bfloat16 and type(layer.bias) is np.float32
    np.testing.assert_array_equal(layer.weight, learner.parameters["layer"].weight)
    assert layer.bias == 1.5


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "requires grad": lambda: torch.arange(3.0, requires_grad=True),
    "without dimensions": lambda: torch.tensor(2.5),
    "empty": lambda: torch.zeros(0, 3),
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "transposed bfloat16": lambda: torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(),
    "every second": lambda: torch.arange(6)[::2],
    "complex": lambda: torch.tensor([1 + 2j, 3 - 1j]),
    "float8": lambda: torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn),
    "bool": lambda: torch.tensor([True, False]),
    "of inference mode": torch.inference_mode()(lambda: torch.arange(3.0)),
}


class TensorAgent(Base):
    """Written in place."""

    def __init__(self, tensor: Any) -> None:
        self.parameters = {"first": torch.zeros(1), "tensor": tensor, "last": torch.zeros(1)}

    def get_parameters(self) -> Any:
        return self.parameters


class TensorSetterAgent(TensorAgent, SetterAgent):
    """Through a setter."""


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS.keys())
@pytest.mark.parametrize("kind", [TensorAgent, TensorSetterAgent], ids=lambda kind: kind.__name__)
def test_tensors_of_every_kind_are_loaded(kind: Callable[[Any], Any], make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    learner, worker = kind(torch.zeros_like(tensor)), kind(tensor)
    learner.parameters["last"] += 7
    with store_of(learner) as store:
        pulled(store, worker)
        assert not published_if_changed(store, learner)
    assert worker.parameters["last"] == 7
    mine, theirs = learner.parameters["tensor"], worker.parameters["tensor"]
    assert theirs.dtype == mine.dtype and theirs.tolist() == mine.tolist()
    assert (theirs is tensor) == (kind is TensorAgent)


def test_a_conjugated_view_is_resolved() -> None:
    learner, worker = TensorAgent(torch.tensor([1 + 2j]).conj()), TensorAgent(torch.zeros(1, dtype=torch.complex64))
    with store_of(learner) as store:
        pulled(store, worker)
    assert worker.parameters["tensor"].tolist() == [1 - 2j]


CONVERSIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "bfloat16": lambda tensor: tensor.bfloat16(),
    "float16": lambda tensor: tensor.half(),
    "float32": lambda tensor: tensor.float(),
    "NumPy": lambda tensor: tensor.float().numpy(),
}


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS.keys())
def test_a_module_may_give_its_tensors_in_another_type(convert: Callable[[Any], Any], own: torch.dtype) -> None:
    class Converting(Module):
        def get_parameters(self) -> Any:
            return {name: convert(value) for name, value in self.state_dict().items()}

    learner, worker = Converting().to(own), Converting().to(own)
    with torch.no_grad():
        learner.net.weight.fill_(0.3)
    with store_of(learner) as store:
        pulled(store, worker)
    assert worker.net.weight.dtype == own
    torch.testing.assert_close(worker.net.weight, learner.net.weight, rtol=1e-2, atol=1e-2)


class TiedModule(Module):
    """One tensor under two names, of which `named_parameters` gives the first only."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.net

    def get_parameters(self) -> Any:
        return {name: value.clone() for name, value in self.state_dict().items()}


def test_tied_tensors() -> None:
    learner, worker = TiedModule(), TiedModule()
    with store_of(learner) as store:
        assert "again.weight" in store.schema.names
        pulled(store, worker)
    assert worker.again.weight is worker.net.weight and torch.equal(worker.net.weight, learner.net.weight)


def test_empty_arrays_are_accepted() -> None:
    learner, worker = NumpyAgent(), NumpyAgent()
    for agent in (learner, worker):
        agent.weights["none"] = np.zeros((0, 2))
    learner.weights["w"] += 1
    with store_of(learner) as store:
        pulled(store, worker)
    np.testing.assert_array_equal(worker.weights["w"], learner.weights["w"])


UNFIT: dict[str, tuple[Callable[[], Any], str]] = {
    "meta": (lambda: torch.zeros(2, device="meta"), "no data"),
    "sparse": (lambda: torch.eye(2).to_sparse(), "to_dense"),
    "sparse bfloat16": (lambda: torch.eye(2).bfloat16().to_sparse(), "Sparse"),
    "uninitialized": (lambda: torch.nn.LazyLinear(2).weight, "uninitialized parameter"),
    "objects": (lambda: np.array([object()]), "array of object; expected plain numbers"),
    "records": (lambda: np.zeros(2, [("x", "f4"), ("y", "f8")]), "expected plain numbers"),
    "a key of JAX's": (lambda: jax.random.key(0), "PRNGKey"),
}


@pytest.mark.parametrize(("make", "words"), UNFIT.values(), ids=UNFIT.keys())
def test_parameters_without_plain_numbers_are_refused_by_name(make: Callable[[], Any], words: str) -> None:
    for refuse in (lambda agent: ParameterStore(agent, 1, 1), ParameterLoader):
        with pytest.raises(AgentError, match=f"parameter 'tensor'.*{words}") as caught:
            refuse(TensorSetterAgent(make()))
        assert type(caught.value) is AgentError


def test_meta_tensor_that_is_not_a_parameter_can_be_pickled() -> None:
    agent = Module()
    agent.shape_only = torch.zeros(2, device="meta")
    assert cloudpickle.loads(ship(agent)).shape_only.device.type == "meta"


# ---- the memory that workers read from ----


def test_worker_cannot_write_to_the_memory_of_parameters() -> None:
    with store_of(Module()) as store:
        with pytest.raises(PermissionError):
            mmap.mmap(store.memory.fd, store.memory.nbytes)
        with pytest.raises(PermissionError):
            os.pwrite(store.memory.fd, b"garbage", 0)
        assert store.publish(Module()) == 1  # the head still can


def mappings(fd: int) -> Counter[str]:
    """The permissions with which this process maps a file."""
    lines = (line.split() for line in Path("/proc/self/maps").read_text().splitlines())
    return Counter(permissions for _, permissions, _, _, inode, *_ in lines if int(inode) == os.fstat(fd).st_ino)


def test_parameters_work_on_a_kernel_without_the_future_write_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    real, future_write = fcntl.fcntl, 0x0010

    def old_kernel(fd: int, command: int, argument: Any = 0) -> Any:
        if argument == future_write:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", old_kernel)
    learner, worker = Module(), Module()
    with store_of(learner) as store:
        pulled(store, worker)
        message = store.message()
        before = mappings(store.memory.fd)
        with closing(SharedWeights(os.dup(store.memory.fd), message.nbytes, message.buffers)):
            assert mappings(store.memory.fd) - before == Counter({"r--s": 1})
    assert torch.equal(worker.net.weight, learner.net.weight)


@pytest.mark.parametrize(
    "make", [*AGENTS, lambda: Module().bfloat16()], ids=[*(m.__name__ for m in AGENTS), "bfloat16"]
)
def test_loading_from_read_only_memory_does_not_warn(make: Callable[[], Any]) -> None:
    filters = list(warnings.filters)
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as warned, store_of(make()) as store:
            warnings.simplefilter("always")
            inside = list(warnings.filters)
            pulled(store, make())
            RemoteWeights(lambda held: (0, -1, [bytes(store.payload())])).load(ParameterLoader(make()))
            assert warnings.filters == inside and not warned
    finally:
        torch.set_warn_always(False)
    assert warnings.filters == filters


READER = """
import sys
from farstep.worker.weights.sources import SharedWeights

class Loader:
    nbytes = int(sys.argv[2])
    schema = property(lambda self: self)
    def views(self, buffer, start):
        return []
    def load(self, arrays):
        print("reading", flush=True)
        sys.stdin.read()

SharedWeights(*map(int, sys.argv[1:])).load(Loader())
"""


def test_buffer_is_reused_only_when_the_worker_that_reads_it_has_ended() -> None:
    agent = NumpyAgent()
    with store_of(agent) as store:
        message, fd = store.message(), store.memory.fd
        command = [sys.executable, "-c", READER, str(fd), str(message.nbytes), str(message.buffers)]
        with subprocess.Popen(command, pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"reading\n"
            read = store.payload()
            before = bytes(read)
            for version in range(1, 9):
                agent.weights["w"] += 1
                assert store.publish(agent) == version
                assert bytes(read) == before
            reader.kill()
        for _ in range(2):  # all but the current buffer are free now, and the first one comes first
            store.publish(agent)
        assert bytes(read) != before


def test_leaves_are_named_and_aligned() -> None:
    schema = ParameterSchema.of(leaves_of(NumpyAgent().get_parameters()))
    assert schema.names == ("w", "layers.0", "layers.1")
    views = schema.views(np.zeros(schema.nbytes, np.uint8))
    offsets = [view.__array_interface__["data"][0] - views[0].__array_interface__["data"][0] for view in views]
    assert offsets == [0, 64, 128] and schema.nbytes == 192


class SortingAgent(SetterAgent):
    """Keeps its parameters by name, as `jax.tree.map` does."""

    def set_parameters(self, parameters: Any) -> None:
        self.parameters = dict(sorted(parameters.items()))


@pytest.mark.parametrize("only", [None, "[wb]"])
def test_a_setter_may_keep_parameters_in_another_order(only: str | None) -> None:
    agent = SortingAgent()
    agent.parameters = {"w": np.zeros(3), "b": np.zeros(3), "a": np.zeros(3)}
    loader = ParameterLoader(agent, WeightsConfig(only=only))
    for value in (1.0, 2.0):
        loader.load([np.full(3, value), np.full(3, -value), np.full(3, 9.0)][: len(loader.schema.names)])
        assert list(agent.parameters) == ["a", "b", "w"]
        assert agent.parameters["w"].tolist() == [value] * 3
        assert agent.parameters["b"].tolist() == [-value] * 3


# ---- agents that cannot work ----


class CopyingAgent(NumpyAgent):
    def get_parameters(self) -> Any:
        return {"w": self.weights["w"].copy()}


class FrozenAgent(NumpyAgent):
    def __init__(self) -> None:
        super().__init__()
        self.weights["w"].flags.writeable = False


@pytest.mark.parametrize("make", [JaxAgent, CopyingAgent, FrozenAgent], ids=lambda make: make.__name__)
def test_weights_that_could_not_reach_the_agent_are_refused_with_advice(make: Callable[[], Any]) -> None:
    with pytest.raises(AgentError, match=r"'w'.*Add set_parameters\(parameters\)"):
        ParameterLoader(make())


def test_a_copy_with_other_parameters_is_refused() -> None:
    one, other = np.zeros(3, np.float32), np.zeros(5, np.float32)  # 64 bytes each in the buffer
    agent = SetterAgent()
    agent.parameters = {"a": one, "b": other}
    with store_of(agent) as store:
        digest = store.message().digest
        check_digest(digest, ParameterSchema.of(leaves_of({"a": one + 1, "b": other})))
        for copy in ({"b": other, "a": one}, {"a": other, "b": one}, {"a": one, "b": other, "c": one}):
            with pytest.raises(AgentError, match="in another form or order than the learner's"):
                check_digest(digest, ParameterSchema.of(leaves_of(copy)))


@pytest.mark.parametrize(("parameters", "words"), [(None, "NoneType"), ({"net": {"w": "text"}}, "str at 'net.w'")])
def test_invalid_parameters_are_refused(parameters: Any, words: str) -> None:
    agent = SetterAgent()
    agent.parameters = parameters
    with pytest.raises(AgentError, match=words):
        ParameterStore(agent, 1, 1)


def test_module_whose_get_parameters_returns_nothing_is_refused() -> None:
    class Secretive(Module):
        def get_parameters(self) -> Any:
            return {}

    with pytest.raises(AgentError, match="Secretive has torch parameters"):
        ParameterStore(Secretive(), 1, 1)
