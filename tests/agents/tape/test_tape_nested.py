"""Nested results are compared as a user would compare them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from farstep.agents.tape import equal_results  # noqa: E402


@pytest.mark.parametrize(
    ("a", "b", "why"),
    [
        ({"x": torch.ones(2)}, {"x": np.ones(2, np.float32)}, None),
        (
            {"x": torch.tensor([float("nan"), float("inf")])},
            {"x": np.array([np.nan, np.inf], np.float32)},
            None,
        ),
        ({"x": torch.ones(2)}, {"x": np.ones(2)}, "x is float32"),
        ({"x": torch.ones(2)}, {"y": torch.ones(2)}, "the result has other keys"),
        (
            {"x": (torch.ones(2), torch.zeros(2))},
            {"x": (torch.ones(2), torch.full((2,), 0.5))},
            "x.1 differs by 0.5",
        ),
        (torch.tensor([1, 2]), np.array([1, 3]), "the result differs in 1 of 2 elements"),
        ([torch.ones(1)], [torch.ones(1), torch.ones(1)], "the result has another length"),
        ({"x": None}, {"x": torch.ones(1)}, "x is None on one side"),
        (torch.tensor(1.0), torch.tensor(1.00001), None),
        (torch.tensor(1.0), torch.tensor(1.0001), "differs by 0.0001"),
    ],
)
def test_difference_of_nested_results_is_described(a: Any, b: Any, why: str | None) -> None:
    found = equal_results(a, b)
    assert found is None if why is None else why in (found or "")
