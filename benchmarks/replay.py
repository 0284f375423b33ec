"""Shared by all contenders of the buffer benchmark: rows, clock and report.

A contender wraps one buffer as a ``Store`` and passes its constructor:

    task = parse_arguments()
    run("numpy", task, PlainArrays, packages=("numpy",))

This file runs in the virtual environments of all peers, so it needs only NumPy.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import cycle
from statistics import median
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from versions import versions_of

Array: TypeAlias = npt.NDArray[Any]
Rows: TypeAlias = dict[str, Array]

KEYS = ("obs", "action", "reward", "next_obs", "terminated")
INSERTS = (1, 16, 512)
"""Rows per insert: a step of one environment, a step of several, a chunk of a rollout."""

FILL_ROWS = 1000
"""Rows per insert while the buffer is filled; divides every capacity."""

POOL_ROWS = 4000
"""Number of different images: too many for a cache, and a fifth of the memory of a full buffer."""

ALPHA, BETA = 0.6, 0.4
"""Exponents of the priorities and of the importance weights (Schaul et al., 2016)."""

PRIORITY_BATCHES = 64
"""Number of different batches of priorities, made before the clock starts."""

WARM_UP_BATCHES = 200
"""Batches whose priorities are updated before the measurement, so that priorities differ."""

MALLOPT = {-3: 32 * 2**20, -1: 2**30}
"""M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of glibc: arrays of up to 32 MiB reuse freed memory."""


@dataclass(frozen=True, kw_only=True)
class Observations:
    """A kind of observation, with capacity and batch size."""

    shape: tuple[int, ...]
    dtype: str
    capacity: int
    batches: tuple[int, ...]


OBSERVATIONS = {
    "vector": Observations(shape=(8,), dtype="float32", capacity=1_000_000, batches=(256, 1024)),
    "image": Observations(shape=(84, 84, 4), dtype="uint8", capacity=20_000, batches=(256,)),
}


@dataclass(frozen=True, kw_only=True)
class Task:
    """The measurement to make, from the command line."""

    observations: str
    sampler: Literal["uniform", "prioritized"]
    seconds: float
    """Seconds of each measurement."""
    shrink: int = 1
    """Divisor of the capacity; more than 1 only to test the benchmark itself."""
    mode: str | None = None
    """The contender's set-up; None if it has only one."""

    @property
    def shape(self) -> tuple[int, ...]:
        return OBSERVATIONS[self.observations].shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(OBSERVATIONS[self.observations].dtype)

    @property
    def capacity(self) -> int:
        return OBSERVATIONS[self.observations].capacity // self.shrink

    @property
    def batches(self) -> tuple[int, ...]:
        return OBSERVATIONS[self.observations].batches

    @property
    def prioritized(self) -> bool:
        return self.sampler == "prioritized"


Way: TypeAlias = tuple[Callable[[Rows], Any], Callable[[Any], None]]
"""Converts rows to the buffer's native form, which is not timed, and inserts them."""


class Store:
    """A buffer, as its contender wraps it; rows and batches have the buffer's native form."""

    next_obs: ClassVar[str] = "stored"
    """How the buffer stores the next observation."""
    fixed_inserts: ClassVar[bool] = False
    """True if the rows per insert are fixed at construction; then each number of rows gets a buffer."""
    takes_any_rows: ClassVar[bool] = False
    """True if rows may lack some of KEYS; then rows with only an observation are measured, too."""

    def __init__(self, task: Task, rows_per_insert: int) -> None:
        raise NotImplementedError

    def native(self, rows: Rows) -> Any:
        """Convert ``rows`` to the form that a user of this buffer would have; not timed."""
        return rows

    def insert(self, rows: Any) -> None:
        raise NotImplementedError

    def ways(self) -> list[Way]:
        """Ways to insert rows; for each number of rows the fastest counts."""
        return [(self.native, self.insert)]

    def sample(self, batch_size: int) -> Any:
        """Sample a batch with all of KEYS; if prioritized, also with weights and what ``update`` needs."""
        raise NotImplementedError

    def update(self, batch: Any, priorities: Array) -> None:
        """Set new priorities for the rows of ``batch``."""
        raise NotImplementedError

    def arrays(self, batch: Any) -> Rows:
        """Convert the batch to NumPy arrays; not timed."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop processes and threads of the buffer."""


