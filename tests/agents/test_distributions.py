"""Divergences against closed forms worked out by hand, against torch's own, and against Monte Carlo."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributions as td

from farstep.agents.distributions import flat_distribution, kl_divergence, kl_estimate
from farstep.errors import AgentError

N = 5


def random_pair(make: Any, seed: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    return make(generator), make(generator)


def normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(N, *shape, generator=generator)


def squared(matrix: torch.Tensor) -> torch.Tensor:
    return matrix @ matrix.mT


def cholesky(generator: torch.Generator) -> torch.Tensor:
    return (0.3 * normal((3, 3), generator)).tril(-1) + torch.diag_embed(normal((3,), generator).exp() + 0.5)


MAKERS: dict[str, Any] = {
    "categorical": lambda g: td.Categorical(logits=normal((4,), g)),
    "one-hot": lambda g: td.OneHotCategorical(logits=normal((4,), g)),
    "normal": lambda g: td.Independent(td.Normal(normal((3,), g), normal((3,), g).exp()), 1),
    "bernoulli": lambda g: td.Independent(td.Bernoulli(logits=normal((3,), g)), 1),
    "beta": lambda g: td.Independent(td.Beta(normal((3,), g).exp(), normal((3,), g).exp()), 1),
    "gamma": lambda g: td.Independent(td.Gamma(normal((2,), g).exp(), normal((2,), g).exp()), 1),
    "laplace": lambda g: td.Independent(td.Laplace(normal((3,), g), normal((3,), g).exp()), 1),
    "one laplace": lambda g: td.Laplace(normal((), g), normal((), g).exp()),
    "full-covariance normal": lambda g: td.MultivariateNormal(normal((3,), g), scale_tril=cholesky(g)),
    "precision": lambda g: td.MultivariateNormal(normal((3,), g), precision_matrix=squared(cholesky(g))),
    "low-rank normal": lambda g: td.LowRankMultivariateNormal(normal((3,), g), normal((3, 1), g), normal((3,), g) ** 2),
    "dirichlet": lambda g: td.Dirichlet(normal((4,), g).exp()),
    "poisson": lambda g: td.Poisson(normal((), g).exp()),
    "exponential": lambda g: td.Independent(td.Exponential(normal((2,), g).exp()), 1),
    "geometric": lambda g: td.Geometric(logits=normal((), g)),
    "binomial": lambda g: td.Binomial(7, logits=normal((), g)),
    "gumbel": lambda g: td.Gumbel(normal((), g), normal((), g).exp()),
    "log-normal": lambda g: td.Independent(td.LogNormal(normal((2,), g), normal((2,), g).exp()), 1),
    "cauchy": lambda g: td.Cauchy(normal((), g), normal((), g).exp()),
    "half-normal": lambda g: td.HalfNormal(normal((), g).exp()),
    "straight-through": lambda g: td.OneHotCategoricalStraightThrough(logits=normal((4,), g)),
    "nested": lambda g: td.Independent(td.Independent(td.Beta(normal((2, 2), g).exp(), normal((2, 2), g).exp()), 1), 1),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", list(MAKERS))
def test_divergences_agree_with_torch(name: str, seed: int) -> None:
    p, q = random_pair(MAKERS[name], seed)
    expected = td.kl_divergence(p, q).numpy()
    np.testing.assert_allclose(
        kl_divergence(flat_distribution(p), flat_distribution(q)), expected, rtol=1e-4, atol=1e-6
    )


def test_hand_worked_numbers() -> None:
    # Two coins, 1/2 against 1/4: 0.5 log 2 + 0.5 log(2/3).
    coins = [{"logits": np.log([[0.5, 0.5]])}, {"logits": np.log([[0.25, 0.75]])}]
    expected = 0.5 * np.log(2) + 0.5 * np.log(2 / 3)
    np.testing.assert_allclose(kl_divergence(*map(flat_distribution, coins)), [expected], rtol=1e-5)
    choices = [{"bernoulli": np.zeros((1, 1))}, {"bernoulli": np.log([[1 / 3]])}]
    np.testing.assert_allclose(kl_divergence(*map(flat_distribution, choices)), [expected], rtol=1e-5)
    # Unit Gaussians one apart: 1/2. Equal means, deviations 1 and 2: log 2 + 1/8 - 1/2.
    shifted = [{"mean": [[0.0]], "log_std": [[0.0]]}, {"mean": [[1.0]], "log_std": [[0.0]]}]
    wider = [{"mean": [[0.0]], "log_std": [[0.0]]}, {"mean": [[0.0]], "log_std": [[np.log(2)]]}]
    np.testing.assert_allclose(kl_divergence(*map(flat_distribution, shifted)), [0.5], rtol=1e-6)
    np.testing.assert_allclose(kl_divergence(*map(flat_distribution, wider)), [np.log(2) - 0.375], rtol=1e-6)


def test_squashing_does_not_change_the_divergence_of_gaussians() -> None:
    def narrow(g: torch.Generator) -> Any:  # or the ends of the interval are hit, where float32 ends too
        return td.Independent(td.Normal(0.3 * normal((3,), g), 0.4 * (0.3 * normal((3,), g)).exp()), 1)

    p, q = random_pair(narrow, 1)
    transforms = [td.TanhTransform(), td.AffineTransform(1.0, 2.0)]
    squashed = [td.TransformedDistribution(d, transforms) for d in (p, q)]
    np.testing.assert_allclose(
        kl_divergence(*map(flat_distribution, squashed)), kl_divergence(flat_distribution(p), flat_distribution(q))
    )
    # And by Monte Carlo, on the squashed values themselves.
    torch.manual_seed(1)
    samples = squashed[0].sample((20_000,))
    estimate = (squashed[0].log_prob(samples) - squashed[1].log_prob(samples)).mean(0)
    exact = kl_divergence(*map(flat_distribution, squashed))
    assert np.all(np.abs(estimate.numpy() - exact) < 0.1 * (1 + exact))


def test_divergences_of_nested_parts_add_up() -> None:
    p = {"arm": MAKERS["normal"], "hand": {"grip": MAKERS["bernoulli"], "tool": MAKERS["categorical"]}}
    generators = [torch.Generator().manual_seed(k) for k in (1, 2)]
    one, other = ({"arm": p["arm"](g), "hand": {k: make(g) for k, make in p["hand"].items()}} for g in generators)
    flat = flat_distribution(one)
    assert sorted(flat) == ["arm.log_std", "arm.mean", "hand.grip.bernoulli", "hand.tool.logits"]
    parts = [(one["arm"], other["arm"]), *((one["hand"][k], other["hand"][k]) for k in ("grip", "tool"))]
    expected = sum(kl_divergence(flat_distribution(a), flat_distribution(b)) for a, b in parts)
    np.testing.assert_allclose(kl_divergence(flat, flat_distribution(other)), expected)
    pair = (td.Categorical(logits=torch.zeros(N, 2)), td.Categorical(logits=torch.zeros(N, 3)))
    assert sorted(flat_distribution(pair)) == ["0.logits", "1.logits"]  # a multi-categorical policy


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.01, 10.0))
def test_a_divergence_is_zero_for_equals_and_never_negative(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    for names in (("logits",), ("mean", "log_std"), ("bernoulli",)):
        p, q = ({name: rng.normal(size=(N, 3)) * scale for name in names} for _ in range(2))
        np.testing.assert_allclose(kl_divergence(flat_distribution(p), flat_distribution(p)), 0, atol=1e-6)
        assert (kl_divergence(flat_distribution(p), flat_distribution(q)) >= -1e-6).all()


def test_divergence_of_masked_and_impossible_actions() -> None:
    p, q = {"logits": [[0.0, 0.0, -np.inf]]}, {"logits": [[0.0, 1.0, -np.inf]]}
    assert np.isfinite(kl_divergence(flat_distribution(p), flat_distribution(q))).all()
    never = {"logits": [[0.0, -np.inf, -np.inf]]}
    assert kl_divergence(flat_distribution(p), flat_distribution(never))[0] == np.inf


def test_the_estimate_is_unbiased_and_varies_less_than_the_plain_one() -> None:
    rng = np.random.default_rng(1)
    log_p, log_q = (np.log(np.array(x)) for x in ([0.2, 0.3, 0.5], [0.25, 0.35, 0.4]))
    exact = kl_divergence({"logits": log_p[None]}, {"logits": log_q[None]})[0]
    action = rng.choice(3, 200_000, p=np.exp(log_p))
    found = kl_estimate(log_p[action], log_q[action])
    assert (found >= 0).all()
    assert abs(found.mean() - exact) < 5 * found.std() / np.sqrt(len(found))
    assert found.std() < 0.5 * (log_p - log_q)[action].std()


@pytest.mark.parametrize("seed", range(3))
def test_scaling_does_not_change_the_divergence_of_a_beta(seed: int) -> None:
    p, q = random_pair(MAKERS["beta"], seed)
    scaled = [td.TransformedDistribution(d, td.AffineTransform(-1.0, 2.0)) for d in (p, q)]
    expected = td.kl_divergence(p, q).numpy()
    np.testing.assert_allclose(kl_divergence(*map(flat_distribution, scaled)), expected, rtol=1e-4, atol=1e-6)


def test_divergences_of_nested_torch_families_add_up() -> None:
    one, other = (
        {"arm": MAKERS["beta"](g), "hand": (MAKERS["categorical"](g), MAKERS["full-covariance normal"](g))}
        for g in (torch.Generator().manual_seed(k) for k in (1, 2))
    )
    pairs = [(one["arm"], other["arm"]), *zip(one["hand"], other["hand"], strict=True)]
    expected = sum(td.kl_divergence(p, q).numpy() for p, q in pairs)
    np.testing.assert_allclose(kl_divergence(flat_distribution(one), flat_distribution(other)), expected, rtol=1e-4)


@pytest.mark.parametrize(
    "unknown", [td.VonMises(torch.ones(N), torch.ones(N)), td.RelaxedBernoulli(cast(Any, 0.5), torch.ones(N))]
)
def test_a_family_whose_divergence_torch_does_not_know_is_refused(unknown: Any) -> None:
    with pytest.raises(AgentError, match=rf"torch {type(unknown).__name__}, for which torch has no kl_divergence"):
        kl_divergence(flat_distribution(unknown), flat_distribution(unknown))


MIXTURE = td.MixtureSameFamily(td.Categorical(torch.ones(N, 2)), td.Normal(torch.zeros(N, 2), torch.ones(N, 2)))


@pytest.mark.parametrize(
    "wrong",
    [{}, (), 3, {"logits": "text"}, {"a.b": {"logits": [[0.0]]}}, MIXTURE],
    ids=["mapping", "tuple", "number", "text", "dot", "mixture"],
)
def test_invalid_distributions_are_refused_with_advice(wrong: Any) -> None:
    with pytest.raises(AgentError, match=r"distribution|the policy's logits"):
        flat_distribution(wrong)


def test_a_single_deviation_is_refused_with_the_shapes_it_may_have() -> None:
    with pytest.raises(AgentError, match=r"log_std is float64\[\]; expected .*give it shape \[k\] or \[n, k\]"):
        flat_distribution({"mean": [[0.0, 1.0]], "log_std": -0.5})


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["probs"], r"Instead of 'probs' return \"logits\": log\(probs\)"),
        (["mean", "std"], r"keys \['mean', 'std'\]\. Instead of 'std' return \"log_std\": log\(std\)"),
        (["loc", "scale"], r'"mean": loc\..*"log_std": log\(scale\)'),
        (["logit"], "Did you mean 'logits' by 'logit'?"),
        (["mean"], r"under the keys \['mean'\]\. Return"),
        (["logits", "value"], r"under the keys \['logits', 'value'\]\. Return"),
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [list, np.array, torch.tensor], ids=["list", "array", "tensor"])
def test_unknown_keys_are_refused_with_the_expected_names(make: Any, keys: list[str], words: str) -> None:
    arrays = {key: make([[0.5, 0.5]]) for key in keys}
    with pytest.raises(AgentError, match=words) as caught:
        flat_distribution(arrays)
    assert '{"mean": ..., "log_std": ...}' in str(caught.value)
    with pytest.raises(AgentError, match="at 'arm'"):
        flat_distribution({"arm": arrays})
