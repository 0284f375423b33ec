"""Runs that cannot be resumed exactly keep counters, versions and statistics, and restart their environments."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farstep.learners.async_ppo import AsyncPPOConfig
from farstep.learners.impala import ImpalaConfig
from farstep.learners.networks.nets import NetConfig
from farstep.learners.ppo import PPOConfig
from farstep.testing import CountingEnv, FaultyEnv
from tests.learning.tasks import Config, Rows, make_env, make_training

VERSION = "train/actor/current_version"
NET = NetConfig(normalize_obs=True, normalize_reward=True)
CONFIGS: dict[str, tuple[Config, dict[str, Any]]] = {
    "async-ppo": (AsyncPPOConfig(num_steps=10, net=NET), {}),
    "impala": (ImpalaConfig(num_steps=10, net=NET), {}),
    "ppo, staggered": (PPOConfig(num_steps=10, net=NET), {"stagger": {"horizon": 20}}),
    "ppo, older weights": (PPOConfig(num_steps=10, net=NET), {"kl_threshold": 0.1}),
    "ppo, seeded once": (PPOConfig(num_steps=10, net=NET), {"seed_episodes": False}),
    "ppo, other workers": (PPOConfig(num_steps=10, net=NET), {}),
}


@pytest.mark.parametrize("which", CONFIGS)
def test_resumed_run_continues_its_counters_in_new_episodes(which: str, tmp_path: Path) -> None:
    config, options = CONFIGS[which]
    first, second = Rows(), Rows()
    with make_env(partial(CountingEnv, 50), 8, launcher="in-process", **options) as env:
        training, agent = make_training(env, config, 800, checkpoints=tmp_path, sink=first)
        begun = set(env.collect(agent, 1)["obs"][0, :, 0].tolist())
        training.run()
    if which == "ppo, other workers":
        options = {"workers": 4}
    with make_env(partial(CountingEnv, 50), 8, launcher="in-process", **options) as env:
        training, agent = make_training(env, config, 1600, checkpoints=tmp_path, sink=second)
        training.resume()
        assert env.version == first.rows[-1][VERSION]
        assert not begun & set(env.collect(agent, 1)["obs"][0, :, 0].tolist()), "the run's first seeds came again"
        training.run()
    last, now = first.rows[-1], second.rows[0]
    assert now["update"] == last["update"] + 1 and now[VERSION] == last[VERSION] + 1
    assert now["step"] > last["step"] >= 800 and second.rows[-1]["step"] >= 1600
    assert all(np.isfinite(list(row.values())).all() for row in second.rows)


def test_restarts_before_a_resume_count(tmp_path: Path) -> None:
    checkpoints, rows = tmp_path / "checkpoints", Rows()
    make = partial(FaultyEnv, "exit", "step", marker=str(tmp_path / "died-once"))
    for total_steps in (16, 32):
        with make_env(make, 1, workers=1) as env:
            training, _ = make_training(env, PPOConfig(num_steps=16), total_steps, checkpoints=checkpoints, sink=rows)
            if rows.rows:
                training.resume()
            training.run()
            here = env.stats()["workers"]["restarts"]
    assert here == 0
    assert [row["workers/restarts"] for row in rows.rows] == [1, 1]
