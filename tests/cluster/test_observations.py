"""Observations of another shape or type than their space has, or that are not numbers."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

import farstep
from farstep.errors import RemoteEnvError, SpaceError
from farstep.rollout.seeds import episode_seed
from farstep.testing import CountingEnv, TableAgent
from tests.cluster.checks import cluster, in_process
from tests.cluster.faulty import FussyBoxEnv, SevenAgent


class LyingEnv(CountingEnv):
    """Returns observations that do not fit its space, from the second step on."""

    def __init__(self, lie: Any) -> None:
        super().__init__(length=None)
        self._lie = lie

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return (self._lie if self.count > 1 else obs, *rest)


@pytest.mark.parametrize("lie", [None, 0.5, np.zeros(1), np.zeros((1, 3)), np.zeros(4)], ids=repr)
def test_observations_that_do_not_fit_the_space_are_named(lie: Any) -> None:
    options: dict[str, Any] = {"env_kwargs": {"lie": lie}, "config": in_process(1, restart_budget=0)}
    said = r"^obs: .* returned shape .* observation space says \[3\]"
    with cluster(LyingEnv, **options) as env, pytest.raises(farstep.FarstepError, match=said):
        env.collect(TableAgent(), steps=4)
    envs = farstep.make_vec(LyingEnv, num_envs=2, env_kwargs={"lie": lie}, config=in_process(1))
    envs.reset(seed=1)
    with pytest.raises(farstep.FarstepError, match=said):
        for _ in range(3):
            envs.step(np.zeros(2, np.int64))
    envs.close()


def warnings_about_bounds(env: farstep.ClusterEnv) -> list[str]:
    return [event.text for event in env.events("warned") if "observation space" in event.text]


@pytest.mark.parametrize("steps", [1, 8])
def test_observations_outside_their_bounds_are_warned_about_once(steps: int, caplog: pytest.LogCaptureFixture) -> None:
    lie = np.full(3, -7, np.float32)
    with cluster(LyingEnv, env_kwargs={"lie": lie}, envs=4, workers=2) as env:
        for _ in range(5):
            batch = env.collect(TableAgent(), steps=steps)
        assert (batch["obs"] == -7).any()  # as they are
        (text,) = warnings_about_bounds(env)
    said = "observations of LyingEnv are outside its observation space: obs[0] was -7 in environment slot "
    assert text.startswith(said) and "but its Box allows -1 to 1e+09." in text and "wrapper" in text
    assert text in caplog.messages


def test_observations_inside_their_bounds_cause_no_warning() -> None:
    with cluster(config=in_process()) as env:
        env.collect(TableAgent(), steps=8)
        assert warnings_about_bounds(env) == []


class NestedEnv(CountingEnv):
    """Returns `obs` from its second step on, as an observation of a Dict space."""

    def __init__(self, obs: Any) -> None:
        super().__init__(length=None)
        box = spaces.Box(0, 1, (2,), np.float32)
        self.observation_space = spaces.Dict(agent=box, target=spaces.Tuple([box, box]))
        self._obs = obs

    def reset(self, **kwargs: Any) -> Any:
        return self.observation_space.sample(), super().reset(**kwargs)[1]

    def step(self, action: Any) -> Any:
        rest = super().step(action)[1:]
        return (self._obs if self.count > 1 else self.observation_space.sample(), *rest)


POINT = np.zeros(2, np.float32)


@pytest.mark.parametrize(
    ("obs", "said"),
    [
        ({"agent": POINT}, r"obs: .* the keys \[agent\], but its space has \[agent, target\]"),
        (
            {"agent": POINT, "target": (POINT, POINT), "more": POINT},
            r"obs: .* the keys \[agent, more, target\], but its space has \[agent, target\]",
        ),
        (POINT, "obs: .* returned a ndarray, but its space is a Dict"),
        ({"agent": POINT, "target": (POINT,)}, r"obs.target: .* 1 entries, but its space is a Tuple with 2 entries"),
        ({"agent": POINT, "target": 0.5}, r"obs.target: .* a float, but its space is a Tuple with 2 entries"),
    ],
    ids=["missing", "extra", "no mapping", "short tuple", "no tuple"],
)
def test_observations_with_other_entries_than_the_space_are_named(obs: Any, said: str) -> None:
    with (
        cluster(NestedEnv, env_kwargs={"obs": obs}, config=in_process(1)) as env,
        pytest.raises(SpaceError, match=f"^{said}"),
    ):
        env.collect(SevenAgent(1), steps=4)


class TypedEnv(CountingEnv):
    """Returns `value` from `reset`, or only from `step`, as an observation of a space of uint8 or float32."""

    def __init__(self, value: Any, late: bool, space: str) -> None:
        super().__init__(length=None)
        self.observation_space = spaces.Box(0, 255, (2,), np.dtype(space).type)
        self._value, self._late = value, late

    def reset(self, **kwargs: Any) -> Any:
        info = super().reset(**kwargs)[1]
        return self._value if not self._late else np.zeros(2, self.observation_space.dtype), info

    def step(self, action: Any) -> Any:
        return self._value, *super().step(action)[1:]


class TypedVector(SyncVectorEnv):
    """Hands on what its environments return as it is."""

    def __init__(self, num_envs: int, **kwargs: Any) -> None:
        super().__init__([lambda: TypedEnv(**kwargs)] * num_envs)

    def reset(self, **kwargs: Any) -> Any:
        return np.stack([env.reset()[0] for env in self.envs]), {}

    def step(self, actions: Any) -> Any:
        obs = np.stack([env.step(action)[0] for env, action in zip(self.envs, actions, strict=True)])
        return obs, np.zeros(self.num_envs), np.zeros(self.num_envs, bool), np.zeros(self.num_envs, bool), {}


def rows_of(kind: str, value: Any, late: bool, space: str) -> Any:
    """The observations of three steps by way of `kind`."""
    kwargs: Any = {"env_kwargs": {"value": value, "late": late, "space": space}, "config": in_process(1)}
    if kind == "make_vec":
        with contextlib.closing(farstep.make_vec(TypedEnv, num_envs=2, **kwargs)) as envs:
            envs.reset(seed=1)
            return np.stack([envs.step(np.zeros(2, np.int64))[0] for _ in range(3)])
    source = TypedVector if kind == "vector" else TypedEnv
    with cluster(source, type=kind, **kwargs) as env:
        batch = env.collect(SevenAgent(1), steps=3)
        return np.concatenate([batch["obs"][1:], batch.last_obs[None]])


KINDS = pytest.mark.parametrize("kind", ["factory", "vector", "make_vec"])


@KINDS
@pytest.mark.parametrize("late", [False, True], ids=["reset", "step"])
@pytest.mark.parametrize("value", [np.array([0.5, 0.25]), np.array([1, 300]), np.array([-1, 0], np.int8)], ids=repr)
def test_observations_that_their_space_would_cut_off_are_refused(kind: str, late: bool, value: Any) -> None:
    said = f"^obs: Typed.* returned {value.dtype}, but its observation space says uint8"
    with pytest.raises(SpaceError, match=said):
        rows_of(kind, value, late, "uint8")


@KINDS
@pytest.mark.parametrize(
    ("value", "space"),
    [
        (np.array([0.5, 0.25]), "float32"),
        (np.array([1, 2]), "float32"),
        (np.array([1, 255]), "uint8"),
        ([1, 0], "uint8"),
    ],
    ids=repr,
)
def test_observations_of_another_type_that_fit_are_kept(kind: str, value: Any, space: str) -> None:
    rows = rows_of(kind, value, False, space)
    assert rows.dtype == space
    np.testing.assert_array_equal(rows, np.broadcast_to(value, (3, 2, 2)))


class NanEnv(FussyBoxEnv):
    """The episode that begins with `seed` has a NaN, from its `at`-th observation on."""

    def __init__(self, seed: int, at: int) -> None:
        super().__init__()
        self._seed, self._at = seed, at

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._odd = seed == self._seed
        obs, info = super().reset(seed=seed, options=options)
        return self._spoiled(obs), info

    def step(self, action: Any) -> Any:
        if np.isnan(action).any():
            raise ValueError("not finite")
        self.count += 1
        return self._spoiled(np.zeros(3, np.float32)), 0.0, False, False, {}

    def _spoiled(self, obs: Any) -> Any:
        return obs * np.nan if self._odd and self.count >= self._at else obs


class BoxAgent(TableAgent):
    """Acts with a part of what it sees; a strict one refuses NaN, as torch's distributions do."""

    def __init__(self, strict: bool) -> None:
        super().__init__()
        self._strict = strict

    def act(self, obs: Any) -> Any:
        if self._strict and np.isnan(obs).any():
            raise ValueError("invalid values")
        return 0 * obs[:, :2]


