"""Probes without processes: both sides pick the same rows, and the divergence is right for every kind of agent."""

from __future__ import annotations

import math
import threading
from typing import Any, cast

import numpy as np
import pytest
import torch

from farstep.agents.distributions import flat_distribution, kl_divergence
from farstep.agents.divergence import Comparison, comparing_method, why_incomparable
from farstep.agents.policy import Policy
from farstep.core import SyncState
from farstep.errors import AgentError
from farstep.schema import ArraySpec
from farstep.sync import AAPS
from farstep.testing import TableAgent
from tests.head.weights.probing_world import (
    ENVS,
    SIZE,
    DeterministicAgent,
    GaussianAgent,
    JaxAgent,
    LinearAgent,
    MixedAgent,
    MultiTorchAgent,
    SquashedAgent,
    TorchAgent,
    World,
)


@pytest.mark.parametrize(
    "kind", [LinearAgent, GaussianAgent, MixedAgent, JaxAgent, TorchAgent, MultiTorchAgent, SquashedAgent]
)
def test_the_divergence_is_exact_on_rows_that_the_worker_sent(kind: Any) -> None:
    learner, worker = kind(0.3), kind(0.1)
    world = World(learner, worker)
    for _ in range(6):
        world.roll()
    found = world.publish()
    rows = np.concatenate([pick.arrays["obs"] for pick in world.head.requests()[0].probed]).astype(np.float32)
    assert len(rows) == 64
    if isinstance(learner, torch.nn.Module):
        before = {name: value.clone() for name, value in learner.state_dict().items()}
        sides = [
            flat_distribution(cast(Any, agent).eval().distribution(torch.from_numpy(rows)))
            for agent in (worker, learner)
        ]
        assert all(torch.equal(value, before[name]) for name, value in learner.state_dict().items())
    else:
        sides = [flat_distribution(agent.distribution(rows)) for agent in (worker, learner)]
    assert found == pytest.approx(kl_divergence(*sides).mean(), rel=1e-4)
    assert found > 0.01


def test_probing_does_not_change_modes_and_generators() -> None:
    agent = TorchAgent(0.3)
    agent.norm.eval()
    world = World(agent, TorchAgent())
    world.roll()
    states = torch.get_rng_state(), cast(Any, np.random.get_state())[1]
    world.publish()
    assert agent.training and agent.drop.training and not agent.norm.training
    assert torch.equal(torch.get_rng_state(), states[0]) and (cast(Any, np.random.get_state())[1] == states[1]).all()
    assert agent.norm.num_batches_tracked == 0


class OwnNamesAgent(TorchAgent):
    """Its attributes `parameters` and `modules` are not those of torch."""

    def parameters(self) -> Any:  # type: ignore[override]
        return {"learning_rate": 0.1}

    def modules(self) -> Any:  # type: ignore[override]
        return ["legs", "arms"]


def test_an_agent_may_use_names_of_torch_for_its_own() -> None:
    world = World(OwnNamesAgent(0.3), OwnNamesAgent())
    world.roll()
    assert world.publish() > 0.01


def test_the_same_weights_do_not_diverge() -> None:
    world = World(TorchAgent(0.3), TorchAgent(0.3))
    world.roll()
    assert world.publish() == pytest.approx(0.0, abs=1e-7)


class LogProbAgent(LinearAgent):
    """Returns only log-probabilities of actions."""

    distribution = None  # type: ignore[assignment]

    def log_prob(self, obs: Any, action: Any) -> Any:
        logits = obs @ self.w
        logits = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return logits[np.arange(len(obs)), action]


def test_without_a_distribution_the_divergence_is_estimated_from_own_actions() -> None:
    """Over many probes the estimate averages to the exact divergence."""
    learner, worker = LogProbAgent(0.2), LogProbAgent(0.1)
    world, exact, found = World(learner, worker), [], []
    for _ in range(300):
        world.roll(actor=worker)
        found.append(world.publish())
        obs = world.blocks["obs"].reshape(-1, SIZE)
        sides = [flat_distribution({"logits": obs @ agent.w}) for agent in (worker, learner)]
        exact.append(kl_divergence(*sides).mean())
    assert min(found) >= 0
    assert np.mean(found) == pytest.approx(np.mean(exact), rel=0.1)


