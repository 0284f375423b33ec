"""Observations outside the bounds of their space are found, with name, value, slot and bounds."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from farstep.worker.hosting.bounds import outside_bounds


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (1.0, ""),
        (1.000001, ""),  # rounding
        (-7.25, "obs[1] was -7.25 in environment slot 12, but its Box allows -1 to 1"),
        (np.inf, "obs[1] was inf in environment slot 12, but its Box allows -1 to 1"),
        (np.nan, "obs[1] was nan in environment slot 12, but its Box allows -1 to 1"),
    ],
)
def test_value_outside_a_box_is_described(value: float, found: str) -> None:
    observed = np.zeros((4, 3, 2), np.float32)
    observed[3, 2, 1] = value
    assert outside_bounds(spaces.Box(-1, 1, (2,), np.float32), {"obs": observed}, first_slot=10) == found


def test_value_furthest_outside_is_the_example() -> None:
    observed = np.array([[[2.0], [0.0]], [[9.0], [-3.0]]], np.float32)
    assert outside_bounds(spaces.Box(-1, 1, (1,), np.float32), {"obs": observed}, 0).startswith("obs[0] was 9 in ")


def test_unbounded_boxes_contain_everything_but_nan() -> None:
    observed = np.array([[1e30, -np.inf]], np.float32)
    box = spaces.Box(-np.inf, np.inf, (), np.float32)
    assert outside_bounds(box, {"obs": observed}, 0) == ""
    observed[0, 1] = np.nan
    assert outside_bounds(box, {"obs": observed}, 0).startswith("obs was nan in environment slot 1,")


def test_entries_of_nested_spaces_are_named() -> None:
    space = spaces.Dict(
        image=spaces.Box(0, 255, (2, 2), np.uint8),
        pair=spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 10, (), np.int64)]),
    )
    observed = {
        "obs.image": np.full((5, 1, 2, 2), 255, np.uint8),
        "obs.pair.0": np.full((5, 1), 7),
        "obs.pair.1": np.full((5, 1), 11),
    }
    assert outside_bounds(space, observed, 0) == "obs.pair.1 was 11 in environment slot 0, but its Box allows 0 to 10"
