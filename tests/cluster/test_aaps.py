"""Adaptive synchronization on running clusters: when workers pull, what it costs, and how it bounds staleness."""

from __future__ import annotations

import math
import os
import signal
from typing import Any

import numpy as np
import pytest
import torch

import farstep
from farstep.config.launch import LaunchConfig
from farstep.sync import AAPS, Always, MaxLag
from farstep.testing import CountingEnv, TableAgent
from tests.cluster.checks import assert_balanced, cluster, eventually, in_process, within, worker_pids

EVERYWHERE = pytest.mark.parametrize(
    "config",
    [in_process(2), *(farstep.LocalConfig(workers_per_node=2, transport=t) for t in ("shm", "tcp"))],
    ids=["in_process", "shm", "tcp"],
)


class CoinAgent(TableAgent):
    """Takes action 1 with its own probability; the divergence between two such agents is known."""

    def __init__(self) -> None:
        super().__init__()
        self.logit = np.zeros(1)

    def get_parameters(self) -> Any:
        return {"logit": self.logit}

    def distribution(self, obs: Any) -> Any:
        return {"bernoulli": np.repeat(self.logit, len(obs))[:, None]}


def divergence(local: float, learner: float) -> float:
    p, q = 1 / (1 + math.exp(-local)), 1 / (1 + math.exp(-learner))
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def never_ending() -> CountingEnv:
    return CountingEnv(length=None)


def versions_while_drifting(env: farstep.ClusterEnv, delta: float) -> list[int]:
    """Collect 12 rollouts with an agent that changes, and return the version that acted in each; check that a pull
    precedes a rollout exactly if the divergence exceeds `delta`."""
    agent, held, versions, seen = CoinAgent(), 0.0, [0], []
    for k in range(12):
        if k:
            agent.logit += 0.2
            versions.append(versions[-1])
        if divergence(held, float(agent.logit[0])) > delta:
            held, versions[-1] = float(agent.logit[0]), k
        assert set(within(lambda: env.collect(agent, steps=8))["version"].flat) == {versions[-1]}
        seen.append(env.stats()["divergence"])
    assert 2 < len(set(versions)) < 12  # it pulled now and then, not always
    assert seen[0] == {0: 0.0, 1: 0.0}  # just pulled
    assert seen[1][0] == seen[1][1] == pytest.approx(divergence(0, 0.2), rel=1e-4)
    return versions


@EVERYWHERE
def test_workers_pull_exactly_when_the_divergence_exceeds_the_threshold(config: LaunchConfig) -> None:
    with cluster(envs=4, sync=AAPS(0.05, window=1), config=config) as env:
        versions = versions_while_drifting(env, 0.05)
        stats = env.stats()
    pulls = len(set(versions))
    assert stats["pulls"] == {"total": 2 * pulls, "per_worker": [pulls, pulls]}
    assert stats["bytes"]["weights_sent"] == 2 * pulls * 64  # one number, aligned
    assert 0 < stats["bytes"]["probes_sent"] < 11 * 2 * 500
    lags = stats["versions"]["lag_histogram"]
    assert len(lags) == 2 and lags[0] == lags[1] and sum(lags[0].values()) == 12
    assert sum(lag * count for lag, count in lags[0].items()) == sum(k - v for k, v in enumerate(versions))


@pytest.mark.parametrize("rule", [AAPS(0.0), Always()], ids=["delta=0", "always"])
def test_a_threshold_of_zero_is_always(rule: Any) -> None:
    with cluster(envs=4, sync=rule, config=in_process(2)) as env:
        agent, versions = CoinAgent(), []
        for k in range(5):
            agent.logit[:] = k if k != 3 else 1e-12 + 2  # hardly different, and yet another version
            versions.append(set(env.collect(agent, steps=3)["version"].flat))
        assert versions == [{0}, {1}, {2}, {3}, {4}]
        stats = env.stats()
        assert stats["pulls"]["total"] == 10
        assert stats["bytes"]["probes_sent"] == 0 and stats["divergence"] == {}


def test_an_infinite_threshold_pulls_once_and_measures_nothing() -> None:
    with cluster(envs=4, sync=AAPS(math.inf), config=in_process(2)) as env:
        agent = TableAgent()  # which has no distribution()
        for k in range(5):
            agent.table[0] = k
            assert (env.collect(agent, steps=3)["version"] == 0).all()
        for k, batch in enumerate(env.stream(agent, steps=3, max_staleness=0)):
            assert (batch["version"] == 0).all()
            if k == 3:
                break
            env.publish(agent)
        stats = env.stats()
        assert stats["pulls"]["total"] == 2
        assert stats["divergence"] == {} and stats["bytes"]["probes_sent"] == 0
        assert not stats["dropped"].get("stale")


