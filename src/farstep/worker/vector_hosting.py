"""Hosting of environments that come as one vector: a Gymnasium VectorEnv of any autoreset mode, or an EnvPool.

The form of an episode's end is made the same as for single environments. Only a vector that resets in its *next*
step needs filler rows: the step that resets takes no action, so its row has `valid` False.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from farstep.core import Array
from farstep.spec import leaf_names, leaves, nest, space_schema
from farstep.worker.hosting import empty_like
from farstep.worker.progress import COUNT, PHASE, STEP, Phase
from farstep.worker.rows import Rows, Slots
from farstep.worker.seeds import episode_seed
from farstep.worker.sources import Source


class HostedVector:
    """One vector environment for all slots of a worker."""

    def __init__(self, source: Source, slots: Slots, progress: memoryview) -> None:
        self.slots, self._source, self._progress = slots, source, progress
        self.num_envs = len(slots.roots)
        self._build()
        self._obs, self._obs_schema = space_schema(self.observation_space, "obs")
        self._action, _ = space_schema(self.action_space, "action")
        self.current = empty_like(self._obs_schema, self.num_envs)
        self._action_names = leaf_names(self._action)
        self.infos: list[dict[str, Any]] | None = None
        self._pending = np.zeros(self.num_envs, bool)
        """Slots whose next step only resets them (NEXT_STEP)."""

    def _build(self) -> None:
        self._progress[PHASE] = Phase.CONSTRUCT
        self._progress[COUNT] += 1
        self.env = self._source.build_vector(self.num_envs, self.seed_of(0))
        if self._source.type == "envpool":
            self.mode = AutoresetMode.NEXT_STEP
            self.observation_space, self.action_space = self.env.observation_space, self.env.action_space
        else:
            self.mode = self.env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
            self.observation_space = self.env.single_observation_space
            self.action_space = self.env.single_action_space

    def reset(self, mask: Array | None, roots: list[int | None] | None, options: dict[str, Any] | None) -> None:
        self._progress[PHASE] = Phase.RESET
        self._progress[COUNT] += 1
        chosen = np.ones(self.num_envs, bool) if mask is None else mask
        for i in np.flatnonzero(chosen):
            if roots is not None and (root := roots[i]) is not None:
                self.slots.roots[i], self.slots.episodes[i] = root, 0
            elif self.slots.started[i]:
                self.slots.episodes[i] += 1
        if self._source.type == "envpool":
            obs, _ = self.env.reset() if mask is None else self.env.reset(np.flatnonzero(chosen).astype(np.int32))
            self._store(obs, chosen, compact=mask is not None)
        else:
            if mask is not None:
                options = {**(options or {}), "reset_mask": chosen}
            seeds: Any = [self.seed_of(i) if chosen[i] else None for i in range(self.num_envs)]
            obs, _ = self.env.reset(seed=seeds, options=options)
            self._store(obs, chosen, compact=False)
        self._pending[chosen] = False
        for i in np.flatnonzero(chosen):
            self.slots.begin_episode(int(i), 0)

    def _store(self, obs: Any, chosen: Array, compact: bool) -> None:
        for name, leaf in leaves(self._obs, obs):
            self.current[name][chosen] = leaf if compact else leaf[chosen]

    def want_infos(self, wanted: bool) -> None:
        """A vector's infos come batched already; they stay on the worker."""

    def begin(self, rows: Rows, steps: int) -> None:
        self.slots.begin_chunk()
        if not self.slots.started.all():
            self.reset(~self.slots.started if self.slots.started.any() else None, None, None)
        self._rows = rows.row
        self._final = {name: rows.row["final_" + name] for name in self._obs_schema}
        for name, current in self.current.items():
            self._rows[name][0] = current
        rows.clear_flags(steps)

    def step(self, t: int) -> None:
        self._progress[PHASE] = STEP
        self._progress[COUNT] += 1
        rows = self._rows
        actions = nest(self._action, {name: rows[name][t].copy() for name in self._action_names})
        obs, reward, terminated, truncated, info = self.env.step(actions)
        for name, leaf in leaves(self._obs, obs):
            rows[name][t + 1] = leaf
        rows["reward"][t] = reward
        if self._pending.any():  # the step that reset them was nobody's action
            rows["valid"][t] = ~self._pending
            rows["reward"][t, self._pending] = 0.0
            for i in np.flatnonzero(self._pending):
                self.slots.begin_episode(int(i), t + 1)
        self.slots.returns += rows["reward"][t]
        done = (np.asarray(terminated) | np.asarray(truncated)) & ~self._pending
        self._pending = done if self.mode == AutoresetMode.NEXT_STEP else np.zeros_like(done)
        if done.any():
            rows["terminated"][t], rows["truncated"][t] = terminated & done, truncated & done
            self._end(t, done, info)

    def _end(self, t: int, done: Array, info: dict[str, Any]) -> None:
        rows = self._rows
        same_step = self.mode == AutoresetMode.SAME_STEP
        for i in np.flatnonzero(done):
            k = self.slots.end_episode(int(i), t)
            place = k // self.num_envs, k % self.num_envs
            final = dict(leaves(self._obs, info["final_obs"][i])) if same_step else {}
            for name in self.current:
                self._final[name][place] = final[name] if same_step else rows[name][t + 1, i]
        if self.mode == AutoresetMode.DISABLED:
            obs, _ = self.env.reset(options={"reset_mask": done})
            for name, leaf in leaves(self._obs, obs):
                rows[name][t + 1] = leaf
        if self.mode != AutoresetMode.NEXT_STEP:
            for i in np.flatnonzero(done):
                self.slots.begin_episode(int(i), t + 1)

    def finish(self, steps: int) -> bytes:
        for name, current in self.current.items():
            np.copyto(current, self._rows[name][steps])
        return self.slots.finish(steps)

    def recover(self, i: int | None) -> None:
        """After an exception nothing of the vector can be trusted: build it anew."""
        self.env.close()
        self.slots.rewind()
        self._build()
        self._pending[:] = False

    def seed_of(self, i: int) -> int:
        return episode_seed(self.slots.roots[i], self.slots.first + i, self.slots.episodes[i])

    def close(self) -> None:
        self._progress[PHASE] = Phase.CLOSE
        self.env.close()
