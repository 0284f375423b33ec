"""A-RIDE: values of its critics, steps that train the actor, priorities of episodes, and penalties."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

import farstep
from farstep.buffer import DPER, Buffer
from farstep.cli import main
from farstep.learners.aride import Aride, ArideConfig
from farstep.learners.episodes.penalties import penalties
from farstep.learners.loop.training import Limits, Training
from farstep.learners.networks.nets import ActorCritic, NetConfig, make_agent
from farstep.learners.replay.batches import DeviceBatches, ReplayBatch
from farstep.learners.replay.config import EpisodeReplayConfig
from farstep.learners.returns import n_step
from farstep.observe.files import read_rows
from tests.buffer.sampled_rows import assert_frequencies
from tests.learning.tasks import Identity, Recall, Rows, make_env, make_training, trained

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("torch_in_workers")]  # real processes, or learning

PLAIN = NetConfig(hidden=(8,), normalize_obs=False, normalize_reward=False)
TINY = ArideConfig(net=PLAIN, learning_rate=0.02, max_grad_norm=100.0, gamma=1.0, entropy_bonus=0.0, gate="none")


def learner_of(config: ArideConfig, num_actions: int = 2) -> Aride:
    torch.manual_seed(1)
    box = spaces.Box(-1, 1, (2,), np.float32)
    return Aride(make_agent(box, spaces.Discrete(num_actions), config.net, config.gamma), config, seed=1)


def set_policy(agent: ActorCritic, probabilities: list[float]) -> None:
    """Make the policy independent of the observation, and keep it."""
    logits: Any = agent.heads["action"].logits
    with torch.no_grad():
        logits.weight.zero_()
        logits.bias.copy_(torch.tensor(probabilities).log())
    agent.actor.requires_grad_(False)
    agent.heads.requires_grad_(False)


def policy_of(agent: ActorCritic) -> Tensor:
    distribution: Any = agent.distribution(torch.zeros(1, 2))
    return torch.softmax(distribution["logits"], -1)[0]


def bandit(actions: list[int], rewards: list[float], behavior: float = 0.5, **columns: Any) -> ReplayBatch:
    """Episodes of one step, all in the same state."""
    count = len(actions)
    rows = {
        "obs": torch.zeros(count, 1, 2),
        "next_obs": torch.zeros(count, 1, 2),
        "action": torch.tensor(actions)[:, None],
        "logprob": torch.full((count, 1), math.log(behavior)),
        "reward": torch.tensor(rewards)[:, None],
        "terminated": torch.ones(count, 1, dtype=torch.bool),
        "truncated": torch.zeros(count, 1, dtype=torch.bool),
        "valid": torch.ones(count, 1, dtype=torch.bool),
        **columns,
    }
    return ReplayBatch(rows, torch.ones(count), np.arange(count))


# ---- critics ----


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 0.5 / 0.7), ({"rho_bar": 100.0}, 0.8), ({"mode": "paper"}, 0.5)],
    ids=["vtrace", "unclipped", "paper"],
)
def test_critic_of_the_bandit_converges_to_the_value_that_its_mode_has(
    options: dict[str, Any], expected: float
) -> None:
    """pi = (.2, .8), mu = (.5, .5), rewards (0, 1). The published target learns mu's value; V-trace's learns that of pi
    clipped at mu, (.2, .5) / .7."""
    learner = learner_of(replace(TINY, **options))
    set_policy(learner.agent, [0.2, 0.8])
    for _ in range(300):
        learner.step(bandit([0, 1], [0.0, 1.0]))
    assert learner.agent.value(torch.zeros(1, 2)).item() == pytest.approx(expected, abs=5e-3)


def test_critic_in_mode_bce_is_the_probability_of_success() -> None:
    learner = learner_of(replace(TINY, mode="bce"))
    set_policy(learner.agent, [0.5, 0.5])
    for _ in range(300):
        learner.step(bandit([0, 1, 0, 1], [0.0, 5.0, -1.0, 0.0]))
    assert learner.agent.value(torch.zeros(1, 2)).sigmoid().item() == pytest.approx(0.25, abs=5e-3)


def test_importance_weights_correct_actor_and_critic() -> None:
    """An episode that is sampled four times as often, with a quarter of the weight, counts once."""
    four = bandit([0, 0, 0, 0, 1], [1.0, 1.0, 1.0, 1.0, 0.0])
    four = replace(four, weights=torch.tensor([0.25, 0.25, 0.25, 0.25, 1.0]))
    one = bandit([0, 1], [1.0, 0.0])
    first, second = learner_of(TINY), learner_of(TINY)
    for _ in range(20):
        first.step(four)
        second.step(one)
    torch.testing.assert_close(policy_of(first.agent), policy_of(second.agent), atol=2e-3, rtol=0)


# ---- which steps train the actor ----


@pytest.mark.parametrize(
    ("gate", "kept", "falls"), [("none", 1.0, True), ("normalize", 1.0, True), ("positive", 1 / 3, False)]
)
def test_gate_decides_which_actions_become_less_likely(gate: Any, kept: float, falls: bool) -> None:
    """Action 0 is good, 1 is bad, 2 was never taken; only without a gate does 2 gain on 1."""
    learner = learner_of(replace(TINY, gate=gate, value_coef=0.0, learning_rate=3e-3), num_actions=3)
    with torch.no_grad():
        for parameter in learner.agent.critic.parameters():
            parameter.zero_()
    batch = bandit([0, 1, 1], [1.0, -1.0, -1.0], behavior=1 / 3)
    metrics, _ = learner.step(batch)
    before = policy_of(learner.agent)
    for _ in range(20):
        learner.step(batch)
    after = policy_of(learner.agent)
    assert metrics["actor/kept_fraction"].item() == pytest.approx(kept)
    assert after[0] > before[0]
    gain = (after[2] / after[1]) / (before[2] / before[1])
    assert (gain > 1.005) == falls, gain


@pytest.mark.parametrize("mode", ["vtrace", "bce"])
def test_filter_keeps_episodes_that_went_better_than_predicted(mode: Any) -> None:
    """Of four equal starts two succeed: these train the actor, all train the critic."""
    learner = learner_of(replace(TINY, mode=mode, filter_quantile=0.5, gate="positive"))
    batch = bandit([0, 0, 1, 1], [0.0, 0.0, 1.0, 1.0])
    losses = []
    for _ in range(150):
        metrics, _ = learner.step(batch)
        losses.append(metrics["critic/trajectory_loss"].item())
    assert metrics["actor/kept_fraction"].item() == 0.5
    assert policy_of(learner.agent)[1] > 0.6
    best = math.log(2) if mode == "bce" else 0.5  # the outcome of a fair coin
    assert losses[-1] == pytest.approx(best, abs=0.01)


def test_entropy_is_that_of_the_policy_and_not_of_the_actions_taken() -> None:
    learner = learner_of(TINY)
    set_policy(learner.agent, [0.1, 0.9])
    metrics, _ = learner.step(bandit([0, 0], [0.0, 0.0]))
    expected = -(0.1 * math.log(0.1) + 0.9 * math.log(0.9))
    assert metrics["actor/entropy_loss"].item() == pytest.approx(expected, rel=1e-4)


# ---- episodes ----


def collected(env: Any, config: ArideConfig, steps: int, **options: Any) -> tuple[Aride, Buffer]:
    """Return a learner, and a buffer with the episodes of its agent."""
    with make_env(env, 4, launcher="in-process", **options) as cluster:
        torch.manual_seed(1)
        agent = make_agent(*cluster.launch(), config.net, config.gamma)
        learner = Aride(agent, config, seed=1)
        buffer = Buffer(4_000, learner.sampler, seed=1)
        buffer.insert(cluster.collect(agent, steps))
    return learner, buffer


def read_all(learner: Aride, buffer: Buffer) -> ReplayBatch:
    return DeviceBatches(buffer, 1, learner.names, learner.device).read(buffer.keys())


@pytest.mark.parametrize("kind", ["discrete", "continuous", "dict"])
@pytest.mark.parametrize("recurrent", ["none", "gru", "lstm"])
def test_ratios_of_own_episodes_are_one(kind: str, recurrent: Any) -> None:
    """Behavior log-probabilities are those of the samples; a recurrent agent is unrolled from each episode's start."""
    config = ArideConfig(net=NetConfig(hidden=(8,), core=8, recurrent=recurrent))
    learner, buffer = collected(Identity, config, 35, env_kwargs={"kind": kind})
    with buffer:
        batch = read_all(learner, buffer)
        assert len(batch.keys) == 12
        metrics, _ = learner.step(batch)
    assert metrics["actor/rho_mean"].item() == pytest.approx(1.0, abs=1e-5)
    assert metrics["actor/ess"].item() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_on_policy_priority_is_the_td_error_with_the_value_after_a_truncation(recurrent: Any) -> None:
    """Against one-step returns of each episode alone, from the values with which workers acted."""
    net = NetConfig(hidden=(8,), core=8, recurrent=recurrent, normalize_reward=False)
    config = ArideConfig(net=net, w1=1.0, w2=0.0, w3=0.0, gamma=0.9)
    learner, buffer = collected(Identity, config, 21)
    with buffer:
        batch = read_all(learner, buffer)
        found = learner.priorities(batch)
        rows, _ = buffer.read(batch.keys)
    for i, obs in enumerate(rows["next_obs"][:, -1]):
        valid = rows["valid"][i]
        values = rows["value"][i][valid][:, None]
        if recurrent == "none":
            last = learner.agent.value(torch.from_numpy(obs[None])).detach().numpy()
        else:  # the value after the episode's last step, from its whole history
            agent: Any = learner.agent
            whole = torch.from_numpy(np.append(rows["obs"][i][valid], obs)[:, None])
            starts = torch.zeros(len(whole), 1, dtype=torch.bool)
            features, _ = agent.unroll(whole, agent.initial_state(1), starts)
            last = agent.critic(features)[-1].detach().numpy()
        flags = {name: rows[name][i][valid][:, None] for name in ("terminated", "truncated")}
        final = np.broadcast_to(last, values.shape)
        target = n_step(rows["reward"][i][valid][:, None], values, last, **flags, final_values=final, gamma=0.9, n=1)
        assert found[i].item() == pytest.approx(np.abs(target - values).mean(), rel=1e-3)


