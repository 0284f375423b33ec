"""What changed between two buffers of numbers, compressed without loss.

Weights move little from version to version: taken as integers, most 32-bit words differ in their low bits only. So the
differences are split into their four bytes, and the high ones, nearly all zero, shrink to almost nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from farstep.core import Array, BytesLike
from farstep.errors import WireError

_PLANES = 4


def encode(old: BytesLike, new: BytesLike) -> list[bytes]:
    """Frames from which, with `old`, `new` can be made; both have the same length, a multiple of 4."""
    difference = np.frombuffer(new, np.int32) - np.frombuffer(old, np.int32)
    folded = (difference << 1) ^ (difference >> 31)  # small ones of either sign have zeros in front
    return [_shrunk(plane) for plane in folded.view(np.uint8).reshape(-1, _PLANES).T]


def decode(old: BytesLike, frames: Sequence[BytesLike]) -> bytes:
    """The new buffer; a `WireError` if the frames are not those of `encode`."""
    size = memoryview(old).nbytes // _PLANES
    if len(frames) != _PLANES:
        raise WireError(f"a difference of {len(frames)} frames; expected {_PLANES}.")
    planes = [np.frombuffer(_grown(frame, size), np.uint8) for frame in frames]
    folded = np.ascontiguousarray(np.stack(planes, axis=1)).view(np.uint32).reshape(-1)
    difference = ((folded >> 1) ^ -(folded & 1).astype(np.int32).view(np.uint32)).view(np.int32)
    return (np.frombuffer(old, np.int32) + difference).tobytes()


def _shrunk(plane: Array) -> bytes:
    raw = plane.tobytes()
    packer = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, strategy=zlib.Z_RLE)  # the fast kind: runs of zeros
    packed = packer.compress(raw) + packer.flush()
    return packed if len(packed) < len(raw) else raw  # of full length: as it is


def _grown(frame: BytesLike, size: int) -> BytesLike:
    if memoryview(frame).nbytes == size:
        return frame
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        raw = unpacker.decompress(frame, size + 1)
    except zlib.error as error:
        raise WireError(f"a difference that cannot be unpacked: {error}.") from error
    if len(raw) != size:
        raise WireError("a difference of another length than what it is to be added to.")
    return raw
