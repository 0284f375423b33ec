"""DQN's targets, its step and Ape-X's initial priorities, against numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from farstep.buffer.samplers import NStep, Prioritized, Uniform
from farstep.errors import ConfigError, SpaceError
from farstep.learners.dqn import DQN, ApexConfig, DQNConfig, make_q_agent, q_targets
from farstep.learners.networks.q_network import PrioritizingQAgent, QAgent, QNetConfig, td_errors
from farstep.learners.replay.batches import ReplayBatch
from farstep.learners.replay.config import ReplayConfig

BOX = spaces.Box(-1, 1, (2,), np.float32)
NET = QNetConfig(hidden=())


def agent_of(weight: list[list[float]], start: int = 0) -> QAgent:
    """An agent without hidden layers whose action values are `obs @ weight.T`."""
    agent = QAgent(BOX, spaces.Discrete(len(weight), start=start), QNetConfig(hidden=(), dueling=False))
    agent.load_state_dict({**agent.state_dict(), "advantage.weight": torch.tensor(weight)})
    return agent


def batch_of(weights: list[float], **rows: object) -> ReplayBatch:
    tensors = {name: torch.tensor(value) for name, value in rows.items()}
    return ReplayBatch(tensors, torch.tensor(weights), np.arange(len(weights)))


def test_double_q_learning_evaluates_the_action_that_the_network_chooses() -> None:
    reward, discount = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.9, 0.5, 0.0])
    target_q = torch.tensor([[1.0, 4.0], [6.0, 2.0], [9.0, 9.0]])
    online_q = torch.tensor([[5.0, 0.0], [7.0, 8.0], [1.0, 0.0]])
    assert q_targets(reward, discount, target_q).tolist() == pytest.approx([1 + 0.9 * 4, 2 + 0.5 * 6, 3])
    assert q_targets(reward, discount, target_q, online_q).tolist() == pytest.approx([1 + 0.9 * 1, 2 + 0.5 * 2, 3])


@pytest.mark.parametrize(("huber_delta", "first_loss"), [(None, 1.04**2 / 2), (1.0, 1.04 - 0.5)])
def test_loss_is_weighted_and_priorities_are_absolute_errors(huber_delta: float | None, first_loss: float) -> None:
    agent = agent_of([[1.0, 0.0], [0.0, 1.0]], start=5)
    config = DQNConfig(prioritized=True, net=NET, huber_delta=huber_delta)
    learner = DQN(agent, config, seed=1)
    batch = batch_of(
        [1.0, 0.5],
        obs=[[0.5, -1.0], [0.25, 0.5]],
        action=[5, 6],
        reward=[1.0, 0.0],
        discount=[0.9, 0.0],
        next_obs=[[0.2, 0.6], [1.0, 1.0]],
    )
    metrics, priorities = learner.step(batch)
    # Q = 0.5 and 0.5; targets 1 + 0.9 * 0.6 = 1.54 and 0; errors 1.04 and -0.5.
    assert priorities is not None
    assert priorities.tolist() == pytest.approx([1.04, 0.5], abs=1e-4)
    assert float(metrics["critic/value_loss"]) == pytest.approx((1.0 * first_loss + 0.5 * 0.125) / 2)
    moved = agent.state_dict()["advantage.weight"] - torch.eye(2)
    assert moved[0, 0] > 0, "the value of the first action was too low, and its observation is positive there"
    assert moved[1, 1] < 0, "the value of the second action was too high"


def test_errors_of_the_size_of_a_failure_enter_the_default_loss_squared() -> None:
    learner = DQN(agent_of([[0.0, 0.0], [0.0, 0.0]]), DQNConfig(net=NET), seed=1)
    rows = {"obs": [[1.0, 0.0]], "action": [0], "reward": [-8.0], "discount": [0.0], "next_obs": [[1.0, 0.0]]}
    metrics, _ = learner.step(batch_of([1.0], **rows))
    assert float(metrics["critic/value_loss"]) == pytest.approx(8.0**2 / 2)


def test_target_network_changes_only_every_target_update() -> None:
    agent = agent_of([[1.0, 0.0], [0.0, 1.0]])
    learner = DQN(agent, DQNConfig(target_update_every=3, tau=1.0, net=NET), seed=1)
    rows = {"obs": [[1.0, 0.0]], "action": [0], "reward": [5.0], "discount": [0.5], "next_obs": [[1.0, 0.0]]}
    targets = [float(learner.step(batch_of([1.0], **rows))[0]["critic/target_mean"]) for _ in range(5)]
    assert targets[:3] == [5.5] * 3
    assert targets[3] == targets[4] > 5.5


def test_dueling_values_do_not_depend_on_the_mean_advantage() -> None:
    agent = QAgent(BOX, spaces.Discrete(2), QNetConfig(hidden=(), dueling=True))
    state = agent.state_dict()
    state |= {"advantage.weight": torch.tensor([[3.0, 0.0], [1.0, 0.0]]), "value.weight": torch.tensor([[10.0, 0.0]])}
    agent.load_state_dict(state)
    assert agent(torch.tensor([[1.0, 0.0]])).tolist() == [[11.0, 9.0]]


def test_td_errors_span_n_steps_and_stop_at_the_end_of_an_episode_and_of_the_chunk() -> None:
    q = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    best = torch.tensor([[10.0], [20.0], [30.0], [40.0], [50.0]])
    reward = torch.tensor([[1.0], [1.0], [1.0], [1.0]])
    no = torch.zeros(4, 1, dtype=torch.bool)
    whole = td_errors(q, best, reward, no, no, steps=2, gamma=0.5)
    assert whole[:, 0].tolist() == [1 + 0.5 + 0.25 * 30 - 1, 1.5 + 0.25 * 40 - 2, 1.5 + 0.25 * 50 - 3, 1 + 0.5 * 50 - 4]
    ends = no.clone()
    ends[1] = True
    terminated = td_errors(q, best, reward, ends, no, steps=2, gamma=0.5)
    assert terminated[:2, 0].tolist() == [1 + 0.5 - 1, 1 - 2]
    truncated = td_errors(q, best, reward, no, ends, steps=2, gamma=0.5)
    assert truncated[1, 0].item() == 1 + 0.5 * 20 - 2


def test_epsilon_falls_linearly_or_differs_by_slot() -> None:
    agent = agent_of([[1.0, 0.0], [0.0, 1.0]])
    annealed = DQN(agent, DQNConfig(epsilon=1.0, epsilon_end=0.2, exploration_steps=100, net=NET), seed=1)
    found = []
    for steps in (0, 50, 100, 1000):
        annealed.explore(steps, num_envs=4)
        found.append(float(agent.epsilons(torch.arange(4))[3]))
    assert found == pytest.approx([1.0, 0.6, 0.2, 0.2])
    ladder = DQN(agent, ApexConfig(net=NET), seed=1)
    ladder.explore(0, num_envs=8)
    expected = [0.4 ** (1 + 7 * i / 7) for i in range(8)]
    assert agent.epsilons(torch.arange(8)).tolist() == pytest.approx(expected)


def test_random_actions_are_as_frequent_as_the_epsilon_of_the_slot() -> None:
    torch.manual_seed(0)
    agent = agent_of([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]], start=-1)
    DQN(agent, ApexConfig(epsilon=0.5, epsilon_alpha=1.0, net=NET), seed=1).explore(0, num_envs=2)
    obs, slots = torch.tensor([[1.0, 0.0]]).expand(20_000, 2), torch.arange(20_000) % 2
    action = agent.act(obs, slots)["action"]
    others = [float((action[slots == slot] != -1).float().mean()) for slot in (0, 1)]
    assert others == pytest.approx([0.5 * 0.75, 0.25 * 0.75], abs=0.02)
    agent.greedy = True
    assert set(agent.act(obs, slots)["action"].tolist()) == {-1}


def test_sampler_and_agent_follow_the_options() -> None:
    def learner(config: DQNConfig) -> DQN:
        return DQN(make_q_agent(BOX, spaces.Discrete(2), config), config, seed=1)

    assert learner(DQNConfig(n_step=2)).sampler == NStep(2, 0.99, by=Uniform())
    apex = learner(ApexConfig(priority_alpha=0.7))
    assert apex.sampler == NStep(3, 0.99, by=Prioritized(0.7, 0.4))
    assert isinstance(apex.agent, PrioritizingQAgent)
    assert type(learner(ApexConfig(worker_priorities=False)).agent) is QAgent


def test_unusable_options_and_spaces_are_refused() -> None:
    with pytest.raises(SpaceError, match="Discrete"):
        make_q_agent(BOX, BOX, DQNConfig())
    with pytest.raises(ConfigError, match="epsilon is 2"):
        DQNConfig(epsilon=2)
    with pytest.raises(ConfigError, match="learning would never start"):
        ReplayConfig(buffer_size=10, learning_starts=11)