def test_the_threshold_of_the_configuration_is_the_papers_rule() -> None:
    config = {"type": "factory", "env_name": CountingEnv, "envs_per_node": 2, "kl_threshold": 0.05}
    with farstep.ClusterEnv(config, in_process(1)) as env:
        agent = CoinAgent()
        env.collect(agent, steps=4)
        agent.logit += 1e-3
        assert (env.collect(agent, steps=4)["version"] == 0).all()
        agent.logit += 3
        assert (env.collect(agent, steps=4)["version"] == 2).all()


def test_single_steps_are_probed_too() -> None:
    with cluster(envs=4, sync=AAPS(0.05, window=1), config=in_process(2)) as env:
        agent = CoinAgent()
        for _ in range(10):
            agent.logit += 0.2
            env.step(agent)
        assert 2 * 2 < env.stats()["pulls"]["total"] < 2 * 8


def test_nothing_is_probed_while_nothing_is_published() -> None:
    with cluster(envs=4, sync=AAPS(0.05), config=in_process(2)) as env:
        agent = CoinAgent()
        for _ in range(5):
            env.collect(agent, steps=3)
        assert env.stats()["bytes"]["probes_sent"] == 0
        env.publish(agent)
        assert env.stats()["bytes"]["probes_sent"] > 0


def test_a_version_that_could_not_be_compared_is_pulled() -> None:
    with cluster(envs=4, sync=AAPS(100.0), config=in_process(2)) as env:
        agent = CoinAgent()
        env.publish(agent)
        agent.logit += 1
        env.publish(agent)  # before any chunk: there is nothing to compare on
        assert (env.collect(agent, steps=3)["version"] == 1).all()


@EVERYWHERE
def test_weights_that_passed_a_probe_are_not_too_old_for_a_stream(config: LaunchConfig) -> None:
    """With tiny updates, the first weights satisfy `max_staleness=0` forever; `version` is that which acted."""
    with cluster(never_ending, envs=4, sync=AAPS(0.05), config=config) as env:
        agent = CoinAgent()
        for k, batch in enumerate(env.stream(agent, steps=4, max_staleness=0)):
            assert (batch["version"] == 0).all()
            if k == 6:
                break
            agent.logit += 1e-4
            assert env.publish(agent) == k + 1
        stats = env.stats()
        assert stats["pulls"]["total"] == 2
        assert not stats["dropped"].get("stale")
        assert stats["versions"]["lag_max"] == 6
        assert_balanced(stats)


@EVERYWHERE
@pytest.mark.parametrize("num_chunks", [None, 3])
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_a_stream_yields_only_rows_close_to_a_version_within_its_bound(
    config: LaunchConfig, max_staleness: int, num_chunks: int | None
) -> None:
    """Learning steps of different size: some probes pass, others fail."""
    delta, generator = 0.05, np.random.default_rng(3)
    with cluster(never_ending, envs=4, sync=AAPS(delta, window=1), config=config) as env:
        agent, logits, kept = CoinAgent(), [0.0], 0
        for k, batch in enumerate(env.stream(agent, steps=4, max_staleness=max_staleness, num_chunks=num_chunks)):
            allowed = logits[max(0, k - max_staleness) :]
            for acted in set(batch["version"].flat):
                assert min(divergence(logits[acted], learner) for learner in allowed) <= delta * 1.001
                kept += k - acted > max_staleness
            if k == 20:
                break
            agent.logit += generator.choice([0.05, 1.5], p=[0.7, 0.3])
            logits.append(float(agent.logit[0]))
            assert env.publish(agent) == k + 1
        assert kept > 0 or max_staleness == 3  # older than the bound, and allowed for being close
        assert_balanced(env.stats())


def test_a_hard_bound_on_lag_can_be_added() -> None:
    with cluster(envs=4, sync=AAPS(math.inf) | MaxLag(2), config=in_process(2)) as env:
        agent, lags = CoinAgent(), []
        for k in range(9):
            agent.logit += 1e-6
            lags.append(k - int(env.collect(agent, steps=3)["version"][0, 0]))
        assert lags == [0, 1, 2, 0, 1, 2, 0, 1, 2]


