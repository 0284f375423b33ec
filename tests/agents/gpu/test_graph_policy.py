"""Policies that replay CUDA graphs: with a fake of `CudaGraphs` on the CPU and, if there is a GPU, with graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from farstep.agents.gpu.cuda_graphs import CudaGraphs, capturable
from farstep.agents.gpu.graph_policy import GRAPHS, GraphPolicy, faster_sizes, padded_size
from farstep.agents.policy import MAX_IN_FLIGHT, Policy
from farstep.agents.precision import reduce_layers
from tests.agents.gpu.fake_graphs import FakeGraphs

if torch.cuda.is_available():
    torch.zeros(1, device="cuda")  # CUDA keeps descriptors open, which no test has to close
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class NetPolicy(torch.nn.Module):
    calls: list[int] = []  # noqa: RUF012
    """Numbers of rows of the calls of `act`; shared, since it is no state of an agent."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))

    def act(self, obs: Any) -> dict[str, Any]:
        self.calls.append(len(obs))
        logits = self.net(obs)
        return {"action": torch.multinomial(torch.softmax(logits, -1), 1)[:, 0], "logits": logits}


class CategoricalPolicy(NetPolicy):
    def act(self, obs: Any) -> dict[str, Any]:
        chosen = torch.distributions.Categorical(logits=self.net(obs))
        action = chosen.sample()
        return {"action": action, "logits": chosen.log_prob(action)}


class HostPolicy(NetPolicy):
    """Returns NumPy arrays."""

    def act(self, obs: Any) -> Any:
        return {name: value.detach().cpu().numpy() for name, value in super().act(obs).items()}


class ReadingPolicy(NetPolicy):
    """Computes with NumPy."""

    def act(self, obs: Any) -> Any:
        return {name: value.cpu().numpy() + 1 for name, value in super().act(obs).items()}


class BranchingPolicy(NetPolicy):
    def act(self, obs: Any) -> dict[str, Any]:
        out = super().act(obs)
        return out if obs.sum().item() < 1e9 else {**out, "logits": -out["logits"]}


class CountingPolicy(NetPolicy):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def act(self, obs: Any) -> dict[str, Any]:
        self.count += 1
        return super().act(obs)


class BufferPolicy(NetPolicy):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def act(self, obs: Any) -> dict[str, Any]:
        self.total += obs.sum(0)
        return super().act(obs)


class CenteringPolicy(NetPolicy):
    def act(self, obs: Any) -> dict[str, Any]:
        return super().act(obs - obs.mean(0))


class NumPyNoisePolicy(NetPolicy):
    def act(self, obs: Any) -> dict[str, Any]:
        return super().act(obs + float(np.random.random()))


class ArrayPolicy(NetPolicy):
    def act(self, obs: Any) -> Any:
        return {**super().act(obs), "rows": np.arange(len(obs))}


class RngPolicy(NetPolicy):
    def act(self, obs: Any, rng: Any) -> dict[str, Any]:  # type: ignore[override]
        draws = np.array([each.random() for each in rng])
        return {"action": torch.from_numpy(draws * 4).long(), "logits": self.net(obs)}


class SlotPolicy(NetPolicy):
    def act(self, obs: Any, slots: Any) -> dict[str, Any]:  # type: ignore[override]
        return {**super().act(obs), "slot": slots + 0}


class RememberingPolicy(NetPolicy):
    def initial_state(self, n: int) -> Any:
        return torch.zeros(n, 3)

    def act(self, obs: Any, state: Any, episode_start: Any) -> dict[str, Any]:  # type: ignore[override]
        state = torch.where(episode_start[:, None], obs, state + obs)
        return {**super().act(state), "state": state}