@pytest.mark.parametrize("at", [0, 1], ids=["trial", "later"])
def test_nan_in_observations_is_not_blamed_on_the_agent(at: int) -> None:
    kwargs = {"seed": episode_seed(5, 1, 0), "at": at}
    config = in_process(restart_budget=0)
    said = r"^the observations of environment slot 1 have NaN, and act raised ValueError: invalid values"
    with (
        cluster(NanEnv, envs=3, env_kwargs=kwargs, config=config) as env,
        pytest.raises(SpaceError, match=said),
    ):
        env.collect(BoxAgent(strict=True), steps=4)
    said = r"^the observations of environment slot 1 have NaN, and .*act returned action nan"
    with (
        cluster(NanEnv, envs=3, env_kwargs=kwargs, config=config) as env,
        pytest.raises(SpaceError, match=said),
    ):
        env.collect(BoxAgent(strict=False), steps=4)


class DiscreteEnv(CountingEnv):
    """Observations are in Discrete(4), except for the `at`-th of the episode that starts with `seed`."""

    def __init__(self, seed: int, at: int) -> None:
        super().__init__(length=None)
        self.observation_space: Any = spaces.Dict(kind=spaces.Discrete(4), speed=spaces.Box(0, 1, (2,), np.float32))
        self._seed, self._at = seed, at

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._odd = seed == self._seed
        super().reset(seed=seed, options=options)
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        _, *rest = super().step(action)
        return self._obs(), *rest

    def _obs(self) -> Any:
        wrong = self._odd and self.count >= self._at
        return {"kind": 7 if wrong else 1, "speed": np.full(2, 9, np.float32)}  # outside the Box, which is no mistake


