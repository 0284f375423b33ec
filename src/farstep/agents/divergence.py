"""How far a worker's policy is from the learner's on the same observations, by what the agent offers.

Each side describes its policy as named arrays, a row per observation; the head's description travels, and the worker
compares. With `distribution(obs)` the divergence is exact; with `log_prob(obs, action)` it is estimated from the
worker's own actions; an agent's own `divergence(local, learner)` takes whatever arrays its `distribution` returns. An
agent of `act` and `get_parameters` alone is compared by what `act` returns beside actions: `distribution`, in the form
that the method has, or `logits`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from farstep.agents.distributions import as_floats, flat_distribution, kl_divergence, kl_estimate
from farstep.agents.parameters import as_array, leaves_of
from farstep.agents.policy import Policy
from farstep.core import Array, Nested
from farstep.errors import AgentError
from farstep.schema import ArraySpec, Schema, Structure, leaf_names, nest

_ROUNDING = 1e-4
"""How far below zero a divergence may be: sums of float32 are not exact."""


def comparing_method(agent: Any, outputs: Schema) -> str:
    """The method that says how far apart policies are, given the arrays that `act` returns; "" if there is none."""
    for method in ("distribution", "log_prob"):
        if callable(getattr(agent, method, None)):
            return method
    return "act" if _has_distribution(outputs) or _has_logits(outputs) else ""


def why_incomparable(agent: Any, outputs: Schema) -> str:
    """Why two versions of an agent without such a method cannot be compared, and what to add."""
    action, logits = outputs.get("action"), outputs.get("logits")
    if logits is None:
        returned = "act returns neither 'logits' nor 'distribution'"
    else:
        of = f"actions of shape {list(action.shape)}" if action else "nested actions"
        returned = f"the 'logits' that act returns, of shape {list(logits.shape)}, are not those of {of}"
    return (
        f"{type(agent).__name__} has no distribution(obs) and {returned}. Let act return, beside the action, "
        '"logits" (one number for each choice) or "distribution" (arrays such as {"mean": ..., "log_std": ...}), or '
        "add distribution(obs) or log_prob(obs, action); for a deterministic policy let distribution(obs) return its "
        "actions and add divergence(local, learner) -> [n]"
    )


def _has_distribution(outputs: Schema) -> bool:
    return any(name.partition(".")[0] == "distribution" for name in outputs)


def _has_logits(outputs: Schema) -> bool:
    """Whether `logits` has the numbers of each choice in a last dimension that actions do not have."""
    action, logits = outputs.get("action"), outputs.get("logits")
    if action is None or logits is None or not logits.shape:
        return False
    return logits.shape[:-1] == action.shape and logits.shape[-1] > 1


class Comparison:
    """Describes the policy of one side, and compares two descriptions."""

    def __init__(
        self, policy: Policy, obs: Structure, action: Structure, state: Structure | None, outputs: Schema | None = None
    ) -> None:
        """`outputs` are the arrays that `act` returns."""
        agent = policy.agent
        self._policy = policy
        own = getattr(agent, "divergence", None)
        self._own = own if callable(own) else None
        outputs = outputs or {}
        self._method = comparing_method(agent, outputs)
        if not self._method:
            raise AgentError(f"policies cannot be compared: {why_incomparable(agent, outputs)}.")
        self._entry = "distribution" if _has_distribution(outputs) else "logits"
        inputs = [obs, action] if self.estimates else [obs]
        if policy.recurrent:
            assert state is not None
            inputs += [state, "episode_start"]
        self._inputs: list[Structure] = inputs
        if self._method != "act":
            self._check_signature()
        self.names = [name for structure in inputs for name in leaf_names(structure)]
        """The arrays of a row that it looks at."""
        self.first_row_only = policy.recurrent
        """A recurrent state is known only where a chunk begins."""
        self.note = ""
        """Why the last comparison came to no number, if it did not."""
        self.expected: Schema = {}
        """What the policy says of an observation; known once it was tried."""

    def _check_signature(self) -> None:
        try:
            signature = inspect.signature(getattr(self._policy.agent, self._method))
        except (TypeError, ValueError):
            return  # not everything that can be called says how
        given = ["obs", *["action"] * self.estimates, *["state", "episode_start"] * self._policy.recurrent]
        try:
            signature.bind(*given)
        except TypeError as error:
            kind = "a recurrent agent (it has initial_state)" if self._policy.recurrent else "an agent"
            raise AgentError(
                f"{self._method}{signature} cannot be called as that of {kind} is: {self._method}({', '.join(given)}); "
                f"{error}. Take these arguments, whether you use them or not."
            ) from error

    @property
    def method(self) -> str:
        """The agent's method that describes the policy."""
        return self._method

    @property
    def estimates(self) -> bool:
        """Whether rows must hold actions of the policy that is compared."""
        return self._method == "log_prob"

    def describe(self, rows: Mapping[str, Array]) -> dict[str, Array]:
        """What the policy says of these rows, as named arrays `[n, ...]` of float32."""
        found = self._flat(self._asked([nest(structure, rows) for structure in self._inputs]))
        count = len(rows[self.names[0]])
        for name, array in found.items():
            if array.shape[:1] != (count,):
                raise AgentError(
                    f"{self._method}() returned {name} as {list(array.shape)} for {count} observations; its first "
                    "dimension must be the observations."
                )
        schema = {name: ArraySpec.of(array) for name, array in found.items()}
        if self.expected and schema != self.expected:
            raise AgentError(
                f"{self._method}() returned {_listed(schema)} for each observation now, and {_listed(self.expected)} "
                "when the agent was first sent, which cannot be compared. Return the same arrays every time, or make "
                "another agent of it."
            )
        return found

    def _asked(self, inputs: Sequence[Nested]) -> Any:
        if self._method != "act":
            return self._policy.ask(self._method, inputs)
        said = self._policy.rehearse(inputs).get(self._entry)
        if said is None:
            raise AgentError(f"act returned no {self._entry!r}, but did in its first call; return it every time.")
        return said if self._entry == "distribution" else {"logits": said}

    def _flat(self, said: Any) -> dict[str, Array]:
        if self.estimates:
            found = as_floats(said, "log_prob")
            if found.ndim != 1:
                raise AgentError(f"log_prob() returned {list(found.shape)}; expected [n]: sum over an action's parts.")
            return {"log_prob": found}
        if self._own is not None:
            return {name: as_floats(leaf, name) for name, leaf in leaves_of(said, "distribution")}
        return flat_distribution(said)

    def check(self, rows: Mapping[str, Array]) -> Schema:
        """Try it, with both sides the same; what it says of an observation from now on."""
        said = self.describe(rows)
        single = (name.rpartition(".")[2] == "logits" and array.shape[-1] == 1 for name, array in said.items())
        if self._own is None and all(single):
            raise AgentError(
                f"{self._method}() returned logits of one choice, which is always certain, so no two versions differ. "
                'Return one number for each of k actions, [n, k], or {"bernoulli": logits} for yes or no.'
            )
        self.compare(said, said)
        self.note = ""
        self.expected = {name: ArraySpec.of(array) for name, array in said.items()}
        return self.expected

    def compare(self, local: Mapping[str, Array], learner: Mapping[str, Array]) -> float:
        """The mean divergence of the local policy from the learner's; infinite if it is no number."""
        if self._own is not None:
            found = self._checked(self._own(dict(local), dict(learner)), len(next(iter(local.values()))))
        else:
            with np.errstate(all="ignore"):  # a NaN is told in our own words, and infinite is too far
                estimates = self.estimates
                found = (
                    kl_estimate(local["log_prob"], learner["log_prob"]) if estimates else kl_divergence(local, learner)
                )
        mean = float(np.mean(found))
        self.note = self._why_nan(local, learner) if np.isnan(mean) else ""
        return np.inf if self.note else mean

    def _checked(self, said: Any, rows: int) -> Array:
        """What the agent's own divergence returned, as numbers."""
        array = None if isinstance(said, Mapping) else as_array(said, "what divergence() returned")
        if array is None or array.dtype.kind not in "fiu" or array.shape != (rows,):
            got = type(said).__name__ if array is None or array.dtype.hasobject else f"{array.dtype}{list(array.shape)}"
        elif (array < -_ROUNDING).any():
            got = f"the negative number {array.min():g}"
        else:
            return np.asarray(array, np.float64)
        raise AgentError(
            f"divergence() returned {got}; expected [n] numbers >= 0, one for each of {rows} rows: how far the local "
            "policy is from the learner's there, 0 where they are equal. Their mean is what kl_threshold bounds."
        )

    def _why_nan(self, local: Mapping[str, Array], learner: Mapping[str, Array]) -> str:
        names = [name for name in local if np.isnan(local[name]).any() or np.isnan(learner[name]).any()]
        if names:
            return f"{self._method}() returns NaN ({', '.join(names)})"
        return (
            "divergence() returns NaN" if self._own is not None else f"the KL of what {self._method}() returns is NaN"
        )


def _listed(schema: Schema) -> str:
    return ", ".join(f"{name} {list(spec.shape)}" for name, spec in schema.items())
