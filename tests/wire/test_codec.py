"""The data-only encoding: round trips, and bytes that farstep did not write."""

from __future__ import annotations

import pickle
import random
from collections import OrderedDict
from copy import deepcopy
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from gymnasium import spaces

from farstep.errors import WireError
from farstep.schema import ArraySpec
from farstep.wire import messages as m
from farstep.wire.codec import Limits, pack, unpack

SPACES = [
    spaces.Box(-1.0, 1.0, (3,), np.float32),
    spaces.Box(np.array([0.0, -np.inf]), np.array([np.inf, 5.0]), dtype=np.float64),
    spaces.Box(0, 255, (84, 84, 4), np.uint8),
    spaces.Box(-5, 5, (), np.int16),
    spaces.Discrete(4),
    spaces.Discrete(3, start=-1),
    spaces.MultiDiscrete([3, 2]),
    spaces.MultiDiscrete(cast(Any, [[3, 2], [4, 5]]), start=cast(Any, [[1, 1], [0, -2]])),
    spaces.MultiBinary(5),
    spaces.MultiBinary((2, 3)),
    spaces.Dict(z=spaces.Discrete(2), a=spaces.Tuple([spaces.Box(0, 1), spaces.Dict(b=spaces.MultiBinary(2))])),
]
VALUES: list[Any] = [
    None,
    True,
    -(2**63),
    2**64 - 1,
    2**200,
    -(2**64),
    1.5,
    float("inf"),
    "text",
    "Grüße ☃",
    b"bytes",
    [1, [2, "x"]],
    (1, (2, [3, ()])),
    {"a": {"b": (1, 2)}, 3: None},
    1 - 2.5j,
    {("red", 1): {(0, (b"x", None)): [2j]}, "plain": (3,), b"raw": 1, 2j: 2},
    np.float32(1.25),
    np.int8(-3),
    np.bool_(True),
    np.str_("word"),
    np.str_(""),
    np.datetime64("2024-01-02", "D"),
]
ARRAYS = [
    np.arange(6, dtype=np.int32).reshape(2, 3),
    np.zeros((0, 4), np.float64),
    np.array(7, np.uint8),
    np.arange(4, dtype=">f4"),
    np.arange(12.0).reshape(3, 4).T,
    np.array([True, False]),
    np.array(["ab", ""]),
    np.array([1 + 2j]),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_survive_a_round_trip(value: Any) -> None:
    got = unpack(pack(value))
    assert got == value and type(got) is type(value)


def test_nan_survives_a_round_trip() -> None:
    assert np.isnan(unpack(pack(float("nan"))))


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype.str}{a.shape}")
def test_arrays_survive_a_round_trip(array: Any) -> None:
    got = unpack(pack(array))
    assert got.dtype == array.dtype and got.shape == array.shape
    np.testing.assert_array_equal(got, array)
    assert got.flags.writeable


def test_arrays_of_objects_keep_their_data() -> None:
    array = np.empty((2, 2), object)
    array[:] = [[None, [1, 2]], [np.arange(3), [3, 4]]]
    got = unpack(pack(array))
    assert got.shape == (2, 2) and got[0, 0] is None and got[0, 1] == [1, 2] and got[1, 1] == [3, 4]
    np.testing.assert_array_equal(got[1, 0], [0, 1, 2])


@pytest.mark.parametrize("space", SPACES, ids=lambda s: type(s).__name__)
def test_spaces_survive_a_round_trip(space: spaces.Space[Any]) -> None:
    got = unpack(pack(space))
    assert got == space and got.dtype == space.dtype and got.shape == space.shape
    assert repr(got) == repr(space)


def test_a_dict_space_keeps_its_order() -> None:
    space = spaces.Dict(OrderedDict(z=spaces.Discrete(2), a=spaces.Discrete(3)))
    assert list(unpack(pack(space)).spaces) == ["z", "a"]


@pytest.mark.parametrize("space", SPACES, ids=lambda s: type(s).__name__)
def test_seeded_spaces_continue_their_samples_after_decoding(space: spaces.Space[Any]) -> None:
    space = deepcopy(space)
    space.seed(5)
    space.sample()
    got = unpack(pack(space))
    for _ in range(3):
        assert repr(got.sample()) == repr(space.sample())


def test_spaces_with_other_generators_than_pcg64_can_be_sent() -> None:
    space = spaces.Discrete(1000, seed=np.random.Generator(np.random.MT19937(1)))
    assert unpack(pack(space)) == space


