"""Data-only encoding of plain Python values, arrays and Gymnasium spaces.

The format cannot refer to code: bytes from a peer decode only to numbers, strings, containers, arrays or spaces. Other
values cannot be encoded; with `opaque`, they are replaced by their `repr`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

import msgspec
import numpy as np
from gymnasium import spaces

from farstep.errors import WireError

_ARRAY, _SCALAR, _TUPLE, _SPACE, _BIGINT, _SEEDED_SPACE, _COMPLEX, _PAIRS = 1, 2, 3, 4, 5, 6, 7, 8
_KEY_PARTS = (str, int, bool, float, complex, bytes, NoneType)
_MAX_DEPTH = 32
_MAX_BOX_BYTES = 2**28
"""Maximum number of bytes of all boxes of a value. Equal bounds are sent as two numbers, so without a limit a few bytes
could request any amount of memory."""


def pack(value: object, *, opaque: bool = False) -> bytes:
    """Encode `value`.

    Args:
        opaque: Whether to replace values that cannot be encoded by their `repr`.

    Raises:
        WireError: A value cannot be encoded, and `opaque` is False; or it is nested too deeply.
    """
    return msgspec.msgpack.encode(_data(value, opaque, 0))


def unpack(payload: bytes | bytearray | memoryview) -> Any:
    """Decode what `pack` encoded. Raise `WireError` for any other bytes."""
    try:
        return _value(msgspec.msgpack.decode(payload), _BoxBudget())
    except WireError:
        raise
    except Exception as error:  # invalid bytes can raise almost anything
        raise WireError(f"cannot decode {len(payload)} bytes: {error}") from error


def _data(value: object, opaque: bool, depth: int) -> object:
    if depth > _MAX_DEPTH:
        raise WireError(f"value is nested more than {_MAX_DEPTH} levels deep; it cannot be sent.")
    kind = type(value)
    if value is None or kind in (bool, float, bytes) or (kind is str and _is_utf8(value)):  # type: ignore[arg-type]
        return value
    if kind is int:
        big = not -(2**63) <= value < 2**64  # type: ignore[operator]
        return msgspec.msgpack.Ext(_BIGINT, str(value).encode()) if big else value
    if kind is complex:
        return msgspec.msgpack.Ext(_COMPLEX, struct.pack("<dd", value.real, value.imag))  # type: ignore[attr-defined]
    if isinstance(value, spaces.Space):  # before Mapping, because a Dict space is also a mapping
        encoded = _ext(_SPACE, _space_data(value, opaque, depth))
        state = _generator_state(value)
        return encoded if state is None else _ext(_SEEDED_SPACE, [encoded, *(_data(x, opaque, depth) for x in state)])
    if isinstance(value, Mapping):
        entries = {_key(key): _data(sub, opaque, depth + 1) for key, sub in value.items()}
        if any(isinstance(key, (tuple, complex, bytes)) for key in entries):  # MessagePack has no such keys
            return _ext(_PAIRS, [[_data(key, opaque, depth + 1), sub] for key, sub in entries.items()])
        return entries
    if kind is list:
        return [_data(sub, opaque, depth + 1) for sub in value]  # type: ignore[attr-defined]
    if kind is tuple:
        return _ext(_TUPLE, [_data(sub, opaque, depth + 1) for sub in value])  # type: ignore[attr-defined]
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            return _ext(_ARRAY, ["O", list(value.shape), [_data(x, opaque, depth + 1) for x in value.flat]])
        if not value.dtype.hasobject and value.dtype.names is None:
            return _ext(_ARRAY, [value.dtype.str, list(value.shape), value.tobytes()])
    if isinstance(value, np.generic) and not value.dtype.hasobject and value.dtype.names is None:
        return _ext(_SCALAR, [value.dtype.str, value.tobytes()])
    if opaque:
        return repr(value)
    raise WireError(
        f"a {kind.__module__}.{kind.__qualname__} cannot be sent from a worker: only numbers, strings, "
        "containers, arrays and spaces can, since the head never unpickles anything from a worker."
    )


def _is_utf8(text: str) -> bool:
    """Whether `text` can be encoded. Lone surrogates, as in file names that are not UTF-8, cannot."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _key(key: object) -> object:
    if isinstance(key, str) and not _is_utf8(key):
        return repr(key)
    if isinstance(key, (str, int, bool, float)) or key is None:
        return key
    if isinstance(key, np.generic):
        return key.item()
    return key if type(key) in (bytes, complex) or _is_tuple_of_data(key) else repr(key)


def _is_tuple_of_data(key: object) -> bool:
    return type(key) is tuple and all(
        type(part) in _KEY_PARTS or isinstance(part, np.generic) or _is_tuple_of_data(part) for part in key
    )


def _ext(code: int, data: object) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(data))


class _BoxBudget:
    """Number of bytes that the remaining boxes of a value may take."""

    def __init__(self) -> None:
        self._left = _MAX_BOX_BYTES

    def take(self, shape: Sequence[int], itemsize: int) -> None:
        self._left -= max(1, math.prod(shape)) * max(1, itemsize)
        if min(shape, default=0) < 0 or self._left < 0:
            raise WireError(f"a Box of shape {shape}; all boxes together may have {_MAX_BOX_BYTES} bytes.")


def _value(data: object, budget: _BoxBudget) -> Any:
    if isinstance(data, dict):
        return {key: _value(sub, budget) for key, sub in data.items()}
    if isinstance(data, list):
        return [_value(sub, budget) for sub in data]
    if isinstance(data, msgspec.msgpack.Ext):
        return _decode_ext(data.code, bytes(data.data), budget)
    return data


