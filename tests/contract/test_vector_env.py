"""`make_vec` behaves exactly as Gymnasium's SyncVectorEnv does."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar, cast

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

import farstep
from farstep.errors import ConfigError, EndedError, FarstepError, WireError
from farstep.testing import CountingEnv, SpacesEnv, TableAgent, check_vector_env
from farstep.testing.vector_env import Parity, assert_same

IN_PROCESS = farstep.InProcessConfig(workers_per_node=2)
MODES = pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)

NESTED = spaces.Dict(
    camera=spaces.Box(0, 255, (4, 4, 3), np.uint8),
    arms=spaces.Tuple([spaces.Dict(joint=spaces.Box(-1, 1, (7,), np.float64)), spaces.MultiBinary(2)]),
    mode=spaces.Discrete(3, start=5),
)
SPACES: dict[str, spaces.Space[Any]] = {
    "box-f4": spaces.Box(-1, 1, (3,), np.float32),
    "box-f8-scalar": spaces.Box(-1, 1, (), np.float64),
    "box-f2": spaces.Box(-1, 1, (2, 2), np.float16),
    "box-u1": spaces.Box(0, 255, (4, 4), np.uint8),
    "box-i4": spaces.Box(-5, 5, (2,), np.int32),
    "box-unbounded": spaces.Box(-np.inf, np.inf, (2,), np.float64),
    "discrete": spaces.Discrete(4),
    "discrete-start": spaces.Discrete(4, start=-2),
    "multidiscrete": spaces.MultiDiscrete([3, 4]),
    "multidiscrete-2d": spaces.MultiDiscrete(cast(Any, [[3, 4], [2, 2]])),
    "multibinary": spaces.MultiBinary(3),
    "multibinary-2d": spaces.MultiBinary((2, 3)),
    "tuple": spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1, (2,))]),
    "dict-ordered": spaces.Dict(OrderedDict(z=spaces.Discrete(2), a=spaces.MultiBinary(2))),
    "nested": NESTED,
}


def spaces_env(observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> Callable[[], SpacesEnv]:
    """Every environment has spaces of its own: they have generators."""
    return lambda: SpacesEnv(deepcopy(observation_space), deepcopy(action_space), p_end=0.3)


class InfosEnv(CountingEnv):
    """Infos of every kind that appear and vanish; observations whose types differ from the space's."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Discrete(10**6)
        self.render_mode = "rgb_array"

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 30}  # type: ignore[misc]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed, options=options)
        return self.episode, {"nested": {"deep": {"episode": self.episode}}} if self.episode % 2 else {}

    def step(self, action: Any) -> Any:
        _, _, terminated, truncated, _ = super().step(action)
        info = {
            "int": self.count,
            "float": self.count / 3,
            "flag": self.count % 2 == 0,
            "none": None,
            "tuple": (1, "two", 3.0),
            "list": [1, [2]],
            "float32": np.float32(self.count),
            "bytes": b"raw",
            "complex": self.count + 1j,
            ("left", 2): self.count,
            "moves": {(0, 1): "up", (1, 0): self.count},
            "array": np.full((2, 2), self.count, np.int16),
            "nested": {"a": self.count, "b": {"c": "text", "d": np.arange(2)}},
        }
        some = {key: value for i, (key, value) in enumerate(info.items()) if (self.count + self.episode + i) % 3}
        return self.count, np.float32(self.count), np.bool_(terminated), truncated, some

    def render(self) -> Any:
        return np.full((2, 2, 3), self.episode % 256, np.uint8)

    def multiply(self, factor: int, plus: int = 0) -> int:
        return self.episode * factor + plus


def pair(
    factory: Callable[[], Any], mode: AutoresetMode, num_envs: int = 5, config: Any = IN_PROCESS
) -> tuple[Any, SyncVectorEnv]:
    theirs = SyncVectorEnv([factory] * num_envs, autoreset_mode=mode)
    return farstep.make_vec(factory, num_envs, config, autoreset_mode=mode), theirs


# ---- parity over random sequences ----


