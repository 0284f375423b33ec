"""Hosts of single environments: one process steps many environments and writes directly into the chunk's rows.

Every host ends an episode in the same way, regardless of the environment's autoreset mode. The row gets the
`terminated` or `truncated` flag, and the final observation is stored in `final_obs`. The host resets the environment at
once with the seed of its next episode. The next row is the first row of that episode.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import numpy as np

from farstep.batch import info_array
from farstep.core import Array
from farstep.errors import AgentError, described
from farstep.rollout.progress import ACT, COUNT, EPISODES, PHASE, RESET, SLOT, STEP
from farstep.rollout.rows import Rows, Slots, with_nan
from farstep.rollout.sources import Source
from farstep.schema import Schema, leaves, space_schema
from farstep.worker.hosting.frame_stacks import stacked_frames
from farstep.worker.hosting.single_envs import SingleEnvs, as_info, explain_step, outside

Space = gymnasium.spaces.Space[Any]
Info = dict[str, Any]
_NOT_DETERMINISTIC = "the environment is not deterministic, given its seed and actions"


@dataclass(frozen=True)
class SavedSlot:
    """A slot's episode in progress, as saved."""

    steps: int | None
    """Steps of the episode so far; None if it had not started."""
    actions: Mapping[str, Array]
    """The actions of these steps, `[steps, ...]` by name."""
    obs: Mapping[str, Array]
    """The last observation."""


class Host:
    """Base class of hosts in workers that act: the slots and their latest observations, with which a chunk starts."""

    num_stacked_frames = 0
    """Frames per stacked observation; 0: observations are not stacked, as far as known."""

    def __init__(
        self, spaces: tuple[Space, Space], slots: Slots, progress: memoryview, info_keys: Sequence[str] = ()
    ) -> None:
        self.slots, self._progress = slots, progress
        self._info_arrays = {key: info_array(key) for key in info_keys}
        """Name of the array that records each selected entry of the infos."""
        self.num_envs = len(slots.roots)
        self.observation_space, self.action_space = spaces
        self._obs, self._obs_schema = space_schema(self.observation_space, "obs")
        self.current = empty_like(self._obs_schema, self.num_envs)
        self.infos: list[Info] | None = None
        self._pending_error: tuple[int, BaseException] | None = None
        """Slot and error of a reset that failed outside of a ticket; the next ticket raises the error."""

    def _start(self, chosen: Array, options: Info | None) -> None:
        """Reset the chosen slots with the seeds of their episodes, and write the observations to `current`."""
        raise NotImplementedError

    def reset(self, mask: Array | None, roots: list[int] | None, options: Info | None) -> None:
        """Start new episodes in the masked slots (all if `mask` is None). With new `roots`, start at episode 0."""
        self._pending_error = None  # the failed episode is replaced
        chosen = self.slots.choose(mask, roots)
        if roots is not None:
            self._reseed(chosen)
        self._start(chosen, options)

    def _reseed(self, chosen: Array) -> None:
        """Hook for environments that take no seed in `reset`."""

    def prepare(self, failures: tuple[type[BaseException], ...]) -> None:
        """Start an episode in each slot that has none, so that a new agent can be tested on real observations.

        The next ticket raises errors whose types are in `failures`, because a ticket can be retried. Until then, the
        slots without an episode have a sample of the observation space as observation.
        """
        missing = ~self.slots.started
        try:
            if missing.any():
                self._start(missing, None)
        except failures as error:
            self._pending_error = self._progress[SLOT], error
            for name, leaf in leaves(self._obs, self.observation_space.sample()):
                self.current[name][~self.slots.started] = leaf

    def want_infos(self, wanted: bool) -> None:
        """Set whether to record the environments' infos during the next chunk; rollouts do not need them."""
        self.infos = [{} for _ in range(self.num_envs)] if wanted else None

    def begin(self, rows: Rows, steps: int) -> None:
        """Start a chunk of `steps` rows. Its first observation is the last observation of the previous chunk."""
        self.slots.begin_chunk()
        if self._pending_error is not None:
            (self._progress[SLOT], error), self._pending_error = self._pending_error, None
            self._progress[PHASE] = RESET
            raise error
        if not self.slots.started.all():
            self._start(~self.slots.started, None)
        self._rows = rows.row
        self._final = {name: rows.row["final_" + name] for name in self._obs_schema}
        for name, current in self.current.items():
            self._rows[name][0] = current
        rows.clear_flags(steps)
        for name in self._info_arrays.values():
            self._rows[name][:steps] = 0.0

    def finish(self, steps: int) -> bytes:
        """End a chunk, and keep its last observations for the next chunk. Return the records of ended episodes."""
        for name, current in self.current.items():
            np.copyto(current, self._rows[name][steps])
        return self.slots.finish(steps)

    def _record_info(self, t: int, i: int, info: Info) -> None:
        """Write the selected entries of the info of slot `i`'s step in row `t`."""
        for key, name in self._info_arrays.items():
            value = info.get(key, 0.0)
            try:
                self._rows[name][t, i] = value
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"step returned the info {key!r} = {value!r}; EnvConfig.info_keys names it, so a number or a bool "
                    "is expected."
                ) from error

    def _blame(self, error: Exception, t: int, i: int, action: Any) -> None:
        """If the agent's action is invalid, raise `AgentError` instead of the error of the step in row `t`.

        An action outside a Box only adds a note to the error. Such actions are common, because many environments clip.
        """
        explain_step(error)
        nan = i in with_nan(self._rows[name][t] for name in self.current)
        cause = " (the observation it acted on has NaN: check the environment)" if nan else ""
        for space, clause in outside(self.action_space, action):
            if not isinstance(space, gymnasium.spaces.Box):
                self._progress[PHASE] = ACT  # errors of the agent end the run, because a retry would fail too
                raise AgentError(
                    f"the agent's {clause}{cause}, in environment slot {self.slots.first + i}; the step raised "
                    f"{type(error).__name__}."
                ) from error
            error.add_note(f"The agent's {clause}{cause}.")

    def seed_of(self, i: int) -> int | None:
        """The seed of slot `i`'s episode; None if the episode is not seeded."""
        return self.slots.seed_of(i)