class Source:
    """The rows that are inserted; a row's reward is its number, which identifies it in a batch."""

    def __init__(self, task: Task) -> None:
        rng = np.random.default_rng(1)
        self.size = task.capacity if task.observations == "vector" else min(POOL_ROWS, task.capacity)
        shape = (self.size + 1, *task.shape)
        self.frames = rng.random(shape, np.float32) if task.observations == "vector" else images(rng, shape)
        self.action = rng.integers(0, 4, self.size)
        self.terminated = rng.random(self.size) < 0.005

    def rows(self, start: int, count: int) -> Rows:
        """``count`` rows from number ``start``; images repeat after POOL_ROWS."""
        first = start % self.size
        assert first + count <= self.size, "a block of rows would cross the end of the pool"
        return {
            "obs": self.frames[first : first + count],
            "action": self.action[first : first + count],
            "reward": np.arange(start, start + count, dtype=np.float32),
            "next_obs": self.frames[first + 1 : first + 1 + count],
            "terminated": self.terminated[first : first + count],
        }

    def check(self, batch: Rows, *, next_obs: bool) -> None:
        """Raise if ``batch`` does not consist of inserted rows."""
        rows = row_numbers(batch) % self.size
        expected = {"obs": self.frames[rows], "action": self.action[rows], "terminated": self.terminated[rows]}
        if next_obs:
            expected["next_obs"] = self.frames[rows + 1]
        for key, values in expected.items():
            found = batch[key].reshape(values.shape)
            if not np.array_equal(found, values):
                raise AssertionError(f"the batch's {key} are not those of the rows that its rewards identify")