def test_frequencies_of_samples_follow_the_priorities() -> None:
    config = ArideConfig(net=PLAIN, priority_alpha=0.7, priority_beta=1.0, w1=1.0, w2=0.1)
    learner, buffer = collected(Recall, config, 50)
    with buffer:
        batch = read_all(learner, buffer)
        priorities = learner.priorities(batch).numpy()
        assert priorities.max() > 1.2 * priorities.min()
        buffer.update_priorities(batch.keys, priorities)
        counts, place = np.zeros(len(batch.keys)), {key: i for i, key in enumerate(batch.keys.tolist())}
        for _ in range(300):
            _, info = buffer.sample(17)
            counts += np.bincount([place[key] for key in info.keys.tolist()], minlength=len(counts))
        assert_frequencies(counts, priorities**0.7)
        shares = priorities**0.7 / (priorities**0.7).sum()
        expected = np.array([1 / shares[place[key]] for key in info.keys.tolist()])
        np.testing.assert_allclose(info.weights, expected / expected.max(), rtol=1e-6)


def test_priorities_fall_when_episodes_are_learned() -> None:
    config = replace(TINY, gamma=0.5, w1=1.0, w2=0.0, w3=0.0)
    learner, buffer = collected("CartPole-v1", config, 60)
    with buffer:
        batch = read_all(learner, buffer)
        before = learner.priorities(batch)
        for _ in range(150):
            _, priorities = learner.step(batch)
        after = learner.priorities(batch)
    assert after.mean() < 0.5 * before.mean()
    assert isinstance(learner.sampler, DPER)
    torch.testing.assert_close(after, priorities, rtol=0.2, atol=0.02)


