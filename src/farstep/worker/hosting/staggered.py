"""Hosts for `EnvConfig.stagger`: the episodes of their environments are spread over the horizon (`stagger.py`).

Normally an episode starts when the previous episode of its slot ends. A slot is out of phase if its episode started for
another reason: a first start, a reset, a replaced or parked worker or a failed environment. Before the next rollout,
the host advances the slot to the episode step that the schedule prescribes.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np

from farstep.acting.client import ServedActor
from farstep.core import Array
from farstep.errors import ConfigError
from farstep.rollout.progress import ACT, COUNT, PHASE, SLOT, STEP
from farstep.rollout.rows import Slots
from farstep.rollout.seeds import advance_seed
from farstep.rollout.sources import Source
from farstep.schema import leaves, nest
from farstep.worker.acting import Actor
from farstep.worker.hosting.base import Host, HostedEnvs, Info
from farstep.worker.hosting.stagger import StaggerSchedule
from farstep.worker.hosting.vector import HostedVector

CheckCancelled = Callable[[], None]
"""Raises `TicketCancelled` if the head cancelled the running ticket."""


class Staggered(Host):
    """Base class of staggered hosts: tracks the slots that are out of phase."""

    _schedule: StaggerSchedule
    _out_of_phase: Array
    _stagger_steps: int
    """Number of steps since the last `report` that only brought slots into phase."""

    def _stagger(self, schedule: StaggerSchedule) -> None:
        self._schedule, self._horizon = schedule, schedule.horizon
        self._out_of_phase = np.zeros(self.num_envs, bool)
        self._stagger_steps = 0

    def advance_to_phase(self, steps: int, actor: Actor | ServedActor, check_cancelled: CheckCancelled) -> None:
        """Bring all slots into phase before a chunk of `steps` rows."""
        if self._out_of_phase.any():
            self._schedule.fix_offsets(self.slots, steps)
            self._advance_slots(actor, check_cancelled)
            self._out_of_phase[:] = False

    def _advance_slots(self, actor: Actor | ServedActor, check_cancelled: CheckCancelled) -> None:
        raise NotImplementedError

    def reenter(self, clock: int) -> bool:
        """Bring slots to the phase that is due now, because the worker was suspended while others rolled.

        Args:
            clock: The schedule's clock of the other workers.

        Returns:
            Whether episodes in progress were abandoned, so that the next rows do not continue the last ones.
        """
        return self._schedule.catch_up(clock, self.slots.total_rows) and self._schedule.has_offsets and self._reenter()

    def _reenter(self) -> bool:
        raise NotImplementedError

    def reset(self, mask: Array | None, roots: list[int] | None, options: Info | None) -> None:
        if mask is None:
            self._schedule.restart(self.slots.total_rows)
        super().reset(mask, roots, options)

    def report(self) -> tuple[int, int]:
        """Return the schedule's clock, and the number of steps since the last call that are not part of a chunk."""
        steps, self._stagger_steps = self._stagger_steps, 0
        return self._schedule.clock(self.slots.total_rows), steps


