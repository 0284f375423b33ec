"""Hosting for `make_vec`: single environments with exactly the semantics of Gymnasium's `SyncVectorEnv`.

The head chooses the actions. An environment is seeded once and then keeps its own generator. A chunk has one step: row
0 holds the action, reward and flags, row 1 the observation after the step. Final observations are in the infos.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from farstep.core import Array
from farstep.errors import WireError
from farstep.rollout.progress import COUNT, PHASE, SLOT, STEP
from farstep.rollout.rows import Rows, Slots
from farstep.rollout.sources import Source
from farstep.schema import leaves, space_schema
from farstep.wire.codec import pack
from farstep.worker.hosting.base import Info, empty_like
from farstep.worker.hosting.single_envs import SingleEnvs, as_info, explain_step, outside


class StrictEnvs:
    """Single environments, one per slot, stepped with the head's actions."""

    def __init__(self, source: Source, slots: Slots, progress: memoryview, mode: AutoresetMode) -> None:
        self.slots, self._progress = slots, progress
        self._next_step, self._same_step = mode == AutoresetMode.NEXT_STEP, mode == AutoresetMode.SAME_STEP
        self.num_envs = len(slots.roots)
        self._envs = SingleEnvs(source, self.num_envs, progress, slots.first)
        self.envs = self._envs.envs
        self.observation_space, self.action_space = self._envs.spaces
        self._check_spaces()
        self._obs, schema = space_schema(self.observation_space, "obs")
        self._action, _ = space_schema(self.action_space, "action")
        self.current = empty_like(schema, self.num_envs)
        self._done = [False] * self.num_envs
        self._stepped = False
        """Whether all environments have stepped. Dtypes of observations are checked only in the first step."""
        self._seeds: list[int | None] = [None] * self.num_envs
        self.infos: list[tuple[int, Info | None, Info]] = []
        """Infos of the slots that have any: the slot, the final observation and info of an ended episode (None unless
        SAME_STEP), and the info."""

    def _check_spaces(self) -> None:
        for i, env in enumerate(self.envs):
            if env.observation_space != self.observation_space or env.action_space != self.action_space:
                raise RuntimeError(
                    f"environment {self.slots.first + i} has spaces {env.observation_space} and {env.action_space}; "
                    f"the first has {self.observation_space} and {self.action_space}. All must have equal spaces."
                )

    def reset(self, mask: Array | None, seeds: list[int | None] | None, options: Info | None) -> None:
        """`SyncVectorEnv.reset` for the masked slots."""
        for i in range(self.num_envs):
            if mask is None or mask[i]:
                seed = seeds[i] if seeds else None
                self._seeds[i] = self._seeds[i] if seed is None else seed
                info = self._envs.reset(i, seed, options, self.current)
                self.slots.start_row[i] = self.slots.total_rows  # errors say the step of the episode
                self._done[i] = False
                if info:
                    self.infos.append((i, None, info))

    def _autoreset(self, i: int, final: Info | None = None) -> None:
        """Reset a slot as part of a step."""
        info = self._envs.reset(i, None, None, self._after)
        self.slots.start_row[i] = self.slots.total_rows + 1
        self._progress[PHASE] = STEP
        if info or final:
            self.infos.append((i, final, info))

    def want_infos(self, wanted: bool) -> None:
        """Clear the infos; they are always recorded, as in Gymnasium."""
        self.infos = []

    def begin(self, rows: Rows, steps: int) -> None:
        self._rows = rows.row
        self._outcome = tuple(rows.row[key][0] for key in ("reward", "terminated", "truncated"))
        actions = rows.row[self._action][0] if isinstance(self._action, str) else None
        self._scalars = actions if actions is not None and actions.ndim == 1 else None
        self._flagged = True  # the flags of an earlier chunk may be set
        self._after = {name: rows.row[name][steps] for name in self.current}

    def step(self, t: int) -> None:
        """One `SyncVectorEnv.step` of this worker's slots."""
        if self._flagged:
            _, terminations, truncations = self._outcome
            terminations[:] = truncations[:] = self._flagged = False
        self._step(range(self.num_envs))

    def step_some(self, chosen: Sequence[int]) -> None:
        """Step only the chosen slots. For them, this counts as a chunk of its own."""
        _, terminations, truncations = self._outcome
        terminations[chosen] = truncations[chosen] = False
        self._step(chosen)
        self.slots.total_rows += 1
        self.slots.start_row += 1  # the others have not stepped
        self.slots.start_row[chosen] -= 1

    def _step(self, chosen: Sequence[int]) -> None:
        progress, rows, after = self._progress, self._rows, self._after
        progress[PHASE] = STEP
        progress[COUNT] += 1
        rewards, terminations, truncations = self._outcome
        next_step, same_step = self._next_step, self._same_step
        single = after[self._obs] if isinstance(self._obs, str) else None
        shape = None if single is None or not self._stepped else single.shape[1:]
        check = self._envs.check_obs if self._stepped else self._envs.check_first_obs
        done = self._done.copy()  # an error leaves it as it was, as in Gymnasium
        actions: list[Any] = list(self._envs.actions(rows, 0) if self._scalars is None else self._scalars)
        envs = self.envs
        for i in chosen:
            if done[i] and next_step:
                self._autoreset(i)
                rewards[i], done[i] = 0.0, False
                continue
            progress[SLOT] = i
            try:
                obs, reward, terminated, truncated, info = envs[i].step(actions[i])
            except Exception as error:
                explain_step(error)
                for _, clause in outside(self.action_space, actions[i]):
                    error.add_note(f"The {clause}.")
                raise
            rewards[i] = reward
            if shape is None or getattr(obs, "shape", None) != shape:
                check(obs)
            if single is not None:
                single[i] = obs
            else:
                for name, leaf in leaves(self._obs, obs):
                    after[name][i] = leaf
            if terminated or truncated:
                terminations[i], truncations[i], done[i], self._flagged = terminated, truncated, True, True
                if same_step:
                    # Copy the object that the environment returned, because the environment may reuse its memory.
                    self._autoreset(i, {"final_obs": deepcopy(obs), "final_info": as_info(info)})
                    continue
            if info:
                self.infos.append((i, None, as_info(info)))
        self._done, self._stepped = done, True

    def keep_observations(self) -> None:
        """Copy the last observations, for a reset of some slots that follows."""
        for name, after in self._after.items():
            np.copyto(self.current[name], after)

    def finish(self, steps: int) -> bytes:
        self.slots.total_rows += steps
        if steps:
            self.keep_observations()
        else:
            for name, current in self.current.items():
                self._after[name][:] = current
        return b""

    def recover(self, i: int | None) -> None:
        """Do nothing: the user steps these environments and handles their errors."""

    def seed_of(self, i: int) -> int | None:
        return self._seeds[i]

    def call(self, name: str, args: tuple[Any, ...], kwargs: Info) -> list[Any]:
        """Like `SyncVectorEnv.call`: return an attribute of each environment, or call it if it is callable."""
        results = []
        for i, env in enumerate(self.envs):
            self._progress[SLOT] = i
            function = env.get_wrapper_attr(name)
            results.append(function(*args, **kwargs) if callable(function) else function)
        return results

    def set_attr(self, name: str, values: list[Any]) -> None:
        for i, (env, value) in enumerate(zip(self.envs, values, strict=True)):
            self._progress[SLOT] = i
            env.set_wrapper_attr(name, value)

    def describe(self) -> list[Any]:
        """Metadata and render mode, which the vector environment needs besides the spaces."""
        metadata = {key: value for key, value in self.envs[0].metadata.items() if _is_data(value)}
        return [{"metadata": metadata, "render_mode": self.envs[0].render_mode}]

    def render(self) -> list[Any]:
        return [env.render() for env in self.envs]

    def close(self) -> None:
        self._envs.close()


def _is_data(value: object) -> bool:
    try:
        pack(value)
    except WireError:
        return False
    return True