def test_worker_that_joins_late_starts_with_the_newest_weights() -> None:
    with cluster(never_ending, envs=4, workers=2, sync=AAPS(1e9)) as env:
        agent = CoinAgent()
        for _ in range(4):
            agent.logit += 1
            env.collect(agent, steps=3)
        os.kill(worker_pids()[1], signal.SIGKILL)
        eventually(lambda: env.stats()["workers"]["restarts"] == 1 and env.stats()["workers"]["alive"] == 2)
        batch = env.collect(agent, steps=3)
        assert (batch["version"][:, :2] == 0).all() and (batch["version"][:, 2:] == 3).all()
        agent.logit += 1e-3
        env.collect(agent, steps=3)  # and its probes are about its own chunks
        assert env.stats()["divergence"][1] < 1e-3 < 0.1 < env.stats()["divergence"][0]


class NanAgent(CoinAgent):
    """Its logits are NaN, or its own measure is."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        if own:
            self.divergence = lambda local, learner: np.full(len(local["distribution.bernoulli"]), np.nan)

    def distribution(self, obs: Any) -> Any:
        return {"bernoulli": np.full((len(obs), 1), 0 if hasattr(self, "divergence") else np.nan)}


@EVERYWHERE
@pytest.mark.parametrize("own", [False, True], ids=["logits", "divergence"])
def test_policy_that_cannot_be_measured_is_reported_once(config: LaunchConfig, own: bool, caplog: Any) -> None:
    with cluster(envs=4, sync=AAPS(0.1), config=config) as env:
        agent = NanAgent(own)
        for k in range(4):
            agent.logit += 1
            assert (env.collect(agent, steps=4)["version"] == k).all()
    said = r"divergence() returns NaN; " if own else "distribution() returns NaN (bernoulli); "
    warnings = [record.getMessage() for record in caplog.records if "NaN" in record.getMessage()]
    assert len(warnings) == 1 and warnings[0].startswith(said) and "as without kl_threshold" in warnings[0]


class TwoHeadedAgent(CoinAgent):
    """Describes itself by a parameter that may not be sent, and by an attribute that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = np.zeros(1)
        self.temperature = 1.0

    def get_parameters(self) -> Any:
        return {"logit": self.logit, "critic": self.critic}

    def distribution(self, obs: Any) -> Any:
        return {"bernoulli": np.repeat(self.logit + self.critic, len(obs))[:, None] / self.temperature}


@EVERYWHERE
@pytest.mark.parametrize(
    ("weights", "learned", "cause"),
    [
        ({"only": "logit"}, {"critic": 1.0}, "weights.only leaves out"),
        ({"half": True}, {"logit": 1000.24, "critic": -1000.0}, "weights.half rounds"),
        ({"half": True, "only": "l*"}, {"critic": 1.0}, "weights.half rounds and weights.only leaves out"),
        ({}, {"logit": 3.0, "temperature": 5.0}, "get_parameters() leaves out"),
        ({"only": ["l*", "c*"]}, {"logit": 3.0, "critic": 1.0}, ""),
    ],
    ids=["only", "half", "both", "attribute", "all"],
)
def test_divergence_left_by_a_pull_is_reported_once(
    config: LaunchConfig, weights: dict[str, Any], learned: dict[str, float], cause: str, caplog: Any
) -> None:
    with cluster(envs=4, sync=AAPS(0.001, window=1) | MaxLag(50), weights=weights, config=config) as env:
        agent = TwoHeadedAgent()
        env.collect(agent, steps=4)
        for name, value in learned.items():
            setattr(agent, name, np.full(1, value))
        for _ in range(3):
            env.publish(agent)
            env.collect(agent, steps=4)
        stats = env.stats()
    assert stats["pulls"]["total"] == 2 * (1 + (3 if cause else 1))
    assert (stats["divergence"][0] > 0.001) == bool(cause)
    said = [record.getMessage() for record in caplog.records if "right after a pull" in record.getMessage()]
    assert len(said) == bool(cause)
    assert all("is still" in text and f"as without kl_threshold: {cause} what the policy uses" in text for text in said)


class MoodyAgent(CoinAgent):
    """Cannot describe itself with some parameters."""

    def distribution(self, obs: Any) -> Any:
        if self.logit[0] > 5:
            raise ZeroDivisionError("deliberate")
        return super().distribution(obs)


