"""Weights that acting servers copy within the GPU: with a fake of its memory, and another process as the server."""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from farstep.agents.gpu import gpu_memory
from farstep.agents.parameters import ParameterLoader
from farstep.config.env import ALL_WEIGHTS, WeightsConfig
from farstep.errors import AgentError
from farstep.head.weights.parameters import ParameterStore
from farstep.rollout.weight_headers import GPU_LOCK, unpack_word
from farstep.worker.weights.sources import SharedWeights
from tests.agents.gpu.fake_gpu import FakeGpuMemory
from tests.agents.parameter_agents import Base, Module, NumpyAgent, SetterAgent, numbers

FORK = multiprocessing.get_context("fork")
SERVER = 3
DEADLINE_S = 30.0


class MixedAgent(torch.nn.Module, Base):
    """Has parameters of several dtypes, one of them not contiguous."""

    count: Any
    mask: Any

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
        self.lower = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.upper = torch.nn.Parameter(torch.zeros(3, 4, dtype=torch.float64).T)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("empty", torch.zeros(0))

    def get_parameters(self) -> Any:
        return self.state_dict()


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gpu_memory, "SharedGpuMemory", FakeGpuMemory)
    yield
    assert not FakeGpuMemory.allocated, "memory of the GPU was not freed"


class Server:
    """Another process that loads weights into its copy of the agent."""

    def __init__(self, store: ParameterStore, agent: Any, **fake: Any) -> None:
        store.refresh_host()  # as the head does before it sends a server the place of parameters
        self._pipe, other = FORK.Pipe()
        fd = store.memory.fd
        self._process = FORK.Process(target=_serve, args=(other, fd, store.message(), agent, fake), daemon=True)
        self._process.start()
        other.close()

    def ask(self, question: str) -> Any:
        self._pipe.send(question)
        assert self._pipe.poll(DEADLINE_S)
        return self._pipe.recv()

    def load(self) -> tuple[int, list[Any]]:
        """Load the newest version; return it and the parameters of the agent then."""
        return self.ask("load")

    def kill(self) -> None:
        self._process.kill()
        self._process.join(DEADLINE_S)
        self._process.close()
        self._pipe.close()


def _serve(pipe: Any, fd: int, message: Any, agent: Any, fake: dict[str, Any]) -> None:
    for name, value in fake.items():
        setattr(FakeGpuMemory, name, value)
    FakeGpuMemory.allocated.clear()
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("farstep").addHandler(handler)
    weights, loader = SharedWeights(fd, message.nbytes, message.buffers, message.on_gpu, SERVER), ParameterLoader(agent)
    while True:
        match pipe.recv():
            case "load":
                pipe.send((weights.load(loader)[0], numbers(agent)))
            case "newest":
                pipe.send(weights.newest())
            case "log":
                pipe.send(list(records))
            case "read":  # until the process ends
                fcntl.lockf(fd, fcntl.LOCK_SH, 1, GPU_LOCK)
                pipe.send(None)
            case "close":
                weights.close()
                pipe.send(len(FakeGpuMemory.opened))


@contextmanager
def shared(agent: Any, config: WeightsConfig = ALL_WEIGHTS) -> Iterator[ParameterStore]:
    store = ParameterStore(agent, agent_id=1, workers=1, config=config)
    store.share_gpu(agent, [SERVER])
    try:
        yield store
    finally:
        assert store.close()


@contextmanager
def serving(store: ParameterStore, agent: Any, **fake: Any) -> Iterator[Server]:
    server = Server(store, agent, **fake)
    try:
        yield server
    finally:
        server.kill()


def version_in_main_memory(store: ParameterStore) -> int:
    return unpack_word(store.memory.map.cast("q")[0])[0]


def change(agent: Any) -> None:
    with torch.no_grad():
        for tensor in agent.state_dict().values():
            tensor.copy_(~tensor if tensor.dtype == torch.bool else tensor + 1)


