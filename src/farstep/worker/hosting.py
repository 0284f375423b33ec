"""Lean hosting of single environments: many in one process, stepped straight into the rows that will be read.

Inside, an episode ends one way only, whatever wrappers say: the row gets its flags, the final observation goes to
the side, the environment is reset at once with the seed of its next episode, and the next row begins it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from farstep.core import Array
from farstep.errors import SpaceError
from farstep.spec import Schema, Structure, leaf_names, leaves, nest, space_schema
from farstep.worker.progress import COUNT, PHASE, RESET, SLOT, STEP, Phase
from farstep.worker.rows import Rows, Slots
from farstep.worker.seeds import episode_seed
from farstep.worker.sources import Source


class HostedEnvs:
    """Single environments, one per slot."""

    def __init__(self, source: Source, slots: Slots, progress: memoryview) -> None:
        self.slots, self._source, self._progress = slots, source, progress
        self.num_envs = len(slots.roots)
        progress[PHASE] = Phase.CONSTRUCT
        self.envs = []
        for i in range(self.num_envs):
            progress[SLOT] = i
            progress[COUNT] += 1
            self.envs.append(source.build())
        self.observation_space, self.action_space = self.envs[0].observation_space, self.envs[0].action_space
        self._obs, self._obs_schema = space_schema(self.observation_space, "obs")
        self._action, _ = space_schema(self.action_space, "action")
        self._single = self._obs if isinstance(self._obs, str) else None
        self.current = empty_like(self._obs_schema, self.num_envs)
        self._steps = [env.step for env in self.envs]
        self._rewards: list[Any] = [0.0] * self.num_envs
        self.infos: list[dict[str, Any]] | None = None

    def reset(self, mask: Array | None, roots: list[int | None] | None, options: dict[str, Any] | None) -> None:
        """Begin new episodes in the masked slots (all without a mask); with roots, from episode 0."""
        for i in range(self.num_envs):
            if mask is not None and not mask[i]:
                continue
            if roots is not None and (root := roots[i]) is not None:
                self.slots.roots[i], self.slots.episodes[i] = root, 0
            elif self.slots.started[i]:
                self.slots.episodes[i] += 1
            self._start(i, self.current, None, options)

    def want_infos(self, wanted: bool) -> None:
        """Whether the next chunk brings the environments' infos along (a rollout does not)."""
        self.infos = [{} for _ in range(self.num_envs)] if wanted else None

    def begin(self, rows: Rows, steps: int) -> None:
        """Get ready to write `steps` rows: the first observation of a chunk is the last one of the one before."""
        self.slots.begin_chunk()
        for i in np.flatnonzero(~self.slots.started):
            self._start(int(i), self.current, None, None)
        self._rows = rows.row
        self._final = {name: rows.row["final_" + name] for name in self._obs_schema}
        for name, current in self.current.items():
            self._rows[name][0] = current
        rows.clear_flags(steps)

    def step(self, t: int) -> None:
        """Step every environment with row `t`'s action; observations go to row `t + 1`."""
        progress, rewards, rows = self._progress, self._rewards, self._rows
        progress[PHASE] = STEP
        progress[COUNT] += 1
        ended: list[tuple[int, bool, bool, Any]] = []
        actions = self._actions(t)
        infos = self.infos
        if self._single is not None and infos is None:
            next_obs = rows[self._single][t + 1]
            for i, (step, action) in enumerate(zip(self._steps, actions, strict=True)):
                progress[SLOT] = i
                next_obs[i], rewards[i], terminated, truncated, info = step(action)
                if terminated or truncated:
                    ended.append((i, terminated, truncated, info))
        else:
            for i, (step, action) in enumerate(zip(self._steps, actions, strict=True)):
                progress[SLOT] = i
                obs, rewards[i], terminated, truncated, info = step(action)
                write_obs(self._obs, rows, t + 1, i, obs)
                if terminated or truncated:
                    ended.append((i, terminated, truncated, info))
                elif infos is not None:
                    infos[i] = info
        gained = np.array(rewards, np.float64)
        rows["reward"][t] = gained
        self.slots.returns += gained
        for i, terminated, truncated, info in ended:
            self._end(t, i, terminated, truncated, info)

    def _end(self, t: int, i: int, terminated: bool, truncated: bool, info: Any) -> None:
        rows = self._rows
        rows["terminated"][t, i], rows["truncated"][t, i] = terminated, truncated
        k = self.slots.end_episode(i, t)
        for name in self.current:
            self._final[name][k // self.num_envs, k % self.num_envs] = rows[name][t + 1, i]
        new = self._start(i, {name: rows[name][t + 1] for name in self.current}, t + 1, None)
        if self.infos is not None:
            self.infos[i] = {**new, "final_info": info}

    def _start(self, i: int, target: dict[str, Array], row: int | None, options: dict[str, Any] | None) -> Any:
        """Reset slot `i` with its episode's seed, its first observation into `target[...][i]`."""
        self._progress[PHASE], self._progress[SLOT] = RESET, i
        self._progress[COUNT] += 1
        obs, info = self.envs[i].reset(seed=self.seed_of(i), options=options)
        check_obs(self._obs, self._obs_schema, obs)
        for name, leaf in leaves(self._obs, obs):
            target[name][i] = leaf
        self.slots.begin_episode(i, row or 0)
        self._progress[PHASE] = STEP
        if self.infos is not None:
            self.infos[i] = info
        return info

    def _actions(self, t: int) -> Any:
        """One action per environment, none of them a view of the row (an environment may change its action)."""
        if isinstance(self._action, str):
            return self._rows[self._action][t].copy()
        arrays = {name: self._rows[name][t].copy() for name in leaf_names(self._action)}
        return [nest(self._action, {n: a[i] for n, a in arrays.items()}) for i in range(self.num_envs)]

    def finish(self, steps: int) -> bytes:
        """The chunk is written: keep its last observations for the next one."""
        for name, current in self.current.items():
            np.copyto(current, self._rows[name][steps])
        return self.slots.finish(steps)

    def recover(self, i: int | None) -> None:
        """After an exception: build the environment anew and go on with everybody's next episode."""
        if i is not None:
            with contextlib.suppress(Exception):
                self.envs[i].close()
            self._progress[PHASE], self._progress[SLOT] = Phase.CONSTRUCT, i
            self._progress[COUNT] += 1
            self.envs[i] = self._source.build()
            self._steps[i] = self.envs[i].step
        self.slots.rewind()

    def seed_of(self, i: int) -> int:
        """The seed of the episode that slot `i` is in."""
        return episode_seed(self.slots.roots[i], self.slots.first + i, self.slots.episodes[i])

    def close(self) -> None:
        self._progress[PHASE] = Phase.CLOSE
        for i, env in enumerate(self.envs):
            self._progress[SLOT] = i
            env.close()


def empty_like(schema: Schema, count: int) -> dict[str, Array]:
    """Arrays for one row of `count` slots."""
    return {name: np.zeros((count, *spec.shape), spec.dtype) for name, spec in schema.items()}


def write_obs(structure: Structure, rows: dict[str, Array], t: int, i: int, obs: Any) -> None:
    """One environment's observation into its place."""
    for name, leaf in leaves(structure, obs):
        rows[name][t, i] = leaf


def check_obs(structure: Structure, schema: Schema, obs: Any) -> None:
    """NumPy would broadcast a wrong shape silently; environments that lie about their space are named."""
    for name, leaf in leaves(structure, obs):
        if np.shape(leaf) != schema[name].shape:
            raise SpaceError(
                f"{name}: the environment returned shape {list(np.shape(leaf))}, but its observation space says "
                f"{list(schema[name].shape)}."
            )
