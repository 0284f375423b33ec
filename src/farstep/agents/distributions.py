"""Action distributions as named arrays, and the KL divergence of two such distributions.

Head and workers exchange these arrays, one row per observation: `logits` (categorical), `mean` and `log_std` (Gaussian)
or `bernoulli` (logits of independent binary choices), each `[n, ...]`. Entries of a mapping or tuple get a prefix, e.g.
`arm.logits`. Entries are independent, so their divergences add up. Any other torch distribution is stored as the
parameters of its class, e.g. `Beta:concentration1`, and torch computes the divergence. A fixed transform of the
actions, e.g. tanh, does not change the divergence. Its constants are stored as `fixed...` and must be equal on both
sides.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import numpy as np

from farstep.agents.parameters import as_array, path
from farstep.core import Array
from farstep.errors import AgentError

_KINDS = ({"logits"}, {"mean", "log_std"}, {"bernoulli"})
_ADVICE = (
    "Return a torch.distributions object (Categorical, Normal, Bernoulli, any other class that torch's kl_divergence "
    "supports, Independent of these, or one of them squashed by Tanh, Sigmoid or a constant affine map), "
    '{"logits": ...}, '
    '{"mean": ..., "log_std": ...}, {"bernoulli": logits}, or a mapping or tuple of these.'
)
_DERIVED = {"probs", "covariance_matrix", "precision_matrix"}
"""Parameters of torch distributions that only repeat `logits` or `scale_tril`."""
_CONVERSIONS = {
    "probs": '"logits": log(probs), or "bernoulli": log(probs) - log(1 - probs) for independent choices',
    "log_probs": '"logits": log_probs',
    "std": '"log_std": log(std)',
    "scale": '"log_std": log(scale)',
    "sigma": '"log_std": log(sigma)',
    "var": '"log_std": 0.5 * log(var)',
    "loc": '"mean": loc',
    "mu": '"mean": mu',
}
"""What to return instead of the parameters that other libraries use."""


def flat_distribution(distribution: Any, name: str = "") -> dict[str, Array]:
    """Convert what `distribution(obs)` returned to named arrays.

    Args:
        distribution: A torch distribution, a mapping of arrays, or mappings and tuples of these.
        name: Prefix of the names.

    Returns:
        float32 arrays `[n, ...]` by name.

    Raises:
        AgentError: The kind of distribution is unknown; the message lists the known kinds.
    """
    if isinstance(distribution, Mapping):
        if set(distribution) in _KINDS:
            found = {key: as_floats(value, key) for key, value in distribution.items()}
            if "mean" in found:  # log_std is often the same for all observations
                found["log_std"] = _spread(found["log_std"], found["mean"])
            return {path(name, key): value for key, value in found.items()}
        if any(_is_array(part) for part in distribution.values()):
            raise AgentError(_unknown_keys(distribution, name))
        parts = distribution.items()
    elif isinstance(distribution, (tuple, list)):
        parts = enumerate(distribution)  # type: ignore[assignment]
    else:
        return _of_torch(distribution, name)
    found = {}
    for key, part in parts:
        if "." in str(key):
            raise AgentError(f"distribution() has an entry named {key!r}; names must not contain a dot.")
        found.update(flat_distribution(part, path(name, str(key))))
    if not found:
        raise AgentError(f"distribution() returned an empty {type(distribution).__name__}. {_ADVICE}")
    return found


def kl_divergence(local: Mapping[str, Array], learner: Mapping[str, Array]) -> Array:
    """Compute the exact KL(local || learner) for each observation, in nats.

    Args:
        local: Arrays of the worker's policy, as `flat_distribution` returns them.
        learner: Arrays of the learner's policy, with the same names and shapes.

    Returns:
        The divergences `[n]`.

    Raises:
        AgentError: The arrays differ in names or shapes, or torch has no divergence for the distribution.
    """
    if {name: array.shape for name, array in local.items()} != {name: array.shape for name, array in learner.items()}:
        raise AgentError("distribution() returned different arrays on the worker and on the learner.")
    total: Any = 0.0
    for prefix in dict.fromkeys(name.rpartition(".")[0] for name in local):
        p, q = _part(local, prefix), _part(learner, prefix)
        if "logits" in p:
            total = total + _categorical(p["logits"], q["logits"])
        elif "bernoulli" in p:
            total = total + _bernoulli(p["bernoulli"], q["bernoulli"])
        elif family := next((key.partition(":")[0] for key in p if ":" in key), None):
            total = total + _by_torch(family, p, q)
        else:
            total = total + _gaussian(p["mean"], p["log_std"], q["mean"], q["log_std"])
        for key in [key for key in p if key.startswith("fixed")]:
            total = total + np.where(_summed(np.asarray(p[key] != q[key], np.float64)) > 0, np.inf, 0.0)
    return np.asarray(total, np.float64)


def kl_estimate(local_logprob: Array, learner_logprob: Array) -> Array:
    """Estimate KL(local || learner) from log-probabilities of actions that the local policy took.

        ratio = exp(learner_logprob - local_logprob),   estimate = (ratio - 1) - log(ratio)

    The expectation of the estimate is the divergence. Unlike -log(ratio), the estimate is never negative, and its
    variance is much lower (k3 in Schulman, "Approximating KL divergence", 2020).

    Args:
        local_logprob: Log-probability of each action under the local policy.
        learner_logprob: Log-probability of the same actions under the learner's policy.

    Returns:
        One estimate per action.
    """
    log_ratio = np.asarray(learner_logprob, np.float64) - np.asarray(local_logprob, np.float64)
    return np.expm1(log_ratio) - log_ratio


def as_floats(value: Any, key: str) -> Array:
    """Return an output of the policy as a float32 array. Raise `AgentError` if it is not numeric or has no rows."""
    array = as_array(value)
    if array.dtype.kind not in "fiu" or array.ndim < 1:
        expected = (
            "one number per dimension of the action; give it shape [k] or [n, k]"
            if key == "log_std"
            else "floats [n, ...]"
        )
        raise AgentError(f"the policy's {key} is {array.dtype}{list(array.shape)}; expected {expected}.")
    with np.errstate(over="ignore"):  # values beyond float32 become infinite
        return np.ascontiguousarray(array, np.float32)


def _is_array(part: Any) -> bool:
    """Return whether the value is a number or an array, not a distribution."""
    while isinstance(part, (list, tuple)) and part:
        part = part[0]
    return isinstance(part, (int, float)) or (hasattr(part, "dtype") and hasattr(part, "shape"))


def _unknown_keys(distribution: Mapping[str, Any], name: str) -> str:
    """Return an error message about the keys of a mapping, with conversions or the nearest known keys."""
    known = {key for kind in _KINDS for key in kind}
    lines = [f"distribution() returned arrays under the keys {list(distribution)}{f' at {name!r}' if name else ''}."]
    for key in distribution:
        if key in _CONVERSIONS:
            lines.append(f"Instead of {key!r} return {_CONVERSIONS[key]}.")
        elif key not in known and (near := difflib.get_close_matches(str(key), known, n=1)):
            lines.append(f"Did you mean {near[0]!r} by {key!r}?")
    return " ".join([*lines, _ADVICE])


def _part(arrays: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    """Return the arrays whose names have this prefix, as float64; remove the prefix from the names."""
    names = {name.rpartition(".")[2]: name for name in arrays if name.rpartition(".")[0] == prefix}
    return {key: np.asarray(arrays[name], np.float64) for key, name in names.items()}


def _of_torch(distribution: Any, name: str) -> dict[str, Array]:
    """Return the arrays of a torch.distributions object. The class name identifies it, so torch is not imported."""
    kind = type(distribution).__name__
    if not type(distribution).__module__.startswith("torch.distributions"):
        raise AgentError(f"distribution() returned a {kind}. {_ADVICE}")
    if kind == "Independent":
        return _of_torch(distribution.base_dist, name)
    if kind == "TransformedDistribution":
        return _of_transformed(distribution, name)
    if kind in ("Categorical", "OneHotCategorical"):
        return {path(name, "logits"): as_floats(distribution.logits, "logits")}
    if kind == "Bernoulli":
        return {path(name, "bernoulli"): as_floats(distribution.logits, "bernoulli")}
    if kind == "Normal":
        mean, log_std = distribution.loc, distribution.scale.log()
        return {path(name, "mean"): as_floats(mean, "mean"), path(name, "log_std"): as_floats(log_std, "log_std")}
    found = {key: getattr(distribution, key) for key in distribution.arg_constraints if key not in _DERIVED}
    if not found:
        raise AgentError(
            f"distribution() returned a torch {kind}, for which farstep cannot compute a divergence. {_ADVICE}"
        )
    return {path(name, f"{kind}:{key}"): as_floats(value, key) for key, value in found.items()}


def _of_transformed(distribution: Any, name: str) -> dict[str, Array]:
    """Return the arrays of a distribution with transforms that squash or scale its actions."""
    found = _of_torch(distribution.base_dist, name)
    mean, log_std = path(name, "mean"), path(name, "log_std")
    squashed = False
    for i, transform in enumerate(distribution.transforms):
        kind = type(transform).__name__
        if kind == "AffineTransform":
            like = next(iter(found.values()))
            loc, scale = (_spread(np.asarray(as_array(v), np.float32), like) for v in (transform.loc, transform.scale))
            if mean in found and not squashed:  # still Gaussian; loc and scale may depend on the policy
                found[mean] = loc + scale * found[mean]
                found[log_std] = found[log_std] + np.log(np.abs(scale))
            else:
                found |= {path(name, f"fixed_loc_{i}"): loc, path(name, f"fixed_scale_{i}"): scale}
        elif kind in ("TanhTransform", "SigmoidTransform"):
            squashed = True
        else:
            raise AgentError(
                f"distribution() returned a policy with a {kind}, which farstep does not support. {_ADVICE}"
            )
    return found


def _spread(array: Array, like: Array) -> Array:
    """Broadcast an array to the shape of another, if possible."""
    try:
        return np.ascontiguousarray(np.broadcast_to(array, like.shape))
    except ValueError:
        return array


def _by_torch(family: str, p: Mapping[str, Array], q: Mapping[str, Array]) -> Array:
    """Return the divergence of two torch distributions of the same class, rebuilt from their parameters."""
    import torch

    def built(part: Mapping[str, Array]) -> Any:
        parameters = {key.partition(":")[2]: torch.from_numpy(array) for key, array in part.items() if ":" in key}
        return getattr(torch.distributions, family)(**parameters, validate_args=False)

    try:
        return _summed(torch.distributions.kl_divergence(built(p), built(q)).numpy())
    except (TypeError, NotImplementedError) as error:
        raise AgentError(
            f"distribution() returned a torch {family}, for which torch has no kl_divergence ({error}). {_ADVICE}"
        ) from error


def _categorical(p: Array, q: Array) -> Array:
    log_p, log_q = _log_softmax(p), _log_softmax(q)
    with np.errstate(invalid="ignore"):
        terms = np.where(np.isneginf(log_p), 0.0, np.exp(log_p) * (log_p - log_q))  # masked actions contribute 0
    return _summed(terms)


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def _gaussian(mean_p: Array, log_std_p: Array, mean_q: Array, log_std_q: Array) -> Array:
    variance_p, variance_q = np.exp(2 * log_std_p), np.exp(2 * log_std_q)
    return _summed(log_std_q - log_std_p + (variance_p + (mean_p - mean_q) ** 2) / (2 * variance_q) - 0.5)


def _bernoulli(p: Array, q: Array) -> Array:
    yes, no = _log_sigmoid(p), _log_sigmoid(-p)
    return _summed(np.exp(yes) * (yes - _log_sigmoid(q)) + np.exp(no) * (no - _log_sigmoid(-q)))


def _log_sigmoid(x: Array) -> Array:
    return np.asarray(-np.logaddexp(0.0, -x))


def _summed(terms: Array) -> Array:
    """Sum over all axes but the first."""
    return np.asarray(terms.reshape(len(terms), -1).sum(axis=1))
