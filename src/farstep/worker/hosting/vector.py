"""Host of a vector environment: a Gymnasium VectorEnv with any autoreset mode, or an EnvPool.

The rows equal those of single environments, with one exception. In mode NEXT_STEP, the step after the end of an episode
only resets the environment and ignores the action; the row of this step has `valid` False.
"""

from __future__ import annotations

import contextlib
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from farstep.core import Array
from farstep.errors import ConfigError
from farstep.rollout.progress import COUNT, PHASE, RESET, SLOT, STEP, Phase
from farstep.rollout.rows import Slots
from farstep.rollout.sources import Source
from farstep.schema import leaf_names, leaves, nest, space_schema
from farstep.worker.hosting.base import Host, Info
from farstep.worker.hosting.frame_stacks import stacked_frames
from farstep.worker.hosting.single_envs import check_dtypes


class HostedVector(Host):
    """One vector environment for all slots of a worker."""

    def __init__(self, source: Source, slots: Slots, progress: memoryview) -> None:
        self._source = source
        self.env = _build(source, slots, progress)
        self._pool = source.type == "envpool"
        self.num_stacked_frames = stacked_frames(self.env)
        if self._pool:
            self.mode = AutoresetMode.NEXT_STEP
            spaces = self.env.observation_space, self.env.action_space
        else:
            self.mode = self.env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
            spaces = self.env.single_observation_space, self.env.single_action_space
        super().__init__(spaces, slots, progress, source.info_keys)
        self._action, _ = space_schema(self.action_space, "action")
        self._action_names = leaf_names(self._action)
        self._one_seed: bool | None = None
        """Whether `reset` accepts only a single seed for all environments; None until the first reset."""
        self._checked = False
        """Whether the dtypes of a step's observations were checked."""
        self._pending = np.zeros(self.num_envs, bool)
        """Slots whose next step is only a reset (NEXT_STEP)."""

    def _reseed(self, chosen: Array) -> None:
        if self._pool:  # an EnvPool accepts a seed only at construction
            assert chosen.all(), "the head rejects a reset of some environments of an EnvPool with new seeds"
            self._rebuild()

    def _start(self, chosen: Array, options: Info | None) -> None:
        self._progress[PHASE] = RESET
        self._progress[COUNT] += 1
        ids = np.flatnonzero(chosen)
        if self._pool:
            obs, info = self.env.reset(ids.astype(np.int32))
            entries, count = np.arange(len(ids)), len(ids)  # an EnvPool returns only the requested environments
        else:
            obs, info = self._reset_vector(chosen, options)
            entries, count = ids, self.num_envs
        check_dtypes(leaves(self._obs, obs), self._obs_schema, self.env)
        for name, leaf in leaves(self._obs, obs):
            self.current[name][ids] = leaf[entries]
        if self.infos is not None:
            parts = split_infos(info, count)
            for i, k in zip(ids.tolist(), entries.tolist(), strict=True):
                self.infos[i] = parts[k]
        self._pending[ids] = False
        for i in ids.tolist():
            self.slots.begin_episode(i, 0)

    def _reset_vector(self, chosen: Array, options: Info | None) -> tuple[Any, Info]:
        """Reset with one seed per slot. If the environment rejects a list in the first reset, use one seed for all."""
        if not chosen.all():
            options = {**(options or {}), "reset_mask": chosen}
        if not self._one_seed:
            seeds = [self.slots.seed_of(i) if chosen[i] else None for i in range(self.num_envs)]
            try:
                result = self.env.reset(seed=seeds, options=options)
            except (TypeError, gymnasium.error.Error):
                if self._one_seed is False:  # the environment accepted a list before, so this error has another cause
                    raise
            else:
                self._one_seed = False
                return result  # type: ignore[no-any-return]
        if not chosen.all() and self.mode != AutoresetMode.DISABLED:
            # The environment would ignore the mask and reset all slots. In mode DISABLED it must support masks.
            raise ConfigError(
                f"reset_mask selects {int(chosen.sum())} of {self.num_envs} environments, but "
                f"{type(self.env.unwrapped).__name__} can only reset all of them together; reset all, or use "
                "type='gymnasium' or a SyncVectorEnv."
            )
        seed = self.slots.seed_of(int(np.flatnonzero(chosen)[0]))
        result = self.env.reset(seed=seed, options=options)
        self._one_seed = True
        return result  # type: ignore[no-any-return]

    def step(self, t: int) -> None:
        self._progress[PHASE] = STEP
        self._progress[COUNT] += 1
        rows = self._rows
        actions = nest(self._action, {name: rows[name][t].copy() for name in self._action_names})
        try:
            obs, reward, terminated, truncated, info = self.env.step(actions)
        except Exception as error:
            for slot in range(self.num_envs):
                action = nest(self._action, {name: rows[name][t, slot] for name in self._action_names})
                self._blame(error, t, slot, action)
            raise
        if not self._checked:
            check_dtypes(leaves(self._obs, obs), self._obs_schema, self.env)
            self._checked = True
        for name, leaf in leaves(self._obs, obs):
            rows[name][t + 1] = leaf
        rows["reward"][t] = reward
        if self.infos is not None:
            self.infos = split_infos(info, self.num_envs)
        if self._info_arrays:
            for slot, part in enumerate(split_infos(info, self.num_envs)):
                if not self._pending[slot]:
                    self._record_info(t, slot, part.get("final_info", part))
        if self._pending.any():  # for these slots the step was a reset
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

    def _end(self, t: int, done: Array, info: Info) -> None:
        rows, ended = self._rows, np.flatnonzero(done).tolist()
        same_step = self.mode == AutoresetMode.SAME_STEP
        for i in ended:
            k = self.slots.end_episode(i, t)
            place = k // self.num_envs, k % self.num_envs
            final = dict(leaves(self._obs, info["final_obs"][i])) if same_step else {}
            for name in self.current:
                self._final[name][place] = final[name] if same_step else rows[name][t + 1, i]
        if self.mode == AutoresetMode.DISABLED:
            obs, info = self.env.reset(options={"reset_mask": done})
            for name, leaf in leaves(self._obs, obs):
                rows[name][t + 1] = leaf
        if self.infos is not None and not same_step:
            after = split_infos(info, self.num_envs)
            for i in ended:
                self.infos[i] = {**after[i], "final_info": self.infos[i]}
        if self.mode != AutoresetMode.NEXT_STEP:
            for i in ended:
                self.slots.begin_episode(i, t + 1)

    def recover(self, i: int | None) -> None:
        """Recover from an exception: rebuild the vector. Any slot may have raised, so all start their next episode."""
        self.slots.rewind(range(self.num_envs))
        self._rebuild()

    def _rebuild(self) -> None:
        self._pending[:] = False
        with contextlib.suppress(Exception, SystemExit):
            self.env.close()
        self.env = _build(self._source, self.slots, self._progress)

    def close(self) -> None:
        self._progress[PHASE] = Phase.CLOSE
        self.env.close()