class StaggeredEnvs(HostedEnvs, Staggered):
    """Staggered single environments, one per slot."""

    def __init__(self, source: Source, slots: Slots, progress: memoryview, schedule: StaggerSchedule) -> None:
        super().__init__(source, slots, progress)
        self._stagger(schedule)
        self._gated = schedule.stagger.early == "gate"
        self._sampler = deepcopy(self.action_space)
        self._left = np.zeros(self.num_envs, np.int64)
        """Remaining steps until each slot is in phase; -1 if not computed yet. Kept if the ticket is cancelled."""
        self._due = np.zeros(self.num_envs, np.int64)
        """The row at which each slot must start a new episode."""
        self._next_due = 0
        """A lower bound of `_due`."""
        self._waiting = np.zeros(self.num_envs, bool)
        """Slots whose episode ended early, and which wait for the gate: the start of their group's next episode."""
        self._num_waiting = 0

    def _start(self, chosen: Array, options: Info | None) -> None:
        self._out_of_phase |= chosen
        self._left[chosen] = -1
        super()._start(chosen, options)

    # ---- bringing slots into phase ----

    def _reenter(self) -> bool:
        """With init="clock", end episodes in progress at the next gate; otherwise abandon them."""
        if self._schedule.stagger.init == "clock":
            for i in range(self.num_envs):
                self._set_due(i, self._gate(i, self.slots.total_rows))
            return False
        for i in range(self.num_envs):
            if self._waiting[i]:
                self._wake(i)
                self.slots.started[i] = False  # the next episode has not started, so it must not be skipped
            elif self.slots.started[i]:
                self.slots.skip(i)
        return True

    def _advance_slots(self, actor: Actor | ServedActor, check_cancelled: CheckCancelled) -> None:
        now, init = self.slots.total_rows, self._schedule.stagger.init
        for i in np.flatnonzero(self._out_of_phase & (self._left < 0)).tolist():
            self._left[i] = 0 if init == "clock" else self._schedule.phase(i, now)
        try:
            if init == "policy":
                self._advance_with_agent(actor, check_cancelled)
            else:
                self._advance_at_random(check_cancelled)
        finally:
            for name, current in self.current.items():
                self._rows[name][0] = current
        for i in np.flatnonzero(self._out_of_phase).tolist():
            whole = init != "clock" and not self._gated  # the episode lasts for the full horizon
            self._set_due(i, int(self.slots.start_row[i]) + self._horizon if whole else self._gate(i, now))

    def _advance_at_random(self, check_cancelled: CheckCancelled) -> None:
        for i in np.flatnonzero(self._left > 0).tolist():
            self._seed_sampler(i)
            while self._left[i] > 0:
                check_cancelled()
                if self._advance_one(i, self._sampler.sample()):
                    self._seed_sampler(i)

    def _seed_sampler(self, i: int) -> None:
        self._sampler.seed(advance_seed(self.slots.roots[i], self.slots.first + i, self.slots.episodes[i]))

    def _advance_with_agent(self, actor: Actor | ServedActor, check_cancelled: CheckCancelled) -> None:
        """Advance slots with the agent's actions. The agent acts for all slots in row 0; only slots out of phase
        step."""
        rows, starts = self._rows, self._out_of_phase.copy()
        with actor.restoring_state():
            while (self._left > 0).any():
                check_cancelled()
                for name, current in self.current.items():
                    rows[name][0] = current
                rows["episode_start"][0] = starts
                self._progress[PHASE] = ACT
                self._progress[COUNT] += 1
                actor.timed_act(0)
                starts[:] = False
                actions = self._envs.actions(rows, 0)
                for i in np.flatnonzero(self._left > 0).tolist():
                    starts[i] = self._advance_one(i, actions[i])
        rows["episode_start"][0] = False

    def _advance_one(self, i: int, action: Any) -> bool:
        """Do one step that no chunk records. Return whether it ended an episode."""
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
        slots.start_row[i] -= 1  # the step counts toward the length of the episode
        self._stagger_steps += 1
        self._left[i] -= 1
        ended = bool(terminated or truncated)
        if ended:
            slots.episodes[i] += 1
            self._begin_episode(i, self.current, 0, None)
        return ended

    # ---- rows ----

    def step(self, t: int, part: slice | None = None) -> None:
        assert part is None, "slots of a staggered worker step together"
        if self._num_waiting:
            self._rows["valid"][t] = ~self._waiting
        super().step(t)
        now = self.slots.total_rows + t + 1
        if now >= self._next_due:
            self._start_due_episodes(t, now)

    def _start_due_episodes(self, t: int, now: int) -> None:
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
        if self._gated and not self._out_of_phase[i] and self._schedule.phase(i, now):
            self._wait(i, target, now)
            return
        super()._begin_episode(i, target, row, options)
        self._set_due(i, now + self._horizon)

    def _set_due(self, i: int, row: int) -> None:
        self._due[i] = row
        self._next_due = min(self._next_due, row)

    def _gate(self, i: int, now: int) -> int:
        """The row at which slot `i`'s group starts its next episode."""
        return now + self._horizon - self._schedule.phase(i, now)

    def _wait(self, i: int, last: dict[str, Array], now: int) -> None:
        """Pause slot `i` until the gate: its rows repeat the episode's last observation, with `valid` False."""
        obs = nest(self._obs, {name: array[i].copy() for name, array in last.items()})
        self._steps[i] = partial(_paused_step, obs)
        self._waiting[i] = True
        self._num_waiting += 1
        self._set_due(i, self._gate(i, now))

    def _wake(self, i: int) -> None:
        self._steps[i] = self._envs.envs[i].step
        self._waiting[i] = False
        self._num_waiting -= 1

    def finish(self, steps: int) -> bytes:
        ends = super().finish(steps)
        self.slots.resume[self._waiting] = np.array(self.slots.episodes, np.int64)[self._waiting]  # not started yet
        return ends

    def reset(self, mask: Array | None, roots: list[int] | None, options: Info | None) -> None:
        for i in np.flatnonzero(self._waiting if mask is None else self._waiting & mask).tolist():
            self._wake(i)
            self.slots.started[i] = False  # the next episode has not started, so the reset must not skip it
        super().reset(mask, roots, options)

    def recover(self, i: int | None) -> None:
        for k in np.flatnonzero(self._waiting).tolist():
            self._wake(k)
        super().recover(i)


def _paused_step(obs: Any, action: Any) -> tuple[Any, float, bool, bool, Info]:
    return obs, 0.0, False, False, {}


class StaggeredVector(HostedVector, Staggered):
    """One staggered vector environment.

    A vector environment steps all slots together. The host therefore brings slots into phase by truncating their first
    episodes, not by extra steps.
    """

    def __init__(self, source: Source, slots: Slots, progress: memoryview, schedule: StaggerSchedule) -> None:
        super().__init__(source, slots, progress)
        self._stagger(schedule)
        self._first_row = np.full(self.num_envs, -1, np.int64)
        """For each slot, the first row of the episode that is truncated early."""
        self._first_length = np.zeros(self.num_envs, np.int64)
        """For each slot, the length of the episode that is truncated early."""

    def _start(self, chosen: Array, options: Info | None) -> None:
        self._out_of_phase |= chosen
        super()._start(chosen, options)

    def _reenter(self) -> bool:
        """End episodes in progress when the next ones of their groups are due."""
        now = self.slots.total_rows
        for i in range(self.num_envs):
            self._first_row[i] = self.slots.start_row[i]
            self._first_length[i] = now - self.slots.start_row[i] + self._horizon - self._schedule.phase(i, now)
        return False

    def _advance_slots(self, actor: Actor | ServedActor, check_cancelled: CheckCancelled) -> None:
        now = self.slots.total_rows
        for i in np.flatnonzero(self._out_of_phase).tolist():
            self._first_row[i] = now
            self._first_length[i] = self._horizon - self._schedule.phase(i, now)

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
