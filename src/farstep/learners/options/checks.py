"""Checks of learner options at construction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from farstep.config.env import check_count, is_number
from farstep.errors import ConfigError, unknown_name

LARGE = 1e6
"""Upper bound of learning rates and loss weights. Above it, float32 parameters overflow within a few updates."""


def check_numbers(config: object, **bounds: tuple[float, float]) -> None:
    """Check that options are None or within bounds (inclusive).

    Args:
        config: The learner's options.
        bounds: Lower and upper bound by name.

    Raises:
        ConfigError: An option is not a number within its bounds.
    """
    for name, (low, high) in bounds.items():
        value = getattr(config, name)
        if value is not None and not (is_number(value) and low <= value <= high):
            expected = f"at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
            raise ConfigError(f"{name} is {value!r}; expected a number {expected}.")


def check_above(config: object, **bounds: float) -> None:
    """Raise `ConfigError` unless options are None or numbers above their lower bounds (exclusive)."""
    for name, low in bounds.items():
        value = getattr(config, name)
        if value is not None and not (is_number(value) and value > low):
            raise ConfigError(f"{name} is {value!r}; expected a number above {low:g}.")


def check_counts(config: object, *names: str, minimum: int = 1) -> None:
    """Raise `ConfigError` unless options are None or whole numbers of at least `minimum`."""
    for name in names:
        if getattr(config, name) is not None:
            check_count(name, getattr(config, name), minimum)


def check_choice(config: object, name: str, known: Sequence[str]) -> None:
    """Raise `ConfigError` unless an option is one of the known words."""
    value = getattr(config, name)
    if value not in known:
        raise ConfigError(unknown_name(name, str(value), list(known)))


class _TrainsCritic(Protocol):
    @property
    def value_lr(self) -> float | None: ...

    @property
    def critic_warmup_updates(self) -> int: ...


def check_critic(config: _TrainsCritic, weight: str) -> None:
    """Check `value_lr` and `critic_warmup_updates`.

    Args:
        config: The learner's options.
        weight: Name of the option for the weight of the value loss.

    Raises:
        ConfigError: A number is out of range, or warm-up updates would change nothing.
    """
    check_numbers(config, value_lr=(0, LARGE))
    check_counts(config, "critic_warmup_updates", minimum=0)
    updates, rate = config.critic_warmup_updates, "learning_rate" if config.value_lr is None else "value_lr"
    for name in (weight, rate):
        if updates and getattr(config, name) == 0:
            raise ConfigError(
                f"critic_warmup_updates is {updates} with {name}=0, so these updates would change nothing; set {name} "
                "above 0, or critic_warmup_updates to 0."
            )