def _build(source: Source, slots: Slots, progress: memoryview) -> Any:
    progress[PHASE] = Phase.CONSTRUCT
    progress[COUNT] += 1
    progress[SLOT] = -1  # all slots are stepped together
    return source.build_vector(len(slots.roots), slots.seed_of(0))


def split_infos(batched: Info, count: int) -> list[Info]:
    """Split the infos of a vector environment into one per environment. Skip `final_obs`, which has its own array.

    In Gymnasium the mask `_key` marks the environments that have `key`. Without a mask (EnvPool), each array of length
    `count` has an entry for every environment.
    """
    parts: list[Info] = [{} for _ in range(count)]
    for key, value in batched.items():
        mask = batched.get(f"_{key}")
        if key == "final_obs" or (isinstance(key, str) and key.startswith("_") and key[1:] in batched):
            continue
        if isinstance(value, dict) and mask is not None:
            entries: Any = split_infos(value, count)
        elif isinstance(value, np.ndarray) and value.shape[:1] == (count,):
            # Convert to Python bools, because Gymnasium would put NumPy bools into an object array.
            entries = value.tolist() if value.dtype == bool and value.ndim == 1 else value
        else:
            continue
        for i in range(count) if mask is None else np.flatnonzero(mask):
            parts[i][key] = entries[i]
    return parts