# ---- penalties ----


def test_repetitions_cost_more_and_more_until_another_action() -> None:
    action = np.array([[0, 5], [0, 5], [0, 5], [1, 6], [1, 5], [2, 5]])
    invalid = np.array([[0, 1], [0, 0], [0, 0], [2, 0], [0, 0], [0, 1]], np.float32)
    found = penalties([action], None, invalid_penalty=1.0, repeat_penalty=0.4)
    np.testing.assert_allclose(found.T, [[0, -0.4, -0.8, 0, -0.4, 0], [0, -0.4, -0.8, 0, 0, -0.4]])
    found = penalties([action], invalid, invalid_penalty=1.0, repeat_penalty=0.4)
    np.testing.assert_allclose(found.T, [[0, -0.4, -0.8, -1, -0.4, 0], [-1, -0.4, -0.8, 0, 0, -1.4]])


def test_nested_actions_repeat_only_if_all_parts_do() -> None:
    first, second = np.array([[0], [0], [0]]), np.array([[[1.0, 2.0]], [[1.0, 2.0]], [[1.0, 3.0]]])
    found = penalties([first, second], None, invalid_penalty=0.0, repeat_penalty=1.0)
    assert found[:, 0].tolist() == [0, -1, 0]


class InvalidActions(gymnasium.Env[Any, Any]):
    """Pays nothing; action 0 is invalid."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._left = 6
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        return np.zeros(2, np.float32), 0.0, self._left == 0, False, {"invalid_action": int(action) == 0}


EPISODES = EpisodeReplayConfig(buffer_size=2_000, learning_starts=100, batch_size=8, report_every=200)


@pytest.mark.parametrize(
    ("options", "goal"), [({"invalid_penalty": 1.0}, "valid"), ({"repeat_penalty": 0.4}, "alternate")]
)
def test_penalties_are_learned_to_be_avoided(options: dict[str, Any], goal: str) -> None:
    config = ArideConfig(net=PLAIN, learning_rate=1e-2, replay=EPISODES, **options)
    with make_env(InvalidActions, 4, launcher="in-process", info_keys=config.info_keys) as env:
        training, agent = make_training(env, config, 1_500, sink=(rows := Rows()))
        training.run()
        actions = env.collect(agent, 50)["action"]
    penalty = [row["train/actor/penalty"] for row in rows.rows if "train/actor/penalty" in row]
    if goal == "valid":
        assert (actions == 1).mean() > 0.9
        assert penalty[-1] < 0.5 * penalty[0]
    else:
        assert penalty[0] > 0.1  # with one observation, the best policy is a coin
        assert 0.3 < actions.mean() < 0.7


def test_penalty_without_recorded_infos_is_refused() -> None:
    config = ArideConfig(net=PLAIN, invalid_penalty=1.0, replay=EPISODES)
    with make_env(InvalidActions, 4, launcher="in-process") as env:
        training, _ = make_training(env, config, 500)
        with pytest.raises(farstep.ConfigError, match="info_keys"):
            training.run()


def test_command_line_records_invalid_actions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the actions are invalid at first; the return that is reported has no penalties."""
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    environment = ["--env", f"{__name__}:InvalidActions", "--env-type", "factory", "--launcher", "in-process"]
    sizes = ["--num-envs", "4", "--total-steps", "256", "--learning-starts", "64", "--report-every", "64"]
    run = ["--folder", str(tmp_path), "--name", "run", "--invalid-penalty", "1"]
    assert main(["train", "aride", *environment, *sizes, *run]) == 0
    rows = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if "train/actor/penalty" in row]
    assert rows[0]["train/actor/penalty"] > 0.2 and rows[-1]["env/return_mean"] == 0


