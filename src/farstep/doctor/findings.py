"""Findings: the printed results of the doctor's checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    level: Level
    text: str
    fix: str = ""
    """What to do about a problem; empty if there is none."""

    def __str__(self) -> str:
        lines = [f"  {self.level:<8} {self.text}"]
        if self.fix:
            lines.append(f"-> {self.fix}")
        return "\n".join(lines).replace("\n", "\n" + " " * 11)


def ok(text: str) -> Finding:
    return Finding("ok", text)


def warning(text: str, fix: str) -> Finding:
    return Finding("warning", text, fix)


def problem(text: str, fix: str) -> Finding:
    return Finding("problem", text, fix)


Report = Callable[[str], None]
"""Receives progress messages, e.g. what the doctor is waiting for."""
