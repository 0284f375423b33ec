"""Contract check of buffers, for farstep's and your own samplers and removers."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from farstep.buffer import Buffer, MinSize, Queue, RateLimiter, SampleInfo
from farstep.core import Array
from farstep.errors import BufferTimeout, ClosedError, ConfigError

MakeBuffer = Callable[..., Buffer]
"""Makes a buffer with a sampler of your choice, given `capacity` and options (`limiter`, `max_times_sampled`, `spec`,
`seed`)."""

_DEADLINE_S = 30.0
_EPISODE = 4
_CAPACITY = 24


def check_buffer(make_buffer: MakeBuffer) -> None:
    """Check that a buffer returns the rows that were inserted, keeps its counters and limits, and rejects bad input.

    Args:
        make_buffer: Makes a buffer; see `MakeBuffer`.

    Raises:
        AssertionError: The buffer breaks the contract; the message says how.
    """
    with warnings.catch_warnings():  # the check sets priorities for every sampler
        warnings.filterwarnings("ignore", "neither .* uses priorities")
        for check in (_rows_and_keys, _gone, _times, _limiter, _timeouts, _close, _close_idle, _refusals):
            check(make_buffer)


class _Filled:
    """A buffer whose rows are derived from their numbers, in episodes of 4 rows."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.number_of: dict[int, int] = {}
        self.times: Counter[int] = Counter()
        self.rows_sampled = 0
        self._stored: list[int] = []
        self._next = 0

    def rows(self, count: int) -> dict[str, Array]:
        number = np.arange(self._next, self._next + count)
        return {
            "number": number,
            "obs": np.stack([number, -number, number % 7], axis=1).astype(np.float32),
            "image": np.broadcast_to((number % 251).astype(np.uint8)[:, None, None], (count, 2, 3)).copy(),
            "reward": number.astype(np.float32),
            "episode_start": number % _EPISODE == 0,
            "terminated": number % _EPISODE == _EPISODE - 1,
        }

    def insert(self, count: int) -> Array:
        rows = self.rows(count)
        keys = self.buffer.insert(rows, timeout_s=0)
        assert keys.shape == (count,), f"insert of {count} rows returned keys of shape {keys.shape}"
        for key, number in zip(keys.tolist(), rows["number"].tolist(), strict=True):
            assert key not in self.number_of, f"key {key} was given twice"
            self.number_of[key] = number
            self._stored.append(key)
        self._next += count
        self.check_counters()
        return keys

    def sample(self, count: int) -> SampleInfo:
        stored = set(self.stored_keys())
        batch, info = self.buffer.sample(count, timeout_s=0)
        self.rows_sampled += int(batch["valid"].sum()) if batch["number"].ndim == 2 else len(info.keys)
        self._check_info(batch, info, count, stored)
        self._check_rows(batch, info)
        self.check_counters()
        return info

    def stored_keys(self) -> list[int]:
        """Return the keys of the items that are still stored. This sets the priority of each item to 1."""
        known = self._stored
        self._stored = [key for key in known if self.buffer.update_priorities(np.array([key]), np.ones(1))]
        return self._stored

    def check_counters(self) -> None:
        buffer, limiter = self.buffer, self.buffer.limiter
        assert len(buffer) <= buffer.capacity, f"{len(buffer)} items in a buffer for {buffer.capacity}"
        assert limiter.inserts - limiter.deletes == len(buffer), f"{len(buffer)} items, but {limiter}"
        assert limiter.inserts == len(self.number_of), f"{len(self.number_of)} rows were inserted, but {limiter}"
        assert limiter.samples == self.rows_sampled, f"{self.rows_sampled} rows were returned, but {limiter}"
        assert sum(buffer.removed.values()) == limiter.deletes, f"{buffer.removed}, but {limiter}"

    def _check_info(self, batch: dict[str, Any], info: SampleInfo, count: int, stored: set[int]) -> None:
        n = len(info.keys)
        assert n >= count, f"{count} items were requested, {n} were returned"
        lengths = {name: len(value) for name, value in batch.items()}
        assert set(lengths.values()) == {n}, f"{n} keys, but arrays of {lengths}"
        for name in ("probabilities", "weights", "times_sampled", "versions"):
            assert getattr(info, name).shape == (n,), f"{name} has shape {getattr(info, name).shape} for {n} items"
        assert set(info.keys.tolist()) <= stored, f"sampled, but gone: {set(info.keys.tolist()) - stored}"
        assert (info.probabilities > 0).all() and (info.probabilities <= 1).all(), info.probabilities
        assert (info.weights > 0).all() and info.weights.max() == 1, info.weights
        distinct = dict(zip(info.keys.tolist(), info.probabilities.tolist(), strict=True))
        if (info.probabilities < 1).any():
            assert sum(distinct.values()) <= 1 + 1e-6 or self.buffer.max_times_sampled, "probabilities add up above 1"
        self.times.update(info.keys.tolist())
        times = [self.times[key] for key in info.keys.tolist()]
        assert info.times_sampled.tolist() == times, f"times_sampled is {info.times_sampled}, not {times}"
        assert (info.versions == -1).all(), "rows have no version"

    def _check_rows(self, batch: dict[str, Any], info: SampleInfo) -> None:
        number = batch["number"]
        first = number if number.ndim == 1 else number[:, 0]
        named = [self.number_of[key] for key in info.keys.tolist()]
        assert first.tolist() == named, f"keys name the rows {named}, but the rows are {first.tolist()}"
        np.testing.assert_array_equal(batch["obs"][..., 0], number)
        np.testing.assert_array_equal(batch["obs"][..., 1], -number)
        np.testing.assert_array_equal(batch["obs"][..., 2], number % 7)
        image = np.broadcast_to((number % 251)[..., None, None], batch["image"].shape)
        np.testing.assert_array_equal(batch["image"], image)
        np.testing.assert_array_equal(batch["episode_start"], number % _EPISODE == 0)
        if number.ndim == 2:
            episode = number // _EPISODE
            assert (episode == episode[:, :1]).all(), f"a sequence across an episode's end: {number}"
            steps = np.diff(number, axis=1)
            assert (steps == batch["valid"][:, 1:]).all(), f"rows of a sequence that do not follow: {number}"


