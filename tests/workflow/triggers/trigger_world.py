"""Helpers for tests of triggers."""

from __future__ import annotations

from typing import Any

from farstep.workflow.triggers import Message

KEYS = ("obs", "reward")


def later(message: Message) -> bool:
    return False


def short(messages: list[Message]) -> list[Any]:
    return [" ".join(f"{a}@{s}" for a, s in zip(m["actor_ids"], m["start"], strict=True)) for m in messages]