def test_an_estimate_looks_at_actions_of_the_weights_in_use_where_it_has_any() -> None:
    learner, worker = LogProbAgent(0.2), LogProbAgent(0.1)
    world = World(learner, worker)
    world.roll(version=0)
    world.roll(version=1)
    both = world.publish(held=0)
    rows = world.worker.recent.all()[0].arrays
    ratio = learner.log_prob(rows["obs"], rows["action"]) - worker.log_prob(rows["obs"], rows["action"])
    assert both == pytest.approx((np.expm1(ratio) - ratio).mean(), rel=1e-4)


def test_deterministic_policy_is_compared_by_its_own_measure() -> None:
    world = World(DeterministicAgent(0.3), DeterministicAgent(0.1))
    world.roll()
    obs = world.worker.recent.all()[0].arrays["obs"]
    assert world.publish() == pytest.approx(((obs @ (np.full((SIZE, 4), 0.2) * np.arange(4))) ** 2).sum(axis=1).mean())


class OwnMeasureAgent(DeterministicAgent):
    """Its measure returns `said` for each row."""

    said: Any = None

    def divergence(self, local: Any, learner: Any) -> Any:
        return self.said(len(local["distribution"]))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (lambda n: np.full(n, -0.5), r"the negative number -0\.5; expected \[n\] numbers >= 0"),
        (lambda n: {"kl": np.zeros(n)}, "returned dict; expected"),
        (lambda n: None, "returned NoneType; expected"),
        (lambda n: 0.5, r"returned float64\[\]; expected"),
        (lambda n: np.zeros((n, 2)), r"returned float64\[\d+, 2\]; expected"),
        (lambda n: ["far"] * n, r"returned <U3\[\d+\]; expected"),
    ],
    ids=["negative", "mapping", "nothing", "number", "matrix", "text"],
)
def test_invalid_results_of_a_custom_measure_are_refused(said: Any, words: str) -> None:
    agent = OwnMeasureAgent()
    agent.said = said
    with pytest.raises(AgentError, match=words):
        Comparison(Policy(agent), "obs", "action", None).check({"obs": np.zeros((6, SIZE))})


@pytest.mark.parametrize("said", [lambda n: [0] * n, torch.ones, lambda n: np.full(n, -1e-7)], ids=["0", "1", "-1e-7"])
def test_a_measure_may_be_any_numbers_and_rounded(said: Any) -> None:
    agent = OwnMeasureAgent()
    agent.said = said
    Comparison(Policy(agent), "obs", "action", None).check({"obs": np.zeros((6, SIZE))})


class RecurrentAgent(LinearAgent):
    def initial_state(self, n: int) -> Any:
        return np.zeros((n, 2), np.float32)

    def act(self, obs: Any, state: Any, episode_start: Any) -> Any:  # type: ignore[override]
        return {"action": np.zeros(len(obs), np.int64), "state": state}

    def distribution(self, obs: Any, state: Any, episode_start: Any) -> Any:  # type: ignore[override]
        assert state.shape == (len(obs), 2) and episode_start.shape == (len(obs),)
        return {"logits": obs @ self.w + state.sum(axis=1, keepdims=True) * self.w[0]}


def test_recurrent_policy_is_probed_at_rows_with_a_known_state() -> None:
    world = World(RecurrentAgent(0.3), RecurrentAgent(0.1))
    world.roll()
    pick = world.worker.recent.all()[0]
    assert pick.rows == ENVS
    for row, state in zip(pick.arrays["obs"], pick.arrays["state"], strict=True):
        assert any(
            (row == world.blocks["obs"][0, 0, e]).all() and (state == world.blocks["state"][0, e]).all()
            for e in range(ENVS)
        )
    assert world.publish() > 0.01


