"""Checks of a checkpoint's contents before they are used.

Even files with matching checksums can be forged, or come from another version of farstep. These functions raise
`Refused` unless types, keys, shapes, dtypes and ranges fit the restored objects.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np

from farstep.checkpoint.files import Refused
from farstep.core import Array

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
"""A counter or seed: at most 2**62, so that increments do not overflow 64 bits."""
Word = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]


def converted(
    where: str, value: object, kind: type[T], dec_hook: Callable[[type[Any], Any], object] | None = None
) -> T:
    """Convert plain data to the msgspec type `kind`. `where` names it in error messages; `dec_hook` is passed to
    msgspec."""
    try:
        return msgspec.convert(value, kind, dec_hook=dec_hook)
    except msgspec.ValidationError as error:
        raise Refused(f"{where} is malformed: {error}") from None


def check_array(where: str, array: object, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return the array. Refuse it unless it has this shape and dtype."""
    expected = f"{np.dtype(dtype)}{list(shape)} expected"
    if not isinstance(array, np.ndarray):
        raise Refused(f"{where} is {type(array).__name__}, {expected}")
    if array.shape != shape or array.dtype != np.dtype(dtype):
        raise Refused(f"{where} is {array.dtype}{list(array.shape)}, {expected}")
    if array.dtype == bool and array.view(np.uint8).max(initial=0) > 1:
        raise Refused(f"{where} holds bytes that are neither True nor False")
    return array


def check_like(found: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    """Refuse arrays whose names, dtypes or shapes differ from `expected`.

    If the first axis of an expected array has length 0, this axis may have any length.
    """
    check_keys("the checkpoint", found, expected)
    for name, array in expected.items():
        shape = array.shape
        if shape[:1] == (0,):
            shape = (*found[name].shape[:1], *shape[1:])
        check_array(name, found[name], shape, array.dtype)


def require(condition: object, reason: str) -> None:
    """Raise `Refused` with the reason unless the condition holds."""
    if not condition:
        raise Refused(reason)


@contextlib.contextmanager
def prefixed(where: str) -> Iterator[None]:
    """Context manager: put `where` in front of the reasons of refusals."""
    try:
        yield
    except Refused as reason:
        raise Refused(f"{where}: {reason}") from reason.__cause__


def check_finite(where: str, array: Array) -> None:
    """Refuse NaN and infinities."""
    if array.dtype.kind in "fc" and not np.isfinite(array).all():
        raise Refused(f"{where} holds {array[~np.isfinite(array)].flat[0]}, finite numbers expected")


def check_keys(where: str, found: Any, expected: Any) -> None:
    """Refuse a mapping with a missing or unknown entry."""
    for key in (key for key in expected if key not in found):
        raise Refused(f"{where} lacks {key}")
    for key in (key for key in found if key not in expected):
        raise Refused(f"{where} has an unknown entry {key!r}")


def check_torch_generator(where: str, state: object) -> None:
    """Refuse an array that is not a state of torch's CPU generator. If torch is not imported, check only the dtype."""
    if not isinstance(state, np.ndarray) or state.dtype != np.uint8 or state.ndim != 1:
        found = f"{state.dtype}{list(state.shape)}" if isinstance(state, np.ndarray) else type(state).__name__
        raise Refused(f"{where} is {found}, uint8[n] expected")
    if (torch := sys.modules.get("torch")) is not None:
        try:
            torch.Generator().set_state(torch.from_numpy(np.array(state)))
        except (RuntimeError, TypeError) as error:
            raise Refused(f"{where} is not a state of a generator: {error}") from None


class _PCG64State(msgspec.Struct, forbid_unknown_fields=True):
    state: int
    inc: int


class PCG64(msgspec.Struct, forbid_unknown_fields=True):
    """The state of a generator of `np.random.default_rng`, as plain data."""

    bit_generator: Literal["PCG64"]
    state: _PCG64State
    has_uint32: Annotated[int, msgspec.Meta(ge=0, le=1)]
    uinteger: Word


def check_numpy_generator(where: str, state: object) -> None:
    """Refuse plain data that is not a state of a generator of `np.random.default_rng`."""
    words = converted(where, state, PCG64)
    in_range = 0 <= words.state.state < 2**128 and 0 <= words.state.inc < 2**128
    require(in_range, f"{where} has a number out of range")
    require(words.state.inc % 2, f"{where} has the even increment {words.state.inc}, an odd one expected")
