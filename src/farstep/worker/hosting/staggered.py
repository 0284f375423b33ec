"""Hosting of environments that are spread over the horizon (see `stagger.py`): off, none of this is there.

Whenever slots begin other than by the end of an episode (the first time, after a reset, where a worker was replaced or
an environment failed), they are brought to the place that they should be in by then, before the next rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np

from farstep.core import Array
from farstep.errors import ConfigError
from farstep.rollout.progress import ACT, COUNT, PHASE, SLOT, STEP
from farstep.rollout.rows import Slots
from farstep.rollout.seeds import advance_seed
from farstep.rollout.sources import Source
from farstep.schema import leaves, nest
from farstep.worker.acting import Actor
from farstep.worker.hosting.base import Host, HostedEnvs, Info
from farstep.worker.hosting.stagger import Places
from farstep.worker.hosting.vector import HostedVector

StillWanted = Callable[[], None]
"""Raises if the ticket in hand was taken back."""


class Staggered(Host):
    """What staggered hosts share: which slots are still to be brought to their places."""

    _places: Places
    _unplaced: Array
    _stagger_steps: int
    """Steps that brought slots to their places, and that were not reported yet."""

    def _stagger(self, places: Places) -> None:
        self._places, self._horizon = places, places.horizon
        self._unplaced = np.zeros(self.num_envs, bool)
        self._stagger_steps = 0

    def place(self, steps: int, actor: Actor, still_wanted: StillWanted) -> None:
        """A chunk of so many steps begins: first bring slots to their places."""
        if self._unplaced.any():
            self._places.settle(self.slots, steps)
            self._place(actor, still_wanted)
            self._unplaced[:] = False

    def _place(self, actor: Actor, still_wanted: StillWanted) -> None:
        raise NotImplementedError

    def reset(self, mask: Array | None, roots: list[int] | None, options: Info | None) -> None:
        if mask is None:
            self._places.anew(self.slots.total_rows)
        super().reset(mask, roots, options)

    def report(self) -> tuple[int, int]:
        """What a chunk says of the schedule: its clock, and steps that nobody was given."""
        taken, self._stagger_steps = self._stagger_steps, 0
        return self._places.clock(self.slots.total_rows), taken


class StaggeredEnvs(HostedEnvs, Staggered):
    """Single environments, staggered."""

    def __init__(self, source: Source, slots: Slots, progress: memoryview, places: Places) -> None:
        super().__init__(source, slots, progress)
        self._stagger(places)
        self._gated = places.stagger.early == "gate"
        self._sampler = deepcopy(self.action_space)
        self._left = np.zeros(self.num_envs, np.int64)
        """Steps to each slot's place; -1 until it is known. Kept if a ticket is taken back meanwhile."""
        self._due = np.zeros(self.num_envs, np.int64)
        """The row that begins a new episode at the latest."""
        self._next_due = 0
        """Nothing is due before."""
        self._waiting = np.zeros(self.num_envs, bool)
        """Slots whose episode has ended, and whose group has not begun anew yet."""
        self._num_waiting = 0

    def _start(self, chosen: Array, options: Info | None) -> None:
        self._unplaced |= chosen
        self._left[chosen] = -1
        super()._start(chosen, options)

    # ---- to their places ----

    def _place(self, actor: Actor, still_wanted: StillWanted) -> None:
        now, init = self.slots.total_rows, self._places.stagger.init
        for i in np.flatnonzero(self._unplaced & (self._left < 0)).tolist():
            self._left[i] = 0 if init == "clock" else self._places.phase(i, now)
        try:
            if init == "policy":
                self._advance_with(actor, still_wanted)
            else:
                self._advance(still_wanted)
        finally:
            for name, current in self.current.items():
                self._rows[name][0] = current
        for i in np.flatnonzero(self._unplaced).tolist():
            whole = init != "clock" and not self._gated  # it ends where its own episode does
            self._set_due(i, int(self.slots.start_row[i]) + self._horizon if whole else self._gate(i, now))

    def _advance(self, still_wanted: StillWanted) -> None:
        for i in np.flatnonzero(self._left > 0).tolist():
            self._seed_sampler(i)
            while self._left[i] > 0:
                still_wanted()
                if self._advance_one(i, self._sampler.sample()):
                    self._seed_sampler(i)

    def _seed_sampler(self, i: int) -> None:
        self._sampler.seed(advance_seed(self.slots.roots[i], self.slots.first + i, self.slots.episodes[i]))

    def _advance_with(self, actor: Actor, still_wanted: StillWanted) -> None:
        """The agent acts for all slots, and those that are at their places do not mind; row 0 is free until then."""
        rows, starts = self._rows, self._unplaced.copy()
        with actor.restoring_state():
            while (self._left > 0).any():
                still_wanted()
                for name, current in self.current.items():
                    rows[name][0] = current
                rows["episode_start"][0] = starts
                self._progress[PHASE] = ACT
                self._progress[COUNT] += 1
                actor.act(0)
                starts[:] = False
                actions = self._envs.actions(rows, 0)
                for i in np.flatnonzero(self._left > 0).tolist():
                    starts[i] = self._advance_one(i, actions[i])
        rows["episode_start"][0] = False

    def _advance_one(self, i: int, action: Any) -> bool:
        """One step that nobody is given; whether it ended an episode."""
        progress, slots = self._progress, self.slots
        progress[PHASE], progress[SLOT] = STEP, i
        progress[COUNT] += 1
        try:
            obs, reward, terminated, truncated, _ = self._steps[i](action)
            self._envs.check_obs(obs)
            slots.returns[i] += reward
        except Exception as error:
            self._blame(error, 0, i, action)
            raise
        for name, leaf in leaves(self._obs, obs):
            self.current[name][i] = leaf
        slots.start_row[i] -= 1  # the step is one of the episode's
        self._stagger_steps += 1
        self._left[i] -= 1
        ended = bool(terminated or truncated)
        if ended:
            slots.episodes[i] += 1
            self._begin_episode(i, self.current, 0, None)
        return ended

    # ---- rows ----

    def step(self, t: int) -> None:
        if self._num_waiting:
            self._rows["valid"][t] = ~self._waiting
        super().step(t)
        now = self.slots.total_rows + t + 1
        if now >= self._next_due:
            self._do_due(t, now)

    def _do_due(self, t: int, now: int) -> None:
        for i in np.flatnonzero(self._due <= now).tolist():
            if self._waiting[i]:
                self._wake(i)
                self._begin_episode(i, {name: self._rows[name][t + 1] for name in self.current}, t + 1, None)
            else:
                self._progress[SLOT] = i
                self._end(t, i, False, True, self.infos[i] if self.infos is not None else {})
        self._next_due = int(self._due.min())

    def _begin_episode(self, i: int, target: dict[str, Array], row: int, options: Info | None) -> None:
        now = self.slots.total_rows + row
        if self._gated and not self._unplaced[i] and self._places.phase(i, now):
            self._wait(i, target, now)
            return
        super()._begin_episode(i, target, row, options)
        self._set_due(i, now + self._horizon)

    def _set_due(self, i: int, row: int) -> None:
        self._due[i] = row
        self._next_due = min(self._next_due, row)

    def _gate(self, i: int, now: int) -> int:
        """The row at which slot `i`'s group begins anew."""
        return now + self._horizon - self._places.phase(i, now)

    def _wait(self, i: int, last: dict[str, Array], now: int) -> None:
        """Stand still until the gate: rows repeat the episode's last observation, and count for nothing."""
        obs = nest(self._obs, {name: array[i].copy() for name, array in last.items()})
        self._steps[i] = partial(_stand, obs)
        self._waiting[i] = True
        self._num_waiting += 1
        self._set_due(i, self._gate(i, now))

    def _wake(self, i: int) -> None:
        self._steps[i] = self._envs.envs[i].step
        self._waiting[i] = False
        self._num_waiting -= 1

    def finish(self, steps: int) -> bytes:
        ends = super().finish(steps)
        self.slots.resume[self._waiting] = np.array(self.slots.episodes, np.int64)[self._waiting]  # not begun yet
        return ends

    def reset(self, mask: Array | None, roots: list[int] | None, options: Info | None) -> None:
        for i in np.flatnonzero(self._waiting if mask is None else self._waiting & mask).tolist():
            self._wake(i)
            self.slots.started[i] = False  # of its next episode, which it would otherwise leave out
        super().reset(mask, roots, options)

    def recover(self, i: int | None) -> None:
        for k in np.flatnonzero(self._waiting).tolist():
            self._wake(k)
        super().recover(i)


