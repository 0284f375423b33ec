"""Outputs of `act` that change after it was tried, and rows that a buffer cannot hold: refused, never cast silently."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import farstep
from farstep.buffer import LIFO, Sampler, Uniform
from farstep.testing import TableAgent
from tests.cluster.checks import cluster, in_process
from tests.cluster.toys import NestedAgent, NestedEnv


class Later(TableAgent):
    """From its third step on, `change` alters what it returns."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change, self.calls = change, 0

    def act(self, obs: Any) -> Any:
        self.calls += 1
        out = {**super().act(obs), "value": np.zeros(len(obs), np.float32)}
        return out if self.calls < 3 else {**out, **self.change(out)}


def put(array: Any, i: int, value: Any, dtype: Any = None) -> Any:
    changed = array.astype(dtype or array.dtype)
    changed[i] = value
    return changed


CHANGES: dict[str, tuple[Any, str]] = {
    "NaN as discrete action": (
        lambda out: {"action": put(out["action"], 2, np.nan, float)},
        r"action nan .* slot 2\. ",
    ),
    "half an action": (
        lambda out: {"action": put(out["action"], 1, 0.5, float)},
        r"action 0.5 .* slot 1\. ",
    ),
    "a float too large": (
        lambda out: {"value": put(out["value"], 3, 1e300, float)},
        r"value 1e\+300 .* slot 3",
    ),
    "complex numbers": (lambda out: {"value": put(out["value"], 0, 1j, complex)}, r"value 1j .* slot 0"),
    "another shape": (lambda out: {"value": out["value"][:1]}, r"value with shape \[1\], but \[4\]"),
    "text": (lambda out: {"value": ["a"] * 4}, r"value as <U1, but float32"),
    "a further key": (lambda out: {"entropy": out["value"]}, "has entropy now, unlike in the first call"),
    "nesting": (lambda out: {"value": {"a": out["value"]}}, r"value with shape \[\], but"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_change_of_outputs_is_named(change: str) -> None:
    alter, said = CHANGES[change]
    with cluster(config=in_process(), envs=4) as env, pytest.raises(farstep.AgentError, match=said):
        env.collect(Later(alter), steps=8)


def test_remote_worker_names_its_own_slots() -> None:
    def change(out: Any) -> Any:
        return {"action": put(out["action"], 1, np.nan, float)}

    said = r"nan .* slot [13]\."
    with cluster(workers=2, envs=4, transport="tcp") as env, pytest.raises(farstep.AgentError, match=said):
        env.collect(Later(change), steps=8)


def test_missing_key_is_named() -> None:
    class Forgetful(Later):
        def act(self, obs: Any) -> Any:
            out = super().act(obs)
            return {"action": out["action"]} if self.calls > 2 else out

    with cluster(config=in_process()) as env, pytest.raises(farstep.AgentError, match=r"has no .*value.* now"):
        env.collect(Forgetful(lambda out: {}), steps=8)


def test_another_dtype_with_the_same_numbers_is_accepted() -> None:
    def change(out: Any) -> Any:
        return {"action": out["action"].astype(np.float64), "value": [0.5] * len(out["value"])}

    with cluster(config=in_process(), envs=4) as env:
        batch = env.collect(Later(change), steps=8)
        assert batch["action"].dtype == TableAgent().act(np.zeros((1, 3), np.float32))["action"].dtype
        assert batch["value"].dtype == np.float32 and (batch["value"][2:] == 0.5).all()


class NestedLater(NestedAgent):
    calls = 0

    def act(self, obs: Any) -> Any:
        self.calls += 1
        out = super().act(obs)
        if self.calls > 2:
            out["extra"]["triple"] = out["extra"]["double"]
        return out


class NestedNan(NestedAgent):
    calls = 0

    def act(self, obs: Any) -> Any:
        self.calls += 1
        out = super().act(obs)
        if self.calls > 2:
            out["action"][0][1, 1] = np.nan
        return out


@pytest.mark.parametrize(
    ("agent", "said"),
    [(NestedLater(), r"the output\['extra'\] has triple now"), (NestedNan(), r"action.0 nan for environment slot 1")],
)
def test_change_of_nested_outputs_is_named(agent: Any, said: str) -> None:
    with cluster(NestedEnv, config=in_process(), envs=2) as env, pytest.raises(farstep.AgentError, match=said):
        env.collect(agent, steps=4)


class Steady(gymnasium.Env[Any, Any]):
    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Box(-1, 1, (3,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 0.0, False, False, {}


def test_nan_of_a_recorded_policy_is_named() -> None:
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 3)
            self.scale = torch.nn.Parameter(torch.ones(3))

        def act(self, obs: Any) -> Any:
            return self.layer(obs) * self.scale / self.scale

        def get_parameters(self) -> Any:
            return self.state_dict()

    agent = Net()
    with cluster(Steady, config=in_process(), envs=2) as env:
        assert np.isfinite(env.collect(agent, steps=2)["action"]).all()
        with torch.no_grad():
            agent.scale[1] = 0
        with pytest.raises(farstep.AgentError, match=r"action nan for environment slot 0"):
            env.collect(agent, steps=2)


# ---- rows of a batch ----


@pytest.mark.parametrize("sampler", [Uniform(), LIFO()], ids=repr)
def test_batch_with_numbers_that_a_buffer_cannot_hold_is_refused(sampler: Sampler) -> None:
    """Of nested observations; nothing is inserted."""
    with cluster(NestedEnv, config=in_process(2), envs=4) as env:
        batch = env.collect(NestedAgent(), steps=4)
        narrow = farstep.Buffer(64, sampler)
        narrow.insert(batch)
        arrays: Any = batch.arrays
        arrays["obs.camera"] = arrays["obs.camera"].astype(np.uint16)
        batch.arrays["obs.camera"][3, 2, 0, 1] = 300
        before = len(narrow)
        with pytest.raises(farstep.ConfigError, match=r"300 in 'obs.camera', row 3 of slot 2; .* uint8\[2, 2\]"):
            narrow.insert(batch)
        assert len(narrow) == before
        narrow.close()
