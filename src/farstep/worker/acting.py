"""A worker's copy of the agent. It acts row by row, and keeps recurrent state and generators between chunks."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np

from farstep.agents.base_weights import BaseBytes, unpickle_agent
from farstep.agents.parameters import ParameterLoader, as_array, leaves_of
from farstep.agents.policy import Policy, same_randomness
from farstep.batch import PRIORITY, RESERVED, is_final
from farstep.config.env import ALL_WEIGHTS, WeightsConfig
from farstep.core import Array, Nested
from farstep.errors import AgentError, SpaceError, described
from farstep.rollout.rows import Rows, Slots, with_nan
from farstep.rollout.seeds import episode_generator
from farstep.schema import (
    ArraySpec,
    Schema,
    Structure,
    differences,
    first_misfit,
    leaf_names,
    leaves,
    map_leaves,
    nest,
    value_structure,
)
from farstep.worker.hosting.single_envs import outside


class Actor:
    """A worker's copy of the agent. `act` writes the actions, and all other arrays that the agent returns, into a
    row."""

    def __init__(
        self,
        payload: bytes,
        inference: str,
        obs: Structure,
        slots: Slots,
        weights: WeightsConfig = ALL_WEIGHTS,
        has_gpu: bool = False,
        base: BaseBytes | None = None,
        space: gymnasium.spaces.Space[Any] | None = None,
    ) -> None:
        self._slots, self._obs, self._space = slots, obs, space
        # `dry_run` calls a second copy, because an agent may count its calls. Unpickle this copy first: unpickling a
        # class of the user's script again overwrites class attributes, so the copy that acts must come last.
        numbers = slots.first + np.arange(len(slots.roots))
        self._trial: Policy | None = Policy(_unpacked(payload, base), "eager", has_gpu, numbers)
        self.policy = Policy(_unpacked(payload, base), inference, has_gpu, numbers)
        self.has_priorities = callable(getattr(self.policy.agent, "priorities", None))
        """Whether the agent computes the initial priorities of rows, which `add_priorities` records."""
        self.loader = ParameterLoader(self.policy.agent, weights)
        self.version = -1
        self.structure: dict[str, Any] = {}
        self.example: dict[str, Array] = {}
        """The row that `dry_run` used: arrays with one entry per environment."""
        self._reported_note = ""
        self._timed_ns = self._timed_rows = 0
        self._state: Any = None
        self._rng: list[np.random.Generator] = []

    def dry_run(self, current: dict[str, Array], action_schema: Schema) -> tuple[Schema, Schema, Structure]:
        """Call `act` once on the environments' current observations.

        Returns:
            The schema of the arrays that `act` returns, and the schema and structure of the recurrent state.

        Raises:
            AgentError: `act` returns something that farstep cannot record.
            SpaceError: `act` raised, and an observation has NaN or is outside its space.
        """
        assert self._trial is not None
        trial, self._trial = self._trial, None
        count = len(self._slots.roots)
        starts = np.ones(count, bool)
        generators = [np.random.default_rng(0) for _ in range(count)]
        try:
            with same_randomness():
                out = trial(nest(self._obs, current), trial.initial_state(count), starts, generators)
        except Exception as error:
            self._explain(error, current)
            raise
        if "action" not in out:
            raise AgentError(f"act returned {list(out)} without 'action'; return the actions or a mapping with them.")
        clash = sorted(RESERVED & out.keys())
        if clash:
            raise AgentError(f"act returned {clash}, names that farstep records itself; rename them.")
        recurrent = self.policy.recurrent
        if recurrent and "state" not in out:
            raise AgentError(
                f"act returned {list(out)} without 'state', but the agent has initial_state(n); return the new state "
                "under 'state', or leave initial_state out."
            )
        if "state" in out and not recurrent:
            raise AgentError(
                "act returned 'state', but the agent has no initial_state(n); add that method, or rename the key."
            )
        new_state = {"state": out.pop("state")} if recurrent else {}
        schema, self.structure = _schema_of(out, count)
        if self.has_priorities:
            if PRIORITY in schema:
                raise AgentError(f"act returned {PRIORITY!r}, but the agent has priorities(rows); drop one of them.")
            schema[PRIORITY] = ArraySpec((), np.dtype(np.float32).str)
        for name, spec in action_schema.items():
            if name not in schema or schema[name].shape != spec.shape:
                raise AgentError(
                    f"act's {name} is {schema.get(name, 'absent')} per environment; the action space requires shape "
                    f"{list(spec.shape)}. Return one such action for each environment, nested like the space. To "
                    'return further arrays, use a mapping, {"action": ..., "logprob": ...}, not a tuple.'
                )
        self._state = self.policy.initial_state(count)
        states = {name: as_array(leaf) for name, leaf in leaves_of(self._state, "state")} if recurrent else {}
        self.example = {**current, **dict(leaves(self.structure, out)), **states, "episode_start": starts}
        state_schema, state_structure = _schema_of({"state": self._state} if recurrent else {}, count)
        if found := differences(_schema_of(new_state, count)[0], state_schema):
            raise AgentError(
                f"the state that act returned (here) differs from initial_state({count}) (there): {'; '.join(found)}. "
                "Give both the same shapes and dtypes."
            )
        with same_randomness():
            self.policy.accelerate(nest(self._obs, current), self._state, starts)
        self._reported_note = self.policy.note
        return schema, state_schema, state_structure.get("state", "")

    @property
    def recorded(self) -> dict[str, Any]:
        """Structure of all arrays that this actor records: what `act` returns, and initial priorities."""
        return {**self.structure, PRIORITY: PRIORITY} if self.has_priorities else self.structure

    def begin(self, rows: Rows) -> None:
        """Start a chunk: record the recurrent state at its start, and write later outputs into `rows`."""
        if self.policy.recurrent:
            for name, leaf in leaves_of(self._state, "state"):
                rows.chunk[name][:] = as_array(leaf)
        self._write_to(rows.row)

    def _write_to(self, rows: dict[str, Array]) -> None:
        """Use these arrays `[steps, n, ...]` in the next calls of `act`."""
        self._rows = rows
        self._flat = all(isinstance(sub, str) for sub in self.structure.values())
        actions = leaf_names(self.structure["action"])
        self._float_actions = [name for name in actions if self._rows[name].dtype.kind == "f"]

    def act(self, t: int) -> None:
        """Act on the observations of row `t`, and write the outputs into the same row."""
        rows = self._rows
        try:
            out = self.policy(self._observed(t), self._state, rows["episode_start"][t], self._generators(t))
        except Exception as error:
            self._explain(error, self._arrays_observed(t))
            raise
        self._record(t, out)

    def _observed(self, t: int) -> Nested:
        """The observations of row `t`, nested as the agent expects them."""
        rows = self._rows
        return rows[self._obs][t] if isinstance(self._obs, str) else nest(self._obs, {n: a[t] for n, a in rows.items()})

    def _arrays_observed(self, t: int) -> dict[str, Array]:
        """The observations of row `t` by name."""
        return {name: self._rows[name][t] for name in leaf_names(self._obs)}

    def _record(self, t: int, out: dict[str, Any]) -> None:
        """Write what the policy returned into row `t`."""
        rows = self._rows
        if self.policy.recurrent:
            if "state" not in out:
                raise AgentError(f"act returned {list(out)} without 'state'; return the new state in every call.")
            self._state = out.pop("state")
        if not self._flat or out.keys() != self.structure.keys():
            out = self._flattened(out)
        for name, leaf in out.items():
            row = rows[name][t]
            if type(leaf) is not np.ndarray or leaf.dtype != row.dtype or leaf.shape != row.shape:
                leaf = self._converted(name, leaf, row)
            row[...] = leaf
        for name in self._float_actions:
            row = rows[name][t]
            if (squares := np.vdot(row, row)) != squares:  # has NaN; twice as fast as np.isnan(row).any()
                slot, value = self._slot_and_value(np.argwhere(np.isnan(row))[0], row)
                invalid = AgentError(
                    f"act returned {name} {value} for environment slot {slot}; an environment cannot step with it. "
                    "Check the weights and observations for NaN and infinity."
                )
                self._explain(invalid, self._arrays_observed(t))
                raise invalid

    def add_priorities(self, rows: Rows, steps: int) -> None:
        """Record the initial priorities of a complete chunk, if the agent computes them.

        `priorities` gets the arrays of the chunk, `[steps, n, ...]`, nested as in a batch, and `last_obs`, the
        observations after its last row, `[n, ...]`.
        """
        if not self.has_priorities:
            return
        given = prioritized_rows(rows, steps, self.structure, self._obs)
        rows.row[PRIORITY][:steps] = self.policy.priorities(given)

    def timed_act(self, t: int) -> None:
        """Call `act` and measure its duration."""
        start = time.perf_counter_ns()
        self.act(t)
        self._timed_ns += time.perf_counter_ns() - start
        self._timed_rows += 1

    def take_timed(self) -> tuple[int, int]:
        """Total nanoseconds and number of `timed_act` calls since the last call of this method."""
        timed, self._timed_ns, self._timed_rows = (self._timed_ns, self._timed_rows), 0, 0
        return timed

    def _flattened(self, out: dict[str, Any]) -> dict[str, Any]:
        """The arrays of an output by name. Raise `AgentError` if the nesting differs from the first call of `act`."""
        if clause := _unlike(self.structure, out, "the output"):
            raise AgentError(f"{clause}, unlike in the first call of act. Return the same keys every time.")
        return dict(leaves(self.structure, out))

    def _converted(self, name: str, leaf: Any, row: Array) -> Array:
        """Convert an output to the dtype of the first call of `act`. Raise `AgentError` if this would change values."""
        array = np.asarray(leaf)
        if array.shape != row.shape:  # otherwise NumPy would broadcast
            raise AgentError(
                f"act returned {name} with shape {list(array.shape)}, but {list(row.shape)} in its first call: "
                "return one value for each environment every time."
            )
        if array.dtype.kind not in "biufc":
            raise AgentError(
                f"act returned {name} as {array.dtype}, but {row.dtype} in its first call: return the same dtype every "
                "time."
            )
        if (place := first_misfit(array, row.dtype)) is not None:
            slot, value = self._slot_and_value(place, array)
            raise AgentError(
                f"act returned {name} {value} ({array.dtype}) for environment slot {slot}. In its first call, {name} "
                f"had the dtype {row.dtype}, which cannot represent this number. Return the same dtype every time."
            )
        return array

    def _slot_and_value(self, place: Iterable[int], row: Array) -> tuple[int, Any]:
        """The environment slot that an index into a row belongs to, and the value there."""
        i, *rest = place
        return self._slot_of(int(i)), row[(i, *rest)]

    def _slot_of(self, i: int) -> int:
        """The environment slot of row entry `i`."""
        return self._slots.first + i

    @contextlib.contextmanager
    def restoring_state(self) -> Iterator[None]:
        """Context manager: restore recurrent state and generators on exit, so that calls of `act` inside have no
        effect."""
        # Copy, because the fast path overwrites the buffers of its state.
        state = map_leaves(np.array, self._state) if self._is_recurrent_torch else copy.deepcopy(self._state)
        rng = copy.deepcopy(self._rng)
        try:
            yield
        finally:
            self._state, self._rng = state, rng

    @property
    def _is_recurrent_torch(self) -> bool:
        return self.policy.recurrent and self.policy.is_torch

    def _explain(self, error: Exception, obs: Mapping[str, Array]) -> None:
        """Raise `SpaceError` instead of the error of `act` if an observation has NaN, or is outside its space (unless
        that is a Box: such observations are common)."""
        if found := with_nan(obs.values()):
            slots = ", ".join(str(self._slot_of(i)) for i in found)
            raise SpaceError(
                f"the observations of environment slot{'s' * (len(found) > 1)} {slots} have NaN, and act raised "
                f"{described(error)}. Fix the environment, or replace NaN in a wrapper."
            ) from error
        if self._space is None:
            return
        for i in range(len(self._slots.roots)):
            value = nest(self._obs, {name: array[i] for name, array in obs.items()})
            for space, clause in outside(self._space, value, "obs"):
                if not isinstance(space, gymnasium.spaces.Box):
                    raise SpaceError(
                        f"the environment in slot {self._slot_of(i)} returned an observation that is not in its "
                        f"space: {clause}, and act raised {described(error)}. Fix the environment, or its "
                        "observation_space."
                    ) from error

    def _generators(self, t: int) -> list[np.random.Generator] | None:
        if not self.policy.wants_rng:
            return None
        if not self._rng:  # a new agent may arrive in the middle of episodes
            self._rng = [self._generator(i) for i in range(len(self._slots.roots))]
        for i in np.flatnonzero(self._rows["episode_start"][t]):
            self._rng[i] = self._generator(int(i))
        return self._rng

    def _generator(self, i: int) -> np.random.Generator:
        slots = self._slots
        return episode_generator(slots.roots[i], slots.first + i, slots.episodes[i])

    def save(self) -> dict[str, Any]:
        """Recurrent state and generators, as plain data."""
        state = [as_array(leaf) for _, leaf in leaves_of(self._state, "state")] if self.policy.recurrent else []
        return {"state": state, "generators": [generator.bit_generator.state for generator in self._rng]}

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Restore what `save` returned."""
        if self.policy.recurrent and saved["state"]:
            arrays = iter(saved["state"])
            self._state = map_leaves(lambda leaf: np.array(next(arrays)), self._state)
        self._rng = [np.random.Generator(np.random.PCG64()) for _ in saved["generators"]]
        for generator, state in zip(self._rng, saved["generators"], strict=True):
            generator.bit_generator.state = state

    def loaded(self, version: int) -> None:
        """Record the version of newly loaded weights, and check that the fast path still agrees with `act`."""
        self.version = version
        if self._is_recurrent_torch:  # the check overwrites the state buffers of the fast path
            self._state = map_leaves(np.array, self._state)
        with same_randomness():
            self.policy.check_after_load()

    def take_note(self) -> str:
        """How the worker calls the policy; "" if unchanged since `dry_run` or the previous `take_note`."""
        if self.policy.note == self._reported_note:
            return ""
        self._reported_note = self.policy.note
        return self._reported_note


