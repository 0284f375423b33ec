"""The agent's copy on a worker: the arguments of `act`, its paths, and refused results."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import cloudpickle
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor

from farstep.agents.policy import FAST, Policy, ship
from farstep.errors import AgentError
from farstep.rollout.blocks import Layout
from farstep.rollout.rows import Rows, Slots
from farstep.schema import ArraySpec
from farstep.worker.acting import Actor

OBS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
STARTS = np.array([True, False, True])


class Module(torch.nn.Module):
    """A module with one parameter, which `get_parameters` returns."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def get_parameters(self) -> Any:
        return self.state_dict()

    def act(self, obs: Any) -> Any:
        return {"action": (obs * self.weight).sum(-1)}


def policy_of(agent: Any, inference: str = "auto") -> Policy:
    policy = Policy(agent, inference)
    policy.accelerate(OBS.copy(), policy.initial_state(len(OBS)), STARTS)
    return policy


# ---- what act gets is its own ----


class Subtracts(Module):
    def act(self, obs: Tensor) -> Any:
        obs -= 1
        return {"action": (obs * self.weight).sum(-1)}


class SubtractsUnseen(Module):
    def act(self, obs: Tensor) -> Any:
        array = obs.numpy()
        array -= 1
        return {"action": (obs * self.weight).sum(-1)}


class WritesThroughData(Module):
    def act(self, obs: Tensor) -> Any:
        obs.data[:, 1:].sub_(1)
        obs.data[:, :1] = obs[:, :1] - 1
        return {"action": (obs * self.weight).sum(-1)}


class WritesIntoIt(Module):
    def act(self, obs: Tensor) -> Any:
        torch.sub(obs, 1, out=obs)
        return {"action": (obs * self.weight).sum(-1)}


class SubtractsArray:
    def act(self, obs: Any) -> Any:
        obs -= 1
        return {"action": obs.sum(-1)}


@pytest.mark.parametrize("inference", ["auto", "eager"])
@pytest.mark.parametrize(
    "make",
    [Subtracts, SubtractsUnseen, WritesThroughData, WritesIntoIt, SubtractsArray],
    ids=lambda make: make.__name__,
)
def test_an_agent_may_change_its_input(make: Callable[[], Any], inference: str) -> None:
    policy = policy_of(make(), inference)
    assert policy.note != FAST
    obs = OBS.copy()
    for _ in range(3):
        action = policy(obs, None, STARTS, None)["action"]
        np.testing.assert_allclose(action, (OBS - 1).sum(-1), rtol=1e-5)
        np.testing.assert_array_equal(obs, OBS)


def test_a_recording_cannot_change_its_input() -> None:
    class Careful(Module):
        def act(self, obs: Tensor) -> Any:
            mine = obs + 0
            mine -= 1
            return {"action": (mine * self.weight).sum(-1), "obs_again": obs}

    policy, obs = policy_of(Careful()), OBS.copy()
    assert policy.note == FAST
    out = policy(obs, None, STARTS, None)
    np.testing.assert_allclose(out["action"], (OBS - 1).sum(-1), rtol=1e-5)
    out["obs_again"][:] = 7
    np.testing.assert_array_equal(obs, OBS)


class Keeps:
    def __init__(self) -> None:
        self.kept: list[Any] = []

    def act(self, obs: Any) -> Any:
        self.kept.append(obs)
        return {"action": obs[:, 0]}


def test_an_agent_may_keep_its_input() -> None:
    policy, obs = policy_of(Keeps()), OBS.copy()
    for _ in range(3):
        policy(obs, None, STARTS, None)
        obs += 1
    for age, kept in enumerate(policy.agent.kept):
        np.testing.assert_allclose(kept, OBS + age)


class Forgetful(Module):
    """Recurrent, in place: its state counts the steps of the episode."""

    def initial_state(self, n: int) -> Any:
        return {"age": torch.zeros(n)}

    def act(self, obs: Any, state: Any, episode_start: Any) -> Any:  # type: ignore[override]
        age = (state["age"] * ~episode_start) + 1
        episode_start[:] = True
        return {"action": age, "state": {"age": age}}


def test_a_recurrent_agent_may_change_the_starts() -> None:
    policy, starts = policy_of(Forgetful()), STARTS.copy()
    policy(OBS, policy.initial_state(3), starts, None)
    np.testing.assert_array_equal(starts, STARTS)


# ---- the fast path ----


class Remembers(Module):
    def initial_state(self, n: int) -> Any:
        return torch.zeros(n, 4)

    def act(self, obs: Tensor, state: Tensor, episode_start: Tensor) -> Any:  # type: ignore[override]
        state = state * ~episode_start[:, None] + obs * self.weight
        return {"action": state.sum(-1), "state": state}