class ForgetfulAgent(RecurrentAgent):
    def distribution(self, obs: Any) -> Any:  # type: ignore[override]
        return {"logits": obs @ self.w}


class CuriousAgent(LinearAgent):
    def distribution(self, obs: Any, temperature: float) -> Any:  # type: ignore[override]
        return {"logits": obs @ self.w / temperature}


@pytest.mark.parametrize(
    ("kind", "state", "words"),
    [
        (ForgetfulAgent, "state", r"^distribution\(obs: .*recurrent.* distribution\(obs, state, episode_start\):"),
        (CuriousAgent, None, r"^distribution\(.*of an agent is called as distribution\(obs\): missing .*'temperature'"),
    ],
)
def test_a_description_that_takes_other_arguments_is_refused(kind: Any, state: Any, words: str) -> None:
    with pytest.raises(AgentError, match=words):
        Comparison(Policy(kind()), "obs", "action", state)


class LoudAgent(LinearAgent):
    """Its outputs overflow."""

    said: Any = None

    def distribution(self, obs: Any) -> Any:
        return {name: np.full((len(obs), 2), value) for name, value in self.said.items()}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "said",
    [
        {"logits": 1e300},
        {"logits": np.inf},
        {"logits": -np.inf},
        {"mean": 1.0, "log_std": -500.0},
        {"mean": 1e30, "log_std": -np.inf},
        {"mean": 1.0, "log_std": 1e30},
        {"bernoulli": np.inf},
    ],
    ids=str,
)
def test_numpy_warnings_are_suppressed(said: dict[str, float]) -> None:
    learner, worker = LoudAgent(), LoudAgent()
    learner.said, worker.said = said, dict.fromkeys(said, 0.0)
    for sides in ((learner, worker), (worker, learner), (learner, learner)):
        world = World(*sides)
        world.roll()
        assert world.publish() >= 0
        assert world.worker.take_note() in ("", "the KL of what distribution() returns is NaN")


def test_an_agent_that_cannot_be_compared_is_refused_with_advice() -> None:
    with pytest.raises(AgentError, match=r"distribution\(obs\).*log_prob.*divergence\(local, learner\)"):
        Comparison(Policy(TableAgent()), "obs", "action", None)


@pytest.mark.parametrize(
    ("returned", "method"),
    [
        ({"action": (), "logits": (4,)}, "act"),
        ({"action": (2,), "logits": (2, 4)}, "act"),
        ({"action": (2,), "distribution.mean": (2,), "distribution.log_std": (2,)}, "act"),
        ({"action": (2,), "logits": (8,)}, ""),  # of two choices, one after the other
        ({"action": (2,), "logits": (2,)}, ""),  # of yes-or-no choices
        ({"action": (), "logits": ()}, ""),
        ({"action.0": (), "action.1": (), "logits": (4,)}, ""),
        ({"action": (), "logits.arm": (4,)}, ""),
        ({"action": (), "value": ()}, ""),
    ],
    ids=str,
)
def test_outputs_of_act_that_policies_are_compared_by(returned: dict[str, Any], method: str) -> None:
    outputs = {name: ArraySpec(shape, "<f4") for name, shape in returned.items()}
    assert comparing_method(TableAgent(), outputs) == method
    assert comparing_method(LinearAgent(), outputs) == "distribution"
    assert "logits" in why_incomparable(TableAgent(), outputs)


class CountingActs(TableAgent):
    """Compared by what `act` returns, which counts its calls and draws from generators of its own and of NumPy."""

    def __init__(self) -> None:
        self.calls, self.own = [0], np.random.default_rng(1)
        self.w = np.arange(12.0).reshape(SIZE, 4)

    def act(self, obs: Any) -> Any:
        self.calls[0] += 1
        noise = self.own.random() + np.random.random()
        return {"action": np.full(len(obs), noise > 1, np.int64), "logits": obs @ self.w}


