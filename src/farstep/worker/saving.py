"""What a worker must know to go on in another process exactly where it is, and how it does.

An environment cannot be saved, but it can be led to the same place: reset with the seed of its episode, then stepped
with the same actions, which the head has. The rest is small: a recurrent state, and generators.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from farstep.worker.acting import Actor
from farstep.worker.hosting import Host

log = logging.getLogger(__name__)


class Saving:
    """Of one worker."""

    def __init__(self, host: Host, actor: Actor | None, owns_process: bool) -> None:
        self._host, self._actor, self._owns_process = host, actor, owns_process

    def save(self) -> dict[str, Any]:
        """Everything as plain data."""
        slots = self._host.slots
        saved: dict[str, Any] = {"roots": list(slots.roots), "episodes": list(slots.episodes)}
        if self._owns_process:  # else the generators are those of the caller
            saved["generators"] = _global_generators()
        return saved | {"agent": {} if self._actor is None else self._actor.save()}

    def resume(self, part: Mapping[str, Any] | None) -> list[int] | None:
        """Go on from what was saved, with the actions since; returns the episodes to go on with if this worker is
        replaced. Without anything, new episodes are begun."""
        if part is None:
            return None
        slots = self._host.slots
        slots.roots[:], slots.episodes[:], slots.resume[:] = part["roots"], part["episodes"], part["episodes"]
        self._host.replay(part["actions"])
        if self._actor is not None:
            self._actor.resume(part["agent"])
        if self._owns_process and "generators" in part:
            _set_global_generators(part["generators"])
        return [int(episode) for episode in slots.resume]


def _global_generators() -> dict[str, Any]:
    kind, words, spare = random.getstate()
    name, keys, place, has_gauss, gauss = np.random.get_state()
    found: dict[str, Any] = {
        "random": [kind, list(words), spare],
        "numpy": [name, np.array(keys), int(place), int(has_gauss), float(gauss)],
    }
    if (torch := sys.modules.get("torch")) is not None:
        found["torch"] = torch.get_rng_state().numpy()
    return found


def _set_global_generators(saved: Mapping[str, Any]) -> None:
    kind, words, spare = saved["random"]
    random.setstate((kind, tuple(words), spare))
    np.random.set_state(tuple(saved["numpy"]))
    if (torch := sys.modules.get("torch")) is not None and "torch" in saved:
        torch.set_rng_state(torch.from_numpy(np.array(saved["torch"])))