def test_a_version_that_cannot_be_described_is_not_published() -> None:
    with cluster(envs=4, sync=AAPS(0.1), config=in_process(2)) as env:
        agent = MoodyAgent()
        env.collect(agent, steps=3)
        agent.logit[:] = 6
        said = r"distribution\(\) of MoodyAgent raised ZeroDivisionError: deliberate; version 0 stays in force"
        with pytest.raises(farstep.AgentError, match=said) as caught:
            env.publish(agent)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        agent.logit[:] = np.nan
        with pytest.raises(farstep.AgentError, match="'logit' has a NaN"):
            env.publish(agent)
        agent.logit[:] = 4
        assert env.publish(agent) == 1
        assert (env.collect(agent, steps=3)["version"] == 1).all()


class GrowingAgent(CoinAgent):
    """Describes itself in other arrays with some parameters."""

    def distribution(self, obs: Any) -> Any:
        if self.logit[0] < 1:
            return super().distribution(obs)
        if self.logit[0] < 2:
            return {"bernoulli": np.repeat(self.logit, len(obs))[:, None].repeat(2, 1)}
        return {"logits": np.repeat(self.logit, len(obs))[:, None]}


@EVERYWHERE
def test_a_version_that_is_described_in_other_arrays_is_not_published(config: LaunchConfig) -> None:
    with cluster(envs=4, sync=AAPS(0.01), config=config) as env:
        agent = GrowingAgent()
        env.collect(agent, steps=3)
        for value, got in ((1, r"bernoulli \[2\]"), (2, r"logits \[1\]")):
            agent.logit[:] = value
            said = rf"distribution\(\) returned {got} .* now, and bernoulli \[1\] when .* Version 0 stays in force\."
            for call in (env.publish, env.collect):
                with pytest.raises(farstep.AgentError, match=said):
                    call(agent)
        agent.logit[:] = 0.9
        assert (env.collect(agent, steps=3)["version"] == 1).all()


class BusyAgent(CoinAgent):
    """Does something else while it describes itself."""

    meanwhile: Any = None

    def distribution(self, obs: Any) -> Any:
        if self.meanwhile is not None:
            self.meanwhile()
        return super().distribution(obs)


def test_publish_raises_if_another_thread_closes_the_cluster() -> None:
    with cluster(envs=4, sync=AAPS(0.1), config=in_process(2)) as env:
        agent = BusyAgent()
        env.collect(agent, steps=3)
        agent.meanwhile = lambda: within(env.close)
        with pytest.raises(farstep.ClosedError, match="this cluster is closed"):
            env.publish(agent)


class MuteAgent(CoinAgent):
    def distribution(self, obs: Any) -> Any:
        raise ZeroDivisionError("deliberate")


def test_agent_whose_first_description_raises_is_refused() -> None:
    with cluster(envs=4, sync=AAPS(0.1), config=in_process(2)) as env:
        with pytest.raises(farstep.WorkerError, match="deliberate"):
            env.collect(MuteAgent(), steps=3)
        env.collect(CoinAgent(), steps=3)  # and nothing is broken


class OnlyHereAgent(CoinAgent):
    """Describes itself on the learner, but not on workers (where it is tried on two rows)."""

    def __init__(self) -> None:
        super().__init__()
        self.home = os.getpid()

    def distribution(self, obs: Any) -> Any:
        if os.getpid() != self.home and len(obs) > 2:
            raise ZeroDivisionError("deliberate, on the worker")
        return super().distribution(obs)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_an_agent_that_fails_on_workers_ends_the_run_with_their_traceback(transport: str) -> None:
    with cluster(envs=4, workers=2, sync=AAPS(0.1), transport=transport) as env:
        agent = OnlyHereAgent()
        env.collect(agent, steps=3)
        agent.logit += 1
        with pytest.raises(farstep.WorkerError, match="deliberate, on the worker"):
            for _ in range(3):
                env.collect(agent, steps=3)


class LogProbAgent(CoinAgent):
    distribution = None  # type: ignore[assignment]

    def act(self, obs: Any, rng: Any) -> Any:  # type: ignore[override]
        yes = 1 / (1 + np.exp(-self.logit[0]))
        return np.array([generator.random() < yes for generator in rng], np.int64)

    def log_prob(self, obs: Any, action: Any) -> Any:
        return -np.logaddexp(0.0, np.where(action == 1, -self.logit[0], self.logit[0]))