@MODES
@pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array")
@pytest.mark.parametrize("number", range(len(SPACES)), ids=list(SPACES))
def test_observations_and_actions_of_every_space(number: int, mode: AutoresetMode) -> None:
    kinds = list(SPACES.values())
    ours, theirs = pair(spaces_env(kinds[number], kinds[number - 4]), mode)
    with closing(ours), closing(theirs):
        Parity(ours, theirs, seed=number).run(40)


@MODES
def test_infos_of_every_kind(mode: AutoresetMode) -> None:
    ours, theirs = pair(InfosEnv, mode)
    with closing(ours), closing(theirs):
        Parity(ours, theirs, seed=3).run(100)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_worker_processes(transport: str) -> None:
    config = farstep.LocalConfig(workers_per_node=2, transport=transport)  # type: ignore[arg-type]
    check_vector_env(lambda factory, count, mode: farstep.make_vec(factory, count, config, autoreset_mode=mode))


def test_the_check_can_fail() -> None:
    """Gymnasium's own AsyncVectorEnv swallows a step after an explicit reset."""
    with pytest.raises(AssertionError):
        check_vector_env(lambda factory, count, mode: AsyncVectorEnv([factory] * count, autoreset_mode=mode))


@pytest.mark.parametrize("workers", [1, 3, 5])
def test_any_number_of_workers(workers: int) -> None:
    config = farstep.InProcessConfig(workers_per_node=workers)
    ours, theirs = pair(InfosEnv, AutoresetMode.SAME_STEP, config=config)
    with closing(ours), closing(theirs):
        Parity(ours, theirs, seed=5).run(60)


def test_a_registered_environment() -> None:
    theirs = gymnasium.make_vec("CartPole-v1", 4, vectorization_mode="sync")
    with closing(farstep.make_vec("CartPole-v1", 4, IN_PROCESS)) as ours, closing(theirs):
        assert ours.spec == gymnasium.spec("CartPole-v1")
        Parity(ours, theirs, seed=6).run(120)  # type: ignore[arg-type]


# ---- environments given by thunks and specs ----


def numbered(i: int, folder: Path | None = None) -> Callable[[], Any]:
    """An environment whose spaces, episodes and answers depend on its number."""

    def make() -> Any:
        env = InfosEnv()
        env.action_space.seed(i)
        env.episode = 100 * i
        if folder is not None and i > 0:
            (folder / str(i)).touch()
        while folder is not None and i == 0 and not (folder / "1").exists():
            time.sleep(0.01)
        return env

    return make


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_thunks_as_in_gymnasium(workers: int) -> None:
    thunks = [numbered(i) for i in range(5)]
    ours = farstep.make_vec(thunks, config=farstep.InProcessConfig(workers_per_node=workers))
    with closing(ours), closing(SyncVectorEnv(thunks)) as theirs:
        assert ours.num_envs == 5
        assert_same(ours.get_attr("episode"), theirs.get_attr("episode"))
        assert_same(ours.single_action_space.sample(), theirs.single_action_space.sample())
        Parity(ours, theirs, seed=8).run(40)


def test_spaces_are_the_first_environments_whichever_worker_is_ready_first(tmp_path: Path) -> None:
    thunks = [numbered(i, tmp_path) for i in range(2)]
    with closing(farstep.make_vec(thunks, config=farstep.LocalConfig(workers_per_node=2))) as ours:
        expected = spaces.Discrete(cast(Any, ours.single_action_space).n, seed=0)
        for _ in range(20):
            assert ours.single_action_space.sample() == expected.sample()


def test_thunks_that_do_not_fit_are_refused() -> None:
    for thunks in ([], [InfosEnv, "CartPole-v1"]):
        with pytest.raises(ConfigError, match="callables, one per environment"):
            farstep.make_vec(thunks, config=IN_PROCESS)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_envs is 3 with a list of 2 callables"):
        farstep.make_vec([InfosEnv, InfosEnv], 3, IN_PROCESS)


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ((make for make in [InfosEnv]), "Call list"),
        (
            {"type": "factory", "env_name": InfosEnv},
            r"pass a callable, e\.g\. functools\.partial\(.* or a list of callables",
        ),
        (InfosEnv(), "Pass a function that makes the environment"),
        (None, "callables"),
    ],
    ids=["generator", "mapping", "instance", "none"],
)
def test_refused_environment_is_called_env_name_of_make_vec(given: Any, hint: str) -> None:
    with pytest.raises(ConfigError, match=rf"make_vec's env_name is .*expected a Gymnasium id.*{hint}"):
        farstep.make_vec(given, config=IN_PROCESS)