class CountingTorchActs(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(SIZE, 4)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(1))
        self.calls = [0]

    def act(self, obs: Any) -> Any:
        self.calls[0] += 1
        self.seen += len(obs)
        self.kept = self.layer(obs)  # for a backward pass
        policy = torch.distributions.Categorical(logits=self.kept)
        return {"action": policy.sample(), "distribution": {"logits": policy.logits}}


@pytest.mark.parametrize("kind", [CountingActs, CountingTorchActs])
def test_comparing_by_act_does_not_change_the_agent(kind: Any) -> None:
    agent, twin = kind(), kind()
    outputs = {"action": ArraySpec((), "<i8"), "logits": ArraySpec((4,), "<f4")}
    if kind is CountingTorchActs:
        outputs = {"action": ArraySpec((), "<i8"), "distribution.logits": ArraySpec((4,), "<f4")}
        twin.load_state_dict(agent.state_dict())
        agent.kept = agent.layer(torch.ones(1, SIZE))
    obs = np.ones((6, SIZE), np.float32)
    comparison = Comparison(Policy(agent), "obs", "action", None, outputs)
    np.random.seed(1)
    torch.manual_seed(1)
    assert list(comparison.check({"obs": obs})) == ["logits"]
    after = Policy(agent)(obs, None, None, None)
    np.random.seed(1)
    torch.manual_seed(1)
    before = Policy(twin)(obs, None, None, None)
    np.testing.assert_array_equal(after["action"], before["action"])
    assert agent.calls == twin.calls == [1]


def test_error_of_an_agent_that_cannot_be_copied_names_the_missing_method() -> None:
    agent = CountingActs()
    agent.own = threading.Lock()  # type: ignore[assignment]
    outputs = {"action": ArraySpec((), "<i8"), "logits": ArraySpec((4,), "<f4")}
    with pytest.raises(AgentError, match=r"a copy of CountingActs.*cannot pickle.*Add distribution\(obs\)"):
        Comparison(Policy(agent), "obs", "action", None, outputs).check({"obs": np.ones((6, SIZE), np.float32)})


def test_a_description_without_a_row_per_observation_is_refused() -> None:
    class Average(LinearAgent):
        def distribution(self, obs: Any) -> Any:
            return {"logits": (obs @ self.w).mean(axis=0, keepdims=True)}

    world = World(Average(), LinearAgent())
    world.roll()
    with pytest.raises(AgentError, match="must be the observations"):
        world.probe()


def test_different_descriptions_of_learner_and_worker_are_reported() -> None:
    world = World(LinearAgent(), GaussianAgent())
    world.roll()
    with pytest.raises(AgentError, match="same arrays on both"):
        world.publish()


def test_policies_that_cannot_be_compared_count_as_too_far() -> None:
    world = World(LinearAgent(), LinearAgent())
    assert world.publish() == math.inf  # nothing was sent yet
    world.roll()
    assert world.publish() == pytest.approx(0.0, abs=1e-7)
    for _ in range(40):
        world.roll(heard=False)  # dropped on the way: the worker has forgotten what the head remembers
    assert world.publish() == math.inf
    assert world.worker.take_note() == ""


def test_policy_that_returns_nan_is_too_far_and_reported_once() -> None:
    world = World(LinearAgent(np.nan), LinearAgent())
    world.roll()
    for said in ("distribution() returns NaN (logits)", ""):  # once
        assert world.publish() == math.inf
        assert world.worker.take_note() == said


def test_divergence_left_by_a_pull_is_measured_by_the_probe_of_that_pull() -> None:
    learner, worker = LinearAgent(0.3), LinearAgent(0.1)
    world = World(learner, worker)
    world.roll()
    world.publish()
    worker.w[:] = learner.w.astype(np.float16) * 0.9  # the sent weights differ from the learner's
    rows = world.worker.recent.all()[0].arrays["obs"]
    sides = [flat_distribution({"logits": rows @ w}) for w in (worker.w, learner.w)]
    assert world.worker.pulled(world.version) == pytest.approx(kl_divergence(*sides).mean(), rel=1e-4)
    assert world.worker.pulled(world.version + 1) == 0.0  # of that one nothing is known
    assert world.worker.divergences == ()


