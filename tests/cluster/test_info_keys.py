"""`EnvConfig.info_keys`: entries of the environments' infos as arrays of a batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import farstep
from farstep.testing import CountingEnv, TableAgent


class OddInfoEnv(CountingEnv):
    """Returns a flag only in some steps, and text."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        *step, info = super().step(action)
        flag = {"is_odd": True} if self.count % 2 else {}
        return *step, {**info, **flag, "text": "a"}


def vector(num_envs: int, mode: str) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    return SyncVectorEnv([OddInfoEnv] * num_envs, autoreset_mode=AutoresetMode[mode])


SOURCES: dict[str, dict[str, Any]] = {
    "single": {"type": "factory", "env_name": OddInfoEnv},
    "staggered": {
        "type": "factory",
        "env_name": OddInfoEnv,
        "stagger": {"horizon": 6, "early": "gate"},
        "env_kwargs": {"length": 4},
    },
    **{mode: {"type": "vector", "env_name": partial(vector, mode=mode)} for mode in AutoresetMode.__members__},
}


def collect(launch: Any = None, steps: int = 24, **options: Any) -> farstep.Batch:
    config = {"envs_per_node": 3, "seed": 1, **options}
    with farstep.ClusterEnv(config, launch or farstep.InProcessConfig()) as env:
        return env.collect(TableAgent(), steps).copy()


@pytest.mark.parametrize("source", SOURCES)
def test_entries_of_every_step_are_recorded(source: str) -> None:
    """The environment's reward is its step count, and so is the entry `count`; also in the last step of an episode."""
    batch = collect(info_keys=["count", "is_odd"], **SOURCES[source])
    valid, ended = batch["valid"], batch["terminated"] | batch["truncated"]
    assert ended.sum() > 5 and batch["info.count"].dtype == np.float32
    np.testing.assert_array_equal(batch["info.count"][valid], batch["reward"][valid])
    np.testing.assert_array_equal(batch["info.is_odd"][valid], batch["reward"][valid] % 2)
    assert not batch["info.count"][~valid].any()


def test_entries_are_sent_without_shared_memory() -> None:
    batch = collect(farstep.LocalConfig(workers_per_node=1, transport="tcp"), info_keys=["count"], **SOURCES["single"])
    np.testing.assert_array_equal(batch["info.count"], batch["reward"])


def test_batches_have_no_entries_by_default() -> None:
    assert not [name for name in collect(**SOURCES["single"]) if name.startswith("info")]


def test_text_is_refused() -> None:
    with pytest.raises(farstep.WorkerError, match="info 'text' = 'a'"):
        collect(info_keys=["text"], **SOURCES["single"])


@pytest.mark.parametrize("keys", ["count", [1], [""], ["a", "a"], None])
def test_invalid_names_are_refused(keys: Any) -> None:
    with pytest.raises(farstep.ConfigError, match="info_keys"):
        farstep.EnvConfig(env_name="CartPole-v1", info_keys=keys)
