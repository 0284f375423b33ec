"""Agents with adapters, in a module that does not import peft, since workers import it."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import nn

from examples.lora_policy import Spelling as Spelling
from examples.lora_policy import TokenPolicy
from examples.lora_policy import tokens as tokens
from farstep.agents.lora import LoraAgent
from farstep.learners.networks.q_network import QAgent
from farstep.learners.networks.soft_actor import SoftActor


class Policy(TokenPolicy):
    """Also returns its logits, and whether its process has imported peft."""

    def act(self, obs: Any) -> dict[str, Any]:
        out = super().act(obs)
        return {
            **out,
            "logits": self.distribution(obs)["logits"],
            "peft": torch.full((len(obs),), "peft" in sys.modules),
        }


class Echo(Spelling):
    """Episodes of one step, in which the right action is the letter that was shown."""

    action_space = gymnasium.spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        gymnasium.Env.reset(self, seed=seed)
        self.shown = int(self.np_random.integers(4))
        return tokens("abcd"[self.shown]), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return tokens(""), float(action == self.shown), True, False, {}


class OwnAgent(LoraAgent):
    """An agent of a user's own loop, without farstep's learners."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(2, 2)

    def act(self, obs: Any) -> dict[str, Any]:
        out = self.q(torch.ones(len(obs), 2))
        return {"action": torch.zeros(len(obs), dtype=torch.int64), "out": out}


class AdaptedQAgent(LoraAgent, QAgent):
    """An agent of DQN."""


class AdaptedSoftActor(LoraAgent, SoftActor):
    """An agent of SAC."""
