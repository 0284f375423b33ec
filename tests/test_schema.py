"""How spaces and an agent's outputs become named arrays."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
from gymnasium import spaces

from farstep.errors import AgentError, ConfigError, SpaceError
from farstep.schema import (
    ArraySpec,
    differences,
    flat,
    leaf_names,
    leaves,
    map_leaves,
    nest,
    space_schema,
    value_structure,
)

CAMERA = spaces.Box(0, 255, (4, 4, 3), np.uint8)
NESTED = spaces.Dict(
    camera=CAMERA,
    arms=spaces.Tuple([spaces.Dict(joint=spaces.Box(-1, 1, (7,), np.float64)), spaces.MultiBinary(2)]),
    mode=spaces.Discrete(3, start=5),
)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"])
def test_a_box_of_any_dtype(dtype: str) -> None:
    structure, schema = space_schema(spaces.Box(0, 1, (2, 3), np.dtype(dtype).type), "obs")
    assert structure == "obs"
    assert schema == {"obs": ArraySpec((2, 3), np.dtype(dtype).str)}
    assert schema["obs"].nbytes == 6 * np.dtype(dtype).itemsize


@pytest.mark.parametrize(
    ("space", "spec"),
    [
        (spaces.Box(-1, 1, (), np.float32), ArraySpec((), "<f4")),
        (spaces.Discrete(5), ArraySpec((), "<i8")),
        (spaces.Discrete(5, start=-2), ArraySpec((), "<i8")),
        (spaces.MultiDiscrete([3, 4]), ArraySpec((2,), "<i8")),
        (spaces.MultiDiscrete(cast(Any, [[3, 4], [1, 2]])), ArraySpec((2, 2), "<i8")),
        (spaces.MultiBinary(6), ArraySpec((6,), "|i1")),
        (spaces.MultiBinary((2, 3)), ArraySpec((2, 3), "|i1")),
    ],
    ids=lambda value: str(value)[:30],
)
def test_flat_spaces_are_one_array(space: spaces.Space[Any], spec: ArraySpec) -> None:
    assert space_schema(space, "action") == ("action", {"action": spec})


def test_nested_spaces_are_arrays_named_by_path() -> None:
    structure, schema = space_schema(NESTED, "obs")
    assert {name: str(spec) for name, spec in schema.items()} == {
        "obs.camera": "uint8[4, 4, 3]",
        "obs.arms.0.joint": "float64[7]",
        "obs.arms.1": "int8[2]",
        "obs.mode": "int64[]",
    }
    assert structure == {
        "camera": "obs.camera",
        "arms": ({"joint": "obs.arms.0.joint"}, "obs.arms.1"),
        "mode": "obs.mode",
    }
    assert sorted(leaf_names(structure)) == sorted(schema)


def test_values_survive_flattening_and_unflattening() -> None:
    structure, schema = space_schema(NESTED, "obs")
    sample = NESTED.sample()
    arrays = dict(leaves(structure, sample))
    assert arrays.keys() == schema.keys()
    assert all(np.shape(arrays[name]) == spec.shape for name, spec in schema.items())
    again = nest(structure, arrays)
    assert NESTED.contains(again)
    assert again["arms"][0]["joint"] is sample["arms"][0]["joint"]


@pytest.mark.parametrize(
    ("space", "reason"),
    [
        (spaces.Text(5), "strings have no fixed number of bytes"),
        (spaces.Graph(CAMERA, None), "the number of nodes and edges varies"),
        (spaces.Sequence(CAMERA), "the length varies"),
        (spaces.OneOf([CAMERA, CAMERA]), "the shape depends on the choice"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_spaces_without_a_fixed_layout_are_refused_with_the_reason(space: spaces.Space[Any], reason: str) -> None:
    nested = spaces.Dict(ok=spaces.Discrete(2), bad=spaces.Tuple([space]))
    with pytest.raises(
        SpaceError, match=f"obs.bad.0: {type(space).__name__} spaces .* since {reason}.*wrapper"
    ) as caught:
        space_schema(nested, "obs")
    assert isinstance(caught.value, ConfigError)


def test_custom_spaces_are_refused() -> None:
    class Odd(spaces.Space[Any]):
        pass

    with pytest.raises(SpaceError, match="Odd spaces are not supported"):
        space_schema(Odd((2,), np.float32), "obs")


def test_keys_that_cannot_be_names_are_refused() -> None:
    with pytest.raises(SpaceError, match=r"key 'left\.arm'.*without a dot"):
        space_schema(spaces.Dict({"left.arm": spaces.Discrete(2)}), "obs")


def test_an_agents_output_has_a_structure_too() -> None:
    arrays: dict[str, Any] = {}
    structure = value_structure({"mean": np.zeros((5, 2)), "heads": [np.ones(5), (np.zeros(5),)]}, "dist", arrays)
    assert structure == {"mean": "dist.mean", "heads": ("dist.heads.0", ("dist.heads.1.0",))}
    assert ArraySpec.of(arrays["dist.mean"]) == ArraySpec((2,), "<f8")
    with pytest.raises(AgentError, match=r"'a\.b'.*without a dot"):
        value_structure({"a.b": np.zeros(3)}, "x", {})


@pytest.mark.parametrize(
    ("value", "got"),
    [(None, "NoneType"), (np.array([{}]), "dict"), (np.array(["left"]), "<U4"), (np.zeros(2, "V2"), r"\|V2")],
    ids=["nothing", "objects", "text", "bytes"],
)
def test_agent_outputs_must_be_numbers(value: Any, got: str) -> None:
    with pytest.raises(AgentError, match=f"x.a: the agent returned {got}; arrays of numbers are expected"):
        value_structure({"a": value}, "x", {})


class Pair(NamedTuple):
    left: Any
    right: Any


def test_leaves_change_and_the_nesting_stays() -> None:
    value = OrderedDict(a=[1, (2, 3)], b=Pair(4, {"c": 5}))
    doubled = map_leaves(lambda leaf: 2 * leaf, value)
    assert doubled == {"a": [2, (4, 6)], "b": Pair(8, {"c": 10})}
    assert type(doubled) is dict and type(doubled["b"]) is Pair
    assert list(flat(doubled)) == [2, 4, 6, 8, 10]
    assert map_leaves(abs, -1) == 1 and list(flat(-1)) == [-1]


def test_differences_name_both_sides() -> None:
    mine = {"obs": ArraySpec((4,), "<f4"), "same": ArraySpec((), "|b1")}
    theirs = {"obs": ArraySpec((4,), "<f8"), "same": ArraySpec((), "|b1"), "new": ArraySpec((2,), "<i8")}
    assert differences(mine, mine) == []
    assert differences(mine, theirs) == [
        "new is absent here and int64[2] there",
        "obs is float32[4] here and float64[4] there",
    ]