class EmbeddingAgent(TableAgent):
    def act(self, obs: Any) -> Any:
        return np.zeros(4, np.int64)[obs["kind"]]


@pytest.mark.parametrize("at", [0, 1], ids=["trial", "later"])
def test_discrete_observation_outside_its_space_is_not_blamed_on_the_agent(at: int) -> None:
    kwargs = {"seed": episode_seed(5, 1, 0), "at": at}
    said = r"^the environment in slot 1 returned .*: obs.kind 7 is outside Discrete\(4\), and act raised IndexError"
    with (
        cluster(DiscreteEnv, envs=3, env_kwargs=kwargs, config=in_process(restart_budget=0)) as env,
        pytest.raises(SpaceError, match=said),
    ):
        env.collect(EmbeddingAgent(), steps=4)


def test_error_of_act_is_unchanged_if_the_observations_are_in_their_space() -> None:
    kwargs = {"seed": -1, "at": 0}
    with (
        cluster(DiscreteEnv, envs=3, env_kwargs=kwargs, config=in_process(restart_budget=0)) as env,
        pytest.raises(RemoteEnvError, match=r"IndexError: index 1 is out of bounds for axis 0 with size 1"),
    ):
        env.collect(NarrowAgent(), steps=4)


class NarrowAgent(TableAgent):
    def act(self, obs: Any) -> Any:
        return np.zeros(1, np.int64)[obs["kind"]]