@pytest.mark.parametrize(
    "state",
    [
        [],
        [1, 3, 0],
        [2**128, 3, 0, 0],
        [-1, 3, 0, 0],
        [1, 2, 0, 0],
        [1, 3, 2, 0],
        [1, 3, 0, 2**32],
        [1, 3.0, 0, 0],
        [True, 3, 0, 0],
        ["1", 3, 0, 0],
    ],
    ids=repr,
)
def test_generators_with_impossible_states_are_refused(state: list[Any]) -> None:
    def seeded(state: list[Any], space: Any) -> bytes:
        numbers = [msgspec.msgpack.decode(pack(number)) for number in state]
        return msgspec.msgpack.encode(msgspec.msgpack.Ext(6, msgspec.msgpack.encode([space, *numbers])))

    space = msgspec.msgpack.decode(pack(spaces.Discrete(2)))
    assert unpack(seeded([1, 3, 0, 0], space)) == spaces.Discrete(2)
    for payload in (seeded(state, space), seeded([1, 3, 0, 0], "Discrete(2)")):
        with pytest.raises(WireError, match="generator"):
            unpack(payload)


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, lambda: None, "\udcff", {"deep": [object()]}],
    ids=["object", "set", "function", "text", "deep"],
)
def test_objects_are_refused_or_described(value: Any) -> None:
    with pytest.raises(WireError):
        pack(value)
    assert isinstance(unpack(pack({"x": value}, opaque=True)), dict)


def test_unbounded_nesting_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(WireError, match="levels deep"):
        pack(value)


def test_no_message_can_name_code() -> None:
    code = pickle.dumps(print)
    for payload in (code, msgspec.msgpack.encode(msgspec.msgpack.Ext(9, code))):
        with pytest.raises(WireError):
            unpack(payload)
    with pytest.raises(WireError):
        unpack(msgspec.msgpack.encode(msgspec.msgpack.Ext(1, msgspec.msgpack.encode(["|O", [1], b"x" * 8]))))


@pytest.mark.slow
def test_a_small_message_cannot_allocate_all_memory() -> None:
    box = ["box", 0.0, 1.0, [2**20, 2**20], "<f8"]
    with pytest.raises(WireError, match="Box of shape"):
        unpack(msgspec.msgpack.encode(msgspec.msgpack.Ext(4, msgspec.msgpack.encode(box))))
    box[3] = [2**21]  # fits alone
    one = msgspec.msgpack.Ext(4, msgspec.msgpack.encode(box))
    assert unpack(msgspec.msgpack.encode(one)).shape == (2**21,)
    with pytest.raises(WireError, match="Box of shape"):
        unpack(msgspec.msgpack.encode(msgspec.msgpack.Ext(4, msgspec.msgpack.encode(["tuple", [one] * 1000]))))


MESSAGES: list[Any] = [
    m.Hello(1, 0, "run", "host", 42, {"python": "3.11"}),
    m.Ready(pack(SPACES[0]), pack(SPACES[4])),
    m.AgentReady(1, {"action": ArraySpec((2,), "<f4")}, pack({"action": "action"})),
    m.Chunk(7, 3, b"\0" * 8, index=4, infos=True, keys=["obs", "reward"]),
    m.Reply(3),
    m.Failure("ValueError: x", "traceback", "step", slot=3, seed=5),
    m.WeightRequest(2),
    m.Progress([1, 2, 3]),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_survive_a_round_trip(message: Any) -> None:
    assert m.decode_from_worker([m.encode(message)]) == message


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xc1"],
        [m.encode(m.Stop())],  # the head's, not a worker's
        [msgspec.msgpack.encode({"type": "hello", "worker": "one"})],
        [msgspec.msgpack.encode({"type": "unknown"})],
        [b"\x82\xa4type\xa5reply\xa1x" + b"\x91" * 100_000 + b"\x01"],
        [b"\x82\xa4type\xa7failure\xa7message\xa2\xff\xfe"],
        [msgspec.msgpack.encode({"type": "progress", "words": [2**63]})],
        [bytes(Limits.HEADER_BYTES + 1)],
    ],
    ids=[
        "none",
        "empty",
        "invalid",
        "other-side",
        "wrong-type",
        "unknown",
        "too-deep",
        "not-utf8",
        "overflow",
        "oversized",
    ],
)
def test_invalid_messages_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        m.decode_from_worker(frames)


def mutations(valid: list[bytes], count: int, seed: int) -> Any:
    """Random bytes, and valid ones that were cut, extended or changed in a few places."""
    rng = random.Random(seed)
    for _ in range(count):
        payload = bytearray(rng.choice(valid) if rng.random() < 0.9 else rng.randbytes(rng.randrange(200)))
        for _ in range(rng.randrange(1, 5)):
            where = rng.randrange(len(payload) + 1)
            match rng.randrange(3):
                case 0:
                    payload[where : where + 1] = rng.randbytes(1)
                case 1:
                    del payload[where : where + rng.randrange(1, 8)]
                case 2:
                    payload[where:where] = rng.randbytes(rng.randrange(1, 8))
        yield bytes(payload)


def test_fuzzed_messages_decode_or_are_refused() -> None:
    refused = 0
    for payload in mutations([m.encode(message) for message in MESSAGES], 20_000, seed=1):
        try:
            m.decode_from_worker([payload])
        except WireError:
            refused += 1
    assert refused > 10_000


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of NumPy, for old names of dtypes
def test_fuzzed_values_decode_or_are_refused() -> None:
    valid = [pack(value) for value in (*VALUES, *ARRAYS, *SPACES, {"all": VALUES})]
    refused = 0
    for payload in mutations(valid, 20_000, seed=2):
        try:
            unpack(payload)
        except WireError:
            refused += 1
    assert refused > 5_000