def _decode_ext(code: int, payload: bytes, budget: _BoxBudget) -> Any:
    if code == _BIGINT:
        return int(payload)
    if code == _COMPLEX:
        return complex(*struct.unpack("<dd", payload))
    body = msgspec.msgpack.decode(payload)
    if code == _TUPLE:
        return tuple(_value(sub, budget) for sub in body)
    if code == _PAIRS:
        return {_value(key, budget): _value(sub, budget) for key, sub in body}
    if code == _SCALAR:
        real = _dtype(body[0])
        return np.frombuffer(body[1], dtype=real)[0] if real.itemsize else real.type()  # an empty string has no bytes
    if code == _SPACE:
        return _space(body, budget)
    if code == _SEEDED_SPACE:
        space, *state = (_value(entry, budget) for entry in body)
        if not isinstance(space, spaces.Space):
            raise WireError(f"a generator state for a {type(space).__name__}; only spaces have one.")
        space._np_random = _generator(state)
        return space
    if code != _ARRAY:
        raise WireError(f"unknown extension type {code}.")
    kind, shape, content = body
    if kind == "O":
        array = np.empty(len(content), dtype=object)
        array[:] = [_value(sub, budget) for sub in content]
        return array.reshape(shape)
    return np.frombuffer(content, dtype=_dtype(kind)).reshape(shape).copy()


def _dtype(text: object) -> np.dtype[Any]:
    dtype = np.dtype(str(text))
    if dtype.hasobject:
        raise WireError(f"dtype {text!r} contains Python objects.")
    return dtype


def _space_data(space: spaces.Space[Any], opaque: bool, depth: int) -> list[object]:
    def nested(sub: object) -> object:
        return _data(sub, opaque, depth + 1)

    match space:
        case spaces.Box():
            low, high = (_shrunk(bound) for bound in (space.low, space.high))
            return ["box", nested(low), nested(high), list(space.shape), np.dtype(space.dtype).str]
        case spaces.Discrete():
            return ["discrete", nested(space.n), nested(space.start), np.dtype(space.dtype).str]
        case spaces.MultiDiscrete():
            return ["multidiscrete", nested(space.nvec), nested(space.start), np.dtype(space.dtype).str]
        case spaces.MultiBinary():
            return ["multibinary", nested(space.n)]
        case spaces.Dict():
            pairs = [[key, nested(sub)] for key, sub in space.spaces.items()]
            return ["dict", pairs, getattr(space, "sort_keys", True)]
        case spaces.Tuple():
            return ["tuple", [nested(sub) for sub in space.spaces]]
    return ["other", type(space).__name__, repr(space)]


def _generator_state(space: spaces.Space[Any]) -> list[int] | None:
    """The state of a space's generator, as integers; None if it was not seeded, or if it is not Gymnasium's PCG64."""
    generator = space._np_random  # `np_random` would seed the generator
    if generator is None or not isinstance(generator.bit_generator, np.random.PCG64):
        return None
    state: Any = generator.bit_generator.state
    return [state["state"]["state"], state["state"]["inc"], state["has_uint32"], state["uinteger"]]


def _generator(state: Sequence[Any]) -> np.random.Generator:
    """The PCG64 generator with this state. Other generators are not sent, because NumPy does not check their states."""
    limits = (2**128, 2**128, 2, 2**32)
    fits = len(state) == len(limits) and all(
        type(x) is int and 0 <= x < limit for x, limit in zip(state, limits, strict=True)
    )
    if not fits or not state[1] % 2:
        raise WireError("a generator state of a space that is not valid for PCG64.")
    bits = np.random.PCG64(0)
    bits.state = {
        "bit_generator": "PCG64",
        "state": {"state": state[0], "inc": state[1]},
        "has_uint32": state[2],
        "uinteger": state[3],
    }
    return np.random.Generator(bits)


def _shrunk(bound: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Reduce a bound with equal entries to one number. The bounds of an image would take 2 x 28 KB."""
    first = bound.reshape(-1)[:1]
    return first.reshape(()) if bound.size and bool(np.all(bound == first)) else bound


def _space(body: list[Any], budget: _BoxBudget) -> object:
    kind, *rest = body
    fields: list[Any] = [_value(entry, budget) for entry in rest]
    if kind == "box":
        low, high, shape, dtype = fields
        real = _dtype(dtype)
        budget.take(shape, real.itemsize)
        bounds = [np.broadcast_to(np.asarray(b, real), tuple(shape)).copy() for b in (low, high)]
        return spaces.Box(bounds[0], bounds[1], tuple(shape), real.type)
    if kind == "discrete":
        return spaces.Discrete(int(fields[0]), start=int(fields[1]), dtype=_dtype(fields[2]).type)
    if kind == "multidiscrete":
        return spaces.MultiDiscrete(fields[0], start=fields[1], dtype=_dtype(fields[2]).type)
    if kind == "multibinary":
        return spaces.MultiBinary(tuple(fields[0]) if isinstance(fields[0], tuple) else fields[0])
    if kind == "dict":
        found = spaces.Dict([(key, sub) for key, sub in fields[0]])  # pass pairs, because Gymnasium sorts a dict
        if not fields[1]:
            found.sort_keys = False
        return found
    if kind == "tuple":
        return spaces.Tuple(fields[0])
    raise WireError(f"a space of kind {fields[0]!r}, which farstep does not support.")


class Limits:
    """Maximum sizes of headers and messages. A peer that sends more is disconnected."""

    HEADER_BYTES = 16 * 2**20
    MESSAGE_BYTES = 8 * 2**30


def frame_lengths(lengths: list[int]) -> bytes:
    """A table of frame lengths, for links that send each message as one block of bytes."""
    return struct.pack(f"<I{len(lengths)}Q", len(lengths), *lengths)
