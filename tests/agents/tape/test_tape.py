"""A replayed act equals the eager one."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.distributions import Categorical, Normal  # noqa: E402

from farstep.agents.tape import compile_act, equal_results  # noqa: E402
from tests.agents.tape.tape_agents import AGENTS, Discrete, Gaussian, check, numpy_of  # noqa: E402


@pytest.mark.parametrize("num_envs", [1, 3, 32])
@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
def test_replay_equals_eager(agent: type[Any], num_envs: int) -> None:
    torch.manual_seed(1)
    check(agent().act, lambda: torch.randn(num_envs, 4), tolerance=1e-4)


@pytest.mark.parametrize(
    "activation",
    [nn.ReLU, nn.ELU, nn.SiLU, nn.GELU, nn.Softplus, nn.Sigmoid, nn.LeakyReLU, nn.Hardtanh, nn.Mish],
)
def test_activations(activation: type[nn.Module]) -> None:
    torch.manual_seed(1)
    check(Discrete(activation).act, lambda: torch.randn(6, 4))


def test_double_precision() -> None:
    check(Discrete().double().act, lambda: torch.randn(6, 4, dtype=torch.float64), tolerance=1e-12)


def test_dict_observations_and_actions() -> None:
    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.vector = nn.Linear(12, 8), nn.Linear(4, 8)
            self.move, self.aim = nn.Linear(16, 3), nn.Linear(16, 2)

        def act(self, obs: dict[str, Any]) -> dict[str, Any]:
            image = self.image(obs["image"].flatten(1).float() / 255.0)
            features = torch.cat([image, self.vector(obs["inner"]["vector"])], dim=1).relu()
            move, aim = Categorical(logits=self.move(features)), Normal(self.aim(features), 0.5)
            action = {"move": move.sample(), "aim": aim.sample()}
            logprob = move.log_prob(action["move"]) + aim.log_prob(action["aim"]).sum(-1)
            return {"action": action, "logprob": logprob}

    check(
        Agent().act,
        lambda: {
            "image": torch.randint(0, 256, (5, 2, 2, 3), dtype=torch.uint8),
            "inner": {"vector": torch.randn(5, 4)},
        },
    )


def test_nature_cnn() -> None:
    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Sequential(
                nn.Conv2d(4, 8, 8, stride=4), nn.ReLU(), nn.Conv2d(8, 8, 4, stride=2), nn.ReLU(),
                nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 7 * 7, 32), nn.ReLU(),
            )  # fmt: skip
            self.actor, self.critic = nn.Linear(32, 6), nn.Linear(32, 1)

        def act(self, obs: Tensor) -> dict[str, Tensor]:
            hidden = self.network(obs / 255.0)
            distribution = Categorical(logits=self.actor(hidden))
            action = distribution.sample()
            return {
                "action": action,
                "logprob": distribution.log_prob(action),
                "value": self.critic(hidden)[:, 0],
            }

    check(Agent().act, lambda: torch.randint(0, 256, (2, 4, 84, 84), dtype=torch.uint8), calls=2)


@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "LSTM", "GRU"])
def test_recurrent(kind: str) -> None:
    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core = getattr(nn, kind)(4, 8)
            self.actor = nn.Linear(8, 3)

        def act(self, obs: Tensor, state: Any, episode_start: Tensor) -> dict[str, Any]:
            keep = (~episode_start).float()[:, None]
            state = tuple(part * keep for part in state)
            if kind == "LSTMCell":
                state = self.core(obs, state)
                hidden = state[0]
            elif kind == "GRUCell":
                hidden = self.core(obs, state[0])
                state = (hidden,)
            else:
                hidden, new = self.core(obs[None], tuple(s[None] for s in state) if kind == "LSTM" else state[0][None])
                hidden, state = hidden[0], tuple(s[0] for s in (new if kind == "LSTM" else (new,)))
            distribution = Categorical(logits=self.actor(hidden))
            action = distribution.sample()
            return {"action": action, "logprob": distribution.log_prob(action), "state": state}

    torch.manual_seed(3)
    agent, parts = Agent(), 2 if "LSTM" in kind else 1
    start = tuple(torch.zeros(5, 8) for _ in range(parts))
    program = compile_act(agent.act, torch.randn(5, 4), start, torch.zeros(5, dtype=torch.bool))
    eager_state, state = start, numpy_of(start)
    for step in range(5):
        obs, episode_start = torch.randn(5, 4), torch.rand(5) < 0.3
        torch.manual_seed(step)
        with torch.no_grad():
            eager = agent.act(obs, eager_state, episode_start)
        torch.manual_seed(step)
        # The state is handed back as it came, a view of the program's own buffer.
        replayed = program(obs.numpy(), state, episode_start.numpy())
        assert equal_results(eager, replayed) is None
        eager_state, state = eager["state"], replayed["state"]


def test_weights_loaded_in_place_are_seen() -> None:
    agent, other = Discrete(), Discrete()
    program = compile_act(agent.act, torch.zeros(4, 4))
    agent.load_state_dict(other.state_dict())
    obs = torch.randn(4, 4)
    torch.manual_seed(0)
    with torch.no_grad():
        expected = other.act(obs)
    torch.manual_seed(0)
    assert equal_results(expected, program(obs.numpy())) is None


def test_the_random_state_is_left_alone() -> None:
    agent = Gaussian()
    before = torch.get_rng_state()
    compile_act(agent.act, torch.zeros(2, 4))
    assert torch.equal(before, torch.get_rng_state())


def test_compiling_inside_inference_mode() -> None:
    agent, obs = Discrete(), torch.randn(3, 4)
    with torch.inference_mode():
        program = compile_act(agent.act, obs)
        torch.manual_seed(0)
        expected = agent.act(obs)
    torch.manual_seed(0)
    assert equal_results(expected, program(obs.numpy())) is None


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
def test_act_may_enter_inference_mode_itself(agent: type[Any]) -> None:
    torch.manual_seed(1)
    act = agent().act
    program = check(lambda obs: torch.inference_mode()(act)(obs), lambda: torch.randn(3, 4), tolerance=1e-4)
    assert "linear" not in program.source


def test_without_a_batch_dimension() -> None:
    check(Discrete().act, lambda: torch.randn(4))


def test_parameters_with_new_memory_are_noticed() -> None:
    agent = Discrete()
    program = compile_act(agent.act, torch.zeros(4, 4))
    assert program.is_current()
    agent.actor[0].weight.data = torch.zeros(16, 4)
    assert not program.is_current()


def test_in_place_operations_and_views_of_an_intermediate() -> None:
    def act(obs: Tensor) -> dict[str, Tensor]:
        hidden = obs * 2
        view = hidden[:, 1:3]
        before = view + 1
        hidden.add_(1).clamp_(max=1.5)
        view[:, 0] = obs[:, 3]
        hidden[0] *= 3
        return {"hidden": hidden, "before": before, "after": view + 1}

    check(act, lambda: torch.randn(3, 4))


def test_constants_made_in_the_call() -> None:
    scale = np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32)

    def act(obs: Tensor) -> dict[str, Tensor]:
        total, steps = torch.zeros(4), torch.tensor([1.0, 2.0, 3.0, 4.0])
        early = steps + obs
        for row in obs:
            total += row
            steps.mul_(row)
        filled = torch.full((2,), 7)
        filled[0] = 1
        between = filled * obs[:2, 0]
        filled[1] = 3
        late = torch.zeros(4)
        unchanged = obs + late
        late += 1
        return {
            "unchanged": unchanged, "total": total, "steps": steps, "early": early, "filled": filled,
            "between": between,
            "arange": torch.arange(4) * obs, "table": obs * torch.from_numpy(scale),
            "like": torch.ones_like(obs) + obs,
        }  # fmt: skip

    check(act, lambda: torch.randn(3, 4))


def test_operations_that_only_change_a_shape_or_only_check() -> None:
    def act(obs: Tensor) -> dict[str, Tensor]:
        torch._assert_async((obs < 100).all())  # noqa: SLF001 - has no public name in torch
        hidden = (obs.sum(-1, keepdim=True) + 1).unsqueeze_(0)
        return {"quantile": torch.quantile(obs, 0.5, dim=1), "hidden": hidden.squeeze_() * 2}

    program = check(act, lambda: torch.randn(3, 4))
    with pytest.raises(RuntimeError):
        program(np.full((3, 4), 1000, np.float32))


def test_names_that_clash_with_generated_code() -> None:
    def act(add: Tensor, v0: Tensor) -> Tensor:
        return add + 1 + v0

    check(act, lambda: torch.randn(3), lambda: torch.randn(3))
    check(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), lambda: torch.randn(3, 4))


def test_structures() -> None:
    class Out(NamedTuple):
        a: Any
        b: Any

    bias = torch.ones(2)

    def act(pair: tuple[Tensor, Any], more: dict[str, Tensor]) -> Any:
        return Out([pair[0] + 1, None], (pair[1]["x"], 3, bias, more["y"].sum()))

    program = check(
        act, lambda: (torch.randn(2), {"x": torch.randn(3)}), lambda: {"y": torch.arange(4).float()}
    )  # fmt: skip
    given = (np.zeros(2, np.float32), {"x": np.arange(3, dtype=np.float32)})
    result = program(given, {"y": np.zeros(4, np.float32)})
    assert type(result) is Out and result.a[1] is None and result.b[1] == 3
    assert not np.shares_memory(result.b[0], given[1]["x"])


def test_invalid_distributions_raise_as_in_eager() -> None:
    program = compile_act(Discrete().act, torch.zeros(2, 4))
    with pytest.raises(RuntimeError, match="probability tensor contains"):
        program(np.full((2, 4), np.nan, np.float32))


@pytest.mark.parametrize("bad", [[[0.0, 0.0], [0.5, 0.5]], [[-1.0, 1.0], [0.5, 0.5]], [[np.inf, 1.0], [0.5, 0.5]]])
def test_invalid_probabilities_raise_as_in_eager(bad: Any) -> None:
    program = compile_act(lambda p: torch.multinomial(p * 1, 1), torch.ones(2, 2))
    with pytest.raises(RuntimeError, match=r"probability|multinomial"):
        program(np.array(bad, np.float32))


def test_a_negative_deviation_raises_as_in_eager() -> None:
    program = compile_act(lambda std: torch.normal(torch.zeros(3), std), torch.ones(3))
    with pytest.raises(RuntimeError, match="std"):
        program(np.array([1, -1, 1], np.float32))


def test_recording_emits_no_warnings() -> None:
    program = compile_act(lambda x: (x.log(), 1 / x, x.exp()), torch.ones(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logs, inverses, exps = program(np.array([0.0, -1.0, 1e9], np.float32))
    assert logs[0] == -np.inf and np.isnan(logs[1]) and inverses[0] == np.inf and exps[2] == np.inf


@pytest.mark.parametrize("given", [np.zeros((3, 1), np.float32), np.zeros((3, 4)), np.zeros((1, 4), np.float32)])
def test_other_shapes_and_types_are_refused(given: np.ndarray[Any, Any]) -> None:
    program = compile_act(lambda obs: obs + 1, torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"obs is float.*recorded with float32\[3, 4\]"):
        program(given)


def test_the_source_is_readable_and_holds_no_validation() -> None:
    source = compile_act(Discrete().act, torch.zeros(2, 4)).source
    assert source.startswith("def act(obs):")
    assert "actor_0_weight" in source and "# tanh float32[2, 16]" in source
    assert "aten_" not in source.replace("aten_multinomial", "")
    assert source.count("\n") < 45


def test_a_scalar_that_depends_on_nothing_is_allowed() -> None:
    check(lambda obs: obs * torch.tensor([2.0, 3.0]).sum().item(), lambda: torch.randn(3))


def test_half_precision_inside() -> None:
    check(lambda obs: (obs.bfloat16() * 2).float(), lambda: torch.randn(3, 4))


@pytest.mark.slow
def test_recording_does_not_import_the_compiler() -> None:
    code = (
        "import sys, torch; from farstep.agents.tape import compile_act\n"
        "compile_act(torch.nn.Linear(4, 2), torch.zeros(3, 4))\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