def prioritized_rows(rows: Rows, steps: int, structure: Mapping[str, Any], obs: Structure) -> dict[str, Any]:
    """Copies of the arrays of a complete chunk that `priorities` of an agent gets (see `Actor.add_priorities`)."""
    arrays = {name: array[:steps] for name, array in rows.row.items() if name != PRIORITY and not is_final(name)}
    given: dict[str, Any] = {key: nest(sub, arrays) for key, sub in structure.items()}
    given |= {key: arrays[key] for key in ("reward", "terminated", "truncated", "episode_start", "valid")}
    given["obs"] = nest(obs, arrays)
    given["last_obs"] = nest(obs, {name: rows.row[name][steps] for name in leaf_names(obs)})
    return {key: map_leaves(np.array, value) for key, value in given.items()}


def _unpacked(payload: bytes, base: BaseBytes | None) -> Any:
    try:
        return unpickle_agent(payload, base or bytearray())
    except Exception as error:
        raise AgentError(
            f"the agent cannot be loaded on the worker: {described(error)}. Its modules must be importable there, and "
            "__setstate__ must not need objects that exist only in the learner's process."
        ) from error


def _unlike(structure: Any, value: Any, name: str) -> str | None:
    """A clause about the first difference between the nesting of `value` and `structure`; None if they agree."""
    if isinstance(structure, dict):
        if not isinstance(value, Mapping):
            return f"{name} is now a {type(value).__name__}, not a mapping with {', '.join(structure)}"
        if missing := structure.keys() - value.keys():
            return f"{name} has no {', '.join(sorted(missing))} now"
        if further := value.keys() - structure.keys():
            return f"{name} has {', '.join(sorted(map(str, further)))} now"
        parts: Iterable[tuple[Any, Any, Any]] = ((key, sub, value[key]) for key, sub in structure.items())
    elif isinstance(structure, tuple):
        if not isinstance(value, tuple | list) or len(value) != len(structure):
            return f"{name} is no longer a sequence of {len(structure)}"
        parts = ((i, sub, value[i]) for i, sub in enumerate(structure))
    else:
        return None
    return next((clause for key, sub, part in parts if (clause := _unlike(sub, part, f"{name}[{key!r}]"))), None)


def _schema_of(out: dict[str, Any], count: int) -> tuple[Schema, dict[str, Any]]:
    arrays: dict[str, Array] = {}
    structure: dict[str, Any] = {}
    for key, value in out.items():
        structure[key] = value_structure(map_leaves(as_array, value), key, arrays)
    for key, sub in structure.items():
        if isinstance(sub, tuple) and sub and all(isinstance(name, str) and not arrays[name].ndim for name in sub):
            raise AgentError(
                f"act's {key} is a {type(out[key]).__name__} of {len(sub)} numbers, which looks like an element of a "
                f"Tuple space; return an array with one entry for each of the {count} environments, e.g. np.array(...)."
            )
    for name, array in arrays.items():
        if array.ndim == 0 or array.shape[0] != count:
            raise AgentError(
                f"act's {name} has shape {list(array.shape)}; its first dimension must be the {count} environments of "
                "the worker (also for a recurrent state: [n, ...], not [layers, n, ...])."
            )
    return {name: ArraySpec.of(array) for name, array in arrays.items()}, structure
