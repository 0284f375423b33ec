"""Acting servers on a GPU: CUDA graphs, new weights, lower precision, and agents that cannot be captured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import farstep
from farstep.learners.networks.nets import NetConfig, make_agent
from tests.cluster.checks import assert_sound, cluster, within

pytestmark = [
    pytest.mark.slow,  # real processes
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
if torch.cuda.is_available():
    torch.zeros(1, device="cuda")  # CUDA keeps descriptors open, which no test has to close


class NumberAgent(torch.nn.Module):
    """Returns its weight with every row."""

    def __init__(self) -> None:
        super().__init__()
        self.number = torch.nn.Parameter(torch.zeros(()))

    def act(self, obs: Any) -> dict[str, Any]:
        return {"action": torch.zeros(len(obs), dtype=torch.int64, device=obs.device), "number": self._numbers(obs)}

    def _numbers(self, obs: Any) -> Any:
        return self.number.expand(len(obs)) + 0 * obs.sum(-1)

    def get_parameters(self) -> dict[str, Any]:
        return dict(self.named_parameters())


class RngAgent(NumberAgent):
    """Draws its actions from the generators of the slots."""

    def act(self, obs: Any, rng: Any) -> dict[str, Any]:  # type: ignore[override]
        draws = torch.tensor([each.random() for each in rng])
        return {"action": (3 * draws).long(), "draw": draws, "number": self._numbers(obs)}


class ReadingAgent(NumberAgent):
    """Cannot be captured: it reads a value of a tensor."""

    def act(self, obs: Any) -> dict[str, Any]:
        return {**super().act(obs), "number": torch.full((len(obs),), self.number.item(), device=obs.device)}


def served(**options: Any) -> farstep.ClusterEnv:
    return cluster(envs=4, workers=2, inference={"device": "cuda", **options})


def assert_near(agent: Any, batch: farstep.Batch, tolerance: float) -> None:
    """The recorded log-probabilities are those of the learner's policy."""
    obs, action, starts = (torch.from_numpy(batch[name].copy()) for name in ("obs", "action", "episode_start"))
    with torch.no_grad():
        if batch.initial_state is None:
            found = agent.evaluate(obs.flatten(0, 1), action.flatten(0, 1))
        else:
            state = tuple(torch.from_numpy(part.copy()) for part in batch.initial_state)
            found = agent.evaluate_sequences(obs, action, state, starts)
    np.testing.assert_allclose(batch["logprob"].ravel(), found.logprob.numpy(), atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.05), ("float16", 0.01)])
@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_actions_are_those_of_the_published_policy(dtype: str, tolerance: float, recurrent: Any) -> None:
    with served(dtype=dtype) as env:
        torch.manual_seed(0)
        agent = make_agent(*env.launch(), NetConfig(recurrent=recurrent), 0.99)
        for _ in range(4):
            batch = within(lambda: env.collect(agent, 10))
            assert_sound(batch)
            assert_near(agent, batch, tolerance)
            with torch.no_grad():
                for parameter in agent.parameters():
                    parameter.add_(0.01 * torch.randn_like(parameter))
            if recurrent == "none":
                precision = "" if dtype == "float32" else f", {dtype}"
                assert env.inference == f"served on cuda{precision}, CUDA graphs"


def test_every_row_has_the_weights_of_its_version() -> None:
    agent = NumberAgent()
    with served() as env:
        stream = env.stream(agent, steps=4, max_staleness=4)
        for k in range(1, 20):
            batch = within(lambda: next(stream))
            np.testing.assert_array_equal(batch["number"], batch["version"])
            with torch.no_grad():
                agent.number.fill_(k)
            within(lambda: env.publish(agent))
        stream.close()
        assert env.inference == "served on cuda, CUDA graphs"


def test_draws_from_rng_follow_the_seeds() -> None:
    found = []
    for inference in ({"device": "cuda"}, "local"):
        with cluster(envs=4, workers=2, seed=3, inference=inference) as env:
            found.append(within(lambda: env.collect(RngAgent(), 20)).copy())
    for name in ("obs", "action", "draw"):
        np.testing.assert_array_equal(found[0][name], found[1][name])


def test_agent_that_cannot_be_captured_is_reported_once() -> None:
    agent = ReadingAgent()
    with served() as env:
        for k in range(3):
            with torch.no_grad():
                agent.number.fill_(k)
            batch = within(lambda: env.collect(agent, 5))
            assert (batch["number"] == k).all()
        assert env.inference.startswith("served on cuda, eager: act cannot be captured")
        assert sum("without CUDA graphs" in event.text for event in env.events("warned")) == 1
