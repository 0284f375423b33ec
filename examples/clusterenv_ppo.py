"""PPO on LunarLander-v3 with `step(agent)` only, as in the ClusterEnv paper, on SLURM.

    python examples/clusterenv_ppo.py --partition gpu --gpus-per-node 2      # on a cluster
    python examples/clusterenv_ppo.py --debug                                # the same on this machine

docs/clusterenv.md lists what to change in a program for ClusterEnv. A worker pulls weights only when its policy differs
from the learner's by more than `kl_threshold`, so rows may come from older policies. Therefore the loss is decoupled
PPO: it clips around the learner's policy at the start of the update, and weights each row by the ratio of that policy
to the one that acted. Values are computed by the learner.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
import tyro
from torch import Tensor, nn
from torch.distributions import Categorical

from farstep import ClusterEnv, SlurmConfig


@dataclass(kw_only=True)
class Args:
    """PPO on LunarLander-v3 with workers on SLURM."""

    nodes: int = 4
    """number of nodes"""
    workers_per_node: int = 1
    """worker processes per node"""
    envs_per_node: int = 8
    """environments per node; 64 in the paper"""
    partition: str | None = None
    """SLURM partition; None: the cluster's default"""
    gpus_per_node: int = 0
    """GPUs per node; 0: workers act on the CPU"""
    gpu_type: str | None = None
    """type of the GPUs, e.g. a100; None: any"""
    time_limit: str = "02:00:00"
    """wall-clock limit of the SLURM jobs"""
    debug: bool = False
    """run all workers on this machine, without SLURM"""
    kl_threshold: float = 0.05
    """KL divergence from the learner's policy, in nats, above which a worker pulls weights"""
    num_updates: int = 200
    """number of updates"""
    num_steps: int = 128
    """steps of each environment per update; 1024 in the paper"""
    update_epochs: int = 10
    """passes over the rows of an update; 30 in the paper"""
    num_minibatches: int = 8
    """minibatches per pass"""
    learning_rate: float = 5e-4
    """initial learning rate of Adam; decreases linearly to zero"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation"""
    clip_coef: float = 0.2
    """clip range of the probability ratio"""
    ent_coef: float = 0.01
    """weight of the entropy bonus"""
    reward_scale: float = 0.02
    """factor for rewards, so that the critic's targets are of the order of 1"""
    seed: int = 1
    """seed of environments and networks"""


class Agent(nn.Module):
    """The agent; every worker gets a copy. It returns `logits`, from which farstep computes the divergence."""

    def __init__(self, obs_size: int, num_actions: int) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(obs_size, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.critic = nn.Sequential(nn.Linear(obs_size, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        self.head = nn.Linear(64, num_actions)
        nn.init.orthogonal_(self.head.weight, 0.01)

    def act(self, obs: Tensor) -> dict[str, Tensor]:
        policy = Categorical(logits=self.head(self.actor(obs)))
        action = policy.sample()
        return {"action": action, "logprob": policy.log_prob(action), "logits": policy.logits}

    def get_parameters(self) -> dict[str, Tensor]:
        return self.state_dict()


def advantages(agent: Agent, rows: dict[str, Tensor], args: Args) -> tuple[Tensor, Tensor]:
    """Return advantages (GAE) and returns; truncated episodes are bootstrapped from their final observation."""
    with torch.no_grad():
        values, following = (agent.critic(rows[key]).squeeze(-1) for key in ("obs", "next_obs"))
    delta = rows["reward"] + args.gamma * following * ~rows["terminated"] - values
    advantage, running = torch.zeros_like(delta), torch.zeros(delta.shape[1])
    for t in reversed(range(len(delta))):
        running = delta[t] + args.gamma * args.gae_lambda * ~rows["ended"][t] * running
        advantage[t] = running
    return advantage.flatten(), (advantage + values).flatten()


def update(agent: Agent, optimizer: torch.optim.Optimizer, rows: dict[str, Tensor], args: Args) -> None:
    """Make the decoupled PPO update, which also accepts rows of older policies."""
    advantage, returns = advantages(agent, rows, args)
    obs, action, recorded = (rows[key].flatten(0, 1) for key in ("obs", "action", "logprob"))
    with torch.no_grad():
        own = Categorical(logits=agent.head(agent.actor(obs))).log_prob(action)
    weight = (own - recorded).exp().clamp(max=2.0)
    for _ in range(args.update_epochs):
        for mb in torch.randperm(len(obs)).chunk(args.num_minibatches):
            policy = Categorical(logits=agent.head(agent.actor(obs[mb])))
            ratio = (policy.log_prob(action[mb]) - own[mb]).exp()
            scaled = (advantage[mb] - advantage[mb].mean()) / (advantage[mb].std() + 1e-8)
            clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
            policy_loss = -(weight[mb] * torch.min(ratio * scaled, clipped * scaled)).mean()
            value_loss = (agent.critic(obs[mb]).squeeze(-1) - returns[mb]).pow(2).mean()
            loss = policy_loss + 0.25 * value_loss - args.ent_coef * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()


def main(args: Args) -> None:
    torch.manual_seed(args.seed)
    env_config = {
        "type": "gymnasium",
        "env_name": "LunarLander-v3",
        "kl_threshold": args.kl_threshold,
        "envs_per_node": args.envs_per_node,
        "seed": args.seed,
    }
    slurm_config = SlurmConfig(
        job_name="ppo_lander",
        nodes=args.nodes,
        gpus_per_node=args.gpus_per_node,
        gpu_type=args.gpu_type,
        partition=args.partition,
        time_limit=args.time_limit,
        workers_per_node=args.workers_per_node,
        debug=args.debug,
    )
    env = ClusterEnv(env_config, slurm_config)
    observation_space, action_space = env.launch()
    agent = Agent(observation_space.shape[0], int(action_space.n))
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    latest: deque[float] = deque(maxlen=100)

    obs, _ = env.reset()
    for count in range(1, args.num_updates + 1):
        steps = []
        for _ in range(args.num_steps):
            next_obs, reward, terminated, truncated, info = env.step(agent)
            ended = terminated | truncated
            after = next_obs.copy()  # after an episode's end, next_obs is the first observation of the next episode
            if ended.any():
                after[ended] = np.stack(list(info["final_obs"][ended]))
                latest.extend(info["episode"]["r"][ended])
            step = {"obs": obs, "next_obs": after, "reward": reward * args.reward_scale, "terminated": terminated}
            steps.append(step | {"ended": ended, "action": info["action"], "logprob": info["logprob"]})
            obs = next_obs
        rows = {key: torch.from_numpy(np.stack([step[key] for step in steps])) for key in steps[0]}
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - (count - 1) / args.num_updates)
        update(agent, optimizer, rows, args)
        pulls = env.stats()["pulls"]["total"] / env.num_workers
        mean = np.mean(latest) if latest else float("nan")
        print(f"update {count}: mean return {mean:.0f}, {pulls:.0f} pulls per worker", flush=True)
    env.close()


if __name__ == "__main__":
    main(tyro.cli(Args))