def images(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """A static background with a moving patch: as compressible as the frames of a game."""
    frames = np.zeros(shape, np.uint8)
    frames[:] = rng.integers(0, 255, (*shape[1:2], 1, 1), np.uint8)
    for frame, (top, left) in zip(frames, rng.integers(0, 76, (len(frames), 2)), strict=True):
        frame[top : top + 8, left : left + 8] = rng.integers(0, 255, (8, 8, frame.shape[-1]), np.uint8)
    return frames


def row_numbers(batch: Rows) -> Array:
    return batch["reward"].reshape(-1).astype(np.int64)


def parse_arguments(*, modes: tuple[str, ...] = ()) -> Task:
    """Parse the command line; ``modes`` are the contender's set-ups, the default first."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--observations", choices=tuple(OBSERVATIONS), default="vector")
    parser.add_argument("--sampler", choices=("uniform", "prioritized"), default="uniform")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--shrink", type=int, default=1)
    if modes:
        parser.add_argument("--mode", choices=modes, default=modes[0])
    return Task(**vars(parser.parse_args()))


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Timed calls of one kind."""

    rows_per_second: float
    """Rows per second over all calls, so that work that a call defers to later calls counts."""
    median_us: float
    """Median time of a call, in microseconds."""
    calls: int

    @classmethod
    def of(cls, rows: int, times_s: list[float]) -> Speed:
        return cls(
            rows_per_second=round(rows * len(times_s) / sum(times_s), 1),
            median_us=round(median(times_s) * 1e6, 2),
            calls=len(times_s),
        )


@dataclass(frozen=True, kw_only=True)
class AgainstNumpy:
    """Batches of the buffer compared with plain arrays indexed by the same rows, alternately in one process."""

    keys: tuple[str, ...]
    """Keys of the rows."""
    batch_size: int
    repeats: int
    sample_us: float
    fancy_us: float
    take_us: float
    times_fancy: float
    """Median time of a batch divided by that of ``array[rows]`` for all keys."""
    times_take: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """The one line that a contender prints."""

    contender: str
    observations: str
    sampler: str
    capacity: int
    speeds: dict[str, Speed]
    """By operation and number of rows, such as ``insert 16``."""
    against_numpy: list[AgainstNumpy]
    """For whole rows and, if the buffer supports them, for rows with only an observation."""
    next_obs: str
    notes: str = ""
    versions: dict[str, str] = field(default_factory=dict)


def run(
    contender: str,
    task: Task,
    make: Callable[[Task, int], Store],
    *,
    notes: str = "",
    packages: tuple[str, ...] = (),
) -> None:
    """Fill a buffer, measure sampling, then inserting, and print the report as one line of JSON."""
    keep_freed_memory()
    source = Source(task)
    store = make(task, FILL_ROWS)
    for start in range(0, task.capacity, FILL_ROWS):
        store.insert(store.native(source.rows(start, FILL_ROWS)))
    source.check(store.arrays(store.sample(256)), next_obs=store.next_obs == Store.next_obs)
    if task.prioritized:
        spread_priorities(store, max(task.batches))
    speeds: dict[str, Speed] = {}
    for batch_size in task.batches:
        speeds |= measure_sampling(store, task, batch_size)
    against = []
    if task.prioritized and task.observations == "vector":
        against.append(compare_with_numpy(store, source.rows(0, task.capacity), row_numbers, task))
        if store.takes_any_rows:
            against.append(compare_observations(make, source, task))
    for count in INSERTS:
        if store.fixed_inserts:
            store.close()
            store = make(task, count)
        speeds[f"insert {count}"] = measure_inserting(store, source, task, count)
    store.close()
    line = Report(
        contender=contender,
        observations=task.observations,
        sampler=task.sampler,
        capacity=task.capacity,
        speeds=speeds,
        against_numpy=against,
        next_obs=store.next_obs,
        notes=notes,
        versions=versions_of("numpy", *packages),
    )
    sys.stdout.write(json.dumps(asdict(line)) + "\n")
    sys.stdout.flush()


def keep_freed_memory() -> None:
    """Make glibc's allocator keep freed memory; does nothing with other allocators.

    Otherwise the history of allocations decides whether the pages of every batch of images are returned to the kernel
    and zeroed again, which takes several times as long as copying the rows and differs between contenders.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in MALLOPT.items():
            mallopt(parameter, value)


def new_priorities(batch_size: int) -> Iterator[Array]:
    rng = np.random.default_rng(2)
    return cycle([rng.uniform(0.05, 1.0, batch_size).astype(np.float32) for _ in range(PRIORITY_BATCHES)])


def spread_priorities(store: Store, batch_size: int) -> None:
    priorities = new_priorities(batch_size)
    for _ in range(WARM_UP_BATCHES):
        store.update(store.sample(batch_size), next(priorities))


def measure_sampling(store: Store, task: Task, batch_size: int) -> dict[str, Speed]:
    """Time batches and, if there are priorities, their update after each batch, as in a learner."""
    clock = time.perf_counter
    priorities = new_priorities(batch_size)
    sampling, updating = [], []
    store.sample(batch_size)
    ends = clock() + task.seconds * (2 if task.prioritized else 1)
    while clock() < ends:
        began = clock()
        batch = store.sample(batch_size)
        sampling.append(clock() - began)
        if task.prioritized:
            fresh = next(priorities)
            began = clock()
            store.update(batch, fresh)
            updating.append(clock() - began)
    found = {f"sample {batch_size}": Speed.of(batch_size, sampling)}
    return found | ({f"update {batch_size}": Speed.of(batch_size, updating)} if updating else {})


def measure_inserting(store: Store, source: Source, task: Task, count: int) -> Speed:
    """Time inserts of ``count`` rows into a full buffer, which replace the oldest rows."""
    return min((measure_way(way, source, task, count) for way in store.ways()), key=lambda speed: speed.median_us)


def measure_way(way: Way, source: Source, task: Task, count: int) -> Speed:
    clock = time.perf_counter
    native, insert = way
    last = min(POOL_ROWS, source.size) - count + 1
    blocks = cycle([native(source.rows(start, count)) for start in range(0, last, count)])
    insert(next(blocks))
    times = []
    ends = clock() + task.seconds
    while clock() < ends:
        rows = next(blocks)
        began = clock()
        insert(rows)
        times.append(clock() - began)
    return Speed.of(count, times)


def compare_observations(make: Callable[[Task, int], Store], source: Source, task: Task) -> AgainstNumpy:
    """Like ``compare_with_numpy``, for rows with only an observation, whose first entry is the row's number."""
    frames = source.frames[: task.capacity].copy()
    frames[:, 0] = np.arange(task.capacity)
    store = make(task, FILL_ROWS)
    for start in range(0, task.capacity, FILL_ROWS):
        store.insert(store.native({"obs": frames[start : start + FILL_ROWS]}))
    spread_priorities(store, max(task.batches))
    compared = compare_with_numpy(store, {"obs": frames}, lambda batch: batch["obs"][:, 0].astype(np.int64), task)
    store.close()
    return compared


def compare_with_numpy(store: Store, rows: Rows, numbers: Callable[[Rows], Array], task: Task) -> AgainstNumpy:
    """Time batches and plain indexing of the same ``rows`` alternately; ``numbers`` reads the row numbers of a batch.

    The plain arrays are separate memory and every batch has other rows, so neither side finds its rows in a cache.
    """
    clock = time.perf_counter
    batch_size = max(task.batches)
    plain = {key: np.array(values) for key, values in rows.items()}
    priorities = new_priorities(batch_size)
    sampling: list[float] = []
    fancy: list[float] = []
    take: list[float] = []
    ends = clock() + 3 * task.seconds
    while clock() < ends or len(sampling) < 20:
        began = clock()
        batch = store.sample(batch_size)
        sampling.append(clock() - began)
        chosen = numbers(store.arrays(batch))
        # Only one of the two per batch, because the second would find the rows in the cache.
        if len(sampling) % 2:
            began = clock()
            taken = {key: values[chosen] for key, values in plain.items()}
            fancy.append(clock() - began)
        else:
            began = clock()
            taken = {key: np.take(values, chosen, axis=0) for key, values in plain.items()}
            take.append(clock() - began)
        assert len(taken["obs"]) == batch_size
        store.update(batch, next(priorities))
    sample_us, fancy_us, take_us = (median(times) * 1e6 for times in (sampling, fancy, take))
    return AgainstNumpy(
        keys=tuple(plain),
        batch_size=batch_size,
        repeats=len(sampling),
        sample_us=round(sample_us, 2),
        fancy_us=round(fancy_us, 2),
        take_us=round(take_us, 2),
        times_fancy=round(sample_us / fancy_us, 3),
        times_take=round(sample_us / take_us, 3),
    )
