"""The replay of any composition of operations equals the eager call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from tests.agents.tape.tape_agents import check  # noqa: E402

SMOOTH: dict[str, Callable[..., Any]] = {
    "tanh": torch.tanh, "sigmoid": torch.sigmoid, "relu": torch.relu, "neg": torch.neg, "abs": torch.abs,
    "exp": lambda x: torch.exp(-x.abs()), "log": lambda x: torch.log(x.abs() + 1), "silu": nn.functional.silu,
    "sqrt": lambda x: (x * x + 1).sqrt(), "softplus": nn.functional.softplus, "elu": nn.functional.elu,
    "pow": lambda x: x.clamp(-2, 2) ** 2, "cube": lambda x: x.clamp(-2, 2) ** 3, "rsub": lambda x: 1 - x,
    "scalar": lambda x: x * 0.5 + 3 - 1.25, "int": lambda x: x // 2 if not x.is_floating_point() else x / 3,
    "t": lambda x: x.transpose(0, -1), "flat": lambda x: x.reshape(-1),
    "unsqueeze": lambda x: x.unsqueeze(-1),
    "squeeze": lambda x: x.squeeze(), "expand": lambda x: x.expand(2, *x.shape),
    "slice": lambda x: x[..., :1],
    "step": lambda x: x[::2], "select": lambda x: x[0], "clone": lambda x: x.clone(),
    "flip": lambda x: x.flip(0),
    "float": lambda x: x.float(), "double": lambda x: x.double(), "mean": lambda x: x.double().mean(-1),
    "sum": lambda x: x.sum(0), "sumall": lambda x: x.sum(), "keep": lambda x: x.sum(-1, keepdim=True),
    "amax": lambda x: x.amax(-1), "amin": lambda x: x.amin(0, keepdim=True),
    "max": lambda x: x.max(-1).values,
    "softmax": lambda x: x.softmax(-1), "log_softmax": lambda x: x.log_softmax(0),
    "lse": lambda x: x.logsumexp(-1), "normalize": lambda x: x - x.logsumexp(-1, keepdim=True),
    "inplace": lambda x: x.clone().add_(1), "view_inplace": lambda x: _halved_row(x),
    "zeros": torch.zeros_like,
    "clamp_min": lambda x: x.clamp_min(0), "clamp_max": lambda x: x.clamp(max=1),
    "layer": lambda x: _normed(x),
    "cumsum": lambda x: x.cumsum(0), "var": lambda x: x.var(-1), "chunk": lambda x: x.chunk(2, -1)[-1],
}  # fmt: skip
PAIRS: dict[str, Callable[..., Any]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": lambda x, y: x / (y.abs() + 1),
    "max": torch.maximum,
    "min": torch.minimum, "matmul": torch.matmul, "cat": lambda x, y: torch.cat([x, y], -1),
    "stack": lambda x, y: torch.stack([x, y]),
    "where": lambda x, y: torch.where(torch.arange(x.shape[-1]) > 0, x, y),
    "scaled": lambda x, y: torch.add(x, y, alpha=2), "in_place": lambda x, y: x.clone().mul_(y),
}  # fmt: skip
STEPPED: dict[str, Callable[..., Any]] = {
    "argmax": lambda x: x.argmax(-1), "argmin": lambda x: x.argmin(), "gt": lambda x: x > 0,
    "le": lambda x: x <= 0.5,
    "mask": lambda x: x.masked_fill(x < 0, 2), "not": lambda x: ~(x == 1), "long": lambda x: x.long(),
    "and": lambda x: (x > 0) & (x < 1), "ne": lambda x: (x != 0).float(), "amax": lambda x: x.max(0),
    "gather": lambda x: x.gather(-1, x.argmax(-1, keepdim=True)),
}  # fmt: skip


def _halved_row(x: Tensor) -> Tensor:
    made = x.clone()
    made[0].mul_(2)
    made[..., -1:] = 0
    return made


def _normed(x: Tensor) -> Tensor:
    return nn.functional.layer_norm(x, x.shape[-1:])


STEPS = st.lists(
    st.tuples(st.sampled_from(sorted(SMOOTH) + sorted(PAIRS)), st.integers(0, 9), st.integers(0, 9)),
    min_size=1,
    max_size=8,
)
SHAPES = [(3, 4), (4,), (1, 4), (3, 1), (), (2, 3, 4), (4, 4)]
DTYPES = [torch.float32, torch.float32, torch.float64, torch.int64, torch.bool, torch.uint8]


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=STEPS,
    stepped=st.lists(st.tuples(st.sampled_from(sorted(STEPPED)), st.integers(0, 9)), max_size=2),
    inputs=st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
def test_any_composition_equals_eager(steps: Any, stepped: Any, inputs: Any, seed: int) -> None:
    def act(*given: Tensor) -> list[Any]:
        results: list[Any] = []
        # A step function of computed values would turn a rounding into a difference: it is given inputs only.
        for name, index in stepped:
            results.append(_attempt(STEPPED[name], given[index % len(given)]))
        known = list(given)
        for name, first, second in steps:
            operands = [known[first % len(known)], known[second % len(known)]]
            made = _attempt(PAIRS[name], *operands) if name in PAIRS else _attempt(SMOOTH[name], operands[0])
            known += [made] if made is not None and made.numel() < 10_000 else []
        return results + known[len(given) :]

    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...], dtype: Any) -> Tensor:
        drawn = (torch.randn(shape, generator=generator) * 2).round(decimals=1)
        return drawn.abs().to(dtype) if dtype == torch.uint8 else drawn.to(dtype)

    check(act, *(lambda spec=spec: draw(*spec) for spec in inputs), calls=2, tolerance=1e-3)


def test_softmax_of_a_log_softmax_of_a_number_equals_eager() -> None:
    check(lambda x: x.log_softmax(0).softmax(-1), lambda: torch.tensor(0.5))


def _attempt(function: Callable[..., Any], *operands: Tensor) -> Any:
    try:
        return function(*operands)
    except (RuntimeError, IndexError, TypeError):
        return None  # no such operation for these shapes or types