@pytest.fixture(params=["fake", pytest.param("cuda", marks=needs_cuda)])
def graphs(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return FakeGraphs() if request.param == "fake" else CudaGraphs()


@pytest.fixture
def captures(graphs: Any) -> list[int]:
    """Gets an entry for each capture."""
    made: list[int] = []
    capture = graphs.capture

    def counted(function: Callable[[], Any]) -> Any:
        made.append(1)
        return capture(function)

    graphs.capture = counted
    return made


def rows(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=(count, 3)).astype(np.float32)


def policies(agent: Any, graphs: Any, count: int = 8, max_batch: int = 64) -> tuple[GraphPolicy, Policy]:
    """A policy with graphs, and one that calls `act`."""
    policy = GraphPolicy(agent, None, graphs, max_batch)
    policy.accelerate(rows(count), policy.initial_state(count), np.ones(count, bool))
    eager = Policy(agent)
    eager.device = graphs.device
    return policy, eager


def acts(policy: Policy, count: int, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    generators = [np.random.default_rng(i) for i in range(count)]
    out = policy(rows(count, seed), None, np.zeros(count, bool), generators)
    return {name: np.array(array) for name, array in out.items()}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-5)


def change(agent: Any) -> None:
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.add_(torch.randn_like(parameter))


def test_sizes_are_few_and_little_larger() -> None:
    sizes = [padded_size(rows) for rows in range(1, 4097)]
    assert all(rows <= size <= max(1.25 * rows, rows + 3, 8) for rows, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes) and len(set(sizes)) == 35
    assert {2**k for k in range(3, 13)} <= set(sizes)


@pytest.mark.parametrize("kind", [NetPolicy, CategoricalPolicy, HostPolicy])
def test_graphs_give_the_same_actions_for_the_same_seeds(graphs: Any, kind: Any) -> None:
    agent = kind()
    policy, eager = policies(agent, graphs)
    assert policy.note == GRAPHS
    for seed in range(5):
        for count in (8, 12, 16):
            assert_same(acts(policy, count, seed), acts(eager, count, seed))


def test_captures_and_checks_draw_no_random_numbers(graphs: Any) -> None:
    agent = NetPolicy()
    found = []
    for policy in policies(agent, graphs):
        torch.manual_seed(7)
        actions = []
        for k in range(9):
            if k % 3 == 0:
                policy.check_after_load()
            count = (8, 12, 16)[k % 3]
            actions.append(np.array(policy(rows(count, k), None, np.zeros(count, bool), None)["action"]).tolist())
        found.append(actions)
    assert found[0] == found[1]


def test_padded_batches_give_the_rows_of_the_batch(graphs: Any, captures: list[int]) -> None:
    policy, eager = policies(NetPolicy(), graphs)
    for count in (9, 10, 10, 9):
        found, expected = acts(policy, count, count), acts(eager, count, count)
        np.testing.assert_allclose(found["logits"], expected["logits"], rtol=1e-5, atol=1e-5)
        assert found["action"].shape == (count,)
    assert len(captures) == 2 * MAX_IN_FLIGHT


def test_a_larger_size_is_used_only_if_it_is_clearly_faster() -> None:
    assert faster_sizes({8: 3.0, 12: 1.0, 16: 1.0, 24: 2.0, 32: 0.5, 64: 4.0}) == {8: 12, 16: 32, 24: 32}
    assert faster_sizes({8: 1.0, 16: 0.99}) == {}


def test_batches_are_padded_to_a_faster_size() -> None:
    graphs: Any = FakeGraphs()
    graphs.times = iter([2.0, 1.0])
    agent = NetPolicy()
    policy, eager = policies(agent, graphs)
    acts(policy, 16)
    agent.calls.clear()
    found = acts(policy, 8, 3)
    assert agent.calls == [16]
    np.testing.assert_allclose(found["logits"], acts(eager, 8, 3)["logits"], rtol=1e-5, atol=1e-5)


@needs_cuda
def test_a_replay_runs_no_python_code() -> None:
    agent = NetPolicy()
    policy, _ = policies(agent, CudaGraphs())
    agent.calls.clear()
    for seed in range(3):
        acts(policy, 8, seed)
    assert agent.calls == []


def launched(policy: Policy, count: int, seed: int) -> Any:
    torch.manual_seed(seed)
    return policy.launch(rows(count, seed), None, np.zeros(count, bool), None)


@pytest.mark.parametrize("counts", [(8, 8, 8, 8), (8, 16, 8, 16), (16, 7, 16, 8)])
def test_two_batches_in_flight_do_not_overwrite_each_other(graphs: Any, counts: Any) -> None:
    policy, eager = policies(NetPolicy(), graphs)
    for count in set(counts):
        acts(policy, count)  # captures the size
    expected = [acts(eager, count, seed)["logits"] for seed, count in enumerate(counts)]
    running = launched(policy, counts[0], 0)
    for seed, count in enumerate(counts[1:], 1):
        following = launched(policy, count, seed)
        out = running.wait()
        np.testing.assert_allclose(out["logits"], expected[seed - 1], rtol=1e-5, atol=1e-5)
        running = following
    np.testing.assert_allclose(running.wait()["logits"], expected[-1], rtol=1e-5, atol=1e-5)
    assert policy.note == GRAPHS


def test_a_batch_is_done_before_the_one_that_was_launched_after_it() -> None:
    graphs: Any = FakeGraphs()
    policy, eager = policies(NetPolicy(), graphs)
    first, second = launched(policy, 8, 0), launched(policy, 8, 1)
    polls = 0
    while not first.is_done():
        polls += 1
    assert polls > 1 and graphs.num_run < graphs.num_enqueued
    np.testing.assert_allclose(first.wait()["logits"], acts(eager, 8, 0)["logits"], rtol=1e-5, atol=1e-5)
    assert graphs.num_run < graphs.num_enqueued and not second.is_done()
    np.testing.assert_allclose(second.wait()["logits"], acts(eager, 8, 1)["logits"], rtol=1e-5, atol=1e-5)
    assert second.is_done()


def test_a_batch_in_flight_survives_a_graph_that_cannot_be_captured(graphs: Any) -> None:
    class LimitedPolicy(NetPolicy):
        """Cannot be captured for more than eight rows."""

        def act(self, obs: Any) -> dict[str, Any]:
            return super().act(obs + obs.sum().item() if len(obs) > 8 else obs)

    policy, eager = policies(LimitedPolicy(), graphs)
    expected = acts(eager, 8, 0)
    running = launched(policy, 8, 0)
    assert launched(policy, 16, 1).is_done() and policy.note.startswith("eager: act cannot be captured")
    np.testing.assert_allclose(running.wait()["logits"], expected["logits"], rtol=1e-5, atol=1e-5)


def test_new_weights_need_no_new_graphs(graphs: Any, captures: list[int]) -> None:
    agent = NetPolicy()
    policy, eager = policies(agent, graphs)
    for seed in range(4):
        change(agent)
        policy.check_after_load()
        assert_same(acts(policy, 8, seed), acts(eager, 8, seed))
    assert len(captures) == MAX_IN_FLIGHT


@pytest.mark.parametrize("what", ["tensor", "module"])
def test_graphs_are_captured_again_if_the_agent_was_changed(graphs: Any, captures: list[int], what: str) -> None:
    agent = NetPolicy()
    policy, eager = policies(agent, graphs)
    if what == "tensor":
        agent.net[0].weight = torch.nn.Parameter(torch.randn(16, 3, device=graphs.device))
    else:
        agent.net[1] = torch.nn.ReLU()
    policy.check_after_load()
    assert_same(acts(policy, 8), acts(eager, 8))
    assert len(captures) == 2 * MAX_IN_FLIGHT and policy.note == GRAPHS


def test_a_recurrent_policy_keeps_its_state(graphs: Any) -> None:
    agent = RememberingPolicy()
    both = policies(agent, graphs)
    states = [each.initial_state(8) for each in both]
    for k in range(5):
        outs = []
        for i, each in enumerate(both):
            torch.manual_seed(k)
            out = each(rows(8, k), states[i], np.arange(8) == k, None)
            outs.append({name: np.array(array) for name, array in out.items()})
            states[i] = outs[i]["state"]
        assert_same(*outs)
    assert both[0].note == GRAPHS


def test_slots_change_from_batch_to_batch(graphs: Any) -> None:
    policy, _ = policies(SlotPolicy(), graphs)
    for first in (0, 5, 9):
        policy.slots = first + np.arange(8)
        assert acts(policy, 8)["slot"].tolist() == policy.slots.tolist()
    assert policy.note == GRAPHS


def test_batches_above_the_largest_size_are_not_captured(graphs: Any, captures: list[int]) -> None:
    policy, eager = policies(NetPolicy(), graphs, max_batch=8)
    assert_same(acts(policy, 16), acts(eager, 16))
    assert len(captures) == MAX_IN_FLIGHT


def test_the_largest_batch_is_captured(graphs: Any, captures: list[int]) -> None:
    policy, eager = policies(NetPolicy(), graphs, max_batch=9)
    for seed in range(2):
        assert_same(acts(policy, 9, seed), acts(eager, 9, seed))
    assert len(captures) == 2 * MAX_IN_FLIGHT


def test_bfloat16_layers_are_captured(graphs: Any, captures: list[int]) -> None:
    agent = reduce_layers(NetPolicy(), "bfloat16")
    policy, eager = policies(agent, graphs)
    for seed in range(3):
        change(agent)
        policy.check_after_load()
        assert_same(acts(policy, 8, seed), acts(eager, 8, seed))
    assert policy.note == GRAPHS and len(captures) == MAX_IN_FLIGHT


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (BranchingPolicy, "act cannot be captured: "),
        (ReadingPolicy, "act reads an array that it made with numpy()"),
        (CountingPolicy, "act changes count"),
        (BufferPolicy, "act changes a parameter or another tensor"),
        (CenteringPolicy, "result for a row depends on other rows"),
        (NumPyNoisePolicy, "NumPy's global random generator"),
        (ArrayPolicy, "returns something other than tensors"),
    ],
)
def test_policy_that_cannot_be_captured_acts_eagerly_and_is_reported_once(
    graphs: Any, kind: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    agent = kind()
    policy, eager = policies(agent, graphs)
    assert policy.note.startswith("eager: ") and reason in policy.note
    for seed in range(3):
        found = []
        for each in (policy, eager):
            np.random.seed(0)
            found.append(acts(each, 8, seed))
        assert_same(*found)
        policy.check_after_load()
    assert sum("act is called without CUDA graphs" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_failure_outside_of_the_capture_falls_back_to_act(is_loaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    graphs: Any = FakeGraphs()
    if not is_loaded:
        monkeypatch.setattr(graphs, "pinned", fail)
    policy, eager = policies(NetPolicy(), graphs)
    if is_loaded:
        assert policy.note == GRAPHS
        policy.check_after_load()
        monkeypatch.setattr(graphs, "run", fail)
    assert_same(acts(policy, 8), acts(eager, 8))
    assert policy.note == "eager: a graph failed: RuntimeError: out of memory"


def test_actions_follow_the_generators_of_the_slots(
    graphs: Any, captures: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    policy, eager = policies(RngPolicy(), graphs)
    assert policy.note == "eager: act takes a generator per slot"
    assert "without CUDA graphs, since act takes a generator per slot" in caplog.text
    assert_same(acts(policy, 8), acts(eager, 8))
    assert captures == []


@needs_cuda
def test_random_numbers_work_after_a_failed_capture() -> None:
    class SynchronizingPolicy(NetPolicy):
        """Fails only inside of a capture."""

        def act(self, obs: Any) -> dict[str, Any]:
            if torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize()
            return super().act(obs)

    policy, eager = policies(SynchronizingPolicy(), CudaGraphs())
    assert policy.note.startswith("eager: act cannot be captured")
    assert_same(acts(policy, 8), acts(eager, 8))
    other, reference = policies(NetPolicy(), CudaGraphs())
    assert other.note == GRAPHS
    assert_same(acts(other, 8), acts(reference, 8))


def test_unchecked_sampling_draws_the_same_numbers() -> None:
    weights = torch.rand(50, 5)
    torch.manual_seed(3)
    expected = torch.multinomial(weights, 1)
    torch.manual_seed(3)
    with capturable():
        assert torch.equal(torch.multinomial(weights, 1), expected)
