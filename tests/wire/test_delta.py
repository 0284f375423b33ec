"""Differences between buffers: without loss, small when little changed, and refused when damaged."""

from __future__ import annotations

import numpy as np
import pytest

from farstep.errors import WireError
from farstep.wire.delta import decode, encode


def weights(seed: int, count: int = 10_000) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=count).astype(np.float32)


def size(frames: list[bytes]) -> int:
    return sum(map(len, frames))


@pytest.mark.parametrize("word", [2, 4])
@pytest.mark.parametrize("seed", range(20))
def test_random_bits_survive_a_round_trip(seed: int, word: int) -> None:
    old, new = (np.random.default_rng((seed, i)).integers(0, 256, 4096, np.uint8).tobytes() for i in range(2))
    assert decode(old, encode(old, new, word), word) == new


@pytest.mark.parametrize("word", [2, 4])
@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", "<i8"])
def test_every_dtype_survives_a_round_trip(dtype: str, word: int) -> None:
    old = weights(0).astype(dtype)
    new = (weights(0) + 1e-3 * weights(1)).astype(dtype)
    assert decode(old.tobytes(), encode(old.tobytes(), new.tobytes(), word), word) == new.tobytes()


def test_special_numbers_survive_a_round_trip() -> None:
    old = np.array([0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-45, 3e38, 1.0], np.float32)
    new = old[::-1].copy()
    assert decode(old.tobytes(), encode(old.tobytes(), new.tobytes())) == new.tobytes()


def test_small_changes_have_small_deltas() -> None:
    old = weights(0, 100_000)
    same, close = old, (old + 1e-4 * weights(1, 100_000)).astype(np.float32)
    assert size(encode(old.tobytes(), same.tobytes())) < 0.01 * old.nbytes
    assert size(encode(old.tobytes(), close.tobytes())) < 0.6 * old.nbytes
    assert size(encode(old.tobytes(), weights(2, 100_000).tobytes())) <= old.nbytes  # never more than the whole


def test_words_of_16_bits_suit_weights_of_16_bits() -> None:
    old = weights(0, 100_000)
    first, second = (array.astype("<f2").tobytes() for array in (old, old + 1e-3 * weights(1, 100_000)))
    assert size(encode(first, second, 2)) < size(encode(first, second, 4))


def test_damaged_delta_is_refused() -> None:
    old, new = weights(0).tobytes(), weights(1).tobytes()
    frames = encode(old, new)
    for damaged in (frames[:3], [frames[0], frames[1], frames[2], b"\xff" * 7], [b"", *frames[1:]]):
        with pytest.raises(WireError, match="difference"):
            decode(old, damaged)


def test_decompression_bomb_is_refused() -> None:
    import zlib

    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    bomb = packer.compress(bytes(50_000_000)) + packer.flush()
    old = weights(0).tobytes()
    with pytest.raises(WireError, match="another length"):
        decode(old, [bomb] * 4)