# ---- the loop ----


def test_ratio_counts_rows_of_episodes() -> None:
    """Episodes of 10 rows: 8 of them are 80 samples, which take 20 new rows at a ratio of 4."""
    config = ArideConfig(net=PLAIN, replay=replace(EPISODES, samples_per_step=4.0))
    with make_env(Identity, 4, launcher="in-process") as env:
        training, _ = make_training(env, config, 960, sink=(rows := Rows()))
        progress = training.run()
    last = rows.rows[-1]
    assert progress.updates == pytest.approx((progress.steps - 100) * 4 / 80, abs=1)
    assert last["replay/samples_per_step"] == pytest.approx(4.0, abs=80 / (progress.steps - 100))
    assert last["replay/episodes"] == progress.steps // 10 - progress.steps // 10 % 4


class LongEpisodes(Identity):
    def __init__(self, length: int = 150) -> None:
        super().__init__("discrete", length)


@pytest.mark.parametrize("launcher", ["in-process", "local"])
def test_learning_waits_for_the_first_complete_episode(launcher: str) -> None:
    """Workers roll 600 rows until then, although the limiter's bounds are reached after 200."""
    replay = EpisodeReplayConfig(learning_starts=16, batch_size=1, samples_per_step=0.5, num_steps=4, report_every=100)
    config = ArideConfig(net=PLAIN, replay=replay)
    with make_env(LongEpisodes, 4, launcher=launcher) as env:
        training, _ = make_training(env, config, 1_300, sink=(rows := Rows()))
        progress = training.run()
    assert rows.rows[0]["update"] == 0 and rows.rows[0]["replay/episodes"] == 0
    assert progress.updates == pytest.approx((progress.steps - 16) / 300, abs=1.1)
    assert rows.rows[-1]["replay/episodes"] >= 4


