"""The difference between two versions of weights, compressed without loss.

Weights change little from version to version. Read as integers, most 32-bit words differ only in their low bits. The
differences are therefore split into four planes, one per byte. The planes of the high bytes are nearly all zero and
compress well.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from farstep.core import Array, BytesLike
from farstep.errors import WireError

_PLANES = 4


def encode(old: BytesLike, new: BytesLike) -> list[bytes]:
    """The difference from `old` to `new` as frames; both must have the same length, a multiple of 4."""
    difference = np.frombuffer(new, np.int32) - np.frombuffer(old, np.int32)
    folded = (difference << 1) ^ (difference >> 31)  # zigzag: small numbers get leading zeros, whatever their sign
    return [_compressed(plane) for plane in folded.view(np.uint8).reshape(-1, _PLANES).T]


def decode(old: BytesLike, frames: Sequence[BytesLike]) -> bytes:
    """Return the new buffer, given the old buffer and the frames of `encode`. Raise `WireError` for other frames."""
    size = memoryview(old).nbytes // _PLANES
    if len(frames) != _PLANES:
        raise WireError(f"a difference of weights in {len(frames)} frames; expected {_PLANES}.")
    planes = [np.frombuffer(_decompressed(frame, size), np.uint8) for frame in frames]
    folded = np.ascontiguousarray(np.stack(planes, axis=1)).view(np.uint32).reshape(-1)
    difference = ((folded >> 1) ^ -(folded & 1).astype(np.int32).view(np.uint32)).view(np.int32)
    return (np.frombuffer(old, np.int32) + difference).tobytes()


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
