"""Sync rules that need nothing but version numbers."""

from __future__ import annotations

from dataclasses import dataclass

from farstep.errors import ConfigError


@dataclass(frozen=True)
class Always:
    """Act with the newest version, always."""

    def should_pull(self, held: int, newest: int) -> bool:
        return newest > held


@dataclass(frozen=True)
class EveryK:
    """Pull when at least `k` versions were published since the last pull."""

    k: int

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or self.k < 1:
            raise ConfigError(f"EveryK(k={self.k!r}): k counts versions and must be an int of at least 1.")

    def should_pull(self, held: int, newest: int) -> bool:
        return held < 0 or newest - held >= self.k
