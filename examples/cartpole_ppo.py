"""PPO on CartPole-v1 with environments on two local workers: the training loop is yours, farstep collects the rollouts.

Run it with `make demo`, or `python examples/cartpole_ppo.py --help`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.live import Live
from rich.table import Table
from torch import nn
from torch.distributions import Categorical

import farstep


@dataclass(kw_only=True)
class Args:
    """PPO on CartPole-v1 with farstep."""

    workers: int = 2
    """number of worker processes"""
    num_envs: int = 32
    """number of environments, divided among the workers"""
    num_steps: int = 64
    """steps of each environment per rollout"""
    learning_rate: float = 1e-3
    """initial learning rate of Adam; decreases linearly to zero over total_steps"""
    update_epochs: int = 8
    """passes over the rows of a rollout"""
    minibatch_size: int = 512
    """rows per optimizer step"""
    gamma: float = 0.98
    """discount factor"""
    gae_lambda: float = 0.9
    """lambda of generalized advantage estimation"""
    clip_coef: float = 0.2
    """clip range of the probability ratio"""
    solved_return: float = 475.0
    """stop when the mean return of the last 100 episodes reaches this value"""
    total_steps: int = 600_000
    """stop after this many environment steps in any case"""
    seed: int = 1
    """seed of environments and networks"""


class ActorCritic(nn.Module):
    """The agent; every worker gets a copy. Any object with `act` and `get_parameters` can be an agent."""

    def __init__(self, obs_size: int, num_actions: int) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(obs_size, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.critic = nn.Sequential(nn.Linear(obs_size, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        self.head = nn.Linear(64, num_actions)
        nn.init.orthogonal_(self.head.weight, 0.01)

    def act(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        policy = Categorical(logits=self.head(self.actor(obs)))
        action = policy.sample()
        return {"action": action, "logprob": policy.log_prob(action), "value": self.critic(obs).squeeze(-1)}

    def get_parameters(self) -> dict[str, torch.Tensor]:
        return self.state_dict()


def advantages(agent: ActorCritic, batch: farstep.Batch, args: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages (GAE) and returns; truncated episodes are bootstrapped from their final observation."""
    with torch.no_grad():
        after_last = agent.critic(torch.from_numpy(batch.last_obs)).squeeze(-1).numpy()
        finals = agent.critic(torch.from_numpy(batch.final_obs.obs)).squeeze(-1).numpy()
    values, reward = batch["value"], batch["reward"]
    following = np.concatenate([values[1:], after_last[None]])
    following[batch.final_obs.row, batch.final_obs.slot] = finals
    ended = batch["terminated"] | batch["truncated"]
    delta = reward + args.gamma * following * ~batch["terminated"] - values
    advantage, running = np.zeros_like(delta), np.zeros(delta.shape[1], np.float32)
    for t in reversed(range(len(delta))):
        running = delta[t] + args.gamma * args.gae_lambda * ~ended[t] * running
        advantage[t] = running
    return torch.from_numpy(advantage).flatten(), torch.from_numpy(advantage + values).flatten()


def update(agent: ActorCritic, optimizer: torch.optim.Optimizer, batch: farstep.Batch, args: Args) -> None:
    """Make the clipped PPO update with one rollout."""
    advantage, returns = advantages(agent, batch, args)
    obs = torch.from_numpy(batch["obs"]).flatten(0, 1)
    action, old_logprob = (torch.from_numpy(batch[key]).flatten() for key in ("action", "logprob"))
    for _ in range(args.update_epochs):
        for rows in torch.randperm(len(obs)).split(args.minibatch_size):
            policy = Categorical(logits=agent.head(agent.actor(obs[rows])))
            ratio = (policy.log_prob(action[rows]) - old_logprob[rows]).exp()
            weight = (advantage[rows] - advantage[rows].mean()) / (advantage[rows].std() + 1e-8)
            clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
            policy_loss = -torch.min(ratio * weight, clipped * weight).mean()
            value_loss = (agent.critic(obs[rows]).squeeze(-1) - returns[rows]).pow(2).mean()
            loss = policy_loss + 0.5 * value_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()


def display(stats: dict, best: float, args: Args, elapsed_s: float) -> Table:
    """Return a table with the progress of the run."""
    mean = stats["episodes"]["return_mean"] or 0.0
    filled = int(40 * min(1.0, mean / args.solved_return))
    table = Table(title="PPO on CartPole-v1, environments on farstep's workers", show_header=False)
    table.add_row("return, last 100 episodes", f"{mean:6.1f}  (best {best:.1f}, solved at {args.solved_return:g})")
    table.add_row("", "█" * filled + "░" * (40 - filled))
    table.add_row("steps", f"{stats['steps']:,} of at most {args.total_steps:,}")
    table.add_row("speed", f"{stats['steps'] / max(elapsed_s, 1e-9):,.0f} steps per second, updates included")
    table.add_row("episodes", f"{stats['episodes']['count']:,}")
    table.add_row("policy version", f"{stats['versions']['current']} (weights sent {stats['pulls']['total']} times)")
    table.add_row("workers", f"{stats['workers']['alive']} alive, {stats['workers']['restarts']} restarts")
    table.add_row("time", f"{elapsed_s:.0f} s, {stats['time']['learner']['wait']:.0f} s of it waiting for environments")
    return table


def main(args: Args) -> bool:
    """Train; return whether the task was solved."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    console = Console()
    env_config = {"env_name": "CartPole-v1", "envs_per_node": args.num_envs, "seed": args.seed}
    console.print(f"starting {args.workers} workers with {args.num_envs} environments ...")
    with farstep.ClusterEnv(env_config, farstep.LocalConfig(workers_per_node=args.workers)) as env:
        observation_space, action_space = env.launch()
        agent = ActorCritic(observation_space.shape[0], int(action_space.n))
        optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
        start, best = time.monotonic(), 0.0
        with Live(console=console, refresh_per_second=8, transient=False) as live:
            while True:
                batch = env.collect(agent, steps=args.num_steps)
                stats = env.stats()
                mean = stats["episodes"]["return_mean"] or 0.0
                best = max(best, mean)
                live.update(display(stats, best, args, time.monotonic() - start))
                solved = stats["episodes"]["count"] >= 100 and mean >= args.solved_return
                if solved or stats["steps"] >= args.total_steps:
                    break
                optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - stats["steps"] / args.total_steps)
                update(agent, optimizer, batch, args)
    verdict = "solved" if solved else "not solved"
    if not console.is_terminal:
        console.print()  # rich writes no line break after the table if the output is a file
    console.print(f"{verdict} after {stats['steps']:,} steps and {time.monotonic() - start:.0f} s")
    return solved


if __name__ == "__main__":
    raise SystemExit(0 if main(tyro.cli(Args)) else 1)
