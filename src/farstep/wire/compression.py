"""Compresses arrays for slow connections. For each array, a measurement decides which codec, if any, saves time.

Images often differ little from row to row, so arrays of bytes may be delta-encoded first: each row minus the previous
row. Rows are compressed in pieces that fit into the processor's cache. The codecs come from optional packages (`pip
install farstep[compression]`); head and worker must both have the package in use.
"""

from __future__ import annotations

import math
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from farstep.core import Array, BytesLike
from farstep.errors import WireError

DELTA = "delta-"
"""Prefix of a codec's name that means delta encoding."""
_SIZE, _LENGTH = struct.Struct("<Q"), struct.Struct("<I")
PIECE_BYTES = 1 << 19
"""Bytes of rows that are compressed at once."""
_SAMPLE_BYTES = 256 * 1024
_SMALL_BYTES = 1024
_REMEASURE_EVERY = 64
"""After this many uses, the choice of a codec is measured again."""
_WORTH = 0.5
"""A codec is used only if it takes less than this fraction of the time to send plain bytes. Sending runs in the
background, but compression does not."""


@dataclass(frozen=True)
class Codec:
    compress: Callable[[BytesLike], bytes]
    decompress: Callable[[BytesLike, int], bytes]
    """Takes the compressed bytes and the size of the result."""


@cache
def available() -> dict[str, Codec]:
    """The codecs whose packages are installed."""
    found: dict[str, Codec] = {}
    try:
        from lz4 import block
    except ImportError:
        pass
    else:
        found["lz4"] = Codec(
            lambda data: bytes(block.compress(data, store_size=False)),
            lambda data, size: bytes(block.decompress(data, uncompressed_size=size)),
        )
    try:
        import zstandard
    except ImportError:
        pass
    else:
        found["zstd"] = Codec(zstandard.ZstdCompressor(level=1).compress, _unzstd)
    return found


def _unzstd(data: BytesLike, size: int) -> bytes:
    import zstandard

    if zstandard.frame_content_size(data) != size:  # otherwise it would allocate as much memory as the sender claims
        raise ValueError(f"expected {size} bytes")
    return zstandard.ZstdDecompressor().decompress(data)


