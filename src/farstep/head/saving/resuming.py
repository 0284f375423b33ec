"""Replays the episodes in progress of a saved run on the workers of this run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from types import NoneType
from typing import Any

import numpy as np

from farstep.config.env import EnvConfig
from farstep.core import Array
from farstep.event import Emit
from farstep.head.members.broadcast import Broadcast
from farstep.head.members.worker_records import WorkerRecord
from farstep.sync import Always


class ReplayResult(IntEnum):
    """The result of replaying a slot's episode."""

    NONE = 0
    """Not replayed: the slot must be reset."""
    OTHER = 1
    """Replayed to a state that differs from the saved state; the slot continues from there."""
    SAME = 2
    """Replayed to the saved state."""


def cannot_replay(config: EnvConfig) -> str:
    """Return the reason why episodes in progress cannot be replayed; empty if they can."""
    if config.type in ("vector", "envpool"):
        return f"environments of type {config.type!r} cannot be stepped one by one"
    if not config.seed_episodes:
        return "with seed_episodes=False, the random states of environments are unknown"
    if config.stagger is not None:
        return "staggered environments start at new offsets"
    if config.kl_threshold is not None or not isinstance(config.sync, (Always, NoneType)):
        return "workers may have acted with older weights, which are not kept"
    return ""


def replay_episodes(
    records: Sequence[WorkerRecord],
    calls: Broadcast,
    root: int,
    workers: Sequence[Any],
    actions: Sequence[Mapping[str, Array]],
    emit: Emit,
) -> Array:
    """Send workers their saved state and the actions of their episodes. Return a `ReplayResult` per slot.

    Args:
        records: All workers.
        calls: Sends the calls.
        root: Seed of slots that cannot be replayed.
        workers: The saved state of each worker; None for a worker that was being restarted.
        actions: For each slot, the actions of its episode in progress.
        emit: Receives an event for each episode that cannot be replayed.
    """
    parts = _parts(records, workers, actions, emit)
    for record, part in zip(records, parts, strict=True):
        if part is not None:  # for a restart of the worker, and for seeds in error messages
            record.roots[:] = part["roots"]
            record.resume[:] = [episode + bool(n) for episode, n in zip(part["episodes"], part["steps"], strict=True)]
    results = np.full(records[-1].stop, ReplayResult.NONE, np.int8)
    differing: dict[str, list[int]] = {}
    answers = calls.call("resume", *[(part, root) for part in parts])
    for record, part, answer in zip(records, parts, answers, strict=True):
        if answer is not None:
            record.resume[:], failures = answer
            results[record.columns] = ReplayResult.SAME
            for slot, why in failures:
                results[slot] = ReplayResult.OTHER
                differing.setdefault(why, []).append(slot)
        elif part is not None:
            text = f"restarting episodes of worker {record.worker}: it died while replaying them"
            emit("warned", text, worker=record.worker, node=record.host)
    for why, slots in differing.items():
        emit("warned", f"replay did not restore environment slot {', '.join(map(str, slots))}: {why}")
    return results


def _parts(
    records: Sequence[WorkerRecord], workers: Sequence[Any], actions: Sequence[Mapping[str, Array]], emit: Emit
) -> list[Any]:
    """What to send to each worker; None if the worker has nothing to replay."""
    fitting = len(workers) == len(records) and len(actions) == records[-1].stop
    if not fitting or any(
        w and len(w["episodes"]) != record.num_envs for w, record in zip(workers, records, strict=True)
    ):
        if workers:
            emit("warned", "restarting all episodes: the run was saved with other numbers of workers or environments")
        return [None] * len(records)
    for record, worker in zip(records, workers, strict=True):
        if worker is None:
            text = f"restarting episodes of worker {record.worker}: it was not alive when the run was saved"
            emit("warned", text, worker=record.worker)
    return [w and {**w, "actions": list(actions[record.columns])} for w, record in zip(workers, records, strict=True)]
