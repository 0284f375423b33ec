"""The agent's copy on a worker: acts on rows, carries recurrent state and generators from chunk to chunk."""

from __future__ import annotations

from typing import Any

import cloudpickle
import numpy as np

from farstep.agents.parameters import ParameterLoader, as_array, leaves_of
from farstep.agents.policy import Policy
from farstep.core import Array
from farstep.errors import AgentError
from farstep.spec import ArraySpec, Schema, Structure, leaves, nest, value_structure
from farstep.worker.rows import Rows, Slots
from farstep.worker.seeds import episode_generator

RESERVED = {"obs", "reward", "terminated", "truncated", "valid", "version", "episode_start", "final_obs"}


class Actor:
    """Writes a row of actions and whatever else `act` returns."""

    def __init__(self, payload: bytes, inference: str, obs: Structure, slots: Slots) -> None:
        self._slots, self._obs = slots, obs
        # Tried first on a copy, since an agent may count its calls. The copy is made first: unpickling a class of
        # the user's script again sets its attributes anew, and ours must be the ones that stay.
        self._trial: Policy | None = Policy(cloudpickle.loads(payload), "eager")
        self.policy = Policy(cloudpickle.loads(payload), inference)
        self.loader = ParameterLoader(self.policy.agent)
        self.version = -1
        self.structure: dict[str, Any] = {}
        self._state: Any = None
        self._rng: list[np.random.Generator] = []

    def probe(self, current: dict[str, Array], action_schema: Schema) -> tuple[Schema, Schema, Structure]:
        """Try `act` once on real observations: what it returns, step by step and as state."""
        assert self._trial is not None
        trial, self._trial = self._trial, None
        count = len(self._slots.roots)
        starts = np.ones(count, bool)
        generators = [np.random.default_rng(0) for _ in range(count)]
        with _same_randomness():
            out = trial(nest(self._obs, current), trial.initial_state(count), starts, generators)
        if "action" not in out:
            raise AgentError(f"act returned {sorted(out)} without 'action'; return the actions or a mapping with them.")
        clash = sorted(RESERVED & out.keys())
        if clash:
            raise AgentError(f"act returned {clash}, which farstep records itself; rename them.")
        state = out.pop("state", None)
        if self.policy.recurrent and state is None:
            raise AgentError("the agent has initial_state(n), so act must return its new state under 'state'.")
        schema, self.structure = _schema_of(out, count)
        for name, spec in action_schema.items():
            if name not in schema or schema[name].shape != spec.shape:
                raise AgentError(
                    f"act's {name} is {schema.get(name, 'absent')} per environment; "
                    f"the action space wants shape {list(spec.shape)}."
                )
        self._state = self.policy.initial_state(count)
        state_schema, state_structure = _schema_of({"state": self._state}, count) if state is not None else ({}, {})
        with _same_randomness():
            self.policy.accelerate(nest(self._obs, current), self._state, starts)
        return schema, state_schema, state_structure.get("state", "") if state_schema else ""

    def begin(self, rows: Rows) -> None:
        """A chunk starts: record the recurrent state it starts with, and where its outputs go."""
        if self.policy.recurrent:
            for name, leaf in leaves_of(self._state, "state"):
                rows.chunk[name][:] = as_array(leaf)
        self._rows = rows.row
        flat = all(isinstance(sub, str) for sub in self.structure.values())
        self._targets = [(key, rows.row[key]) for key in self.structure] if flat else None

    def act(self, t: int) -> None:
        """Row `t`: from its observations to its actions."""
        rows = self._rows
        obs = rows[self._obs][t] if isinstance(self._obs, str) else nest(self._obs, {n: a[t] for n, a in rows.items()})
        out = self.policy(obs, self._state, rows["episode_start"][t], self._generators(t))
        if self.policy.recurrent:
            self._state = out.pop("state")
        if self._targets is not None:
            for key, target in self._targets:
                target[t] = out[key]
        else:
            for name, leaf in leaves(self.structure, out):
                rows[name][t] = leaf

    def _generators(self, t: int) -> list[np.random.Generator] | None:
        if not self.policy.wants_rng:
            return None
        slots = self._slots
        if not self._rng:
            self._rng = [np.random.default_rng(0)] * len(slots.roots)
        for i in np.flatnonzero(self._rows["episode_start"][t]):
            self._rng[i] = episode_generator(slots.roots[i], slots.first + int(i), slots.episodes[i])
        return self._rng

    def loaded(self, version: int) -> None:
        """New weights are in: make sure that the fast path still agrees."""
        self.version = version
        with _same_randomness():
            self.policy.check_after_load()


def _schema_of(out: dict[str, Any], count: int) -> tuple[Schema, dict[str, Any]]:
    arrays: dict[str, Array] = {}
    structure: dict[str, Any] = {}
    for key, value in out.items():
        structure[key] = value_structure(_as_arrays(value), key, arrays)
    for name, array in arrays.items():
        if array.ndim == 0 or array.shape[0] != count:
            raise AgentError(
                f"act's {name} has shape {list(array.shape)}; its first dimension must be the {count} environments "
                "that the worker acts for (a recurrent state too: [n, ...], not [layers, n, ...])."
            )
    return {name: ArraySpec.of(array) for name, array in arrays.items()}, structure


def _as_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_arrays(sub) for key, sub in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(_as_arrays(sub) for sub in value)
    return as_array(value)


class _same_randomness:  # noqa: N801
    """Leaves the global generators as they were: a trial must not change what follows."""

    def __enter__(self) -> None:
        import random
        import sys

        self._torch = sys.modules.get("torch")
        self._states = (random.getstate(), np.random.get_state())
        self._tensor_state = self._torch.get_rng_state() if self._torch else None

    def __exit__(self, *_: object) -> None:
        import random

        random.setstate(self._states[0])
        np.random.set_state(self._states[1])
        if self._torch is not None and self._tensor_state is not None:
            self._torch.set_rng_state(self._tensor_state)
