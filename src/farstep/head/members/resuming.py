"""How environments of a run that another process saved are led back to where they were, worker by worker."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from farstep.core import Array
from farstep.head.members.broadcast import Broadcast
from farstep.head.members.worker_records import WorkerRecord

log = logging.getLogger("farstep")


class ReplayResult(IntEnum):
    """Where a slot is afterwards."""

    NONE = 0
    """Not led back: it must be reset."""
    OTHER = 1
    """Elsewhere, and goes on from there."""
    SAME = 2


def replay_episodes(
    records: Sequence[WorkerRecord],
    calls: Broadcast,
    root: int,
    workers: Sequence[Any],
    actions: Sequence[Mapping[str, Array]],
) -> Array:
    """Send workers what they saved and the actions of current episodes; returns a `ReplayResult` per slot."""
    parts = _parts(records, workers, actions)
    for record, part in zip(records, parts, strict=True):
        if part is not None:  # for whoever replaces it, and for the seeds that errors name
            record.roots[:] = part["roots"]
            record.resume[:] = [episode + bool(n) for episode, n in zip(part["episodes"], part["steps"], strict=True)]
    places = np.full(records[-1].stop, ReplayResult.NONE, np.int8)
    strayed: dict[str, list[int]] = {}
    answers = calls.call("resume", *[(part, root) for part in parts])
    for record, part, answer in zip(records, parts, answers, strict=True):
        if answer is not None:
            record.resume[:], elsewhere = answer
            places[record.columns] = ReplayResult.SAME
            for slot, why in elsewhere:
                places[slot] = ReplayResult.OTHER
                strayed.setdefault(why, []).append(slot)
        elif part is not None:
            log.warning(
                "episodes of worker %d begin anew: it was lost while it took their actions again", record.worker
            )
    for why, slots in strayed.items():
        log.warning("not where it was when the run was saved: environment slot %s: %s", ", ".join(map(str, slots)), why)
    return places


def _parts(
    records: Sequence[WorkerRecord], workers: Sequence[Any], actions: Sequence[Mapping[str, Array]]
) -> list[Any]:
    """What each worker is told; None if there is nothing that it could go on with."""
    fitting = len(workers) == len(records) and len(actions) == records[-1].stop
    if not fitting or any(
        w and len(w["episodes"]) != record.num_envs for w, record in zip(workers, records, strict=True)
    ):
        if workers:
            log.warning("episodes begin anew: there were other workers or environments when this run was saved")
        return [None] * len(records)
    for record, worker in zip(records, workers, strict=True):
        if worker is None:
            log.warning(
                "episodes of worker %d begin anew: it was being replaced when this run was saved", record.worker
            )
    return [w and {**w, "actions": list(actions[record.columns])} for w, record in zip(workers, records, strict=True)]
