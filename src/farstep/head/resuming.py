"""How environments of a run that another process saved are led back to where they were, worker by worker."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from farstep.core import Array
from farstep.head.broadcast import Calls
from farstep.head.worker_records import Seat

log = logging.getLogger("farstep")


class Place(IntEnum):
    """Where a slot is afterwards."""

    NONE = 0
    """Not led back: it must be reset."""
    OTHER = 1
    """Elsewhere, and goes on from there."""
    SAME = 2


def lead_back(
    seats: Sequence[Seat], calls: Calls, root: int, workers: Sequence[Any], actions: Sequence[Mapping[str, Array]]
) -> Array:
    """Tell workers what they saved, and each slot's actions since its episode began; a `Place` for every slot."""
    parts = _parts(seats, workers, actions)
    for seat, part in zip(seats, parts, strict=True):
        if part is not None:  # for whoever replaces it, and for the seeds that errors name
            seat.roots[:] = part["roots"]
            seat.resume[:] = [episode + bool(n) for episode, n in zip(part["episodes"], part["steps"], strict=True)]
    places = np.full(seats[-1].stop, Place.NONE, np.int8)
    strayed: dict[str, list[int]] = {}
    answers = calls.call("resume", *[(part, root) for part in parts])
    for seat, part, answer in zip(seats, parts, answers, strict=True):
        if answer is not None:
            seat.resume[:], elsewhere = answer
            places[seat.columns] = Place.SAME
            for slot, why in elsewhere:
                places[slot] = Place.OTHER
                strayed.setdefault(why, []).append(slot)
        elif part is not None:
            log.warning("episodes of worker %d begin anew: it was lost while it took their actions again", seat.worker)
    for why, slots in strayed.items():
        log.warning("not where it was when the run was saved: environment slot %s: %s", ", ".join(map(str, slots)), why)
    return places


def _parts(seats: Sequence[Seat], workers: Sequence[Any], actions: Sequence[Mapping[str, Array]]) -> list[Any]:
    """What each worker is told; None if there is nothing that it could go on with."""
    fitting = len(workers) == len(seats) and len(actions) == seats[-1].stop
    if not fitting or any(w and len(w["episodes"]) != seat.num_envs for w, seat in zip(workers, seats, strict=True)):
        if workers:
            log.warning("episodes begin anew: there were other workers or environments when this run was saved")
        return [None] * len(seats)
    for seat, worker in zip(seats, workers, strict=True):
        if worker is None:
            log.warning("episodes of worker %d begin anew: it was being replaced when this run was saved", seat.worker)
    return [w and {**w, "actions": list(actions[seat.columns])} for w, seat in zip(workers, seats, strict=True)]
