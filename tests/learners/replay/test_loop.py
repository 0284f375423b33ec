"""The loop of replay learners: the ratio it holds, whole versions, failures of the learner, and saved states."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

import farstep
from farstep.buffer.samplers import Sampler, Uniform
from farstep.checkpoint.files import Refused
from farstep.learners.aride import Aride, ArideConfig
from farstep.learners.dqn import DQN, ApexConfig, make_q_agent
from farstep.learners.loop.iteration import Iteration
from farstep.learners.loop.timing import Timer
from farstep.learners.loop.training import Limits, Training
from farstep.learners.networks.agent import NetworkAgent
from farstep.learners.networks.nets import make_agent
from farstep.learners.replay.batches import ReplayBatch
from farstep.learners.replay.config import ReplayConfig
from farstep.learners.replay.loop import ReplayLoop, make_limiter
from farstep.learners.sac import SAC, SACConfig, make_soft_actor

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("torch_in_workers")]  # real processes, or learning


class TwinAgent(NetworkAgent):
    """Records its two parameters with every action; the learner keeps them equal between updates."""

    sees_images = False

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (torch.nn.Parameter(torch.zeros(())) for _ in range(2))

    def act(self, obs: Tensor) -> Any:
        count = len(obs)
        action = torch.zeros(count, dtype=torch.int64)
        return {"action": action, "left": self.left.expand(count), "right": self.right.expand(count)}


class TwinLearner:
    """Adds 1 to one parameter and, a moment later, to the other; fails if a worker acted in between."""

    synchronous = False
    device = torch.device("cpu")
    names = ("left", "right", "reward")

    def __init__(self, config: ReplayConfig, fail_at: int | None = None) -> None:
        self.agent, self.config, self.fail_at = TwinAgent(), config, fail_at
        self.updates = 0
        self.seen: set[float] = set()

    @property
    def sampler(self) -> Sampler:
        return Uniform()

    def step(self, batch: ReplayBatch) -> tuple[Mapping[str, Tensor], Tensor | None]:
        assert torch.equal(batch.rows["left"], batch.rows["right"]), "a worker acted with half an update"
        self.seen |= set(batch.rows["left"].flatten().tolist())
        self.updates += 1
        if self.updates == self.fail_at:
            raise ZeroDivisionError("of the test")
        with torch.no_grad():
            self.agent.left.add_(1)
            time.sleep(0)  # lets other threads run in the middle of the update
            self.agent.right.add_(1)
        return {"loss": batch.rows["reward"].mean()}, None

    def explore(self, steps: int, num_envs: int) -> None:
        pass

    def run(self, env: farstep.ClusterEnv, loop: Any) -> None:
        ReplayLoop(self, self.config, seed=1).run(env, loop)

    def state(self) -> dict[str, object]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        pass


CONFIG = ReplayConfig(
    buffer_size=1_000, learning_starts=50, batch_size=16, num_steps=4, publish_every=1, report_every=100
)


def make_env(launch: farstep.LocalConfig | farstep.InProcessConfig) -> farstep.ClusterEnv:
    return farstep.ClusterEnv({"env_name": "CartPole-v1", "envs_per_node": 4, "seed": 1}, launch)


def test_workers_never_act_with_half_an_update() -> None:
    with make_env(farstep.LocalConfig(workers_per_node=2)) as env:
        learner = TwinLearner(CONFIG)
        Training(learner, env, Limits(total_steps=1_000)).run()
    assert learner.updates == (1_000 - 50) // 2
    assert len(learner.seen) > 10, "workers pulled new versions while the learner worked"


def test_error_of_the_learner_ends_the_run() -> None:
    with make_env(farstep.LocalConfig(workers_per_node=1)) as env:
        with pytest.raises(ZeroDivisionError, match="of the test"):
            Training(TwinLearner(CONFIG, fail_at=3), env, Limits(total_steps=1_000)).run()
        assert env.collect(TwinAgent(), steps=2).shape == (2, 4), "the environments are still usable"


class Endless:
    """A loop that stops the learner after some reports, as a reached target return does."""

    total_steps = steps_left = 100_000
    stopping = False
    checkpoints = None

    def __init__(self, reports: int) -> None:
        self.reports: list[Iteration] = []
        self._most, self.timer = reports, Timer()

    def collecting(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def report(self, iteration: Iteration) -> bool:
        self.reports.append(iteration)
        return len(self.reports) < self._most


@pytest.mark.parametrize(
    "launch", [farstep.InProcessConfig(workers_per_node=2), farstep.LocalConfig(workers_per_node=2)]
)
def test_learner_stops_when_a_report_ends_the_loop(launch: Any) -> None:
    loop: Any = Endless(reports=3)
    with make_env(launch) as env:
        TwinLearner(CONFIG).run(env, loop)
    assert len(loop.reports) == 3
    assert all(iteration.steps > 0 for iteration in loop.reports)


@pytest.mark.parametrize("chunk_rows", [1, 16, 500])
@pytest.mark.parametrize("updates_per_step", [0.01, 0.5, 20])
def test_limiter_neither_deadlocks_nor_lets_the_learner_run_ahead(updates_per_step: float, chunk_rows: int) -> None:
    config = ReplayConfig(learning_starts=100, batch_size=32, updates_per_step=updates_per_step)
    limiter = make_limiter(config, round_rows=2 * chunk_rows)
    rng, updates = np.random.default_rng(0), 0
    for _ in range(2_000):
        inserts, samples = limiter.can_insert(chunk_rows), limiter.can_sample(32)
        assert inserts or samples, "both sides wait"
        if inserts and (not samples or rng.random() < 0.5):
            limiter.insert(chunk_rows)
        elif samples:
            limiter.sample(32)
            updates += 1
        assert updates <= max(0, limiter.inserts - 100) * updates_per_step
    behind = max(0, limiter.inserts - 100) * updates_per_step - updates
    assert behind <= 1 + 4 * chunk_rows * updates_per_step


BOX = spaces.Box(-1, 1, (2,), np.float32)


def learner_of(kind: str) -> Any:
    torch.manual_seed(1)
    if kind == "dqn":
        config = ApexConfig()
        return DQN(make_q_agent(BOX, spaces.Discrete(2), config), config, seed=1)
    if kind == "aride":
        filtered = ArideConfig(filter_quantile=0.5)
        return Aride(make_agent(BOX, spaces.Discrete(2), filtered.net, filtered.gamma), filtered, seed=1)
    options = SACConfig()
    return SAC(make_soft_actor(BOX, BOX, options), options, seed=1)


def batch(kind: str) -> ReplayBatch:
    obs, action = torch.rand(8, 2), torch.ones(8, dtype=torch.int64) if kind == "dqn" else torch.rand(8, 2)
    rows = {"obs": obs, "action": action, "reward": torch.ones(8), "discount": torch.ones(8), "next_obs": obs}
    if kind == "aride":  # two episodes of four steps
        flags = {
            "terminated": torch.arange(8) % 4 == 3,
            "truncated": torch.zeros(8).bool(),
            "valid": torch.ones(8).bool(),
        }
        rows = rows | flags | {"action": torch.ones(8, dtype=torch.int64), "logprob": -torch.rand(8)}
        grouped = {name: column.reshape(2, 4, *column.shape[1:]) for name, column in rows.items()}
        return ReplayBatch(grouped, torch.ones(2), np.arange(2))
    return ReplayBatch(rows, torch.ones(8), np.arange(8))


@pytest.mark.parametrize("kind", ["dqn", "sac", "aride"])
def test_restored_learner_continues_like_the_saved_one(kind: str) -> None:
    first, second, rows = learner_of(kind), learner_of(kind), batch(kind)
    for _ in range(3):
        first.step(rows)
    second.agent.load_state_dict(first.agent.state_dict())
    second.load(first.state())
    for learner in (first, second):
        torch.manual_seed(2)
        learner.step(rows)
    saved = second.agent.state_dict()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in first.agent.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "network", "optimizer"),
    [
        ("dqn", "target", "optimizer"),
        ("sac", "target", "alpha_optimizer"),
        ("aride", "trajectory_critic", "optimizer"),
        ("aride", "trajectory_critic", "trajectory_optimizer"),
    ],
)
def test_damaged_states_are_refused_without_changes(kind: str, network: str, optimizer: str) -> None:
    learner, other = learner_of(kind), learner_of(kind)
    other.step(batch(kind))
    before = {name: tensor.clone() for name, tensor in learner.state()[network].items()}
    for damage in ({"exp_avg": torch.zeros(3)}, {"step": torch.tensor(-1.0)}, {"exp_avg_sq": None}):
        state = other.state()
        state[optimizer] = {**state[optimizer], **damage}
        with pytest.raises(Refused):
            learner.load(state)
    state = other.state()
    state[network] = {name: tensor * np.nan for name, tensor in state[network].items()}
    with pytest.raises(Refused):
        learner.load(state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.state()[network].items())


PARTS = {
    "dqn": ["optimizer", "target", "updates"],
    "sac": ["critics", "target", "actor_optimizer", "critic_optimizer", "log_alpha", "alpha_optimizer"],
    "aride": ["optimizer", "trajectory_critic", "trajectory_optimizer"],
}


@pytest.mark.parametrize("kind", PARTS)
def test_names_of_saved_parts_stay_so_that_older_checkpoints_load(kind: str) -> None:
    learner = learner_of(kind)
    assert list(learner.state()) == PARTS[kind]
    for wrong in ({"another": 1}, {name: part for name, part in learner.state().items() if name != PARTS[kind][0]}):
        with pytest.raises(Refused, match=r"another|lacks"):
            learner.load({**learner.state(), **wrong} if "another" in wrong else wrong)


def test_invalid_number_of_updates_is_refused() -> None:
    learner = learner_of("dqn")
    with pytest.raises(Refused, match=r"learner\.updates"):
        learner.load({**learner.state(), "updates": -1})


def test_restored_filter_compares_with_the_episodes_before_the_checkpoint() -> None:
    """The last episodes are worse than all before: the filter keeps none, unless it has forgotten the others."""
    saved, restored, forgetful = (learner_of("aride") for _ in range(3))
    rows = batch("aride")
    for _ in range(3):
        saved.step(rows)
    restored.load(saved.state())
    earlier = saved.state()
    assert len(earlier["trajectory_critic"].pop("scores")) == 6
    forgetful.load(earlier)  # as earlier versions wrote it, without scores
    worse = replace(rows, rows={**rows.rows, "reward": torch.full((2, 4), -9.0)})
    kept = [learner.step(worse)[0]["actor/kept_fraction"].item() for learner in (saved, restored, forgetful)]
    assert kept[:2] == [0.0, 0.0] and kept[2] > 0.0


@pytest.mark.parametrize(
    "scores", [torch.zeros(1001, dtype=torch.float64), torch.full((2,), np.nan, dtype=torch.float64), torch.zeros(2), 1]
)
def test_damaged_scores_of_a_filter_are_refused(scores: object) -> None:
    learner = learner_of("aride")
    state = learner.state()
    state["trajectory_critic"]["scores"] = scores
    with pytest.raises(Refused, match=r"learner\.trajectory_critic\.scores"):
        learner.load(state)


def test_checkpoint_of_a_filter_loads_without_one_and_not_the_other_way() -> None:
    config = ArideConfig()
    filtered = learner_of("aride")
    plain = Aride(make_agent(BOX, spaces.Discrete(2), config.net, config.gamma), config, seed=1)
    plain.load(filtered.state())
    assert plain.state()["trajectory_critic"] is None
    with pytest.raises(Refused, match="trajectory_critic"):
        filtered.load(plain.state())