@pytest.mark.parametrize("kind", [LinearAgent, LogProbAgent], ids=["distribution", "log_prob"])
def test_pull_of_all_parameters_leaves_no_divergence(kind: Any) -> None:
    learner, worker = kind(0.3), kind(0.1)
    world = World(learner, worker)
    world.roll()
    world.publish()
    worker.w[:] = learner.w
    assert world.worker.pulled(world.version) == pytest.approx(0.0, abs=1e-7)


def test_late_and_repeated_probes_are_harmless() -> None:
    world = World(LinearAgent(0.3), LinearAgent(0.1))
    world.roll()
    first, second = world.probe(), world.probe()
    world.worker.compare(*second, 0)
    said = world.worker.divergences
    for late in (first, second, second):
        world.worker.compare(*late, 0)
    assert world.worker.divergences == said and world.worker.compared == 2
    world.worker.compare(*world.probe(), 3)  # a version that was pulled before its probe came
    assert world.worker.divergences == said


def test_replaced_worker_is_not_probed_about_rows_of_its_predecessor() -> None:
    world = World(LinearAgent(), LinearAgent())
    world.roll()
    world.records[0].incarnation += 1
    assert not world.head.requests()[0].probed
    world.index = 0
    world.roll()
    assert world.head.requests()[0].indices == [1]


def test_probes_of_all_workers_take_one_evaluation() -> None:
    calls = []

    class Counting(LinearAgent):
        def distribution(self, obs: Any) -> Any:
            calls.append(len(obs))
            return super().distribution(obs)

    world = World(Counting(0.3), LinearAgent(), num_seats=3)
    for _ in range(5):
        world.roll()
    world.records[1].incarnation += 1  # one that has nothing to be asked about
    requests = world.head.requests()
    answers = world.head.answers(requests)
    assert calls == [128]
    assert not answers[1]
    for request, answer in zip(requests, answers, strict=True):
        if request.probed:
            obs = np.concatenate([pick.arrays["obs"] for pick in request.probed])
            np.testing.assert_allclose(answer["logits"], LinearAgent(0.3).distribution(obs)["logits"], rtol=1e-5)


def test_versions_published_in_a_row_are_compared_with_one_evaluation_of_the_worker() -> None:
    calls = []

    class Counting(LinearAgent):
        def distribution(self, obs: Any) -> Any:
            calls.append(len(obs))
            return super().distribution(obs)

    world = World(LinearAgent(0.3), Counting(0.1))
    world.roll()
    for _ in range(10):
        world.publish()
    assert len(calls) == 1
    world.publish(held=5)
    world.roll()
    world.publish(held=5)
    assert len(calls) == 3


@pytest.mark.slow
def test_with_a_window_of_one_no_chunk_begins_with_weights_too_far_from_the_newest_probe() -> None:
    """A learner on a random walk, probes that are late or lost, and a worker that decides before each chunk."""
    delta, generator = 0.02, np.random.default_rng(1)
    learner, worker = LinearAgent(), LinearAgent()
    world, rule = World(learner, worker), AAPS(delta, window=1)
    held, pulls, chunks, under_way = 0, 0, 0, []
    newest: tuple[int, Any, Any] = (0, None, None)  # of the newest delivered probe: version, weights and rows
    for _ in range(3000):
        if generator.random() < 0.5:
            learner.w += generator.normal(size=learner.w.shape) * 0.02
            picks = world.head.requests()[0].probed
            rows = np.concatenate([pick.arrays["obs"] for pick in picks]) if picks else None
            under_way.append((world.probe(), learner.w.copy(), rows))
        while under_way and generator.random() < 0.6:
            probe, weights, rows = under_way.pop(int(generator.integers(len(under_way))))
            world.worker.compare(*probe, held)
            newest = max(newest, (probe[0].version, weights, rows), key=lambda entry: entry[0])
        if generator.random() < 0.5:
            chunks += 1
            if rule.should_pull(SyncState(held, world.version, divergences=world.worker.divergences)):
                held, pulls = world.version, pulls + 1
                worker.w[:] = learner.w
                world.worker.pulled(held)
            version, weights, rows = newest
            if version > held and rows is not None:
                sides = [flat_distribution({"logits": rows @ w}) for w in (worker.w, weights)]
                assert kl_divergence(*sides).mean() <= delta * (1 + 1e-4)
            world.roll(held)
    assert 10 < pulls < chunks / 2


