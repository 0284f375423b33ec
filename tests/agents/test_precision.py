"""Policies whose layers compute in bfloat16 or float16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Independent, Normal

from farstep.acting.serving.batch_actor import BatchActor
from farstep.agents.precision import MAX_DIVERGENCE, reduce_layers
from farstep.errors import AgentError
from farstep.learners.networks.nets import NetConfig, make_agent
from farstep.rollout.rows import Slots
from farstep.schema import space_schema

COUNT = 6
BOX = gymnasium.spaces.Box(-2, 2, (4,), np.float32)
IMAGES = gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8)


class Plain(nn.Module):
    """Returns what it computes with."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 32), nn.LayerNorm(32), nn.Tanh())
        self.head = nn.Linear(32, 3)
        self.scale = nn.Parameter(torch.tensor(scale))

    def distribution(self, obs: Any) -> Any:
        return Categorical(logits=self.head(self.body(obs)) * self.scale, validate_args=False)

    def act(self, obs: Any) -> dict[str, Any]:
        distribution = self.distribution(obs)
        action = distribution.sample()
        return {"action": action, "logprob": distribution.log_prob(action), "logits": distribution.logits}

    def get_parameters(self) -> dict[str, Any]:
        return self.state_dict()


class Narrow(Plain):
    """A Gaussian whose standard deviation is below the rounding of its mean."""

    def distribution(self, obs: Any) -> Any:
        mean = self.head(self.body(obs)) + 3
        return Independent(Normal(mean, torch.full_like(mean, 1e-3)), 1)

    def act(self, obs: Any) -> dict[str, Any]:
        return {"action": self.distribution(obs).sample()}


class Overflowing(Plain):
    """Its layers return numbers above the largest of float16."""

    def distribution(self, obs: Any) -> Any:
        return Categorical(logits=(self.head(self.body(obs) * 1e6)) * 1e-6, validate_args=False)


class Silent(Plain):
    """Cannot be compared."""

    distribution = None  # type: ignore[assignment]

    def act(self, obs: Any) -> Any:
        return self.head(self.body(obs)).argmax(-1)


class Logits(Plain):
    """Has no distribution, but returns logits."""

    distribution = None  # type: ignore[assignment]

    def act(self, obs: Any) -> dict[str, Any]:
        logits = self.head(self.body(obs))
        return {"action": logits.argmax(-1), "logits": logits}


class Direct(Plain):
    """Uses the weights of a layer without calling it."""

    def distribution(self, obs: Any) -> Any:
        return Categorical(logits=nn.functional.linear(self.body(obs), self.head.weight))


class Hiding(Plain):
    """Has a parameter that is not one of the module."""

    def get_parameters(self) -> dict[str, Any]:
        return {**self.state_dict(), "extra": torch.zeros(3)}

    def set_parameters(self, parameters: Any) -> None:
        pass


class Table:
    def act(self, obs: Any) -> Any:
        return np.zeros(len(obs), np.int64)

    def get_parameters(self) -> dict[str, Any]:
        return {}


def actor_of(agent: Any, dtype: Any = "bfloat16", space: Any = BOX, action: Any = None) -> BatchActor:
    """The copy of an acting server, after its first call of `act`."""
    obs, obs_schema = space_schema(space, "obs")
    _, action_schema = space_schema(action or gymnasium.spaces.Discrete(3), "action")
    actor = BatchActor(cloudpickle.dumps(agent), obs, Slots(0, [0] * COUNT, [0] * COUNT), dtype=dtype)
    space.seed(0)
    current = {name: np.stack([space.sample() for _ in range(COUNT)]) for name in obs_schema}
    actor.dry_run(current, action_schema)
    return actor


def test_layers_have_the_lower_precision_and_all_else_is_float32() -> None:
    agent = Plain()
    actor = actor_of(agent)
    reduced = actor.policy.agent
    dtypes = {name: parameter.dtype for name, parameter in reduced.named_parameters()}
    layers = {name for name, dtype in dtypes.items() if dtype == torch.bfloat16}
    assert layers == {"body.0.weight", "body.0.bias", "head.weight", "head.bias"}
    assert {dtypes[name] for name in dtypes.keys() - layers} == {torch.float32}
    out = actor.policy(actor.example["obs"], None, None, None)
    assert out["logprob"].dtype == out["logits"].dtype == np.float32
    logits = torch.from_numpy(out["logits"])
    expected = Categorical(logits=logits).log_prob(torch.from_numpy(out["action"]))
    np.testing.assert_allclose(out["logprob"], expected, rtol=1e-6)  # of the distribution that was sampled from
    full = agent.distribution(torch.from_numpy(actor.example["obs"])).logits.detach()
    assert 0 < (full - logits).abs().max() < 0.05


