"""The divergence between a worker's policy and the learner's policy on the same observations.

Each side describes its policy as named arrays, one row per observation. The head sends its description to the worker,
and the worker compares both. The method depends on what the agent implements:

- `distribution(obs)`: the divergence is exact.
- `log_prob(obs, action)`: the divergence is estimated from the worker's own actions.
- `divergence(local, learner)`: the agent computes the divergence from the arrays that its `distribution` returns.
- only `act` and `get_parameters`: the divergence is computed from `distribution` or `logits`, if `act` returns one of
  them with the actions.
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
"""How far below zero a divergence may be, because of float32 rounding."""


def comparing_method(agent: Any, outputs: Schema) -> str:
    """Return the name of the agent's method for comparing policies; "" if none. `outputs`: the arrays of `act`."""
    for method in ("distribution", "log_prob"):
        if callable(getattr(agent, method, None)):
            return method
    return "act" if _has_distribution(outputs) or _has_logits(outputs) else ""


def why_incomparable(agent: Any, outputs: Schema) -> str:
    """Return why versions of this agent cannot be compared, and what the agent must add."""
    action, logits = outputs.get("action"), outputs.get("logits")
    if logits is None:
        returned = "act returns neither 'logits' nor 'distribution'"
    else:
        of = f"actions of shape {list(action.shape)}" if action else "nested actions"
        returned = f"the 'logits' that act returns, of shape {list(logits.shape)}, do not match {of}"
    return (
        f"{type(agent).__name__} has no distribution(obs) and {returned}. Have act return, beside the action, "
        '"logits" (one number per choice) or "distribution" (arrays such as {"mean": ..., "log_std": ...}), or add '
        "distribution(obs) or log_prob(obs, action). For a deterministic policy, have distribution(obs) return its "
        "actions and add divergence(local, learner) -> [n]"
    )


def _has_distribution(outputs: Schema) -> bool:
    return any(name.partition(".")[0] == "distribution" for name in outputs)


def _has_logits(outputs: Schema) -> bool:
    """Return whether `logits` has the shape of actions plus a last axis with one number per choice."""
    action, logits = outputs.get("action"), outputs.get("logits")
    if action is None or logits is None or not logits.shape:
        return False
    return logits.shape[:-1] == action.shape and logits.shape[-1] > 1


