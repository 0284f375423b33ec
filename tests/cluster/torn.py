"""An agent that notices half-updated weights; workers import this module by its name."""

from __future__ import annotations

import time
from typing import Any

import numpy as np


class TornAgent:
    """Its parameters are equal numbers except in the middle of an update; `torn` of a row is True if they were not."""

    def __init__(self, parameters: int = 24) -> None:
        self.weights = {f"w{i}": np.zeros(2) for i in range(parameters)}

    def _numbers(self) -> np.ndarray:
        return np.array([weight[0] for weight in self.weights.values()])

    def act(self, obs: Any) -> dict[str, Any]:
        numbers = self._numbers()
        return {
            "action": np.zeros(len(obs), np.int64),
            "torn": np.full(len(obs), bool((numbers != numbers[0]).any())),
            "number": np.full(len(obs), numbers.min()),
        }

    def get_parameters(self) -> dict[str, Any]:
        return dict(self.weights)

    def set_parameters(self, parameters: dict[str, Any]) -> None:
        self.weights = {name: np.array(value) for name, value in parameters.items()}

    def update(self, part: slice = slice(None)) -> None:
        """Increment one parameter after the other; other threads run between any two."""
        for name in list(self.weights)[part]:
            time.sleep(0)
            self.weights[name] += 1


class ComparedAgent(TornAgent):
    """Keeps the numbers that probes were answered with, and those that were published after it."""

    def __init__(self) -> None:
        super().__init__()
        self.answered: list[list[float]] = []
        self.published: list[list[float]] = []

    def distribution(self, obs: Any) -> dict[str, Any]:
        self.answered.append(self._numbers().tolist())
        time.sleep(0.001)  # an update of another thread could begin here
        return {"bernoulli": np.repeat(self._numbers()[:1] % 5, len(obs))[:, None]}

    def get_parameters(self) -> dict[str, Any]:
        if len(self.answered) > len(self.published):
            self.published.append(self._numbers().tolist())
        return super().get_parameters()