def test_a_recurrent_module_has_a_fast_path_too() -> None:
    fast, eager = policy_of(Remembers()), policy_of(Remembers(), "eager")
    assert (fast.note, eager.note) == (FAST, "eager")
    states = [fast.initial_state(3), eager.initial_state(3)]
    for t in range(4):
        starts = np.array([t == 0, t == 2, False])
        outs = [p(OBS + t, state, starts, None) for p, state in zip((fast, eager), states, strict=True)]
        np.testing.assert_allclose(outs[0]["action"], outs[1]["action"], rtol=1e-5)
        states = [out["state"] for out in outs]


def test_an_attribute_that_cannot_be_pickled_keeps_the_agent_eager() -> None:
    class Locked(Module):
        """Pickled without its lock."""

        def __getstate__(self) -> Any:
            return {key: value for key, value in vars(self).items() if key != "lock"}

        def __setstate__(self, state: Any) -> None:
            super().__setstate__(state)
            self.lock = threading.Lock()

    policy = policy_of(cloudpickle.loads(cloudpickle.dumps(Locked())))
    assert "cannot be pickled" in policy.note
    np.testing.assert_allclose(policy(OBS, None, STARTS, None)["action"], OBS.sum(-1), rtol=1e-5)


# ---- as a worker has it ----


def actor_of(agent: Any) -> tuple[Actor, Any]:
    """The actor of a worker of three environments, and a call that probes it."""
    actor = Actor(cloudpickle.dumps(agent), "auto", "obs", Slots(0, [1, 2, 3], [0, 0, 0]))
    return actor, lambda: actor.dry_run({"obs": OBS.copy()}, {"action": ArraySpec((), "<f4")})


class Doubting(Module):
    """Its newest weights make it read a computed value."""

    doubts = False

    def get_parameters(self) -> Any:
        return {"weight": self.weight, "doubts": self.doubts}

    def set_parameters(self, parameters: Any) -> None:
        self.weight.data.copy_(parameters["weight"])
        self.doubts = parameters["doubts"]

    def act(self, obs: Any) -> Any:
        action = (obs * self.weight).sum(-1)
        return {"action": -action if self.doubts and action.sum() > 100 else action}


def test_loss_of_the_fast_path_after_a_load_is_reported_once() -> None:
    actor, probe = actor_of(Doubting())
    probe()
    assert actor.policy.note == FAST and actor.take_note() == ""
    weight = np.full(4, 2, np.float32)
    actor.loader.load([weight, np.array(False)])
    actor.loaded(1)
    assert actor.take_note() == ""
    actor.loader.load([weight, np.array(True)])
    actor.loaded(2)
    assert actor.take_note().startswith("eager: act reads a tensor's value into Python")
    assert actor.policy.note.startswith("eager: ") and actor.take_note() == ""
    actor.loaded(3)
    assert actor.take_note() == ""


def test_a_load_of_weights_leaves_the_recurrent_state_alone() -> None:
    actor, probe = actor_of(Remembers())
    probe()
    assert actor.policy.note == FAST
    floats = {"obs": ArraySpec((4,), "<f4"), "action": ArraySpec((), "<f4")}
    layout = Layout(1, 1, 3, {**floats, "episode_start": ArraySpec((), "|b1")}, {"state": floats["obs"]})
    rows = Rows(layout, layout.views(bytearray(layout.nbytes)), 0, 0, 3)
    rows.row["obs"][0] = OBS + 1
    actor.begin(rows)
    actor.act(0)
    (before,) = (state.copy() for state in actor.save()["state"])
    assert before.any()
    actor.loaded(1)
    np.testing.assert_array_equal(actor.save()["state"][0], before)


WEIGHTS = np.zeros(1)


def returning(out: Any, **methods: Any) -> Any:
    """An agent whose act returns `out`."""

    def act(self: Any, *_: Any) -> Any:
        return out

    own = {"act": act, "get_parameters": lambda self: WEIGHTS, "__module__": "__main__"}
    return type("Returning", (), {**own, **methods})()


ACTION = np.zeros(3, np.float32)
STATE = {"initial_state": lambda self, n: {"h": np.zeros((n, 2), np.float32)}}