def test_an_environments_spec() -> None:
    spec = deepcopy(gymnasium.spec("CartPole-v1"))
    spec.max_episode_steps = 7
    theirs = SyncVectorEnv([lambda: gymnasium.make(spec)] * 2)
    with closing(farstep.make_vec(spec, 2, IN_PROCESS)) as ours, closing(theirs):
        assert ours.spec == spec
        Parity(ours, theirs, seed=9).run(40)
    with closing(farstep.ClusterEnv({"env_name": spec}, IN_PROCESS)) as cluster:
        assert "CartPole-v1" in repr(cluster) and cluster.launch()[1] == spaces.Discrete(2)
    with pytest.raises(ConfigError, match="is an EnvSpec but type is 'vector'"):
        farstep.ClusterEnv({"env_name": spec, "type": "vector"}, IN_PROCESS)


class TupleKeyEnv(CountingEnv):
    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], {("left", 2): 1 + 2j}


@pytest.mark.parametrize("kind", ["factory", "vector"])
def test_tuple_keys_and_complex_numbers_in_infos_of_a_cluster(kind: str) -> None:
    def make(num_envs: int = 1) -> Any:
        return SyncVectorEnv([TupleKeyEnv] * num_envs) if kind == "vector" else TupleKeyEnv()

    with farstep.ClusterEnv({"type": kind, "env_name": make, "envs_per_node": 2}, IN_PROCESS) as env:
        env.reset(seed=1)
        info: Any = env.step(TableAgent())[4]
        assert info[("left", 2)].tolist() == [1 + 2j] * 2


# ---- samples of spaces ----


def assert_samples_equal(ours: Any, theirs: SyncVectorEnv, draws: int = 4) -> None:
    """In an order that reveals whether batched and single spaces share generators in only one of the two."""
    for _ in range(draws):
        for name in ("single_action_space", "action_space", "single_observation_space", "observation_space"):
            assert_same(getattr(ours, name).sample(), getattr(theirs, name).sample(), name)


def seeded_env(space: spaces.Space[Any]) -> Callable[[], SpacesEnv]:
    """As CleanRL's thunks do it."""

    def make() -> SpacesEnv:
        env = SpacesEnv(deepcopy(space), deepcopy(space))
        env.action_space.seed(3)
        env.observation_space.seed(4)
        env.observation_space.sample()
        return env

    return make


@pytest.mark.parametrize("kind", SPACES)
def test_spaces_seeded_in_the_factory_sample_as_in_gymnasium(kind: str) -> None:
    ours, theirs = pair(seeded_env(SPACES[kind]), AutoresetMode.NEXT_STEP, num_envs=3)
    with closing(ours), closing(theirs):
        assert_samples_equal(ours, theirs)


def test_order_of_keys_is_the_same_in_batched_spaces() -> None:
    unsorted = spaces.Dict({"z": spaces.Discrete(2), "a": spaces.MultiBinary(2)}, sort_keys=False)
    ours, theirs = pair(seeded_env(unsorted), AutoresetMode.NEXT_STEP)
    with closing(ours), closing(theirs):
        assert_samples_equal(ours, theirs)


def test_generators_of_spaces_come_from_worker_processes() -> None:
    def make() -> Any:
        env = gymnasium.make("CartPole-v1")
        env.action_space.seed(1)
        return env

    ours, theirs = pair(make, AutoresetMode.NEXT_STEP, num_envs=2, config=farstep.LocalConfig(workers_per_node=2))
    with closing(ours), closing(theirs):
        for _ in range(20):
            assert_same(ours.single_action_space.sample(), theirs.single_action_space.sample())
            assert_same(ours.action_space.sample(), theirs.action_space.sample())