@pytest.mark.parametrize(
    ("config", "space"),
    [
        (NetConfig(), BOX),
        (NetConfig(recurrent="gru"), BOX),
        (NetConfig(recurrent="lstm"), BOX),
        (NetConfig(), IMAGES),
    ],
    ids=["mlp", "gru", "lstm", "images"],
)
@pytest.mark.parametrize("action", [gymnasium.spaces.Discrete(3), BOX], ids=["discrete", "continuous"])
@pytest.mark.slow
def test_new_weights_are_converted(config: NetConfig, space: Any, action: Any) -> None:
    agent = make_agent(space, action, config, 0.99)
    actor = actor_of(agent, space=space, action=action)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.mul_(1.01)
    actor.loader.load([tensor.numpy() for tensor in agent.get_parameters().values()])
    actor.loaded(1)
    reduced = actor.policy.agent.state_dict()
    for name, tensor in agent.state_dict().items():
        torch.testing.assert_close(reduced[name], tensor.to(reduced[name].dtype), rtol=0, atol=0)
    assert any(tensor.dtype == torch.bfloat16 for tensor in reduced.values())


LAYERS: dict[str, tuple[Callable[[], Any], tuple[Any, ...]]] = {
    "lstm": (lambda: nn.LSTM(4, 8, batch_first=True), (torch.randn(2, 5, 4),)),
    "attention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), (torch.randn(2, 5, 8),) * 3),
    "embedding": (lambda: nn.Embedding(7, 4), (torch.arange(5),)),
    "convolution": (lambda: nn.Conv1d(4, 2, 3), (torch.randn(2, 4, 9),)),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, batch_first=True).eval(), (torch.randn(2, 5, 8),)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_take_and_return_float32(name: str) -> None:
    torch.manual_seed(0)
    make, inputs = LAYERS[name]
    layer = make()
    with torch.inference_mode():
        expected = layer(*inputs)
        found = reduce_layers(layer, "bfloat16")(*inputs)
    expected, found = (each[0] if isinstance(each, tuple) else each for each in (expected, found))
    assert found.dtype == torch.float32 and any(p.dtype == torch.bfloat16 for p in layer.parameters())
    torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Table, "Table is not a torch module with float32 layers"),
        (lambda: Plain().double(), "is not a torch module with float32 layers"),
        (Hiding, "returns 'extra', which is not a parameter or buffer"),
        (Silent, "Silent has no distribution"),
        (Direct, "use their weights only by calling the layers"),
    ],
    ids=["array", "double", "hiding", "silent", "direct"],
)
def test_agents_that_cannot_have_a_lower_precision_are_refused(make: Any, reason: str) -> None:
    with pytest.raises(AgentError, match=reason):
        actor_of(make())


def test_a_policy_that_differs_too_much_is_refused_with_numbers() -> None:
    with pytest.raises(AgentError, match=rf"differs from float32 by \d.* \(mean KL of 6 .*; at most {MAX_DIVERGENCE}"):
        actor_of(Narrow(), action=gymnasium.spaces.Box(-9, 9, (3,), np.float32))
    actor_of(Overflowing())  # the range of bfloat16 is that of float32
    with pytest.raises(AgentError, match=r"act raised .* with dtype='float16'"):
        actor_of(Overflowing(), "float16")


@pytest.mark.parametrize("make", [Plain, Logits])
def test_later_weights_are_compared_too(make: Callable[[], Any]) -> None:
    agent = make()
    actor = actor_of(agent)
    with torch.no_grad():
        agent.head.bias.copy_(torch.tensor([1001.0, 1002.0, 1003.0]))  # in bfloat16: 1000, 1000 and 1004
    actor.loader.load([tensor.numpy() for tensor in agent.get_parameters().values()])
    with pytest.raises(AgentError, match="differs from float32 by"):
        actor.loaded(1)
    with torch.no_grad():
        agent.head.weight += torch.nan
    actor.loader.load([tensor.numpy() for tensor in agent.get_parameters().values()])
    actor.loaded(2)  # float32 weights with NaN are not the fault of the precision