def test_a_worker_without_weights_passes_no_probe() -> None:
    world = World(LinearAgent(), LinearAgent())
    world.roll()
    world.worker.compare(*world.probe(), -1)
    assert world.worker.compared == -1 and world.worker.divergences == ()


def test_busy_worker_gets_a_bounded_number_of_probes() -> None:
    world = World(LinearAgent(), LinearAgent())
    world.roll()
    assert sum(len(world.head.requests()) for _ in range(1000)) < 100
    world.roll()
    assert len(world.head.requests()) == 1


def test_a_probability_for_each_part_of_an_action_is_refused() -> None:
    class Parts(LogProbAgent):
        def log_prob(self, obs: Any, action: Any) -> Any:
            return np.zeros((len(obs), 2))

    world = World(Parts(), LogProbAgent())
    world.roll()
    with pytest.raises(AgentError, match="sum over the dimensions of an action"):
        world.probe()


class OwnScaleAgent(TorchAgent):
    """Puts its mean and deviation into an affine map, before it squashes and scales."""

    def distribution(self, obs: Any) -> Any:
        d, mean = torch.distributions, obs @ self.w
        maps = [
            d.AffineTransform(mean, (self.w[0, 1] + 1.0)),
            d.TanhTransform(),
            d.AffineTransform(torch.zeros(4), 2.0),
        ]
        return d.TransformedDistribution(d.Normal(torch.zeros_like(mean), torch.ones_like(mean)), maps)


def test_a_policy_inside_an_affine_map_is_seen() -> None:
    world = World(OwnScaleAgent(0.3), OwnScaleAgent(0.1))
    world.roll()
    found = world.publish()
    rows = torch.from_numpy(world.worker.recent.all()[0].arrays["obs"].astype(np.float32))
    weights = {v: torch.full((3, 4), v) * torch.arange(4) for v in (0.1, 0.3)}
    local, learner = (torch.distributions.Normal(rows @ w, v + 1) for v, w in weights.items())
    assert found == pytest.approx(float(torch.distributions.kl_divergence(local, learner).sum(-1).mean()), rel=1e-4)


def test_maps_of_actions_that_differ_are_too_far() -> None:
    class Scaled(SquashedAgent):
        def distribution(self, obs: Any) -> Any:
            d = torch.distributions
            maps = [d.TanhTransform(), d.AffineTransform(0.0, self.w[0, 1])]
            return d.TransformedDistribution(d.Normal(torch.zeros(len(obs), 4), 1.0), maps)

    world = World(Scaled(0.3), Scaled(0.1))
    world.roll()
    assert world.publish() == math.inf
    same = World(Scaled(0.3), Scaled(0.3))
    same.roll()
    assert same.publish() == pytest.approx(0.0, abs=1e-7)


def test_one_deviation_may_stand_for_all_observations() -> None:
    class Shared(GaussianAgent):
        def distribution(self, obs: Any) -> Any:
            return {"mean": obs @ self.w[:, :2], "log_std": np.full(2, self.w[0, 1])}

    found = []
    for kind in (Shared, GaussianAgent):
        world = World(kind(0.3), kind(0.1))
        world.roll()
        found.append(world.publish())
    assert found[0] == found[1] > 0