# ---- what random sequences do not reach ----


@contextmanager
def vectors() -> Iterator[tuple[Any, SyncVectorEnv]]:
    ours, theirs = pair(InfosEnv, AutoresetMode.NEXT_STEP)
    with closing(ours), closing(theirs):
        ours.reset(seed=0), theirs.reset(seed=0)
        yield ours, theirs


def test_metadata_and_render() -> None:
    with vectors() as (ours, theirs):
        assert ours.autoreset_mode is theirs.autoreset_mode is AutoresetMode.NEXT_STEP
        assert_same(ours.metadata, theirs.metadata)
        assert_same(ours.render_mode, theirs.render_mode)
        assert_same(ours.render(), theirs.render())


def test_calls_and_attributes() -> None:
    with vectors() as (ours, theirs):
        for vector in (ours, theirs):
            vector.set_attr("episode", [5, 6, 7, 8, 9])
            vector.set_attr("limit", 4)
        for name, args, kwargs in (("multiply", (3,), {}), ("multiply", (3,), {"plus": 1}), ("episode", (), {})):
            assert_same(ours.call(name, *args, **kwargs), theirs.call(name, *args, **kwargs))
        assert ours.call("multiply", 3, plus=1) == (16, 19, 22, 25, 28)
        assert_same(ours.get_attr("limit"), theirs.get_attr("limit"))
        assert_same(ours.np_random_seed, theirs.np_random_seed)


def refused(error: type[Exception], words: str, act: Callable[[Any], Any]) -> None:
    """Both refuse, and are unchanged afterwards."""
    with vectors() as both:
        for vector in both:
            with pytest.raises(error, match=words):
                act(vector)
        ours, theirs = both
        assert_same(ours.step(np.zeros(5, np.int64)), theirs.step(np.zeros(5, np.int64)))


BAD_MASKS = {
    "list": ([True] * 5, TypeError),
    "shape": (np.ones(4, bool), ValueError),
    "dtype": (np.ones(5), TypeError),
    "empty": (np.zeros(5, bool), ValueError),
}


@pytest.mark.parametrize("kind", BAD_MASKS)
def test_bad_masks_raise_as_in_gymnasium(kind: str) -> None:
    mask, error = BAD_MASKS[kind]
    refused(error, "reset_mask", lambda vector: vector.reset(options={"reset_mask": mask}))


@pytest.mark.parametrize("count", [2, 6])
def test_wrong_number_of_values_or_seeds_is_refused(count: int) -> None:
    refused(ValueError, "5", lambda vector: vector.set_attr("episode", [1] * count))
    refused(ValueError, "num_envs=5", lambda vector: vector.reset(seed=[1] * count))


def test_an_unknown_attribute() -> None:
    refused(AttributeError, "no_such_thing", lambda vector: vector.get_attr("no_such_thing"))


def test_value_that_cannot_be_sent_is_not_blamed_on_the_environment() -> None:
    with vectors() as (ours, _):
        for name in ("np_random", "unwrapped"):
            with pytest.raises(WireError, match=f"'{name}' succeeded, but its value cannot be sent: a .*only numbers"):
                ours.get_attr(name)
        assert ours.call("multiply", 0) == (0,) * 5  # it is still usable
        with pytest.raises(TypeError, match="the environment raised"):
            ours.call("multiply")


def test_actions_that_do_not_fit() -> None:
    with vectors() as (ours, theirs):
        for vector in (ours, theirs):
            with pytest.raises(ValueError):
                vector.step(np.zeros(4, np.int64))
        with pytest.raises(ConfigError, match=r"\[4\]; expected \[5\]"):
            ours.step(np.zeros(4, np.int64))


def test_an_action_keeps_the_dtype_it_was_given_in() -> None:
    ours, theirs = pair(lambda: EchoEnv(), AutoresetMode.NEXT_STEP, num_envs=2)
    with closing(ours), closing(theirs):
        ours.reset(), theirs.reset()
        for actions in (np.zeros((2, 2), np.float32), np.zeros((2, 2)), [[0, 1], [1, 0]], np.ones((2, 2), np.float32)):
            assert_same(ours.step(actions), theirs.step(np.asarray(actions)))


