"""Agents with adapters, in a module that does not import peft, since workers import it."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from examples.lora_policy import Spelling as Spelling
from examples.lora_policy import TokenPolicy
from examples.lora_policy import tokens as tokens
from farstep.agents.lora import LoraAgent


class Policy(TokenPolicy):
    """Also returns its logits, and whether its process has imported peft."""

    def act(self, obs: Any) -> dict[str, Any]:
        out = super().act(obs)
        return {
            **out,
            "logits": self.distribution(obs)["logits"],
            "peft": torch.full((len(obs),), "peft" in sys.modules),
        }


class OwnAgent(LoraAgent):
    """An agent of a user's own loop, without farstep's learners."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(2, 2)

    def act(self, obs: Any) -> dict[str, Any]:
        out = self.q(torch.ones(len(obs), 2))
        return {"action": torch.zeros(len(obs), dtype=torch.int64), "out": out}