def assert_loaded(server: Server, version: int, agent: Any) -> None:
    assert server.ask("newest") == version
    found, loaded = server.load()
    assert found == version
    for mine, theirs in zip(numbers(agent), loaded, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_versions_after_the_first_stay_on_the_gpu() -> None:
    agent = MixedAgent()
    with shared(agent) as store, serving(store, MixedAgent()) as server:
        assert_loaded(server, 0, agent)
        for version in (1, 2, 3):
            change(agent)
            assert store.publish(agent) == version
            assert_loaded(server, version, agent)
        assert version_in_main_memory(store) == 0
        assert not server.ask("log")


def test_parameters_may_be_new_tensors() -> None:
    agent = Module()
    with shared(agent) as store, serving(store, Module()) as server:
        server.load()
        agent.net.weight = torch.nn.Parameter(torch.full((2, 3), 5.0))
        agent.scale = torch.full((4,), 7.0)[::2]
        store.publish(agent)
        assert_loaded(server, 1, agent)
        assert version_in_main_memory(store) == 0


def test_changes_are_noticed_while_versions_are_only_on_the_gpu() -> None:
    agent = MixedAgent()
    with shared(agent) as store, serving(store, MixedAgent()) as server:
        server.load()
        change(agent)
        store.publish(agent)
        assert version_in_main_memory(store) == 0
        assert not store.changed(agent)
        agent.mask.logical_not_()
        assert store.changed(agent)


def test_a_restarted_server_gets_the_newest_version_and_then_reads_from_the_gpu() -> None:
    agent = MixedAgent()
    with shared(agent) as store:
        with serving(store, MixedAgent()) as server:
            server.load()
            change(agent)
            store.publish(agent)
        assert version_in_main_memory(store) == 0
        with serving(store, MixedAgent()) as server:
            assert version_in_main_memory(store) == 1
            assert_loaded(server, 1, agent)
            change(agent)
            store.publish(agent)
            assert_loaded(server, 2, agent)
            assert version_in_main_memory(store) == 1
        change(agent)
        store.publish(agent)
        assert version_in_main_memory(store) == 3, "no server reads from the GPU"


def test_a_version_is_not_written_to_the_gpu_while_a_server_reads() -> None:
    agent = Module()
    with shared(agent) as store, serving(store, Module()) as server:
        server.load()
        server.ask("read")
        ((_, block),) = FakeGpuMemory.allocated.values()
        before = block.clone()
        change(agent)
        store.publish(agent)
        assert torch.equal(block, before)
        assert_loaded(server, 1, agent)  # from main memory


def other_gpu(block: Any) -> dict[str, Any]:
    return {"uuid": "other-gpu"}


def no_access(block: Any) -> dict[str, Any]:
    def refuse(*_: Any) -> Any:
        raise gpu_memory.UnsuitableError("cuIpcOpenMemHandle_v2 failed with CUDA error 1")

    return {"open": refuse}


def other_bits(block: Any) -> dict[str, Any]:
    block[0] ^= 1
    return {}


def agent_on_cpu(block: Any) -> dict[str, Any]:
    return {"device_type": "cuda"}


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (other_gpu, "the learner is on GPU fake-gpu, the server on other-gpu"),
        (no_access, "cuIpcOpenMemHandle_v2 failed"),
        (other_bits, "'scale' has other values on the GPU"),
        (agent_on_cpu, "'scale' is a torch.strided tensor on cpu"),
    ],
)
def test_a_server_that_cannot_trust_the_gpu_reads_main_memory_and_says_why_once(spoil: Any, reason: str) -> None:
    agent = Module()
    with shared(agent) as store:
        ((_, block),) = FakeGpuMemory.allocated.values()
        with serving(store, Module(), **spoil(block)) as server:
            for version in range(3):
                assert_loaded(server, version, agent)
                change(agent)
                store.publish(agent)
                assert version_in_main_memory(store) == version + 1
            (line,) = server.ask("log")
            assert reason in line