class HostedEnvs(Host):
    """Single environments, one per slot."""

    def __init__(self, source: Source, slots: Slots, progress: memoryview) -> None:
        self._envs = SingleEnvs(source, len(slots.roots), progress)
        self.num_stacked_frames = stacked_frames(self._envs.envs[0])
        super().__init__(self._envs.spaces, slots, progress, source.info_keys)
        self._single = self._obs if isinstance(self._obs, str) else None
        self._steps = [env.step for env in self._envs.envs]
        self._stepped = False
        """Whether all environments have stepped. Dtypes of observations are checked only in the first step."""
        self._rewards: list[Any] = [0.0] * self.num_envs
        self._gained = np.zeros(self.num_envs)
        self._seed_episodes, self._seeded = source.seed_episodes, [False] * self.num_envs
        # Faster than np.array, and raises for None instead of converting it to NaN.
        self._pack_rewards = partial(struct.Struct(f"{self.num_envs}d").pack_into, self._gained.data, 0)

    def _start(self, chosen: Array, options: Info | None) -> None:
        for i in np.flatnonzero(chosen).tolist():
            self._begin_episode(i, self.current, 0, options)

    def replay(self, saved: Sequence[SavedSlot], failures: tuple[type[BaseException], ...]) -> dict[int, str]:
        """Restore every slot's episode by resetting its environment and replaying its actions.

        Returns:
            The reason for each slot whose replay failed.
        """
        diverged = {}
        for i, slot in enumerate(saved):
            try:
                reason = self._replay_slot(i, slot)
            except failures as error:
                self._replace(i)
                self.slots.skip(i)
                reason = f"the environment raised {described(error)}; it is rebuilt and starts its next episode"
            if reason:
                diverged[self.slots.first + i] = reason
        return diverged

    def _replay_slot(self, i: int, saved: SavedSlot) -> str:
        self._begin_episode(i, self.current, 0, None)
        if saved.steps is None:
            return ""
        if saved.steps and len(next(iter(saved.actions.values()), ())) != saved.steps:
            self.slots.skip(i)
            return "the actions of the episode were not kept, so the slot starts its next episode"  # see `Journal`
        for t in range(saved.steps):
            self._progress[PHASE], self._progress[SLOT] = STEP, i
            self._progress[COUNT] += 1
            obs, reward, terminated, truncated, _ = self._steps[i](self._envs.action(saved.actions, t))
            if terminated or truncated:
                self.slots.skip(i)
                return (
                    f"the episode ended earlier than before, so the slot starts its next episode; {_NOT_DETERMINISTIC}"
                )
            self.slots.replayed(i, float(reward))
            for name, leaf in leaves(self._obs, obs):
                self.current[name][i] = leaf
        same = all(np.array_equal(self.current[name][i], leaf, equal_nan=True) for name, leaf in saved.obs.items())
        return "" if same else f"the observation differs from the saved observation; {_NOT_DETERMINISTIC}"

    def step(self, t: int, part: slice | None = None) -> None:
        """Step environments with the actions of row `t`. Write the new observations to row `t + 1`.

        Args:
            t: The row.
            part: Which environments; None: all. The parts of a row are stepped in order.
        """
        progress, rewards, rows = self._progress, self._rewards, self._rows
        progress[PHASE] = STEP
        progress[COUNT] += 1
        self.slots.row = t
        ended: list[tuple[int, bool, bool, Any]] = []
        steps, actions, first = self._steps, self._envs.actions(rows, t), 0
        if part is not None:
            steps, actions, first = steps[part], actions[part], part.start
        infos = self.infos
        try:
            if self._single is not None and infos is None and self._stepped and not self._info_arrays:
                next_obs = rows[self._single][t + 1]
                shape = next_obs.shape[1:]
                for i, (step, action) in enumerate(zip(steps, actions, strict=True), first):
                    progress[SLOT] = i
                    obs, rewards[i], terminated, truncated, info = step(action)
                    if getattr(obs, "shape", None) != shape:
                        self._envs.check_obs(obs)
                    next_obs[i] = obs
                    if terminated or truncated:
                        ended.append((i, terminated, truncated, info))
            else:
                check = self._envs.check_obs if self._stepped else self._envs.check_first_obs
                for i, (step, action) in enumerate(zip(steps, actions, strict=True), first):
                    progress[SLOT] = i
                    obs, rewards[i], terminated, truncated, info = step(action)
                    check(obs)
                    for name, leaf in leaves(self._obs, obs):
                        rows[name][t + 1, i] = leaf
                    if self._info_arrays:
                        self._record_info(t, i, as_info(info))
                    if terminated or truncated:
                        ended.append((i, terminated, truncated, info))
                    elif infos is not None:
                        infos[i] = as_info(info)
                self._stepped = self._stepped or first + len(steps) == self.num_envs
        except Exception as error:
            self._blame(error, t, progress[SLOT], actions[progress[SLOT] - first])
            raise
        try:
            self._pack_rewards(*rewards)
        except struct.error:
            self._raise_for_rewards()
        if part is None:
            rows["reward"][t] = self._gained
            self.slots.returns += self._gained
        else:
            rows["reward"][t, part] = self._gained[part]
            self.slots.returns[part] += self._gained[part]
        for i, terminated, truncated, info in ended:
            self._end(t, i, terminated, truncated, info)

    def _raise_for_rewards(self) -> None:
        for i, reward in enumerate(self._rewards):
            self._progress[SLOT] = i
            try:
                struct.pack("d", reward)
            except struct.error:
                raise TypeError(f"step returned the reward {reward!r}; a number is expected.") from None

    def _end(self, t: int, i: int, terminated: bool, truncated: bool, info: Any) -> None:
        rows = self._rows
        rows["terminated"][t, i], rows["truncated"][t, i] = terminated, truncated
        k = self.slots.end_episode(i, t)
        for name in self.current:
            self._final[name][k // self.num_envs, k % self.num_envs] = rows[name][t + 1, i]
        self._begin_episode(i, {name: rows[name][t + 1] for name in self.current}, t + 1, None)
        if self.infos is not None:
            self.infos[i] = {**self.infos[i], "final_info": as_info(info)}

    def _begin_episode(self, i: int, target: dict[str, Array], row: int, options: Info | None) -> None:
        self._progress[EPISODES + i] = self.slots.episodes[i] + 1
        seeds = self._seed_episodes or not self._seeded[i] or not self.slots.episodes[i]
        info = self._envs.reset(i, self.slots.seed_of(i) if seeds else None, options, target)
        self._seeded[i] = True
        self.slots.begin_episode(i, row)
        self._progress[PHASE] = STEP
        if self.infos is not None:
            self.infos[i] = info

    def recover(self, i: int | None) -> None:
        """Recover from an exception: rebuild environment `i`, if given, and discard the current chunk of all slots."""
        self.slots.rewind(() if i is None else (i,))
        if i is not None:
            self._replace(i)

    def _replace(self, i: int) -> None:
        self._envs.replace(i)
        self._steps[i] = self._envs.envs[i].step
        self._seeded[i] = False

    def seed_of(self, i: int) -> int | None:
        return self.slots.seed_of(i) if self._seed_episodes else None

    def close(self) -> None:
        self._envs.close()


def empty_like(schema: Schema, count: int) -> dict[str, Array]:
    """Arrays for one row of `count` slots."""
    return {name: np.zeros((count, *spec.shape), spec.dtype) for name, spec in schema.items()}
