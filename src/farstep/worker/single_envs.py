"""The single environments of a worker, one per slot; the hosts that step them stand on this."""

from __future__ import annotations

import contextlib
from typing import Any

import gymnasium
import numpy as np

from farstep.core import Array
from farstep.errors import SpaceError
from farstep.spec import Schema, Structure, leaf_names, leaves, nest, space_schema
from farstep.worker.progress import COUNT, PHASE, RESET, SLOT, Phase
from farstep.worker.sources import Source


class SingleEnvs:
    """Builds environments, resets them, hands out their actions, replaces and closes them."""

    def __init__(self, source: Source, count: int, progress: memoryview) -> None:
        self._source, self._progress = source, progress
        self.envs = [self._build(i) for i in range(count)]
        self.spaces = self.envs[0].observation_space, self.envs[0].action_space
        self._obs, self._obs_schema = space_schema(self.spaces[0], "obs")
        self._action, _ = space_schema(self.spaces[1], "action")

    def _build(self, i: int) -> gymnasium.Env[Any, Any]:
        self._progress[PHASE], self._progress[SLOT] = Phase.CONSTRUCT, i
        self._progress[COUNT] += 1
        return self._source.build()

    def replace(self, i: int) -> None:
        """Build one anew, whatever became of the old one."""
        with contextlib.suppress(Exception):
            self.envs[i].close()
        self.envs[i] = self._build(i)

    def reset(self, i: int, seed: int | None, options: dict[str, Any] | None, target: dict[str, Array]) -> Any:
        """Reset one, its observation into `target[...][i]`; returns its info."""
        self._progress[PHASE], self._progress[SLOT] = RESET, i
        self._progress[COUNT] += 1
        obs, info = self.envs[i].reset(seed=seed, options=options)
        _check_obs(self._obs, self._obs_schema, obs)
        for name, leaf in leaves(self._obs, obs):
            target[name][i] = leaf
        return info

    def actions(self, rows: dict[str, Array], t: int) -> Any:
        """Row `t`'s action for each, none of them a view of the row (an environment may change its action)."""
        if isinstance(self._action, str):
            return rows[self._action][t].copy()
        arrays = {name: rows[name][t].copy() for name in leaf_names(self._action)}
        return [nest(self._action, {n: a[i] for n, a in arrays.items()}) for i in range(len(self.envs))]

    def close(self) -> None:
        self._progress[PHASE] = Phase.CLOSE
        for i, env in enumerate(self.envs):
            self._progress[SLOT] = i
            env.close()


def _check_obs(structure: Structure, schema: Schema, obs: Any) -> None:
    """NumPy would broadcast a wrong shape silently; environments that lie about their space are named."""
    for name, leaf in leaves(structure, obs):
        if np.shape(leaf) != schema[name].shape:
            raise SpaceError(
                f"{name}: the environment returned shape {list(np.shape(leaf))}, but its observation space says "
                f"{list(schema[name].shape)}."
            )
