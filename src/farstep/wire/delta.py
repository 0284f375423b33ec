"""The difference between two versions of weights, compressed without loss.

Weights change little from version to version. Read as integers, most words (of 32 bits, or 16 if weights are rounded to
that) differ only in their low bits. The differences are therefore split into planes, one per byte of a word. The planes
of the high bytes are nearly all zero and compress well.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from farstep.config.env import WeightsConfig
from farstep.core import Array, BytesLike
from farstep.errors import WireError


def word_bytes(config: WeightsConfig) -> int:
    """The number of bytes per word for weights that are sent in this form."""
    return 2 if config.half else 4


def encode(old: BytesLike, new: BytesLike, word: int = 4) -> list[bytes]:
    """The difference from `old` to `new` as frames; both must have the same length, a multiple of `word` bytes."""
    difference = np.frombuffer(new, f"i{word}") - np.frombuffer(old, f"i{word}")
    folded = (difference << 1) ^ (difference >> (8 * word - 1))  # zigzag: small numbers get leading zeros
    return [_compressed(plane) for plane in folded.view(np.uint8).reshape(-1, word).T]


def decode(old: BytesLike, frames: Sequence[BytesLike], word: int = 4) -> bytes:
    """Return the new buffer, given the old buffer and the frames of `encode`. Raise `WireError` for other frames."""
    size = memoryview(old).nbytes // word
    if len(frames) != word:
        raise WireError(f"a difference of weights in {len(frames)} frames; expected {word}.")
    planes = [np.frombuffer(_decompressed(frame, size), np.uint8) for frame in frames]
    folded = np.ascontiguousarray(np.stack(planes, axis=1)).view(f"u{word}").reshape(-1)
    difference = (folded >> 1) ^ -(folded & 1)
    new: Array = np.frombuffer(old, f"u{word}") + difference
    return new.tobytes()


def _compressed(plane: Array) -> bytes:
    raw = plane.tobytes()
    packer = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, strategy=zlib.Z_RLE)  # fast, and finds runs of zeros
    packed = packer.compress(raw) + packer.flush()
    return packed if len(packed) < len(raw) else raw  # full length means uncompressed to the receiver


def _decompressed(frame: BytesLike, size: int) -> BytesLike:
    if memoryview(frame).nbytes == size:
        return frame
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        raw = unpacker.decompress(frame, size + 1)
    except zlib.error as error:
        raise WireError(f"a difference of weights that cannot be decompressed: {error}.") from error
    if len(raw) != size:
        raise WireError(f"a difference of weights with another length than the weights ({size} bytes per plane).")
    return raw
