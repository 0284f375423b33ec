"""Saves and restores a worker's state, so that another process can continue exactly where this one stopped.

An environment cannot be saved, but its episode can be replayed: reset it with the seed of the episode, then repeat the
actions, which the head has stored. The rest of the state is small: recurrent state and random generators.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from farstep.acting.client import ServedActor
from farstep.worker.acting import Actor
from farstep.worker.hosting.base import Host, HostedEnvs, SavedSlot


class Saving:
    """Saves and restores one worker. The head calls both methods by name (`messages.Call`)."""

    def __init__(
        self,
        host: Host,
        actor: Actor | ServedActor | None,
        owns_process: bool,
        failures: tuple[type[BaseException], ...],
    ) -> None:
        self._host, self._actor, self._owns_process, self._failures = host, actor, owns_process, failures

    def save(self) -> dict[str, Any]:
        """The worker's state as plain data, without the actions."""
        slots = self._host.slots
        saved: dict[str, Any] = {
            "roots": list(slots.roots),
            "episodes": list(slots.episodes),
            "steps": [slots.steps_done(i) for i in range(self._host.num_envs)],
            "obs": self._host.current,
        }
        if self._owns_process:  # otherwise the global generators belong to the user
            saved["generators"] = _global_generators()
        return saved | {"agent": {} if self._actor is None else self._actor.save()}

    def resume(self, part: Mapping[str, Any] | None, root: int) -> tuple[list[int], list[tuple[int, str]]] | None:
        """Restore the state that `save` returned.

        Args:
            part: The saved state plus the actions of episodes in progress. None: only seed the global generators; the
                head then resets all slots.
            root: The root seed of the global generators.

        Returns:
            The episodes with which a replacement of this worker would continue; and the slots whose replay failed, each
            with the reason. None if `part` is None.
        """
        slots = self._host.slots
        if part is None:
            if self._owns_process:
                seed_generators(root, slots.first, 0)
            return None
        assert isinstance(self._host, HostedEnvs), "the head replays single environments only"
        slots.roots[:], slots.episodes[:], slots.resume[:] = part["roots"], part["episodes"], part["episodes"]
        saved = [
            SavedSlot(steps, actions, {name: array[i] for name, array in part["obs"].items()})
            for i, (steps, actions) in enumerate(zip(part["steps"], part["actions"], strict=True))
        ]
        diverged = self._host.replay(saved, self._failures)
        if self._actor is not None and part["agent"]:
            self._actor.resume(part["agent"])
        if self._owns_process and "generators" in part:
            _set_global_generators(part["generators"])
        return slots.resume.tolist(), list(diverged.items())


def seed_generators(root: int, slot: int, incarnation: int) -> None:
    """Seed the global generators of Python, NumPy and torch, with a different but reproducible seed per worker."""
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