class RecurrentAgent(CoinAgent):
    def initial_state(self, n: int) -> Any:
        return {"count": np.zeros((n, 1), np.float32)}

    def act(self, obs: Any, state: Any, episode_start: Any) -> Any:  # type: ignore[override]
        return {"action": np.zeros(len(obs), np.int64), "state": {"count": state["count"] + 1}}

    def distribution(self, obs: Any, state: Any, episode_start: Any) -> Any:  # type: ignore[override]
        assert state["count"].shape == (len(obs), 1) and episode_start.dtype == bool
        return super().distribution(obs)


class DistanceAgent(CoinAgent):
    def distribution(self, obs: Any) -> Any:
        return {"action": np.repeat(self.logit, len(obs))}

    def divergence(self, local: Any, learner: Any) -> Any:
        return np.abs(local["distribution.action"] - learner["distribution.action"])


@EVERYWHERE
@pytest.mark.parametrize("kind", [LogProbAgent, RecurrentAgent, DistanceAgent], ids=lambda kind: kind.__name__)
def test_every_kind_of_agent_can_be_compared(config: LaunchConfig, kind: Any) -> None:
    with cluster(never_ending, envs=8, sync=AAPS(0.2, window=1), config=config) as env:
        agent = kind()
        env.collect(agent, steps=16)
        agent.logit += 1e-3
        assert (env.collect(agent, steps=16)["version"] == 0).all()
        agent.logit += 3
        assert (env.collect(agent, steps=16)["version"] == 2).all()


# ---- parameters that are sent ----


class ActorCriticAgent(CoinAgent):
    def __init__(self) -> None:
        super().__init__()
        self.critic = np.zeros(1000, np.float32)

    def get_parameters(self) -> Any:
        return {"actor": {"logit": self.logit}, "critic": [self.critic]}

    def act(self, obs: Any) -> Any:
        count = len(obs)
        return {
            "action": np.zeros(count, np.int64),
            "logit": np.repeat(self.logit, count),
            "value": np.repeat(self.critic[0], count),
        }


@pytest.mark.parametrize("only", ["actor.*", ["actor.logit", "a*"], lambda name: name.startswith("actor")])
@EVERYWHERE
def test_some_of_the_parameters_can_be_selected_for_sending(config: LaunchConfig, only: Any) -> None:
    with cluster(envs=4, weights={"only": only}, config=config) as env:
        agent = ActorCriticAgent()
        env.collect(agent, steps=2)
        agent.critic[:] = 7
        assert (env.collect(agent, steps=2)["version"] == 0).all()  # parameters that are not sent make no version
        agent.logit[:] = 3
        batch = env.collect(agent, steps=2)
        assert (batch["logit"] == 3).all() and (batch["value"] == 0).all() and (batch["version"] == 1).all()
        assert env.stats()["bytes"]["weights_sent"] == 2 * 2 * 64


class SetterAgent(ActorCriticAgent):
    def set_parameters(self, parameters: Any) -> None:
        self.logit, self.critic = parameters["actor"]["logit"], parameters["critic"][0]

    def get_parameters(self) -> Any:
        return {"actor": {"logit": self.logit.copy()}, "critic": [self.critic.copy()]}


@pytest.mark.parametrize("weights", [{"only": "actor.*"}, {"half": True}, {"only": "critic.0", "half": True}], ids=repr)
def test_set_parameters_gets_all_parameters_with_new_values_of_those_sent(weights: dict[str, Any]) -> None:
    with cluster(envs=4, weights=weights, config=in_process(2)) as env:
        agent = SetterAgent()
        env.collect(agent, steps=2)
        agent.logit[:], agent.critic[:] = 3, 5
        batch = env.collect(agent, steps=2)
        only = weights.get("only", "")
        assert (batch["logit"] == (0 if only == "critic.0" else 3)).all()
        assert (batch["value"] == (0 if only == "actor.*" else 5)).all()


def test_selection_of_no_parameters_is_refused_by_name() -> None:
    with (
        cluster(envs=4, weights={"only": lambda name: False}, config=in_process(1)) as env,
        pytest.raises(farstep.AgentError, match=r"none of the agent's.*The agent has actor\.logit, critic\.0"),
    ):
        env.collect(ActorCriticAgent(), steps=2)


@pytest.mark.parametrize("only", ["actr.*", ["critic.*", "actr.*"]], ids=repr)
def test_pattern_that_selects_no_parameter_is_refused_with_the_nearest_names(only: Any) -> None:
    said = r"the pattern 'actr\.\*', which matches none.*The nearest are actor\.logit"
    with (
        cluster(envs=4, weights={"only": only}, config=in_process(1)) as env,
        pytest.raises(farstep.AgentError, match=said),
    ):
        env.collect(ActorCriticAgent(), steps=2)