def _rows_and_keys(make: MakeBuffer) -> None:
    """Check that sampled rows are complete and match their keys, for inserts of any size and for reused cells."""
    with make(capacity=_CAPACITY, seed=1) as buffer:
        filled = _Filled(buffer)
        for count in (0, 8, 1, 3, 7, 5, 24, 0, 16, 40, 100, 2, 2):
            filled.insert(count)
            for size in (1, 2):
                try:
                    filled.sample(size)
                except BufferTimeout:
                    # Of 8 new rows, at least two start an item, unless items are removed after they were sampled.
                    assert count < 8 or buffer.max_times_sampled, "the buffer has rows, but none is sampled"


def _gone(make: MakeBuffer) -> None:
    """Check that evicted and deleted items are never sampled, and that their keys are ignored."""
    with make(capacity=_CAPACITY, seed=2) as buffer:
        filled = _Filled(buffer)
        keys = filled.insert(3 * _CAPACITY)
        stored = filled.stored_keys()
        assert len(stored) == len(buffer) == buffer.capacity
        everything, ones = np.array(list(filled.number_of)), np.ones(len(keys))
        assert buffer.update_priorities(everything, ones) == len(stored), "evicted items took a priority"
        never = np.array([-1, -(2**62), 2**62, 0])
        assert buffer.update_priorities(never, np.ones(4)) == buffer.delete(never) == 0, "keys that do not exist"
        chosen = [key for key in stored if filled.number_of[key] // _EPISODE % 2]
        assert buffer.delete(np.array(chosen)) == len(chosen) > 0
        assert buffer.delete(np.array([*chosen, *chosen])) == 0, "deleted twice"
        assert buffer.update_priorities(np.array(chosen), np.full(len(chosen), 9.0)) == 0
        filled.check_counters()
        for _ in range(2):
            if len(buffer):
                filled.sample(1)
        filled.insert(_EPISODE)
        filled.sample(1)
        buffer.delete(np.array([*filled.number_of, *filled.number_of]))
        filled.check_counters()
        assert len(buffer) == 0
        _expect(BufferTimeout, "the buffer is empty", buffer.sample, 1, timeout_s=0)
        filled.insert(2 * _EPISODE)
        filled.sample(1)


def _times(make: MakeBuffer) -> None:
    """Check that an item is sampled at most `max_times_sampled` times, even within one batch, and is then removed."""
    for most in (1, 3):
        with make(capacity=_CAPACITY, seed=3, max_times_sampled=most) as buffer:
            filled = _Filled(buffer)
            filled.insert(_CAPACITY)
            total = 0
            try:
                while True:
                    total += len(filled.sample(2).keys)
            except BufferTimeout:
                pass
            assert total >= 2 * (most > 0), "nothing could be sampled"
            assert max(filled.times.values()) <= most, f"max_times_sampled={most}: {filled.times}"
            used_up = sum(times == most for times in filled.times.values())
            expected = (used_up, used_up * _EPISODE)  # items are rows, or episodes with all their rows
            assert buffer.removed["sampled"] in expected, f"{buffer.removed['sampled']} rows removed, not {expected}"


def _limiter(make: MakeBuffer) -> None:
    """Check that the limiter's `diff` stays within its bounds, unless the length of items is known only after
    drawing."""
    with make(capacity=_CAPACITY, seed=4, limiter=RateLimiter(1.0, 4, -6.0, 16.0)) as buffer:
        filled, limiter = _Filled(buffer), buffer.limiter
        rng, unforeseen = np.random.default_rng(4), 0
        for _ in range(60):
            count = int(rng.integers(1, 5))
            if rng.random() < 0.5 and limiter.has_room(count):
                filled.insert(count)
            else:
                try:
                    before = filled.rows_sampled
                    filled.sample(count)
                    unforeseen = filled.rows_sampled - before - count * buffer.sampler.item_rows[0]
                except BufferTimeout:
                    if limiter.has_room(1):
                        filled.insert(1)
            assert -6 - max(0, unforeseen) <= limiter.diff <= 16, limiter


def _timeouts(make: MakeBuffer) -> None:
    """Check that a call that times out raises `BufferTimeout` and changes nothing."""
    with make(capacity=_CAPACITY, limiter=MinSize(8)) as buffer:
        _expect(BufferTimeout, "nothing was inserted", buffer.sample, 1, timeout_s=0)
        filled = _Filled(buffer)
        filled.insert(7)
        for timeout_s in (0, 0.01):
            error = _expect(BufferTimeout, "min_size is 8", buffer.sample, 1, timeout_s=timeout_s)
            assert isinstance(error, TimeoutError) and "min_size=8" in str(error), error
        filled.check_counters()
        filled.insert(1)
        filled.sample(1)
    with make(capacity=_CAPACITY, limiter=Queue(4)) as buffer:
        filled = _Filled(buffer)
        filled.insert(4)
        rows = filled.rows(1)
        _expect(BufferTimeout, "4 rows are waiting already", buffer.insert, rows, timeout_s=0.01)
        filled.check_counters()


def _close(make: MakeBuffer) -> None:
    """Check that waiting threads continue when the limiter allows it, and that `close` wakes all other threads."""
    buffer = make(capacity=_CAPACITY, limiter=MinSize(8))
    filled = _Filled(buffer)
    results, join = _in_thread(lambda: buffer.sample(1, timeout_s=_DEADLINE_S))
    filled.insert(8)
    join()
    assert isinstance(results[0], tuple), results
    buffer.delete(np.array(list(filled.number_of)))
    results, join = _in_thread(lambda: buffer.sample(1, timeout_s=_DEADLINE_S))
    buffer.close()
    join()
    assert isinstance(results[0], ClosedError), results


def _close_idle(make: MakeBuffer) -> None:
    buffer = make(capacity=_CAPACITY)
    rows = _Filled(buffer).rows(1)
    buffer.close()
    buffer.close()
    _expect(ClosedError, "insert", buffer.insert, rows)
    _expect(ClosedError, "sample", buffer.sample, 1)
    _expect(ClosedError, "delete", buffer.delete, np.zeros(1, np.int64))


def _refusals(make: MakeBuffer) -> None:
    """Check that bad input is rejected and changes nothing."""
    with make(capacity=_CAPACITY, seed=5) as buffer:
        filled = _Filled(buffer)
        filled.insert(_CAPACITY)
        good, stored = filled.rows(2), filled.stored_keys()
        state = (len(buffer), str(buffer.limiter), dict(buffer.removed))
        bad_rows: dict[str, Any] = {
            "a missing array": {name: value for name, value in good.items() if name != "image"},
            "an unknown array": {**good, "imagee": good["image"]},
            "a wrong shape": {**good, "image": good["image"][:, :, :2]},
            "a missing axis": {**good, "reward": np.zeros((2, 1), np.float32)},
            "a wrong dtype": {**good, "image": good["image"].astype(np.float32)},
            "text": {**good, "reward": np.array(["a", "b"])},
            "objects": {**good, "reward": np.array([None, None])},
            "different lengths": {**good, "reward": good["reward"][:1]},
            "one number": {**good, "reward": 1.0},
            "ragged lists": {**good, "obs": [[1.0, 2.0, 3.0], [1.0]]},
            "no mapping": [1, 2],
            "no arrays": {},
        }
        for what, rows in bad_rows.items():
            _expect(ConfigError, what, buffer.insert, rows, timeout_s=0)
        keys = np.array(stored[:2])
        bad_priorities: dict[str, tuple[Any, Any]] = {
            "NaN": (keys, [1.0, np.nan]),
            "an infinite priority": (keys, [np.inf, 1.0]),
            "a negative priority": (keys, [-1.0, 1.0]),
            "too few priorities": (keys, [1.0]),
            "priorities of another shape": (keys, np.ones((2, 1))),
            "keys of another shape": (keys[:, None], np.ones(2)),
            "keys that are no integers": (keys + 0.5, np.ones(2)),
            "text": (keys, ["a", "b"]),
        }
        for what, (some, priorities) in bad_priorities.items():
            _expect(ConfigError, what, buffer.update_priorities, some, priorities)
        _expect(ConfigError, "keys of another shape", buffer.delete, keys[:, None])
        _expect(ConfigError, "keys that are no integers", buffer.delete, keys + 0.5)
        for size in (0, -1, 1.5, True, "two"):
            _expect(ConfigError, f"a batch_size of {size!r}", buffer.sample, size, timeout_s=0)
        for seconds in (-1, float("nan")):
            _expect(ConfigError, f"a timeout_s of {seconds}", buffer.sample, 1, timeout_s=seconds)
        _expect(ConfigError, "an unknown option", buffer.limit, max_diff=3.0, most=1)
        _expect(ConfigError, "a min_size that is never reached", buffer.limit, min_size=_CAPACITY + 1)
        assert state == (len(buffer), str(buffer.limiter), dict(buffer.removed)), "a rejected call changed the buffer"
        assert stored == filled.stored_keys()
        filled.sample(2)


def _in_thread(call: Callable[[], object]) -> tuple[list[object], Callable[[], None]]:
    """Call a function in a thread. Return a list for its result or error, and a function that joins the thread."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join() -> None:
        thread.join(_DEADLINE_S)
        assert not thread.is_alive(), "a waiting thread was not woken"

    return results, join


def _expect(kind: type[Exception], what: str, call: Callable[..., object], *args: Any, **options: Any) -> Exception:
    try:
        call(*args, **options)
    except kind as error:
        return error
    raise AssertionError(f"{what}: expected {kind.__name__}, but nothing was raised")