def test_buffer_that_is_smaller_than_an_episode_is_reported() -> None:
    replay = EpisodeReplayConfig(buffer_size=400, learning_starts=100, batch_size=1, report_every=100)
    with make_env(LongEpisodes, 4, launcher="in-process") as env:
        training, _ = make_training(env, ArideConfig(net=PLAIN, replay=replay), 1_000)
        progress = training.run()
        warned = [event.text for event in env.events("warned")]
    assert progress.updates == 0 and progress.steps >= 1_000
    assert sum("no complete episode" in text and "100 rows of each environment" in text for text in warned) == 1


class Refreshed(Aride):
    """Gives each episode a priority that is known from its key."""

    seen: list[int]
    refreshes = 0
    largest = 0

    def priorities(self, batch: ReplayBatch) -> Tensor:
        self.largest = max(self.largest, len(batch.keys))
        self.seen = [*getattr(self, "seen", []), *batch.keys.tolist()]
        return torch.from_numpy(1.0 + batch.keys % 7)

    def step(self, batch: ReplayBatch) -> Any:
        if seen := set(getattr(self, "seen", [])):
            assert set(batch.keys.tolist()) <= seen, "an episode was not refreshed"
            expected = 1 / (1.0 + batch.keys % 7)
            np.testing.assert_allclose(batch.weights.numpy(), expected / expected.max(), rtol=1e-5)
            self.refreshes += 1
        self.seen = []
        return super().step(batch)[0], None


def test_all_priorities_are_refreshed_in_blocks() -> None:
    """In one round of chunks, no episode arrives between a refresh and the next samples."""
    replay = EpisodeReplayConfig(learning_starts=400, batch_size=2, samples_per_step=1.0, num_steps=200)
    config = ArideConfig(net=PLAIN, replay=replay, refresh_every=1, priority_alpha=1.0, priority_beta=1.0)
    with make_env(Identity, 4, launcher="in-process") as env:
        torch.manual_seed(1)
        learner = Refreshed(make_agent(*env.launch(), config.net, config.gamma), config, seed=1)
        Training(learner, env, Limits(total_steps=800)).run()
    assert learner.refreshes >= 10 and learner.largest == 8
    assert len(set(learner.seen)) == 80


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "td"},
        {"gate": "sign"},
        {"retrace_lambda": 1.1},
        {"filter_quantile": 2},
        {"rho_bar": 0},
        {"refresh_every": 0},
        {"w1": -1},
        {"invalid_penalty": -1},
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(farstep.ConfigError, match=next(iter(options))):
        ArideConfig(**options)


@pytest.mark.parametrize("option", ["samples_per_step", "batch_size", "buffer_size"])
def test_invalid_options_of_the_loop_are_refused(option: str) -> None:
    with pytest.raises(farstep.ConfigError, match=option):
        replace(EPISODES, **{option: 0})  # type: ignore[arg-type]


def test_memory_task_is_learned() -> None:
    """Without memory, no policy gets more than half of the reward."""
    config = ArideConfig(net=NetConfig(recurrent="gru", core=32), mode="bce", replay=EPISODES, learning_rate=5e-3)
    mean, _ = trained(Recall, config, 10_000, target=0.85, launcher="in-process")
    assert mean >= 0.85
