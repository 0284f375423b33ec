"""AAPS with agents that have only `act` and `get_parameters`, with streams, workflows, stagger and `MaxLag`."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

import farstep
from farstep.agents.policy import FAST
from farstep.config.launch import LaunchConfig
from farstep.sync import AAPS, MaxLag
from farstep.testing import CountingEnv, TableAgent
from tests.cluster.checks import assert_balanced, cluster, in_process

EVERYWHERE = pytest.mark.parametrize(
    "config",
    [in_process(2), *(farstep.LocalConfig(workers_per_node=2, transport=t) for t in ("shm", "tcp"))],
    ids=["in_process", "shm", "tcp"],
)
STEPS = 4


class LogitsAgent:
    """Three actions, whose logits are its only parameters."""

    def __init__(self) -> None:
        self.logits = np.zeros(3)

    def act(self, obs: Any) -> dict[str, Any]:
        return {"action": np.zeros(len(obs), np.int64), "logits": np.tile(self.logits, (len(obs), 1))}

    def get_parameters(self) -> Any:
        return {"logits": self.logits}


class DrawingAgent(LogitsAgent):
    """Draws its actions from a generator per environment."""

    def act(self, obs: Any, rng: Any) -> dict[str, Any]:  # type: ignore[override]
        assert len(rng) == len(obs)
        noise = np.array([generator.gumbel(size=3) for generator in rng])
        return super().act(obs) | {"action": (self.logits + noise).argmax(axis=1)}


class RecurrentAgent(LogitsAgent):
    def initial_state(self, n: int) -> Any:
        return {"count": np.zeros((n, 1), np.float32)}

    def act(self, obs: Any, state: Any, episode_start: Any) -> dict[str, Any]:  # type: ignore[override]
        return super().act(obs) | {"state": {"count": state["count"] + 1}}


class GaussianAgent(LogitsAgent):
    """Returns the parameters of a Gaussian under `distribution`."""

    def act(self, obs: Any) -> dict[str, Any]:
        mean = np.tile(self.logits, (len(obs), 1))
        distribution = {"mean": mean, "log_std": np.zeros_like(mean)}
        return {"action": np.zeros(len(obs), np.int64), "distribution": distribution}


class MuteAgent(LogitsAgent):
    """Returns actions alone."""

    def act(self, obs: Any) -> dict[str, Any]:
        return {"action": np.zeros(len(obs), np.int64)}


def versions(env: farstep.ClusterEnv, agent: Any, changes: list[float]) -> list[int]:
    """The version that acted after each change of the first logit."""
    found = []
    for change in changes:
        agent.logits[0] += change
        acted = set(env.collect(agent, steps=STEPS)["version"].flat)
        assert len(acted) == 1
        found.append(int(acted.pop()))
    return found


SLIGHTLY_THEN_MUCH = [0.0, 1e-3, 1e-3, 1e-3, 3.0, 1e-3, 1e-3]


@EVERYWHERE
def test_workers_pull_at_once_after_a_jump_and_not_before(config: LaunchConfig) -> None:
    with cluster(envs=4, kl_threshold=0.05, config=config) as env:
        assert versions(env, LogitsAgent(), SLIGHTLY_THEN_MUCH) == [0, 0, 0, 0, 4, 4, 4]
        assert env.stats()["pulls"]["per_worker"] == [2, 2]
        assert_balanced(env.stats())


@pytest.mark.parametrize("kind", [DrawingAgent, RecurrentAgent, GaussianAgent])
def test_agents_of_other_kinds(kind: Any) -> None:
    with cluster(envs=4, kl_threshold=0.05, config=in_process(2)) as env:
        assert versions(env, kind(), SLIGHTLY_THEN_MUCH) == [0, 0, 0, 0, 4, 4, 4]


def test_a_module_on_the_fast_path() -> None:
    import torch  # not above: workers of the other tests import this file

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(3))

        @property
        def logits(self) -> Any:
            return self.weight.detach()

        def act(self, obs: Any) -> dict[str, Any]:
            logits = torch.zeros(len(obs), 3) + self.weight
            return {"action": logits.argmax(-1), "logits": logits}

        def get_parameters(self) -> Any:
            return self.state_dict()

    with cluster(envs=4, kl_threshold=0.05, config=in_process(2)) as env:
        assert versions(env, Module(), SLIGHTLY_THEN_MUCH) == [0, 0, 0, 0, 4, 4, 4]
        assert env.inference == FAST == "fast: workers replay the recorded torch operations of act"


@EVERYWHERE
def test_an_agent_that_cannot_be_compared_pulls_every_version_and_one_warning_says_what_to_add(
    config: LaunchConfig, caplog: pytest.LogCaptureFixture
) -> None:
    agent = MuteAgent()
    with caplog.at_level(logging.WARNING, "farstep"), cluster(envs=4, kl_threshold=0.05, config=config) as env:
        assert versions(env, agent, [0.0, 1e-3, 1e-3, 1e-3]) == [0, 1, 2, 3]
        agent.logits[0] += 1e-3
        *_, info = env.step(agent)
        assert (info["version"] == 4).all()
        stats = env.stats()
    assert stats["pulls"]["per_worker"] == [5, 5]
    assert stats["divergence"] == {} and stats["bytes"]["probes_sent"] == 0
    # On a busy machine a slow start is logged.
    (said,) = [text for text in caplog.messages if not text.startswith("waiting ")]
    for words in ("pull every version", "MuteAgent has no distribution(obs)", "'logits'", '"distribution"'):
        assert words in said


def test_logits_that_do_not_fit_the_action_are_named(caplog: pytest.LogCaptureFixture) -> None:
    class Flat(LogitsAgent):
        def act(self, obs: Any) -> dict[str, Any]:
            return super().act(obs) | {"logits": np.zeros(len(obs))}

    with caplog.at_level(logging.WARNING, "farstep"), cluster(kl_threshold=0.05, config=in_process()) as env:
        assert versions(env, Flat(), [0.0, 1e-3]) == [0, 1]
    assert "'logits' that act returns, of shape [], do not match actions of shape []" in caplog.text


def never_ending() -> CountingEnv:
    return CountingEnv(length=None)


@EVERYWHERE
def test_streams_keep_their_bound(config: LaunchConfig) -> None:
    """Weights that passed their probe are as good as new; those of an agent that cannot be compared are new."""
    with cluster(never_ending, envs=4, kl_threshold=0.05, config=config) as env:
        for agent, first in ((LogitsAgent(), 0), (MuteAgent(), 4)):
            for k, batch in enumerate(env.stream(agent, steps=STEPS, max_staleness=0)):
                assert (batch["version"] == first + k * isinstance(agent, MuteAgent)).all()
                if k == 3:
                    break
                agent.logits[0] += 1e-3
                env.publish(agent)
        assert not env.stats()["dropped"].get("stale")
        assert_balanced(env.stats())


@pytest.mark.parametrize(("kind", "acted"), [(LogitsAgent, [0] * 4), (MuteAgent, [0, 1, 2, 3])])
def test_workflows(kind: Any, acted: list[int]) -> None:
    agent, found = kind(), []
    with cluster(never_ending, envs=4, kl_threshold=0.05, config=in_process(2)) as env:
        buffer = farstep.Buffer(capacity=4 * STEPS, sampler=farstep.FullBatch())
        flow = farstep.Workflow(env, agent, buffer)

        def update(message: Any) -> None:
            found.append(set(flow.batch(message)["version"].flat))
            agent.logits[0] += 1e-3
            flow.publish()

        flow.on(farstep.DataKeyTrigger(n=2, size=STEPS), update)
        flow.on(farstep.ObjectKeyTrigger("parameters"), flow.next_rollout)
        flow.run(until=lambda: len(found) == 4)
    assert found == [{version} for version in acted]


def test_staggered_environments() -> None:
    options: dict[str, Any] = {"stagger": {"horizon": 8}, "env_kwargs": {"length": 8, "truncate": True}}
    with cluster(envs=4, kl_threshold=0.05, config=in_process(2), **options) as env:
        assert versions(env, LogitsAgent(), SLIGHTLY_THEN_MUCH) == [0, 0, 0, 0, 4, 4, 4]


def test_a_hard_bound_beside_the_threshold() -> None:
    with cluster(envs=4, sync=AAPS(0.05) | MaxLag(1), config=in_process(2)) as env:
        assert versions(env, LogitsAgent(), [0.0, 1e-3, 1e-3, 1e-3, 1e-3]) == [0, 0, 2, 2, 4]


def test_single_steps() -> None:
    with cluster(envs=4, kl_threshold=0.05, config=in_process(2)) as env:
        agent, found = LogitsAgent(), []
        for change in SLIGHTLY_THEN_MUCH:
            agent.logits[0] += change
            *_, info = env.step(agent)
            found.append(int(info["version"][0]))
        assert found == [0, 0, 0, 0, 4, 4, 4]


@pytest.mark.parametrize("entry", ["logits", "distribution"])
def test_a_single_logit_is_not_taken_for_a_distribution(entry: str, caplog: pytest.LogCaptureFixture) -> None:
    """The softmax of one number never changes: workers would keep their first weights forever."""

    class Sigmoid(TableAgent):
        def act(self, obs: Any) -> dict[str, Any]:
            logits = np.full((len(obs), 1), self.table[0], np.float32)
            return {**super().act(obs), entry: logits if entry == "logits" else {"logits": logits}}

    with cluster(envs=2, kl_threshold=0.05, config=in_process(1)) as env:
        agent = Sigmoid()
        if entry == "distribution":
            with pytest.raises(farstep.AgentError, match="logits of a single choice"):
                env.collect(agent, steps=2)
            return
        for version in range(4):
            assert (env.collect(agent, steps=2)["version"] == version).all()
            agent.table[0] += 1
    assert "logits" in caplog.text
