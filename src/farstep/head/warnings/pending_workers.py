"""Describes the workers that the head waits for in one short line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_MAX_NAMED = 3
"""Maximum size of a group whose slots or workers are listed."""


@dataclass(frozen=True)
class PendingWorker:
    """A worker that the head is waiting for."""

    worker: int
    state: str
    """What the worker is doing, e.g. `in step`, `starting` or `lost`."""
    slot: int | None = None
    """The environment slot that it is working on; None: no particular slot."""


def describe(workers: Iterable[PendingWorker], unconnected_nodes: str = "") -> str:
    """Describe what the head is waiting for, grouped by state, the largest group first.

    Args:
        workers: The workers that have not finished.
        unconnected_nodes: The launcher's report on nodes that are not connected; empty if all are connected.

    Returns:
        A phrase that follows "waiting 20 s for", e.g. `14 workers: 13 in act, 1 in step (slot 37)`.
    """
    pending = list(workers)
    parts = [unconnected_nodes] if unconnected_nodes else []
    if len(pending) == 1:
        slot = "" if pending[0].slot is None else f" (slot {pending[0].slot})"
        parts.append(f"worker {pending[0].worker}, {pending[0].state}{slot}")
    elif pending:
        groups: dict[str, list[PendingWorker]] = {}
        for each in pending:
            groups.setdefault(each.state, []).append(each)
        by_size = sorted(groups.values(), key=len, reverse=True)
        parts.append(f"{len(pending):,} workers: {', '.join(map(_describe_group, by_size))}")
    return "; ".join(parts) or "workers, all of which are idle"


def _describe_group(group: list[PendingWorker]) -> str:
    text = f"{len(group):,} {group[0].state}"
    if len(group) > _MAX_NAMED:
        return text
    slots = [each.slot for each in group if each.slot is not None]
    noun, numbers = ("slot", slots) if len(slots) == len(group) else ("worker", [each.worker for each in group])
    return f"{text} ({noun}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))})"