REFUSED: dict[str, tuple[Any, str]] = {
    "nothing": (returning(None), "action: the agent returned NoneType; arrays of numbers are expected"),
    "no action": (returning({"value": ACTION}), r"act returned \['value'\] without 'action'"),
    "a reserved name": (returning({"action": ACTION, "reward": ACTION}), r"\['reward'\], names that farstep records"),
    "another shape": (returning(np.zeros((3, 2))), r"action is float64\[2\] per .* requires shape \[\]. Return one"),
    "one for all": (returning({"action": ACTION, "value": np.zeros(1)}), r"act's value has shape \[1\].*the 3 env"),
    "a list": (returning([0, 1, 0]), "act's action is a list of 3 numbers.*return an array with one entry"),
    "a number": (returning({"action": ACTION, "value": 1.5}), r"act's value has shape \[\]; its first dimension"),
    "bfloat16 of JAX": (returning({"action": jnp.zeros(3, jnp.bfloat16)}), "returned bfloat16; arrays of numbers"),
    "no new state": (returning({"action": ACTION}, **STATE), r"\['action'\] without 'state'.*initial_state\(n\)"),
    "a state from nowhere": (returning({"action": ACTION, "state": ACTION}), r"has no initial_state\(n\)"),
    "another state": (
        returning({"action": ACTION, "state": {"h": np.zeros((3, 2))}}, **STATE),
        r"state.h is float64\[2\] here and float32\[2\] there. Give both",
    ),
    "a state with layers first": (
        returning({"action": ACTION, "state": {"h": np.zeros((1, 3, 2))}}, **STATE),
        r"state.h has shape \[1, 3, 2\].*\[n, ...\], not \[layers, n, ...\]",
    ),
}


@pytest.mark.parametrize(("agent", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_invalid_results_of_act_are_refused_with_advice(agent: Any, words: str) -> None:
    _, probe = actor_of(agent)
    with pytest.raises(AgentError, match=words) as caught:
        probe()
    assert type(caught.value) is AgentError


class Amnesiac(Module):
    def act(self, obs: Any, state: Any) -> Any:  # type: ignore[override]
        return {**super().act(obs), "state": state}


def test_act_with_a_state_requires_initial_state() -> None:
    with pytest.raises(AgentError, match=r"act requires \['state'\] beside obs.*add initial_state\(n\)"):
        actor_of(Amnesiac())


def test_agent_class_in_place_of_an_instance_is_refused() -> None:
    with pytest.raises(AgentError, match=r"the agent is the class Module; pass an instance, e.g. Module\(\)"):
        ship(Module)


class ReturnsHalf(Module):
    def act(self, obs: Any) -> Any:
        return {"action": super().act(obs)["action"].bfloat16()}


class HalfState(Remembers):
    def initial_state(self, n: int) -> Any:
        return torch.zeros(n, 4, dtype=torch.bfloat16)


class Sparse(Module):
    def act(self, obs: Any) -> Any:
        return {"action": obs.to_sparse()}


@pytest.mark.parametrize(
    ("make", "words"),
    [(ReturnsHalf, r"BFloat16.*\.float\(\)"), (HalfState, "BFloat16"), (Sparse, "to_dense")],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_tensors_that_numpy_cannot_hold_are_refused_with_advice(make: Callable[[], Any], words: str) -> None:
    _, probe = actor_of(make())
    with pytest.raises(AgentError, match=words) as caught:
        probe()
    assert type(caught.value) is AgentError


class Homesick(Module):
    def __reduce__(self) -> Any:
        return int, ("home",)


def test_an_agent_that_cannot_be_loaded_is_refused() -> None:
    with pytest.raises(AgentError, match=r"cannot be loaded on the worker: ValueError: .*'home'"):
        actor_of(Homesick())


def test_parameters_that_vary_in_number_are_refused() -> None:
    class Growing(Module):
        def get_parameters(self) -> Any:
            self.calls = getattr(self, "calls", 0) + 1
            return [torch.zeros(1)] * self.calls

    with pytest.raises(AgentError, match=r"get_parameters\(\) changed: missing none, new \['1'\]"):
        actor_of(Growing())


class ArrayAgent(torch.nn.Module):
    """Written as for a learner with NumPy: from arrays and to arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 2)

    def act(self, obs: Any) -> dict[str, Any]:
        logits = self.net(torch.as_tensor(obs, dtype=torch.float32, device="cpu"))
        action = torch.distributions.Categorical(logits=logits).sample().cpu().numpy()
        assert isinstance(action, np.ndarray)
        return {"action": action, "logits": logits.detach().cpu().numpy(), "value": logits.sum(-1)}

    def get_parameters(self) -> dict[str, Any]:
        return dict(self.named_parameters())


def test_act_that_ends_in_numpy_is_replayed_with_equal_results() -> None:
    agent = ArrayAgent()
    fast, eager = Policy(agent, "auto"), Policy(agent, "eager")
    example = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    fast.accelerate(example, None, None)
    assert fast.note == FAST
    for seed in range(3):
        obs = np.random.default_rng(seed).normal(size=(3, 4)).astype(np.float32)
        results = []
        for policy in (fast, eager):
            torch.manual_seed(seed)
            results.append({key: np.array(value) for key, value in policy(obs, None, None, None).items()})
        assert results[0].keys() == results[1].keys()
        for key, value in results[0].items():
            assert value.dtype == results[1][key].dtype
            np.testing.assert_allclose(value, results[1][key], rtol=1e-5)
