"""Receive buffers are reused, but never while a view of them exists."""

from __future__ import annotations

import numpy as np
import pytest

from farstep.wire.buffer_pool import BufferPool

LARGE = 1 << 20


def address(buffer: memoryview) -> int:
    return np.frombuffer(buffer, np.uint8).ctypes.data


def test_released_buffer_is_reused() -> None:
    pool = BufferPool()
    first = pool.take(LARGE)
    place = address(first)
    first[:] = bytes(LARGE)
    del first
    second = pool.take(LARGE - 1)
    assert address(second) == place and len(second) == LARGE - 1


@pytest.mark.parametrize(
    "look",
    [
        lambda buffer: buffer[10:20],
        lambda buffer: memoryview(buffer).cast("B", [LARGE // 4, 4]),
        lambda buffer: np.frombuffer(buffer[8:], np.float64),
        lambda buffer: np.frombuffer(buffer, np.uint8).reshape(2, -1)[1:, ::2],
    ],
    ids=["slice", "cast", "array", "part of an array"],
)
def test_buffer_with_a_live_view_is_not_reused(look: object) -> None:
    pool = BufferPool()
    first = pool.take(LARGE)
    place = address(first)
    first[:] = bytes([7]) * LARGE
    view = look(first)  # type: ignore[operator]
    del first
    others = [pool.take(LARGE) for _ in range(3)]
    for other in others:
        other[:] = bytes(LARGE)
    assert place not in map(address, others)
    assert np.asarray(view).any()
    del view
    assert address(pool.take(LARGE)) == place


def test_much_larger_buffer_is_not_taken_for_a_small_message() -> None:
    pool = BufferPool()
    place = address(pool.take(8 * LARGE))
    assert address(pool.take(LARGE)) != place


def test_pool_keeps_at_most_its_limit() -> None:
    pool = BufferPool(3 * LARGE)
    held = [pool.take(LARGE) for _ in range(10)]
    assert len({address(buffer) for buffer in held}) == 10
    assert pool.kept_bytes == 3 * LARGE
    del held
    pool.take(100 * LARGE)
    assert pool.kept_bytes == 3 * LARGE
