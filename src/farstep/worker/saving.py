"""What a worker must know to go on in another process exactly where it is, and how it does.

An environment cannot be saved, but it can be led to the same place: reset with the seed of its episode, then stepped
with the same actions, which the head has. The rest is small: a recurrent state, and generators.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from farstep.worker.acting import Actor
from farstep.worker.hosting.base import Host, HostedEnvs, Past


class Saving:
    """Of one worker."""

    def __init__(
        self, host: Host, actor: Actor | None, owns_process: bool, failures: tuple[type[BaseException], ...]
    ) -> None:
        self._host, self._actor, self._owns_process, self._failures = host, actor, owns_process, failures

    def save(self) -> dict[str, Any]:
        """Everything as plain data."""
        slots = self._host.slots
        saved: dict[str, Any] = {
            "roots": list(slots.roots),
            "episodes": list(slots.episodes),
            "steps": [slots.taken(i) for i in range(self._host.num_envs)],
            "obs": self._host.current,
        }
        if self._owns_process:  # else the generators are those of the caller
            saved["generators"] = _global_generators()
        return saved | {"agent": {} if self._actor is None else self._actor.save()}

    def resume(self, part: Mapping[str, Any] | None, root: int) -> tuple[list[int], list[tuple[int, str]]] | None:
        """Go on from what was saved, with the actions of episodes in progress; returns the episodes to go on with if
        this worker is replaced, and which slots are elsewhere now, and why. Without anything, the head resets all
        slots to new roots, so generators get theirs."""
        slots = self._host.slots
        if part is None:
            if self._owns_process:
                seed_generators(root, slots.first, 0)
            return None
        assert isinstance(self._host, HostedEnvs), "the head leads back no others"
        slots.roots[:], slots.episodes[:], slots.resume[:] = part["roots"], part["episodes"], part["episodes"]
        past = [
            Past(steps, actions, {name: array[i] for name, array in part["obs"].items()})
            for i, (steps, actions) in enumerate(zip(part["steps"], part["actions"], strict=True))
        ]
        strayed = self._host.replay(past, self._failures)
        if self._actor is not None and part["agent"]:
            self._actor.resume(part["agent"])
        if self._owns_process and "generators" in part:
            _set_global_generators(part["generators"])
        return slots.resume.tolist(), list(strayed.items())


def seed_generators(root: int, slot: int, incarnation: int) -> None:
    """An agent that draws from a global generator draws differently on every worker, alike in every run."""
    seed = int(np.random.SeedSequence(root, spawn_key=(slot, incarnation, 2)).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


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