class EchoEnv(SpacesEnv):
    def __init__(self) -> None:
        box = spaces.Box(-1, 1, (2,), np.float32)
        super().__init__(box, box)

    def step(self, action: Any) -> Any:
        return (
            np.zeros(2, np.float32),
            0.0,
            False,
            False,
            {"got": str(action.dtype), "writable": action.flags.writeable},
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.zeros(2, np.float32), {}


def ended(vector: Any) -> np.ndarray[Any, Any]:
    """Step until an environment has ended."""
    while True:
        _, _, terminated, truncated, _ = vector.step(np.zeros(5, np.int64))
        if (terminated | truncated).any():
            return terminated | truncated


def test_without_autoreset_an_ended_environment_must_not_be_stepped() -> None:
    for vector in pair(InfosEnv, AutoresetMode.DISABLED):
        with closing(vector):
            vector.reset(seed=1)
            mask = ended(vector)
            with pytest.raises(AssertionError):
                vector.step(np.zeros(5, np.int64))
            if not isinstance(vector, SyncVectorEnv):  # which by now has stepped those before the ended one
                with pytest.raises(EndedError, match="reset_mask"):
                    vector.step(np.zeros(5, np.int64))
            vector.reset(options={"reset_mask": mask})
            vector.step(np.zeros(5, np.int64))


def test_no_step_is_swallowed_after_an_explicit_reset() -> None:
    """AsyncVectorEnv would reset once more here, instead of stepping."""
    for vector in pair(InfosEnv, AutoresetMode.NEXT_STEP):
        with closing(vector):
            vector.reset(seed=1)
            mask = ended(vector)
            vector.reset(options={"reset_mask": mask})
            observations, *_ = vector.step(np.zeros(5, np.int64))
            assert (observations[mask] == 1).all()  # the first step of an episode, not its beginning


def test_later_steps_do_not_change_earlier_results() -> None:
    ours, theirs = pair(spaces_env(NESTED, spaces.Discrete(3)), AutoresetMode.SAME_STEP)
    with closing(ours), closing(theirs):
        mine: list[Any] = []
        kept: list[Any] = []
        for vector, results in ((ours, mine), (theirs, kept)):
            results.append(vector.reset(seed=3))
            results += [vector.step(np.ones(5, np.int64)) for _ in range(20)]
        assert_same(mine, kept)


def test_invalid_arguments_are_refused_with_the_reason() -> None:
    with pytest.raises(FarstepError, match="strings have no fixed number of bytes"):
        farstep.make_vec(spaces_env(spaces.Text(3), spaces.Discrete(2)), 2, IN_PROCESS)
    with pytest.raises(ConfigError, match="num_envs=3 is not a multiple"):
        farstep.make_vec(InfosEnv, 3, farstep.InProcessConfig(nodes=2))
    with pytest.raises(ConfigError, match=r"'SometimesReset'.*Known: DISABLED, NEXT_STEP, SAME_STEP"):
        farstep.make_vec(InfosEnv, 3, IN_PROCESS, autoreset_mode="SometimesReset")
    for count in ("4", 0, 2.0):
        with pytest.raises(ConfigError, match=f"num_envs is {count!r}; it must be an integer of at least 1"):
            farstep.make_vec("CartPole-v1", count)  # type: ignore[arg-type]


@MODES
def test_a_mode_may_be_given_by_name_or_value(mode: AutoresetMode) -> None:
    for given in (mode.name, mode.value):
        with closing(farstep.make_vec(InfosEnv, 2, IN_PROCESS, autoreset_mode=given)) as vector:
            assert vector.metadata["autoreset_mode"] is vector.autoreset_mode is mode


def test_close_may_be_called_twice_and_a_closed_vector_raises() -> None:
    vector = farstep.make_vec(InfosEnv, 2, IN_PROCESS)
    vector.reset()
    vector.close()
    vector.close()
    with pytest.raises(farstep.ClosedError):
        vector.step(np.zeros(2, np.int64))