def _stand(obs: Any, action: Any) -> tuple[Any, float, bool, bool, Info]:
    return obs, 0.0, False, False, {}


class StaggeredVector(HostedVector, Staggered):
    """One vector environment whose first episodes are cut short, each at its place; it cannot step only some."""

    def __init__(self, source: Source, slots: Slots, progress: memoryview, places: Places) -> None:
        super().__init__(source, slots, progress)
        self._stagger(places)
        self._first_row = np.full(self.num_envs, -1, np.int64)
        """Where the episode began that is cut short."""
        self._first_length = np.zeros(self.num_envs, np.int64)

    def _start(self, chosen: Array, options: Info | None) -> None:
        self._unplaced |= chosen
        super()._start(chosen, options)

    def _place(self, actor: Actor, still_wanted: StillWanted) -> None:
        now = self.slots.total_rows
        for i in np.flatnonzero(self._unplaced).tolist():
            self._first_row[i] = now
            self._first_length[i] = self._horizon - self._places.phase(i, now)

    def step(self, t: int) -> None:
        super().step(t)
        start, now = self.slots.start_row, self.slots.total_rows + t + 1
        limit = np.where(start == self._first_row, self._first_length, self._horizon)
        over = (now - start >= limit) & ~self._pending
        if over.any():
            self._truncate(t, over)

    def _truncate(self, t: int, over: Array) -> None:
        rows, ended, last_infos = self._rows, np.flatnonzero(over), self.infos and list(self.infos)
        rows["truncated"][t, ended] = True
        for i in ended.tolist():
            k = self.slots.end_episode(i, t)
            for name in self.current:
                self._final[name][k // self.num_envs, k % self.num_envs] = rows[name][t + 1, i]
        try:
            super()._start(over, None)
        except ConfigError as error:
            raise ConfigError(f"stagger resets environments at different times, but {error}") from error
        for name, current in self.current.items():
            rows[name][t + 1, ended] = current[ended]
        self.slots.start_row[ended] = self.slots.total_rows + t + 1
        self._progress[PHASE] = STEP
        if self.infos is not None and last_infos:
            for i in ended.tolist():
                self.infos[i] = {**self.infos[i], "final_info": last_infos[i]}
