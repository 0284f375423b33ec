"""`rollout_epochs`: several rollouts per update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from farstep.learners.async_ppo import AsyncPPOConfig
from farstep.learners.networks.nets import NetConfig, make_agent
from farstep.learners.on_policy.rollout import prepare
from farstep.learners.ppo import PPOConfig
from tests.learning.tasks import Config, Rows, assert_resumes_exactly, make_env, make_training, trained

ENVS, STEPS, EPOCHS = 4, 12, 3
SIZES: dict[str, Any] = {"num_steps": STEPS, "rollout_epochs": EPOCHS, "update_epochs": 1}
NETS = {
    "plain": NetConfig(),
    "gru": NetConfig(recurrent="gru", core=8),
    "lstm": NetConfig(recurrent="lstm", core=8, normalize_obs=False, normalize_reward=False),
}


@pytest.mark.parametrize("net", NETS)
def test_advantages_are_computed_per_rollout(net: str) -> None:
    """They equal those of separate batches, with the value and the recurrent state after each rollout's last row."""
    found = []
    for counts in ([EPOCHS], [1] * EPOCHS):
        with make_env("CartPole-v1", ENVS, launcher="in-process", workers=1) as env:
            torch.manual_seed(0)
            agent = make_agent(*env.launch(), NETS[net], 0.99)
            batches = [env.collect(agent, STEPS, count).copy() for count in counts]
            rollouts = [prepare(agent, batch, env.version, torch.device("cpu")) for batch in batches]
        found.append(np.concatenate([rollout.advantages(0.99, 0.95)[0].numpy() for rollout in rollouts], axis=1))
    assert found[0].shape == (STEPS, EPOCHS * ENVS)
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)


RUNS: dict[str, tuple[Config, dict[str, Any]]] = {
    "ppo": (PPOConfig(**SIZES), {}),
    "recurrent": (PPOConfig(**SIZES, net=NETS["lstm"]), {}),
    "aaps": (PPOConfig(**SIZES), {"kl_threshold": 0.01}),
    "staggered": (PPOConfig(**SIZES), {"stagger": {"horizon": 50}}),
    "async": (AsyncPPOConfig(**SIZES), {}),
    "async, recurrent": (AsyncPPOConfig(**SIZES, net=NETS["gru"]), {}),
    "async, staggered, aaps": (
        AsyncPPOConfig(**SIZES, staleness_threshold=2),
        {"stagger": {"horizon": 50}, "kl_threshold": 0.01},
    ),
    "async, first chunks": (AsyncPPOConfig(**SIZES, num_chunks=2), {}),
    "warm-up": (PPOConfig(**SIZES, critic_warmup_updates=2, value_lr=1e-3), {}),
}


@pytest.mark.parametrize("which", RUNS)
def test_update_learns_from_the_rows_of_all_its_rollouts(which: str) -> None:
    config, options = RUNS[which]
    seen, rows = Rows(), ENVS * STEPS * EPOCHS
    with make_env("CartPole-v1", ENVS, launcher="in-process", **options) as env:
        make_training(env, config, 5 * rows, sink=seen)[0].run()
        stats = env.stats()
    assert [row["train/actor/current_version"] for row in seen.rows] == list(range(1, len(seen.rows) + 1))
    assert all(np.isfinite(list(row.values())).all() for row in seen.rows)
    bound = config.staleness_threshold if isinstance(config, AsyncPPOConfig) else 0
    if "kl_threshold" not in options:
        assert max(row["lag/versions_max"] for row in seen.rows) <= bound
    if "stagger" not in options:
        assert [row["step"] for row in seen.rows] == [rows * k for k in range(1, 6)]
    assert stats["chunks"] == 2 * EPOCHS * len(seen.rows)


@pytest.mark.parametrize("net", ["plain", "gru"])
def test_resumed_run_equals_an_uninterrupted_one(net: str, tmp_path: Path) -> None:
    config = PPOConfig(num_steps=STEPS, rollout_epochs=2, update_epochs=2, anneal_lr=True, net=NETS[net])
    assert_resumes_exactly(config, 4 * 2 * ENVS * STEPS, 2, tmp_path)


def test_async_ppo_without_staleness_equals_ppo() -> None:
    shared: dict[str, Any] = {"num_steps": STEPS, "rollout_epochs": 2, "update_epochs": 2}
    configs = PPOConfig(**shared), AsyncPPOConfig(staleness_threshold=0, clip_ratio_c=None, **shared)
    first, second = (
        trained("CartPole-v1", config, 4 * 2 * ENVS * STEPS, num_envs=ENVS, launcher="in-process")[1].state_dict()
        for config in configs
    )
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
