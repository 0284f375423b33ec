"""PPO trains LoRA adapters of a small transformer: workers get the base weights once, and then only adapters.

The task is to spell the opposite of a word: an observation is a prompt and the letters so far ("hot:co"), an action is
the next letter. The base model is pretrained to spell the words, but does not know which word to spell. Run
`pip install 'farstep[torch,lora]'` first.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
import tyro
from torch import Tensor, nn
from torch.nn import functional

import farstep
from farstep.agents.lora import LoraAgent
from farstep.learners import PPO, ActorCritic, Limits, NetConfig, PPOConfig, Training

OPPOSITES = {
    "hot": "cold", "up": "down", "day": "night", "in": "out", "big": "small", "left": "right", "yes": "no",
    "slow": "fast",
}  # fmt: skip
LENGTH = 10
"""Tokens of an observation: the last letters of the prompt, a colon and the answer so far, padded on the left."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(kw_only=True)
class Args:
    """PPO with LoRA adapters on a spelling task."""

    workers: int = 2
    """number of worker processes"""
    num_envs: int = 32
    """number of environments, divided among the workers"""
    pretraining_steps: int = 300
    """steps of supervised learning that make the base model"""
    total_steps: int = 24_576
    """environment steps of PPO"""
    r: int = 4
    """rank of the adapters"""
    learning_rate: float = 5e-3
    """learning rate of PPO"""
    seed: int = 1
    """seed of environments and networks"""


def tokens(text: str) -> np.ndarray:
    """Return text as tokens: 0 for padding, 1 to 26 for letters, 27 for a colon."""
    found = [(LETTERS + ":").index(letter) + 1 for letter in text[-LENGTH:]]
    return np.array([0] * (LENGTH - len(found)) + found, np.int64)


class Spelling(gymnasium.Env[np.ndarray, np.int64]):
    """Each right letter is rewarded; the return of a right answer is 1. A wrong letter ends the episode."""

    observation_space = gymnasium.spaces.MultiDiscrete([28] * LENGTH)
    action_space = gymnasium.spaces.Discrete(26)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.prompt, self.answer = list(OPPOSITES.items())[self.np_random.integers(len(OPPOSITES))]
        self.typed = ""
        return tokens(f"{self.prompt}:"), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        is_right = self.answer[len(self.typed)] == LETTERS[action]
        self.typed += LETTERS[action]
        ended = not is_right or self.typed == self.answer
        return tokens(f"{self.prompt}:{self.typed}"), is_right / len(self.answer), ended, False, {}


class Attention(nn.Module):
    """Self-attention with several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed: Tensor = self.o(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return mixed


class Transformer(nn.Module):
    """A transformer over tokens; its features are those of the last token."""

    sees_images = False

    def __init__(self, num_tokens: int, length: int, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(num_tokens, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.attention = nn.ModuleList([Attention(width, heads=4) for _ in range(layers)])
        self.mlp = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)]
        )
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2 * layers + 1)])

    def forward(self, obs: Tensor) -> Tensor:
        x = self.embedding(obs.long()) + self.position
        for i, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            x = x + attention(self.norms[2 * i](x))
            x = x + mlp(self.norms[2 * i + 1](x))
        features: Tensor = self.norms[-1](x[:, -1])
        return features

    def update_moments(self, obs: Tensor) -> None:
        """Do nothing: tokens are not normalized."""


class TokenPolicy(LoraAgent, ActorCritic):
    """farstep's actor and critic on top of a transformer."""

    def make_encoders(self, observation_space: Any, config: NetConfig) -> Transformer:
        return Transformer(int(observation_space.nvec.max()), len(observation_space.nvec))


def make_policy() -> TokenPolicy:
    """Make a policy with random weights."""
    config = NetConfig(hidden=(), normalize_obs=False, normalize_reward=False)
    return TokenPolicy(Spelling.observation_space, Spelling.action_space, config)


def pretrain(policy: TokenPolicy, steps: int, rng: np.random.Generator) -> None:
    """Teach the base model to spell all answers, whatever the prompt."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3)
    prompts, answers = list(OPPOSITES), list(OPPOSITES.values())
    for _ in range(steps):
        texts, letters = [], []
        for _ in range(64):
            answer = answers[rng.integers(len(answers))]
            known = rng.integers(len(answer))
            texts.append(tokens(f"{prompts[rng.integers(len(prompts))]}:{answer[:known]}"))
            letters.append(LETTERS.index(answer[known]))
        loss = -policy.evaluate(torch.from_numpy(np.stack(texts)), torch.tensor(letters)).logprob.mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()


def mean_return(env: farstep.ClusterEnv, policy: TokenPolicy) -> float:
    """Play some episodes; return the mean of their returns."""
    return float(env.collect(policy, steps=64).episodes["return"].mean())


def main(args: Args) -> None:
    """Pretrain the base, then train its adapters."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    policy = make_policy()
    pretrain(policy, args.pretraining_steps, np.random.default_rng(args.seed))
    policy.add_adapters(r=args.r, alpha=2 * args.r, targets=("q", "k", "v", "o"), also_train=("critic",))
    full = sum(parameter.nbytes for parameter in policy.merged().parameters())
    env_config = {"type": "factory", "env_name": Spelling, "envs_per_node": args.num_envs, "seed": args.seed}
    config = PPOConfig(learning_rate=args.learning_rate, num_steps=32, minibatch_size=256, update_epochs=4)
    start = time.monotonic()
    with farstep.ClusterEnv(env_config, farstep.LocalConfig(workers_per_node=args.workers)) as env:
        before = mean_return(env, policy)
        print(f"return of the base model: {before:.2f}", flush=True)
        Training(PPO(policy, config, seed=args.seed), env, Limits(total_steps=args.total_steps)).run()
        after, stats = mean_return(env, policy), env.stats()
    pulls, sent = stats["pulls"]["total"], stats["bytes"]["weights_sent"]
    print(f"return with adapters:     {after:.2f} after {stats['steps']:,} steps and {time.monotonic() - start:.0f} s")
    print(f"base weights: sent once for all {args.workers} workers, {stats['bytes']['base_sent'] / 1e6:.2f} MB")
    print(f"adapters: loaded {pulls} times, {sent / 1e6:.2f} MB; full weights would be {pulls * full / 1e6:.2f} MB")


if __name__ == "__main__":
    main(tyro.cli(Args))