def test_a_predicate_that_raises_is_named() -> None:
    def choose(name: str) -> bool:
        raise ZeroDivisionError("deliberate")

    said = r"the predicate weights\.only raised ZeroDivisionError: deliberate, for the parameter 'actor\.logit'"
    with cluster(envs=4, weights={"only": choose}, config=in_process(1)) as env:
        with pytest.raises(farstep.AgentError, match=said) as caught:
            env.collect(ActorCriticAgent(), steps=2)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


@EVERYWHERE
def test_weights_can_be_sent_in_half_precision(config: LaunchConfig) -> None:
    with cluster(envs=4, weights={"half": True}, config=config) as env:
        agent = ActorCriticAgent()
        agent.critic[:] = 0.1
        batch = env.collect(agent, steps=2)
        assert batch["value"][0, 0] == np.float32(np.float16(0.1))
        assert env.stats()["bytes"]["weights_sent"] == 2 * (64 + 2048)
        assert (env.collect(agent, steps=2)["version"] == 0).all()  # rounding is no change
        agent.critic[3] = 1e6
        with pytest.raises(farstep.AgentError, match=r"critic\.0.*half precision"):
            env.publish(agent)
        agent.critic[3] = 1
        assert env.publish(agent) == 1


def as_sent(value: np.float32, half: bool | str) -> float:
    """A parameter as workers receive it."""
    dtype = {False: torch.float32, True: torch.float16, "bfloat16": torch.bfloat16}[half]
    return torch.tensor(value).to(dtype).float().item()


def test_bfloat16_has_the_range_of_float32() -> None:
    with cluster(envs=4, weights={"half": "bfloat16"}, config=in_process(1)) as env:
        agent = ActorCriticAgent()
        for value in (0.1, -3e38, 1e-30, 0.0, np.inf):
            agent.critic[:] = value
            expected = torch.tensor(value, dtype=torch.float32).bfloat16().float().item()
            assert env.collect(agent, steps=1)["value"][0, 0] == np.float32(expected)
        assert env.stats()["bytes"]["weights_sent"] == 5 * (64 + 2048)


@pytest.mark.parametrize("half", [False, True, "bfloat16"])
def test_differences_arrive_exactly_and_take_less(half: bool | str) -> None:
    generator = np.random.default_rng(0)
    with cluster(envs=4, workers=2, weights={"delta": True, "half": half}, transport="tcp") as env:
        agent = ActorCriticAgent()
        agent.critic[:] = generator.normal(size=1000)
        env.collect(agent, steps=2)
        whole = env.stats()["bytes"]["weights_sent"]
        for k in range(5):
            agent.critic += generator.normal(size=1000).astype(np.float32) * 1e-4
            agent.logit[:] = k
            batch = env.collect(agent, steps=2)
            exact = as_sent(agent.critic[0], half)
            assert (batch["value"] == np.float32(exact)).all() and (batch["logit"] == k).all()
        later = (env.stats()["bytes"]["weights_sent"] - whole) / 5
        assert 0 < later < 0.75 * whole
        os.kill(worker_pids()[1], signal.SIGKILL)
        eventually(lambda: env.stats()["workers"]["restarts"] == 1 and env.stats()["workers"]["alive"] == 2)
        agent.critic += 1  # a worker without a version gets all weights, the other one the delta
        batch = env.collect(agent, steps=2)
        exact = as_sent(agent.critic[0], half)
        assert (batch["value"] == np.float32(exact)).all()


# ---- in view ----


def test_counters_become_scalars_for_tensorboard(tmp_path: Any) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with cluster(envs=4, sync=AAPS(0.5), config=in_process(2)) as env, tensorboard.SummaryWriter(tmp_path) as writer:
        agent = CoinAgent()
        for k in range(4):
            agent.logit += 0.3
            env.collect(agent, steps=3)
            for tag, value in farstep.scalars(env.stats()).items():
                writer.add_scalar(tag, value, k)
        stats = env.stats()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Scalars("farstep/bytes/probes_sent")[-1].value == stats["bytes"]["probes_sent"]
    assert events.Scalars("farstep/pulls/per_worker/1")[-1].value == stats["pulls"]["per_worker"][1]
    assert events.Scalars("farstep/divergence/0")[-1].value == pytest.approx(stats["divergence"][0], rel=1e-5)
    assert [e.step for e in events.Scalars("farstep/versions/current")] == [0, 1, 2, 3]
