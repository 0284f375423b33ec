"""Infos of a batch in Gymnasium's batched form."""

from __future__ import annotations

from collections.abc import Container, Mapping
from operator import itemgetter
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from farstep.batch import Batch
from farstep.schema import map_leaves, nest


class _Infos:
    """Merges the infos of a batch's columns with Gymnasium's code."""

    _add_info: Any = VectorEnv._add_info

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.merged: dict[str, Any] = {}

    def add(self, info: Mapping[str, Any], column: int) -> None:
        self.merged = self._add_info(self.merged, info, column)


def merged_infos(batch: Batch) -> dict[str, Any]:
    """Return the environments' infos in Gymnasium's batched form, one entry per column."""
    infos = _Infos(len(batch.slots))
    for first, per_env in batch.infos:
        column = int(np.searchsorted(batch.slots, first))
        for i, info in enumerate(per_env):
            infos.add(info, column + i)
    final = batch.final_obs
    for k, column in enumerate(final.slot):
        episode = {"r": batch.episodes["return"][k], "l": batch.episodes["length"][k], "t": batch.episodes["time"][k]}
        infos.add({"final_obs": map_leaves(itemgetter(k), final.obs), "episode": episode}, int(column))
    return infos.merged


def with_acting(infos: dict[str, Any], batch: Batch) -> dict[str, Any]:
    """Add to the infos of a step what the workers recorded: actions, other outputs of `act`, versions."""
    row = {name: array[0] for name, array in batch.arrays.items()}
    acting = {key: nest(structure, row) for key, structure in batch.structures.items() if key != "obs"}
    acting |= {key: row[key] for key in ("version", "valid", "episode_start")}
    return {_renamed(key, acting): value for key, value in infos.items()} | acting


def _renamed(key: Any, taken: Container[str]) -> Any:
    """Return `env_<key>` if an array has the name of this info key; the key of its mask, `_key`, likewise."""
    if not isinstance(key, str):
        return key
    mask, name = ("_", key[1:]) if key.startswith("_") and key not in taken else ("", key)
    return f"{mask}env_{name}" if name in taken else key