class Comparison:
    """Describes a policy as named arrays, and compares two descriptions."""

    def __init__(
        self, policy: Policy, obs: Structure, action: Structure, state: Structure | None, outputs: Schema | None = None
    ) -> None:
        """`outputs` is the schema of the arrays that `act` returns."""
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
        """Names of the arrays that a comparison reads from each row."""
        self.first_row_only = policy.recurrent
        """Whether a comparison can use only the first row of a chunk: only that row has a recurrent state."""
        self.note = ""
        """Why the last comparison gave NaN; "" if it gave a number."""
        self.expected: Schema = {}
        """Schema of the arrays that describe the policy on one observation; set by `check`."""

    def _check_signature(self) -> None:
        """Raise `AgentError` if the agent's method cannot be called with the necessary arguments."""
        try:
            signature = inspect.signature(getattr(self._policy.agent, self._method))
        except (TypeError, ValueError):
            return  # some callables have no signature
        given = ["obs", *["action"] * self.estimates, *["state", "episode_start"] * self._policy.recurrent]
        try:
            signature.bind(*given)
        except TypeError as error:
            kind = "a recurrent agent (it has initial_state)" if self._policy.recurrent else "an agent"
            raise AgentError(
                f"{self._method}{signature} of {kind} is called as {self._method}({', '.join(given)}): "
                f"{error}. The method must accept these arguments, even if it ignores them, and must not "
                "require others."
            ) from error

    @property
    def method(self) -> str:
        """The agent's method that describes the policy."""
        return self._method

    @property
    def estimates(self) -> bool:
        """Whether the divergence is estimated from actions; the rows must then hold the actions."""
        return self._method == "log_prob"

    def describe(self, rows: Mapping[str, Array]) -> dict[str, Array]:
        """Describe the policy on these rows, as named float32 arrays `[n, ...]`."""
        found = self._flat(self._query([nest(structure, rows) for structure in self._inputs]))
        count = len(rows[self.names[0]])
        for name, array in found.items():
            if array.shape[:1] != (count,):
                raise AgentError(
                    f"{self._method}() returned {name} as {list(array.shape)} for {count} observations; its first axis "
                    "must be the observations."
                )
        schema = {name: ArraySpec.of(array) for name, array in found.items()}
        if self.expected and schema != self.expected:
            raise AgentError(
                f"{self._method}() returned {_listed(schema)} for each observation now, and {_listed(self.expected)} "
                "when the agent was first sent; these cannot be compared. Return the same arrays every time, or create "
                "another agent object."
            )
        return found

    def _query(self, inputs: Sequence[Nested]) -> Any:
        """Call the agent's method and return its description of the policy."""
        if self._method != "act":
            return self._policy.query(self._method, inputs)
        answer = self._policy.act_on_copy(inputs).get(self._entry)
        if answer is None:
            raise AgentError(f"act returned no {self._entry!r}, but did in its first call; return it every time.")
        return answer if self._entry == "distribution" else {"logits": answer}

    def _flat(self, answer: Any) -> dict[str, Array]:
        """Convert the answer of the agent to named arrays."""
        if self.estimates:
            found = as_floats(answer, "log_prob")
            if found.ndim != 1:
                raise AgentError(
                    f"log_prob() returned {list(found.shape)}; expected [n]: sum over the dimensions of an action."
                )
            return {"log_prob": found}
        if self._own is not None:
            return {name: as_floats(leaf, name) for name, leaf in leaves_of(answer, "distribution")}
        return flat_distribution(answer)

    def check(self, rows: Mapping[str, Array]) -> Schema:
        """Compare the policy with itself, and store the schema of its description.

        Returns:
            The schema; later descriptions must match it.

        Raises:
            AgentError: The agent's methods do not work, or cannot tell versions apart.
        """
        described = self.describe(rows)
        single = (name.rpartition(".")[2] == "logits" and array.shape[-1] == 1 for name, array in described.items())
        if self._own is None and all(single):
            raise AgentError(
                f"{self._method}() returned logits of a single choice, which always has probability 1, so no two "
                'versions differ. Return one number for each of k actions, [n, k], or {"bernoulli": logits} for a '
                "binary choice."
            )
        self.compare(described, described)
        self.note = ""
        self.expected = {name: ArraySpec.of(array) for name, array in described.items()}
        return self.expected

    def compare(self, local: Mapping[str, Array], learner: Mapping[str, Array]) -> float:
        """Return the mean divergence of the two policies; infinity instead of NaN (`note` then has the reason)."""
        if self._own is not None:
            found = self._checked(self._own(dict(local), dict(learner)), len(next(iter(local.values()))))
        else:
            with np.errstate(all="ignore"):  # NaN is reported in `note`, and infinity is a valid divergence
                estimates = self.estimates
                found = (
                    kl_estimate(local["log_prob"], learner["log_prob"]) if estimates else kl_divergence(local, learner)
                )
        mean = float(np.mean(found))
        self.note = self._why_nan(local, learner) if np.isnan(mean) else ""
        return np.inf if self.note else mean

    def _checked(self, answer: Any, rows: int) -> Array:
        """Check that the agent's own `divergence` returned one number of at least 0 per row."""
        array = None if isinstance(answer, Mapping) else as_array(answer, "what divergence() returned")
        if array is None or array.dtype.kind not in "fiu" or array.shape != (rows,):
            got = type(answer).__name__
            if array is not None and not array.dtype.hasobject:
                got = f"{array.dtype}{list(array.shape)}"
        elif (array < -_ROUNDING).any():
            got = f"the negative number {array.min():g}"
        else:
            return np.asarray(array, np.float64)
        raise AgentError(
            f"divergence() returned {got}; expected [n] numbers >= 0, one for each of {rows} rows: the divergence of "
            "the local policy from the learner's, 0 where they are equal. kl_threshold bounds their mean."
        )

    def _why_nan(self, local: Mapping[str, Array], learner: Mapping[str, Array]) -> str:
        """Return a clause that names the output of the agent with a NaN."""
        names = [name for name in local if np.isnan(local[name]).any() or np.isnan(learner[name]).any()]
        if names:
            return f"{self._method}() returns NaN ({', '.join(names)})"
        return (
            "divergence() returns NaN" if self._own is not None else f"the KL of what {self._method}() returns is NaN"
        )


def _listed(schema: Schema) -> str:
    return ", ".join(f"{name} {list(spec.shape)}" for name, spec in schema.items())
