"""`value_lr`, the critic's learning rate, and critic warm-up, which leaves the policy unchanged."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from farstep.checkpoint import folder as checkpoint
from farstep.learners.async_ppo import AsyncPPOConfig
from farstep.learners.impala import ImpalaConfig
from farstep.learners.loop.checkpoints.saving import join_state, split_state
from farstep.learners.networks.nets import ActorCritic, NetConfig, make_agent
from farstep.learners.on_policy.optimizer import Optimizer
from farstep.learners.ppo import PPOConfig
from tests.learning.tasks import Config, Rows, assert_resumes_exactly, make_env, make_training, resumable, trained

ENVS, STEPS = 4, 12
ROWS = ENVS * STEPS
PLAIN, GRU = NetConfig(), NetConfig(recurrent="gru", core=8)
CONFIGS: dict[str, Callable[..., Config]] = {
    "ppo": lambda **options: PPOConfig(num_steps=STEPS, update_epochs=2, **options),
    "async-ppo": lambda **options: AsyncPPOConfig(num_steps=STEPS, update_epochs=2, **options),
    "impala": lambda **options: ImpalaConfig(num_steps=STEPS, **options),
}


class Pixels(gymnasium.Env[Any, Any]):
    """Rewards action 1 if the image is bright and action 0 if it is dark; actor and critic share the encoder."""

    observation_space = spaces.Box(0, 255, (12, 12, 1), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._left = 10
        return self._shown(), {}

    def _shown(self) -> Any:
        self._bright = int(self.np_random.integers(2))
        return np.full((12, 12, 1), 200 * self._bright, np.uint8)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward, self._left = float(action == self._bright), self._left - 1
        return self._shown(), reward, False, self._left == 0, {}


class Snapshots(Rows):
    """Records, after each update, the agent's logits for fixed observations and its critic's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.agent: ActorCritic | None = None
        self.policies: list[torch.Tensor] = []
        self.critics: list[torch.Tensor] = []

    def watch(self, agent: ActorCritic, space: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        shown = torch.rand(7, *space.shape, generator=generator) * 3
        self._obs = (shown * 80).to(torch.uint8) if space.dtype == np.uint8 else shown
        memory = cast(Any, agent).initial_state(7) if hasattr(agent, "initial_state") else ()
        state = tuple(torch.rand(part.shape, generator=generator) for part in memory)
        self._memory = (state, torch.zeros(7, dtype=torch.bool)) if state else ()
        self.agent = agent
        self.take()

    def take(self) -> None:
        assert self.agent is not None
        with torch.no_grad():
            self.policies.append(self.agent.distribution(self._obs, *self._memory)["logits"].clone())
        self.critics.append(torch.cat([p.detach().flatten() for p in self.agent.critic.parameters()]))

    def log(self, step: int, metrics: Any) -> None:
        super().log(step, metrics)
        self.take()


def watched(env: Any, config: Config, updates: int, **options: Any) -> Snapshots:
    """Train for some updates and return the snapshots."""
    seen = Snapshots()
    with make_env(env, ENVS, launcher="in-process", workers=1, **options) as cluster:
        training, agent = make_training(cluster, config, updates * ROWS, sink=seen)
        seen.watch(agent, cluster.launch()[0])
        training.run()
    return seen


WARM: dict[str, Any] = {
    "plain": ("ppo", "CartPole-v1", PLAIN, {}),
    "annealed": ("ppo", "CartPole-v1", PLAIN, {"anneal_lr": True, "value_lr": 1e-3}),
    "recurrent": ("ppo", "CartPole-v1", GRU, {}),
    "images": ("ppo", Pixels, PLAIN, {}),
    "stale": ("async-ppo", "CartPole-v1", PLAIN, {}),
    "stale and recurrent": ("async-ppo", "CartPole-v1", GRU, {"staleness_threshold": 2}),
    "v-trace": ("impala", "CartPole-v1", PLAIN, {}),
}


@pytest.mark.parametrize("which", WARM)
def test_policy_does_not_change_during_critic_warmup(which: str) -> None:
    learner, env, net, options = WARM[which]
    seen = watched(env, CONFIGS[learner](critic_warmup_updates=2, net=net, **options), 3)
    assert len(seen.policies) == 4
    assert all(torch.equal(seen.policies[0], policy) for policy in seen.policies[1:3])
    assert not torch.equal(seen.policies[2], seen.policies[3])
    assert not any(torch.equal(before, after) for before, after in zip(seen.critics, seen.critics[1:], strict=False))
    assert [row.get("train/critic/warmup") for row in seen.rows] == [1, 1, None]
    assert [row["train/actor/lr"] > 0 for row in seen.rows] == [False, False, True]
    assert all(row["train/critic/lr"] > 0 for row in seen.rows)


def test_workers_with_a_kl_threshold_pull_nothing_during_critic_warmup() -> None:
    """Action distributions of old and new weights are equal."""
    seen = watched("CartPole-v1", CONFIGS["ppo"](critic_warmup_updates=3), 6, kl_threshold=1e-9)
    assert all(torch.equal(seen.policies[0], policy) for policy in seen.policies[1:4])
    pulls = [row["sync/pulls_per_worker"] for row in seen.rows]
    assert pulls[0] == pulls[2] < pulls[-1]
    assert [row["lag/versions_max"] for row in seen.rows[:3]] == [0, 1, 2]


def test_critic_learns_values_during_warmup() -> None:
    config = PPOConfig(num_steps=64, critic_warmup_updates=100)
    seen = Rows()
    with make_env("CartPole-v1", 8, launcher="in-process") as env:
        make_training(env, config, 8 * 64 * 8, sink=seen)[0].run()
    explained = [row["train/critic/explained_variance"] for row in seen.rows]
    assert max(explained[:2]) < 0.2 and min(explained[-2:]) > 0.35


def test_run_that_ends_during_critic_warmup_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    for updates, warnings in ((2, 1), (3, 1)):  # the second run ends after warm-up: no further warning
        watched("CartPole-v1", CONFIGS["ppo"](critic_warmup_updates=2), updates)
        assert (
            sum("its policy was not trained: lower --critic-warmup-updates" in r.getMessage() for r in caplog.records)
            == warnings
        )


@pytest.mark.parametrize("net", [PLAIN, GRU], ids=["plain", "recurrent"])
@pytest.mark.parametrize("learner", CONFIGS)
def test_actor_and_critic_have_separate_learning_rates(learner: str, net: NetConfig) -> None:
    """Shared layers use the policy's rate: if it is 0, action distributions do not change."""
    still = NetConfig(recurrent=net.recurrent, core=net.core, normalize_obs=False)
    seen = watched("CartPole-v1", CONFIGS[learner](learning_rate=0.0, value_lr=1e-3, net=still), 2)
    assert torch.equal(seen.policies[0], seen.policies[-1]) and not torch.equal(seen.critics[0], seen.critics[-1])
    seen = watched("CartPole-v1", CONFIGS[learner](learning_rate=1e-3, value_lr=0.0, net=still), 2)
    assert torch.equal(seen.critics[0], seen.critics[-1]) and not torch.equal(seen.policies[0], seen.policies[-1])


def test_both_learning_rates_are_annealed() -> None:
    config = CONFIGS["ppo"](learning_rate=1e-3, value_lr=4e-3, anneal_lr=True)
    seen = watched("CartPole-v1", config, 4)
    np.testing.assert_allclose([row["train/actor/lr"] for row in seen.rows], [1e-3, 7.5e-4, 5e-4, 2.5e-4])
    np.testing.assert_allclose([row["train/critic/lr"] for row in seen.rows], [4e-3, 3e-3, 2e-3, 1e-3])


def test_value_lr_defaults_to_learning_rate() -> None:
    found = []
    for value_lr in (None, 1e-3):
        config = CONFIGS["ppo"](learning_rate=1e-3, value_lr=value_lr)
        found.append(trained("CartPole-v1", config, 3 * ROWS, num_envs=ENVS, launcher="in-process")[1].state_dict())
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


RESUMED: dict[str, tuple[dict[str, Any], int]] = {
    "value_lr": ({"value_lr": 2e-3, "anneal_lr": True}, 3),
    "in critic warm-up": ({"critic_warmup_updates": 4}, 2),
    "at the end of critic warm-up": ({"critic_warmup_updates": 3}, 3),
    "after critic warm-up": ({"critic_warmup_updates": 1, "value_lr": 2e-3}, 4),
    "recurrent, in critic warm-up": ({"critic_warmup_updates": 3, "value_lr": 2e-3, "net": GRU}, 2),
}


@pytest.mark.parametrize("which", RESUMED)
def test_resumed_run_equals_an_uninterrupted_one(which: str, tmp_path: Path) -> None:
    options, stop_at = RESUMED[which]
    assert_resumes_exactly(CONFIGS["ppo"](**options), 6 * ROWS, stop_at, tmp_path)


def test_checkpoint_older_than_critic_warmup_can_be_resumed(tmp_path: Path) -> None:
    config = CONFIGS["ppo"]()
    whole = resumable(config, 6 * ROWS, tmp_path / "whole")
    resumable(config, 6 * ROWS, tmp_path / "parts", stop_at=3)
    state = join_state(checkpoint.load(tmp_path / "parts"))
    del state["learner"]["updates"], state["learner"]["optimizer"]["adam"]["critic_step"]
    arrays, plain = split_state(state)
    checkpoint.save(tmp_path / "parts", arrays, {"state": plain})
    parts = resumable(config, 6 * ROWS, tmp_path / "parts", resume=True)
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())


def test_checkpoint_that_an_older_version_saved_before_its_first_update_can_be_loaded() -> None:
    """Its optimizer has no state yet, as when Ctrl-C comes while the first rollout is collected."""
    space = spaces.Box(-1.0, 1.0, (3,))
    optimizer = Optimizer(make_agent(space, spaces.Discrete(2), NetConfig(), 0.99), 1e-3, 0.5, seed=1)
    optimizer.load(optimizer.check({**optimizer.state(), "adam": {}}))
    saved = optimizer.check(optimizer.state())
    assert all(not tensor.any() for tensor in saved.adam.values())


def test_code_of_the_ppo_page_loads_a_trained_policy_with_a_new_critic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "ppo.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.S | re.M)
    trained = resumable(CONFIGS["ppo"](), 2 * ROWS, tmp_path / "runs" / "NAME" / "checkpoints")
    monkeypatch.chdir(tmp_path)
    with make_env("CartPole-v1", ENVS, launcher="in-process") as env:
        names: dict[str, Any] = {"env": env}
        exec(code, names)
    started = names["learner"].agent.state_dict()
    changed = {name.split(".")[0] for name, tensor in started.items() if not torch.equal(tensor, trained[name])}
    assert changed == {"critic"}
