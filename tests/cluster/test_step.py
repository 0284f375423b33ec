"""`step(agent)`: its `info` has the rows that `collect` would record."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import farstep
from farstep.config.launch import LaunchConfig
from farstep.testing import CountingEnv, TableAgent
from tests.cluster.checks import cluster, in_process
from tests.cluster.toys import NestedAgent, NestedEnv, RememberingAgent, counting_vector

EVERYWHERE = pytest.mark.parametrize(
    "config",
    [
        in_process(2),
        farstep.LocalConfig(workers_per_node=2),
        farstep.LocalConfig(workers_per_node=2, transport="tcp"),
    ],
    ids=["in_process", "local", "tcp"],
)
OF_A_ROW = ("version", "valid", "episode_start")


def stepped(env: farstep.ClusterEnv, agent: Any, steps: int) -> tuple[list[Any], list[dict[str, Any]]]:
    """The five values of some steps, all kept until the end, and their infos."""
    values = [env.step(agent) for _ in range(steps)]
    return values, [info for *_, info in values]


@EVERYWHERE
def test_info_of_step_has_the_rows_that_collect_records(config: LaunchConfig) -> None:
    agent = TableAgent()
    with cluster(envs=3, config=config) as env:
        batch = env.collect(agent, steps=12).copy()
    with cluster(envs=3, config=config) as env:
        values, infos = stepped(env, agent, 12)
        for key in ("action", "value", *OF_A_ROW):
            found = np.stack([info[key] for info in infos])
            np.testing.assert_array_equal(found, batch[key], err_msg=key)
            assert found.dtype == batch[key].dtype
        # The action is the one that the environment was given: these environments repeat it in their observation.
        for obs, _, terminated, _, info in values:
            np.testing.assert_array_equal(obs[~terminated, 2], info["action"][~terminated])
        agent.table[:] = 2
        *_, info = env.step(agent)
        assert (info["action"].tolist(), info["version"].tolist()) == ([2] * 3, [1] * 3)


@EVERYWHERE
def test_info_nests_actions_as_their_space(config: LaunchConfig) -> None:
    with cluster(NestedEnv, config=config) as env:
        env.reset()
        obs, *_, info = env.step(NestedAgent())
        move, gear = info["action"]
        np.testing.assert_array_equal(move, obs["echo"]["move"])
        np.testing.assert_array_equal(gear, obs["echo"]["gear"])
        assert info["extra"]["double"].tolist() == [0.0, 0.0]


def test_info_has_no_recurrent_state() -> None:
    with cluster(config=in_process(), env_kwargs={"length": 2}) as env:
        _, infos = stepped(env, RememberingAgent(), 3)
        assert [info["age"].tolist() for info in infos] == [[1, 1], [2, 2], [1, 1]]
        assert [info["episode_start"].tolist() for info in infos] == [[True] * 2, [False] * 2, [True] * 2]
        assert "state" not in infos[0]


class NamesakeEnv(CountingEnv):
    """Its infos have names that agents use, too; some only in some steps."""

    def step(self, action: Any) -> Any:
        *rest, info = super().step(action)
        return *rest, {**info, "action": f"move {action}", **({"version": 70} if self.count == 2 else {})}


@EVERYWHERE
def test_environment_infos_with_the_workers_names_get_a_prefix(config: LaunchConfig) -> None:
    with cluster(NamesakeEnv, config=config, env_kwargs={"length": None}) as env:
        _, (first, second) = stepped(env, TableAgent(), 2)
        assert list(first["env_action"]) == [f"move {action}" for action in first["action"]]
        assert first["_env_action"].tolist() == [True, True]
        assert "_action" not in first
        assert "env_version" not in first
        assert second["env_version"].tolist() == [70, 70]
        assert second["version"].tolist() == [0, 0]
        assert second["count"].tolist() == [2, 2]


def test_rows_in_which_a_vector_environment_only_resets_itself_are_not_valid() -> None:
    source: dict[str, Any] = {"type": "vector", "env_kwargs": {"mode": "NEXT_STEP"}, "config": in_process()}
    with cluster(counting_vector, envs=3, **source) as env:
        values, infos = stepped(env, TableAgent(), 20)
    ended = np.stack([terminated for _, _, terminated, _, _ in values])
    valid = np.stack([info["valid"] for info in infos])
    assert ended.any()
    np.testing.assert_array_equal(valid[1:], ~ended[:-1])


class OddKeysEnv(CountingEnv):
    def step(self, action: Any) -> Any:
        *rest, _ = super().step(action)
        return *rest, {("arm", 1): 2, 3: 4.5, b"raw": 6}


@EVERYWHERE
def test_keys_of_infos_that_are_not_strings_are_kept(config: LaunchConfig) -> None:
    with cluster(OddKeysEnv, envs=2, config=config, env_kwargs={"length": None}) as env:
        info: Any = env.step(TableAgent())[-1]
    assert info[("arm", 1)].tolist() == [2, 2] and info[3].tolist() == [4.5, 4.5] and info[b"raw"].tolist() == [6, 6]
