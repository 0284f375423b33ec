"""Sources of environments: vectors, envpool, factories and ids."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

import farstep
from farstep.config.launch import LaunchConfig
from farstep.rollout.seeds import episode_seed
from farstep.testing import CountingEnv, TableAgent
from tests.cluster.checks import BOTH, cluster, in_process, together
from tests.cluster.toys import DoubledReward, counting_vector, telling_vector


def oracle(slot: int, rows: int, seed: int = 5) -> list[tuple[float, ...]]:
    """Observation, action, reward and end of one environment by itself, seeded once."""
    env, agent, found = CountingEnv(), TableAgent(), []
    obs, _ = env.reset(seed=episode_seed(seed, slot, 0))
    for _ in range(rows):
        action = agent.act(obs[None])["action"][0]
        new, reward, over, _, _ = env.step(action)
        found.append((*obs, action, reward, over))
        obs = env.reset()[0] if over else new
    return found


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP", "DISABLED"])
def test_a_vector_source_gives_the_episodes_of_its_environments(mode: str) -> None:
    options: Any = {"type": "vector", "env_kwargs": {"mode": mode}, "config": in_process(2)}
    with cluster(counting_vector, envs=3, **options) as env:
        batches = [env.collect(TableAgent(), steps=steps).copy() for steps in (13, 1, 16)]
    joined = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    ends = sum(len(batch.episodes["length"]) for batch in batches)
    assert joined["valid"].all() == (mode != "NEXT_STEP")
    assert joined["terminated"].sum() == ends > 6
    assert not joined["terminated"][~joined["valid"]].any()
    assert not joined["episode_start"][~joined["valid"]].any()
    for slot in range(3):
        mine = np.flatnonzero(joined["valid"][:, slot])
        rows = [
            (*joined["obs"][t, slot], *(joined[key][t, slot] for key in ("action", "reward", "terminated")))
            for t in mine
        ]
        assert rows == oracle(slot, len(mine))
        np.testing.assert_array_equal(joined["episode_start"][mine, slot], joined["obs"][mine, slot, 1] == 0)
    for batch in batches:
        length = batch.episodes["length"]
        np.testing.assert_array_equal(batch.final_obs.obs[:, 1], length)
        np.testing.assert_array_equal(batch.episodes["return"], length * (length + 1) / 2)


def part(info: dict[str, Any], i: int) -> dict[str, Any]:
    """What a batched info says of environment `i`."""
    keys = [key for key in info if f"_{key}" in info and info[f"_{key}"][i]]
    return {key: part(info[key], i) if isinstance(info[key], dict) else info[key][i] for key in keys}


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP", "DISABLED"])
def test_infos_of_a_vector_source_are_those_of_its_environments(mode: str) -> None:
    agent, theirs = TableAgent(), telling_vector(3, mode)
    options: Any = {"type": "vector", "env_kwargs": {"mode": mode}, "config": in_process(2)}
    with cluster(telling_vector, envs=3, **options) as env:
        _, info = env.reset(seed=5)
        obs, own = theirs.reset(seed=[episode_seed(5, slot, 0) for slot in range(3)])
        np.testing.assert_equal(info, own)
        for _ in range(20):
            *_, info = env.step(agent)
            obs, _, over, _, own = theirs.step(agent.act(obs)["action"])
            begun = own
            if mode == "DISABLED" and over.any():
                obs, begun = theirs.reset(options={"reset_mask": over})
            for i in range(3):
                got, expected = part(info, i), part(own, i)
                if over[i]:
                    final = expected["final_info"] if mode == "SAME_STEP" else expected
                    expected = {key: value for key, value in part(begun, i).items() if "final" not in key}
                    np.testing.assert_equal(got.pop("final_info"), final)
                    assert got.pop("final_obs")[1] == got.pop("episode")["l"] == final["count"]
                np.testing.assert_equal(got, expected)
            assert all(info[key].dtype == own[key].dtype for key in ("flag", "array", "odd") if key in info)
    theirs.close()


class PoleAgent(TableAgent):
    def act(self, obs: Any) -> Any:
        return (obs[:, 2] > 0).astype(np.int32)


@BOTH
@pytest.mark.parametrize("options", [{}, {"vectorization_mode": "vector_entry_point"}], ids=["default", "named"])
def test_gymnasiums_native_vectors_take_one_seed_for_all(options: dict[str, Any], config: LaunchConfig) -> None:
    described = {"type": "vector", "env_name": "CartPole-v1", "env_kwargs": options, "envs_per_node": 6, "seed": 1}

    def rolled() -> Any:
        with farstep.ClusterEnv(described, config) as env:
            first = env.collect(PoleAgent(), steps=120).copy()
            again = env.reset(seed=1)[0]
            np.testing.assert_array_equal(again, first["obs"][0])
            assert (env.reset()[0] != again).all()
            return first

    batch, other = rolled(), rolled()
    assert len(batch.final_obs) > 6
    np.testing.assert_array_equal(batch["obs"], other["obs"])
    assert len(np.unique(batch["obs"][0], axis=0)) == 6
    np.testing.assert_array_equal(batch.episodes["return"], batch.episodes["length"])
    assert batch["episode_start"].sum() >= len(batch.final_obs)


def test_a_native_vector_refuses_to_reset_some_of_its_environments() -> None:
    described = {"type": "vector", "env_name": "CartPole-v1", "envs_per_node": 4}
    with farstep.ClusterEnv(described, farstep.InProcessConfig(workers_per_node=2, restart_budget=0)) as env:
        env.reset(options={"reset_mask": np.array([True, True, False, False])})  # a worker's environments, whole
        with pytest.raises(farstep.ConfigError, match="selects 1 of 2 environments, but CartPoleVectorEnv"):
            env.reset(options={"reset_mask": np.array([True, False, False, False])})


@pytest.fixture(scope="module")
def envpool() -> Any:
    """Imported outside of any test: it keeps exceptions of its own imports, and with them their frames."""
    return pytest.importorskip("envpool")


def pool() -> farstep.ClusterEnv:
    config = farstep.LocalConfig(workers_per_node=2)
    return farstep.ClusterEnv({"type": "envpool", "env_name": "CartPole-v1", "envs_per_node": 4}, config)


@pytest.mark.usefixtures("envpool")
def test_envpool_is_a_source() -> None:
    with pool() as env:
        batch = env.collect(PoleAgent(), steps=200)
        assert len(batch.final_obs) > 4
        assert (batch["reward"] == batch["valid"]).all()
        np.testing.assert_array_equal(batch.episodes["return"], batch.episodes["length"])
        for slot, row, length in zip(
            batch.episodes["slot"], batch.final_obs.row, batch.episodes["length"], strict=True
        ):
            span = slice(row - length + 1, row + 1)
            assert batch["valid"][span, slot].all()
            assert batch["episode_start"][span, slot].tolist() == [True] + [False] * (length - 1)
            assert batch["terminated"][row, slot]
        assert (np.abs(batch["obs"][batch["episode_start"]]) < 0.06).all()


@pytest.mark.usefixtures("envpool")
def test_envpool_gives_infos() -> None:
    with pool() as env:
        agent = PoleAgent()
        _, info = env.reset()
        assert info["elapsed_step"].tolist() == [0] * 4
        assert "players" not in info  # nested, and not of one length
        for count in range(1, 200):
            _, _, terminated, _, info = env.step(agent)
            assert info["elapsed_step"].tolist() == [count] * 4
            if terminated.any():
                break
        assert info["final_info"]["_elapsed_step"].tolist() == terminated.tolist()
        assert info["final_info"]["elapsed_step"][terminated.argmax()] == count


@pytest.mark.usefixtures("envpool")
def test_envpool_is_reseeded_by_a_reset() -> None:
    with pool() as env:
        first, second, other = (env.reset(seed=seed)[0] for seed in (3, 3, 4))
        np.testing.assert_array_equal(first, second)
        assert (first != other).all()
        assert len(np.unique(first[:, 0])) == 4
        assert (env.reset()[0] != other).all()


def test_factories_and_wrappers() -> None:
    length = 4
    in_main = type("MainEnv", (CountingEnv,), {"__module__": "__main__"})

    def closure() -> CountingEnv:
        return CountingEnv(length=length)

    limit = ("gymnasium.wrappers:TimeLimit", {"max_episode_steps": length})
    never = {"env_kwargs": {"length": None}}
    cases: dict[str, dict[str, Any]] = {
        "path with a colon": {"env_name": "farstep.testing:CountingEnv", "env_kwargs": {"length": length}},
        "path with dots": {"env_name": "farstep.testing.envs.CountingEnv", "env_kwargs": {"length": length}},
        "closure": {"env_name": closure},
        "class of __main__": {"env_name": in_main, "env_kwargs": {"length": length}},
        "wrappers": {"env_name": CountingEnv, "wrappers": [limit, DoubledReward], **never},
    }

    def lengths(case: dict[str, Any]) -> Any:
        with farstep.ClusterEnv({"type": "factory", **case}, farstep.LocalConfig(workers_per_node=1)) as env:
            batch = env.collect(TableAgent(), steps=2 * length)
            return batch.episodes["length"].tolist(), batch["reward"][:, 0].tolist()

    for name, outcome in together({name: partial(lengths, case) for name, case in cases.items()}).items():
        found, rewards = outcome.get()
        assert found == [length, length], name
        assert rewards == [k * (1 + (name == "wrappers")) for k in (1, 2, 3, 4)] * 2


def test_gymnasium_environments_by_id() -> None:
    config = {"env_name": "CartPole-v1", "env_kwargs": {"sutton_barto_reward": True}, "envs_per_node": 2}
    with farstep.ClusterEnv(config, in_process()) as env:
        batch = env.collect(PoleAgent(), steps=60)
        np.testing.assert_array_equal(batch["reward"], -batch["terminated"].astype(np.float32))


@pytest.mark.parametrize("kind", ["gymnasium", "vector"])
def test_an_environment_that_only_the_script_registered_comes_with_advice(kind: str) -> None:
    env = farstep.ClusterEnv({"type": kind, "env_name": "Mine-v0"}, in_process())
    with pytest.raises(farstep.ConfigError, match=r"NameNotFound.*'your_module:Mine-v0'.*type='factory'"):
        env.launch()


def test_an_unknown_id_is_refused_before_local_workers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farstep.run.launched_run.Collector", None)  # so that none can be started
    env = farstep.ClusterEnv({"env_name": "CartPol-v1"}, farstep.LocalConfig(workers_per_node=1))
    with pytest.raises(farstep.ConfigError, match=r"NameNotFound.*Did you mean: `CartPole`"):
        env.launch()


def test_a_class_that_is_given_as_an_id_comes_with_advice() -> None:
    env = farstep.ClusterEnv({"env_name": "farstep.testing:CountingEnv"}, in_process())
    with pytest.raises(farstep.ConfigError, match=r"add type='factory' .*--env-type factory"):
        env.launch()


def test_factory_that_cannot_be_pickled_is_refused_before_the_launch() -> None:
    lock = threading.Lock()
    env = farstep.ClusterEnv({"type": "factory", "env_name": lambda: lock, "envs_per_node": 1})
    with pytest.raises(farstep.ConfigError, match="cannot be sent to workers"):
        env.launch()
