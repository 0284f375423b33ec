"""Weights that acting servers copy within the GPU of the learner: with a fake of its memory, and with a GPU."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import farstep
from farstep.agents.gpu import gpu_memory
from farstep.head import collector
from farstep.head.weights.publisher import Publisher
from farstep.sync import AAPS
from tests.agents.gpu import fake_gpu
from tests.cluster.checks import assert_balanced, assert_sound, cluster, eventually, within

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("torch_in_workers")]  # real processes
if torch.cuda.is_available():
    torch.zeros(1, device="cuda")  # CUDA keeps descriptors open, which no test has to close
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
USED = "acting servers copy weights within GPU"


class NumberAgent(torch.nn.Module):
    """Returns its weights, which are all the same number, with every row."""

    count: Any

    def __init__(self, fakes_gpu: bool = False) -> None:
        super().__init__()
        self._head = os.getpid() if fakes_gpu else -1
        self.number = torch.nn.Parameter(torch.zeros(700, 1000))  # 2.8 MB: more than a block of GPU memory
        self.lower = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._head not in (-1, os.getpid()):
            fake_gpu.install()  # in the server, before it opens the memory

    def act(self, obs: Any) -> dict[str, Any]:
        rows = 0 * obs.sum(-1)
        numbers = {
            "first": self.number[0, 0] + rows,
            "last": self.number[-1, -1] + rows,
            "lower": self.lower[-1] + rows,
        }
        logits = torch.stack([rows, rows + 0.1 * self.number[0, 0]], -1)
        return {
            "action": torch.zeros_like(rows, dtype=torch.int64),
            "count": self.count + rows,
            "logits": logits,
        } | numbers

    def get_parameters(self) -> dict[str, Any]:
        return self.state_dict()

    def set(self, number: int) -> None:
        with torch.no_grad():
            for tensor in (self.number, self.lower, self.count):
                tensor.fill_(number)


def _publisher_for_gpu(*args: Any) -> Publisher:
    server, env_config, rule, counters, warnings, cancel_session, _ = args
    return Publisher(server, env_config, rule, counters, warnings, cancel_session, serves_on_gpu=True)


class Gpu:
    """A fake GPU or a real one, and the blocks that the head has allocated there."""

    def __init__(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kind = kind
        self.blocks: set[int] = set()
        if kind == "fake":
            monkeypatch.setattr(gpu_memory, "SharedGpuMemory", fake_gpu.FakeGpuMemory)
            monkeypatch.setattr(collector, "Publisher", _publisher_for_gpu)
        memory = gpu_memory.SharedGpuMemory
        allocate, free = memory.allocate, memory.free

        def counted_allocate(memory: Any, nbytes: int) -> Any:
            block, handle = allocate(memory, nbytes)
            self.blocks.add(block.data_ptr())
            return block, handle

        def counted_free(memory: Any, block: Any) -> None:
            free(memory, block)
            self.blocks.remove(block.data_ptr())

        monkeypatch.setattr(memory, "allocate", counted_allocate)
        monkeypatch.setattr(memory, "free", counted_free)

    def agent(self) -> NumberAgent:
        return NumberAgent(fakes_gpu=True) if self.kind == "fake" else NumberAgent().to("cuda")

    def served(self, workers: int = 2, **options: Any) -> farstep.ClusterEnv:
        return cluster(
            envs=4, workers=workers, inference={"device": "cpu" if self.kind == "fake" else "cuda"}, **options
        )


@pytest.fixture(params=["fake", pytest.param("cuda", marks=needs_cuda)])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Gpu:
    caplog.set_level(logging.INFO, "farstep")
    return Gpu(request.param, monkeypatch)


def assert_versions(batch: farstep.Batch) -> None:
    """Every row has the weights of its version."""
    for name in ("first", "last", "lower", "count"):
        np.testing.assert_array_equal(batch[name], batch["version"])


def train(
    env: farstep.ClusterEnv, agent: NumberAgent, versions: range, also: Callable[[int], None] = lambda k: None
) -> None:
    """Publish versions, and check the batch of each; the weights of version `k` are `k`."""
    for k in versions:
        agent.set(k)
        also(k)
        batch = within(lambda: env.collect(agent, 5))
        assert (batch["version"] == k).all()
        assert_sound(batch)
        assert_versions(batch)


def test_a_server_acts_with_each_version(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    agent = gpu.agent()
    with gpu.served() as env:
        train(env, agent, range(8))
        batch = within(lambda: env.collect(agent, 5))
        assert (batch["version"] == 7).all(), "unchanged parameters are no new version"
        stats = env.stats()
        assert stats["pulls"]["total"] == 8
        nbytes = 700 * 1000 * 4 + 64 + 64
        assert stats["bytes"]["weights_sent"] == 8 * nbytes
        assert_balanced(stats)
    assert caplog.text.count(USED) == 1
    assert not gpu.blocks


def test_versions_change_while_a_stream_runs(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    agent = gpu.agent()
    with gpu.served() as env:
        stream = env.stream(agent, steps=4, max_staleness=4)
        for k in range(1, 30):
            assert_versions(within(lambda: next(stream)))
            agent.set(k)
            within(lambda: env.publish(agent))
        stream.close()
    assert USED in caplog.text


def test_a_killed_server_is_replaced_by_one_with_the_newest_version(gpu: Gpu) -> None:
    def kill(k: int) -> None:
        if k in (4, 7):
            os.kill(int(env.stats()["acting"][0]["pid"]), signal.SIGKILL)
            eventually(lambda: env.stats()["workers"]["restarts"] == (1 if k == 4 else 2))

    agent = gpu.agent()
    with gpu.served() as env:
        train(env, agent, range(10), kill)
        os.kill(int(env.stats()["acting"][0]["pid"]), signal.SIGKILL)
        batch = within(lambda: env.collect(agent, 5))  # without a new version
        assert (batch["version"] == 9).all()
        assert_versions(batch)
    assert not gpu.blocks


def test_the_memory_of_a_replaced_agent_is_freed(gpu: Gpu) -> None:
    first, second = gpu.agent(), gpu.agent()
    with gpu.served() as env:
        train(env, first, range(4))
        train(env, second, range(4, 8))
        assert len(gpu.blocks) == 1
        train(env, first, range(8, 10))
        assert len(gpu.blocks) == 1
    assert not gpu.blocks


def test_parameters_may_be_new_tensors(gpu: Gpu) -> None:
    def replace(k: int) -> None:
        agent.number = torch.nn.Parameter(torch.full_like(agent.number, k))
        agent.lower.data = agent.lower.detach().clone()

    agent = gpu.agent()
    with gpu.served() as env:
        train(env, agent, range(6), replace)


def test_aaps_pulls_within_the_gpu(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    agent = gpu.agent()
    with gpu.served(sync=AAPS(0.01, window=1)) as env:
        for k in range(40):
            agent.set(k)
            within(lambda: env.publish(agent))
            assert_versions(within(lambda: env.collect(agent, 5)))
        assert 2 <= env.stats()["pulls"]["total"] < 40
    assert USED in caplog.text


@needs_cuda
@pytest.mark.parametrize("where", ["learner", "server"])
def test_weights_pass_through_main_memory_if_one_side_has_no_gpu(where: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "farstep")
    agent = NumberAgent().to("cpu" if where == "learner" else "cuda")
    inference = {"device": "cuda" if where == "learner" else "cpu"}
    with cluster(envs=4, workers=2, inference=inference) as env:
        train(env, agent, range(4))
    assert ("pass through main memory" in caplog.text) == (where == "learner")
    assert USED not in caplog.text


class PreciseAgent(NumberAgent):
    """Has a layer that can compute in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)


@needs_cuda
def test_a_server_of_lower_precision_loads_from_main_memory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "farstep")
    agent = PreciseAgent().to("cuda")
    with cluster(envs=4, workers=2, inference={"device": "cuda", "dtype": "bfloat16"}) as env:
        train(env, agent, range(4))
    assert USED not in caplog.text
