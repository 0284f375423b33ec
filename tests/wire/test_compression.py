"""Arrays survive compression, are compressed where it saves time, and never decompress to more than announced."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farstep.errors import WireError
from farstep.wire import compression as module
from farstep.wire.compression import DELTA, Compressor, available, unpack

ALL = ("lz4", "zstd")
SLOW, FAST = 1e6, 1e12


def frames(rows: int = 32) -> Any:
    """A picture in which little changes."""
    still = np.random.default_rng(0).integers(0, 255, (84, 84), np.uint8)
    movie = np.repeat(still[None], rows, axis=0)
    for t in range(rows):
        movie[t, t : t + 4, 10:20] = 255
    return movie


def unpacked(choice: str, frame: Any, array: Any) -> bytes:
    return b"".join(rows.tobytes() for rows in unpack(choice, frame, array.nbytes, array[0].nbytes))


def test_both_compression_packages_are_installed() -> None:
    assert sorted(available()) == ["lz4", "zstd"]


@pytest.mark.parametrize("choice", [*ALL, *(DELTA + name for name in ALL)])
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_packed_arrays_survive_a_round_trip(choice: str, data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 20), st.integers(1, 5), st.integers(1, 9)))
    array = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 3, shape).astype(np.uint8)
    array = array[:, :: data.draw(st.integers(1, 2))]  # not always one after the other
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_BYTES", data.draw(st.integers(1, 2000)))
        packed = Compressor("auto", ALL, lambda: SLOW).compressed(choice, array)
        assert unpacked(choice, packed, array) == array.tobytes()
        for wrong in (packed[:-1], packed + b"x", packed[:8]):
            with pytest.raises(WireError):
                unpacked(choice, wrong, array)


def test_arrays_are_compressed_on_a_slow_connection() -> None:
    movie = frames()
    codec, frame = Compressor("auto", ALL, lambda: SLOW).pack("obs", movie)
    assert codec
    assert len(frame) < movie.nbytes / 10
    assert unpacked(codec, frame, movie) == movie.tobytes()


def test_arrays_are_not_compressed_on_a_fast_connection() -> None:
    movie = frames()
    assert Compressor("auto", ALL, lambda: FAST).pack("obs", movie) == ("", movie.tobytes())


def test_noise_is_not_compressed() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (32, 1000), np.uint8)
    assert Compressor("auto", ALL, lambda: SLOW).pack("obs", noise)[0] == ""


def test_no_choice_is_made_before_the_rate_is_known() -> None:
    rate = [math.inf]
    compressor = Compressor("auto", ALL, lambda: rate[0])
    assert compressor.pack("obs", frames())[0] == ""
    rate[0] = SLOW
    assert compressor.pack("obs", frames())[0] != ""


@pytest.mark.parametrize(("mode", "accepted"), [("none", ALL), ("auto", ()), ("lz4", ("zstd",))])
def test_methods_that_are_disabled_or_unknown_to_the_head_are_not_used(mode: str, accepted: tuple[str, ...]) -> None:
    assert Compressor(mode, accepted, lambda: SLOW).pack("obs", frames())[0] == ""


def test_each_array_has_its_own_choice() -> None:
    rate = [SLOW]
    compressor = Compressor("auto", ALL, lambda: rate[0])
    arrays = [np.full((16, 256), i, np.uint8) for i in range(4)]
    compressed: list[set[int]] = []
    for _ in range(130):
        compressed.append({i for i, array in enumerate(arrays) if compressor.pack(f"array {i}", array)[0]})
        rate[0] = FAST
    assert compressed[0] == compressed[1] == {0, 1, 2, 3}
    assert compressed[-1] == set()


def test_choices_are_reconsidered() -> None:
    rate = [SLOW]
    compressor = Compressor("auto", ALL, lambda: rate[0])
    assert compressor.pack("obs", frames())[0] != ""
    rate[0] = FAST
    assert {compressor.pack("obs", frames())[0] for _ in range(70)} >= {""}


@pytest.mark.parametrize("choice", [*ALL, *(DELTA + name for name in ALL)])
def test_decompression_bomb_is_refused(choice: str) -> None:
    huge = np.zeros((1, 50_000_000), np.uint8)
    packed = Compressor("auto", ALL, lambda: SLOW).compressed(choice, huge)
    with pytest.raises(WireError, match="at most 1000 fit"):
        list(unpack(choice, packed, 1000, 10))
    lie = (1000).to_bytes(8, "little") + packed[8:]
    with pytest.raises(WireError):
        list(unpack(choice, lie, 1000, 10))


@pytest.mark.parametrize("frame", [b"", b"x", b"\0" * 8, b"\1" + b"\0" * 7 + b"nonsense"])
@pytest.mark.parametrize("choice", [*ALL, "delta-", "gzip", "delta-delta-lz4"])
def test_invalid_compressed_arrays_are_refused(choice: str, frame: bytes) -> None:
    with pytest.raises(WireError):
        list(unpack(choice, frame, 1000, 10))


@pytest.mark.parametrize("choice", [*ALL, *(DELTA + name for name in ALL)])
def test_a_frame_without_a_complete_header_is_called_truncated(choice: str) -> None:
    with pytest.raises(WireError, match="truncated compressed array: 7 bytes"):
        list(unpack(choice, bytes(7), 1000, 10))