class Compressor:
    """The sender's side: chooses a codec for each array, given the throughput of the connection.

    Args:
        mode: "auto", "none" or the name of a codec.
        accepted: The codecs that the receiver has.
        rate: Returns the throughput in bytes per second; infinite if it is unknown.
    """

    def __init__(self, mode: str, accepted: Sequence[str], rate: Callable[[], float]) -> None:
        codecs = {name: codec for name, codec in available().items() if name in accepted}
        self._codecs = {name: codec for name, codec in codecs.items() if mode in ("auto", name)}
        self._rate = rate
        self._choices: dict[str, str] = {}
        self._uses: Counter[str] = Counter()

    def pack(self, name: str, array: Array) -> tuple[str, BytesLike]:
        """Compress an array whose first axis is time.

        Returns:
            The codec ("" for none) and the bytes, which may be a view of the array.
        """
        if not self._codecs or array.nbytes < _SMALL_BYTES or math.isinf(self._rate()):
            return "", _bytes(array)
        self._uses[name] += 1
        if name not in self._choices or self._uses[name] % _REMEASURE_EVERY == 0:
            self._choices[name] = self._best(array)
        choice = self._choices[name]
        return choice, self.compressed(choice, array) if choice else _bytes(array)

    def compressed(self, choice: str, array: Array) -> bytes:
        """Return the uncompressed size, then for each piece its length and its compressed bytes."""
        codec = self._codecs[choice.removeprefix(DELTA)]
        frames = [_SIZE.pack(array.nbytes)]
        for first, stop in _pieces(len(array), array[:1].nbytes):
            piece = _delta(array, first, stop) if choice.startswith(DELTA) else _bytes(array[first:stop])
            packed = codec.compress(piece)
            frames += [_LENGTH.pack(len(packed)), packed]
        return b"".join(frames)

    def _best(self, array: Array) -> str:
        """The codec that takes the least time per byte to compress, send and decompress a sample."""
        rows = max(2, _SAMPLE_BYTES // max(1, array[:1].nbytes))
        sample = array[:rows]
        send_s = 1.0 / self._rate()
        costs = {"": _WORTH * send_s}
        deltas = [f"{DELTA}{name}" for name in self._codecs] if array.dtype == np.uint8 and len(array) > 1 else []
        for choice in [*self._codecs, *deltas]:
            began = time.perf_counter()
            packed = self.compressed(choice, sample)
            for _ in unpack(choice, packed, sample.nbytes, sample[:1].nbytes):
                pass
            seconds = time.perf_counter() - began
            costs[choice] = (seconds + len(packed) * send_s) / sample.nbytes
        return min(costs, key=costs.__getitem__)


def unpack(choice: str, frame: BytesLike, most_bytes: int, row_bytes: int) -> Iterator[Array]:
    """Decompress an array. Yield some rows at a time, as bytes of shape `[rows, row_bytes]`.

    Raises:
        WireError: The array is larger than `most_bytes`, or the frame is invalid.
    """
    codec = available().get(choice.removeprefix(DELTA))
    if codec is None:
        raise WireError(f"an array compressed with {choice!r}, a codec that is not installed here.")
    if len(frame) < _SIZE.size:
        raise WireError(f"a truncated compressed array: {len(frame)} bytes; its header alone has {_SIZE.size}.")
    (size,) = _SIZE.unpack(frame[: _SIZE.size])
    if size > most_bytes:
        raise WireError(f"a compressed array of {size} bytes; at most {most_bytes} fit.")
    if not size or not row_bytes or size % row_bytes:
        raise WireError(f"a compressed array of {size} bytes; a multiple of {row_bytes} is expected.")
    place, last = _SIZE.size, None
    for first, stop in _pieces(size // row_bytes, row_bytes):
        (length,) = _LENGTH.unpack(bytes(frame[place : place + _LENGTH.size]).ljust(_LENGTH.size, b"\0"))
        place += _LENGTH.size + length
        expected = (stop - first) * row_bytes
        try:
            data = codec.decompress(frame[place - length : place], expected)
        except Exception as error:  # each package raises its own types
            raise WireError(f"an array that cannot be decompressed: {error}") from error
        if len(data) != expected or place > len(frame):
            raise WireError(f"a compressed array without the {size} bytes that its header announces.")
        rows = np.frombuffer(data, np.uint8).reshape(stop - first, row_bytes)
        if choice.startswith(DELTA):
            rows = _undelta(rows, last)
            last = rows[-1]
        yield rows
    if place != len(frame):
        raise WireError("a compressed array with further bytes after its end.")


def _pieces(rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """The first row and the end of each piece."""
    step = max(1, PIECE_BYTES // max(1, row_bytes))
    return ((first, min(first + step, rows)) for first in range(0, rows, step))


def _bytes(array: Array) -> BytesLike:
    """The bytes of an array: a view if it is contiguous, otherwise a copy."""
    return array.data.cast("B") if array.nbytes and array.flags.c_contiguous else array.tobytes()


def _delta(array: Array, first: int, stop: int) -> bytes:
    """Return each row minus the previous row; the very first row stays unchanged."""
    changed = np.array(array[first:stop])
    skipped = 1 if first == 0 else 0
    np.subtract(changed[skipped:], array[first + skipped - 1 : stop - 1], out=changed[skipped:])
    return changed.tobytes()


def _undelta(rows: Array, last: Array | None) -> Array:
    rows = rows.copy()
    if last is not None:
        rows[0] += last
    for t in range(1, len(rows)):  # faster than an accumulation over strided rows
        rows[t] += rows[t - 1]
    return rows
