"""`own_ppo_single.py` with its environments on farstep's workers, which act with their own copy of the agent.

14 lines differ: 8 are removed, 6 are added. `collect` publishes the agent's parameters if they have changed, and
returns the whole rollout.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import nn
from torch.distributions import Categorical

import farstep


@dataclass(kw_only=True)
class Args:
    """PPO for environments with vector observations and discrete actions."""

    env_id: str = "CartPole-v1"
    """Gymnasium id of the environment"""
    seed: int = 1
    """seed of environments and networks"""
    total_timesteps: int = 150_000
    """environment steps to train for"""
    learning_rate: float = 1e-3
    """learning rate of Adam"""
    anneal_lr: bool = True
    """decrease the learning rate linearly to zero over total_timesteps"""
    num_envs: int = 16
    """number of environments"""
    num_steps: int = 128
    """steps of each environment per rollout"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation"""
    num_minibatches: int = 4
    """minibatches per pass"""
    update_epochs: int = 4
    """passes over the rows of a rollout"""
    norm_adv: bool = True
    """normalize the advantages of each minibatch"""
    clip_coef: float = 0.2
    """clip range of the probability ratio"""
    clip_vloss: bool = False
    """clip the change of the values, too"""
    ent_coef: float = 0.0
    """weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """largest norm of the gradients"""
    target_kl: float | None = None
    """stop an update when the KL divergence exceeds this many nats; None: never"""


def layer(inputs: int, outputs: int, gain: float = 2**0.5) -> nn.Linear:
    made = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(made.weight, gain)
    nn.init.zeros_(made.bias)
    return made


class Agent(nn.Module):
    def __init__(self, observation_space: gym.Space, action_space: gym.Space) -> None:
        super().__init__()
        width = int(np.prod(observation_space.shape))
        self.actor = nn.Sequential(
            layer(width, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, int(action_space.n), gain=0.01)
        )
        self.critic = nn.Sequential(layer(width, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 1, gain=1.0))

    get_parameters = nn.Module.state_dict

    def get_value(self, obs: torch.Tensor) -> torch.Tensor:
        return self.critic(obs).squeeze(-1)

    @torch.no_grad()
    def act(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        policy = Categorical(logits=self.actor(obs))
        action = policy.sample()
        return {"action": action, "logprob": policy.log_prob(action), "value": self.get_value(obs)}

    def evaluate(self, obs: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        policy = Categorical(logits=self.actor(obs))
        return policy.log_prob(action), policy.entropy(), self.get_value(obs)


def advantages(batch: Mapping[str, np.ndarray], next_value: np.ndarray, args: Args) -> np.ndarray:
    """Return advantages (GAE); as in CleanRL, a truncated episode counts as terminated."""
    not_done = ~(batch["terminated"] | batch["truncated"])
    advantage, running = np.zeros_like(batch["value"]), np.zeros_like(next_value)
    for t in reversed(range(args.num_steps)):
        delta = batch["reward"][t] + args.gamma * next_value * not_done[t] - batch["value"][t]
        advantage[t] = running = delta + args.gamma * args.gae_lambda * not_done[t] * running
        next_value = batch["value"][t]
    return advantage


def count_returns(batch: Mapping[str, np.ndarray], so_far: np.ndarray, returns: deque[float]) -> None:
    """Add the rewards to `so_far`, and append the returns of ended episodes to `returns`."""
    for reward, ended in zip(batch["reward"], batch["terminated"] | batch["truncated"], strict=True):
        so_far += reward
        returns.extend(so_far[ended].tolist())
        so_far[ended] = 0


def main(args: Args) -> float:
    """Train; return the mean return of the last 100 episodes."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    envs = farstep.ClusterEnv({"env_name": args.env_id, "envs_per_node": args.num_envs, "seed": args.seed})
    agent = Agent(*envs.launch())
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    batch_size = args.num_envs * args.num_steps
    num_iterations = -(-args.total_timesteps // batch_size)
    so_far, returns, start = np.zeros(args.num_envs), deque([0.0], maxlen=100), time.monotonic()
    next_obs, _ = envs.reset(seed=args.seed)

    for iteration in range(num_iterations):
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / num_iterations)

        # collect a rollout
        batch = envs.collect(agent, args.num_steps)
        next_obs = batch.last_obs

        # compute advantages and returns
        with torch.no_grad():
            next_value = agent.get_value(torch.from_numpy(next_obs)).numpy()
        b_advantages = torch.from_numpy(advantages(batch, next_value, args)).flatten()
        b_obs, b_actions, b_logprobs, b_values = (
            torch.from_numpy(batch[key]).flatten(0, 1) for key in ("obs", "action", "logprob", "value")
        )
        b_returns = b_advantages + b_values

        # update the agent
        for _ in range(args.update_epochs):
            for mb_inds in torch.randperm(batch_size).chunk(args.num_minibatches):
                logprob, entropy, value = agent.evaluate(b_obs[mb_inds], b_actions[mb_inds])
                log_ratio = logprob - b_logprobs[mb_inds]
                ratio = log_ratio.exp()
                approx_kl = ((ratio - 1) - log_ratio).mean().item()
                weight = b_advantages[mb_inds]
                if args.norm_adv:
                    weight = (weight - weight.mean()) / (weight.std() + 1e-8)
                clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                pg_loss = -torch.min(weight * ratio, weight * clipped).mean()
                v_loss = (value - b_returns[mb_inds]).square()
                if args.clip_vloss:
                    change = (value - b_values[mb_inds]).clamp(-args.clip_coef, args.clip_coef)
                    v_loss = v_loss.max((b_values[mb_inds] + change - b_returns[mb_inds]).square())
                loss = pg_loss + args.vf_coef * 0.5 * v_loss.mean() - args.ent_coef * entropy.mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
            if args.target_kl is not None and approx_kl > args.target_kl:
                break

        # report progress
        count_returns(batch, so_far, returns)
        if (iteration + 1) % 10 == 0 or iteration + 1 == num_iterations:
            steps, mean = (iteration + 1) * batch_size, np.mean(returns)
            print(f"{steps:>8,} steps  return {mean:6.1f}  {steps / (time.monotonic() - start):>7,.0f} steps/s")
    envs.close()
    return float(np.mean(returns))


if __name__ == "__main__":
    main(tyro.cli(Args))