class SettingModule(Module):
    def set_parameters(self, parameters: Any) -> None:
        self.load_state_dict(parameters)


def test_an_agent_with_set_parameters_is_loaded_from_main_memory() -> None:
    agent = SettingModule()
    with shared(agent) as store, serving(store, SettingModule()) as server:
        for version in range(2):
            assert_loaded(server, version, agent)
            store.publish(agent)
        assert "set_parameters" in server.ask("log")[0]


@pytest.mark.parametrize(
    ("make", "config", "reason"),
    [
        (NumpyAgent, ALL_WEIGHTS, "'w' is a ndarray"),
        (SetterAgent, ALL_WEIGHTS, "'n.0' is a ndarray"),
        (Module, WeightsConfig(half=True), "option weights"),
        (Module, WeightsConfig(only="net.*"), "option weights"),
    ],
)
def test_other_agents_are_not_offered_on_the_gpu(
    make: Any, config: WeightsConfig, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "farstep"), shared(make(), config) as store:
        assert store.message().on_gpu is None
    (record,) = caplog.records
    assert reason in record.getMessage()


def test_a_version_that_is_no_longer_on_the_gpu_passes_through_main_memory(caplog: pytest.LogCaptureFixture) -> None:
    agent = Module()
    with shared(agent) as store, serving(store, Module()) as server, caplog.at_level(logging.INFO, "farstep"):
        server.load()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FakeGpuMemory, "device_type", "cuda")
            for _ in range(2):
                change(agent)
                store.publish(agent)
        assert version_in_main_memory(store) == 2
        assert_loaded(server, 2, agent)
        assert sum("passes through main memory" in record.getMessage() for record in caplog.records) == 1
        store.publish(agent)  # it is on the GPU again
        assert_loaded(server, 3, agent)
        assert version_in_main_memory(store) == 2


def test_a_version_with_nan_is_refused_and_the_last_one_stays() -> None:
    agent, published = MixedAgent(), MixedAgent()
    with shared(agent) as store, serving(store, MixedAgent()) as server:
        server.load()
        for each in (agent, published):
            change(each)
        store.publish(agent)
        with torch.no_grad():
            agent.lower[1] = float("nan")
        with pytest.raises(AgentError, match="'lower' has a NaN"):
            store.publish(agent)
        assert_loaded(server, 1, published)
        assert version_in_main_memory(store) == 0


def test_an_interrupted_version_is_published_again() -> None:
    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    agent = Module(size=200_000)  # so large that unchanged counters are trusted
    with shared(agent) as store, serving(store, Module(size=200_000)) as server:
        server.load()
        change(agent)
        store.publish(agent)
        assert not store.changed(agent)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(FakeGpuMemory, "synchronize", interrupt)
            store.publish(agent)
        assert store.changed(agent), "the copy on the GPU is gone"
        store.publish(agent)
        assert_loaded(server, 2, agent)


@pytest.mark.parametrize("end", ["close", "kill"])
def test_memory_is_freed_when_no_server_has_it_open(end: str) -> None:
    agent = Module()
    store = ParameterStore(agent, agent_id=1, workers=1)
    store.share_gpu(agent, [SERVER])
    with serving(store, Module()) as server:
        server.load()
        assert not store.close()
        assert FakeGpuMemory.allocated
        if end == "close":
            assert server.ask("close") == 0
            assert store.close()
    assert store.close()


def test_a_server_does_not_open_memory_that_is_being_freed() -> None:
    agent = Module()
    store = ParameterStore(agent, agent_id=1, workers=1)
    store.share_gpu(agent, [SERVER])
    fd = os.dup(store.memory.fd)
    with serving(store, Module()) as server:
        assert store.close()
        server.load()
        assert server.ask("close") == 0
        assert not server.ask("log")
    os.close(fd)
