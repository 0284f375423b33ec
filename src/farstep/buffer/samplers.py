"""Samplers: which rows a batch is made of, and what of them.

Each is a small description (frozen, comparable, saved with a checkpoint); `selector` makes what does the choosing. The
plain ones (`FIFO`, `LIFO`, `Uniform`, `Prioritized`, `MinHeap`, `MaxHeap`) also serve as removers.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from farstep.buffer.selectors import Cells, HeapSelector, OrderSelector, PrioritySelector, Selector, UniformSelector
from farstep.buffer.storage.store import ENDINGS, Store
from farstep.buffer.storage.table import Table
from farstep.config.env import check_count
from farstep.core import Array
from farstep.errors import ConfigError
from farstep.schema import Schema

_LEAST = 1e-6
"""The lowest priority of an episode."""


class Sampler:
    """What samplers have in common: single rows, as often as they are drawn."""

    once = False
    """A row is gone when it was sampled, unless `max_times_sampled` says otherwise."""
    needs_order = False
    """Rows must stay in the order of their episodes, so only the oldest may be removed."""
    uses_priorities = False
    """What `update_priorities` says counts."""
    beta: float = 0.0
    """Exponent of importance weights."""
    reach: int = 1
    """How many rows `usable` looks at for each."""
    item_rows: tuple[int, int] = (1, 1)
    """Fewest and most rows per item, as far as they are known before drawing. The limiter admits a batch by its fewest
    rows, and counts the rows that it turned out to have."""

    def selector(self, table: Table) -> Selector:
        raise NotImplementedError

    def check(self, schema: Schema) -> None:
        """Refuse rows without something that is needed."""

    def check_room(self, rows: int) -> None:
        """Refuse a buffer with so few rows for an environment that nothing could ever be sampled."""

    def usable(self, store: Store, cells: Array) -> Array | None:
        """Which of these rows can be sampled; None: all of them."""
        return None

    def all_usable(self, store: Store) -> Array | None:
        """As `usable`, of all cells, for a sampler that knows a quicker way than to look at each."""
        return self.usable(store, np.arange(store.table.cells))

    def span(self, store: Store) -> int:
        """Number of consecutive rows that an item may need, its own row first.

        Args:
            store: The rows. If next observations are not stored with each row, an item also needs the row after its
                last one.

        Returns:
            The largest number of rows, at least 1.
        """
        return self.reach + (store.tails is not None)

    def count_rows(self, batch: Mapping[str, Array]) -> int:
        """How many rows a batch has, for the limiter: in batches of sequences, those that are `valid`."""
        valid = batch.get("valid")
        if valid is not None and valid.ndim > 1:
            return int(np.count_nonzero(valid))
        return len(next(iter(batch.values())))

    def rows(self, store: Store, cells: Array) -> dict[str, Array]:
        """The batch that begins at these cells."""
        batch = {name: store.take(name, cells) for name in store.schema}
        if store.tails is not None:
            batch.update(_next_obs(store, cells))
        return batch


def check_sampler(what: str, value: object) -> Sampler:
    """Refuse what is none."""
    if not isinstance(value, Sampler):
        hint = "; make one: add ()" if isinstance(value, type) else ""
        raise ConfigError(f"{what} is {value!r}; expected a sampler such as farstep.buffer.Uniform(){hint}.")
    return value


def with_beta(sampler: Sampler, beta: float) -> Sampler:
    """The same with another exponent of importance weights."""
    if isinstance(sampler, _Composed):
        return replace(sampler, by=with_beta(sampler.by, beta))
    if not isinstance(sampler, (Prioritized, DPER)):
        raise ConfigError(f"{sampler!r} has no beta; only weights of Prioritized(...) and DPER(...) do.")
    return replace(sampler, beta=beta)


def check_remover(remover: Sampler, sampler: Sampler) -> None:
    """Refuse one that takes single rows out of what the sampler needs in order, or that cannot take single rows."""
    if sampler.needs_order and type(remover) is not FIFO:
        raise ConfigError(f"{sampler!r} needs rows in order, so only the oldest can be removed: leave remover out.")
    if isinstance(remover, FullBatch):
        raise ConfigError("remover=FullBatch(); single rows are removed. Leave remover out for the oldest first.")
    if remover.needs_order:
        raise ConfigError(f"remover={remover!r}; single rows are removed, so it must be a sampler of these.")


@dataclass(frozen=True)
class Uniform(Sampler):
    """Every row alike, with replacement."""

    def selector(self, table: Table) -> Selector:
        return UniformSelector(table)


@dataclass(frozen=True)
class FIFO(Sampler):
    """The oldest rows, each once."""

    once = True

    def selector(self, table: Table) -> Selector:
        return OrderSelector(table, newest=False)


@dataclass(frozen=True)
class LIFO(Sampler):
    """The newest rows, each once."""

    once = True

    def selector(self, table: Table) -> Selector:
        return OrderSelector(table, newest=True)


@dataclass(frozen=True)
class FullBatch(FIFO):
    """All rows that are there, each once, as soon as there are as many as asked for."""


@dataclass(frozen=True)
class Prioritized(Sampler):
    """In proportion to priority ** alpha; weights are (N * probability) ** -beta, the largest scaled to 1.

    A new row gets the highest priority so far, at first 1. (Schaul et al. 2016, proportional variant.)
    """

    alpha: float = 0.6
    beta: float = 0.4

    uses_priorities = True

    def __post_init__(self) -> None:
        _check_number("alpha", self.alpha)
        _check_number("beta", self.beta)

    def selector(self, table: Table) -> Selector:
        return PrioritySelector(table, self.alpha)


@dataclass(frozen=True)
class MinHeap(Sampler):
    """The rows of lowest priority, in order; new rows have priority 1."""

    uses_priorities = True

    def selector(self, table: Table) -> Selector:
        return HeapSelector(table, highest=False)


@dataclass(frozen=True)
class MaxHeap(Sampler):
    """The rows of highest priority, in order; new rows have priority 1."""

    uses_priorities = True

    def selector(self, table: Table) -> Selector:
        return HeapSelector(table, highest=True)


@dataclass(frozen=True)
class _Composed(Sampler):
    """Rows that another sampler chooses are where something longer begins."""

    by: Sampler = field(default_factory=Uniform, kw_only=True)
    """What chooses."""

    needs_order = True

    def __post_init__(self) -> None:
        if not isinstance(self.by, Sampler) or self.by.needs_order:
            raise ConfigError(f"by={self.by!r}; {type(self).__name__} is built on a sampler of single rows.")

    def selector(self, table: Table) -> Selector:
        return self.by.selector(table)

    @property
    def beta(self) -> float:  # type: ignore[override]
        return self.by.beta

    @property
    def uses_priorities(self) -> bool:  # type: ignore[override]
        return self.by.uses_priorities

    @property
    def once(self) -> bool:  # type: ignore[override]
        return self.by.once


@dataclass(frozen=True)
class NStep(_Composed):
    """Transitions over `n` steps: `reward` is the discounted sum, `next_obs` what was observed after the last step and
    `discount` what its value is to be multiplied with (0 where the episode terminated).

    Never across an end: `steps` says how many steps a transition has, fewer than `n` where its episode ends earlier;
    `terminated` and `truncated` are those of the last. What was observed after it comes with a `Batch` or in an array
    `next_obs`; then there are also transitions of fewer steps up to the newest row. Else it is in the row that follows,
    and nothing begins so near to the newest row, or to a truncated one, that it is not known.
    """

    n: int = 3
    gamma: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("n", self.n)
        _check_number("gamma", self.gamma, 1.0)

    def check(self, schema: Schema) -> None:
        if "reward" not in schema:
            raise ConfigError("NStep adds up rewards, and the rows have no array 'reward'.")

    @property
    def reach(self) -> int:  # type: ignore[override]
        return self.n

    def span(self, store: Store) -> int:
        return self.n + (not _stored_next(store))

    def _last(self, store: Store, cells: Array) -> tuple[Array, Array]:
        """The last row of each transition, and how many it takes."""
        steps = np.ones(len(cells), np.int64)
        for _ in range(self.n - 1):
            goes_on = ~store.flat_cut.take(cells)
            cells = np.where(goes_on, store.following(cells), cells)
            steps += goes_on
        return cells, steps

    def usable(self, store: Store, cells: Array) -> Array | None:
        if store.tails is not None or _stored_next(store):
            return None
        last, _ = self._last(store, cells)  # what was observed after it must be in the row that follows, or not matter
        known = ~store.flat_cut.take(last)
        return known if (over := _terminal(store)) is None else known | store.take(over, last).astype(bool)

    def all_usable(self, store: Store) -> Array | None:
        if store.tails is not None or _stored_next(store):
            return None
        after = store.rows_after()
        usable = after >= self.n
        if (over := _terminal(store)) is not None:
            usable |= store.take(over, store.ahead(np.minimum(after, self.n - 1))).astype(bool)
        return np.asarray(usable)

    def rows(self, store: Store, cells: Array) -> dict[str, Array]:
        batch = {name: store.take(name, cells) for name in store.schema}
        last, steps = self._last(store, cells)
        reward, at = batch["reward"].astype(np.result_type(batch["reward"], np.float32)), cells
        for k in range(1, self.n):
            more = np.flatnonzero(k < steps)
            at = store.following(at)
            reward[more] += (self.gamma**k * store.take("reward", at[more])).astype(reward.dtype)
        batch["reward"], batch["steps"] = reward, steps
        for name in ("terminated", "truncated", "done"):
            if name in store.schema:
                batch[name] = store.take(name, last)
        over = _terminal(store)
        batch["discount"] = self.gamma**steps * (1.0 if over is None else ~batch[over].astype(bool))
        stored = _stored_next(store)
        batch.update({name: store.take(name, last) for name in stored} if stored else _next_obs(store, last))
        return batch


@dataclass(frozen=True)
class Sequence(_Composed):
    """`length` rows of one episode that follow each other: arrays `[batch, length, ...]`.

    With `pad`, a sequence may also begin nearer to its episode's end; it is filled up with its last row, and the array
    `valid` is False there.
    """

    length: int = 2
    pad: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("length", self.length)

    @property
    def reach(self) -> int:  # type: ignore[override]
        return self.length

    @property
    def item_rows(self) -> tuple[int, int]:  # type: ignore[override]
        return (1 if self.pad else self.length), self.length

    def check_room(self, rows: int) -> None:
        if rows < self.length and not self.pad:
            raise ConfigError(
                f"{self!r} needs {self.length} rows that follow each other, and there is room for {rows} of an "
                "environment, so nothing could ever be sampled. Raise capacity, lower length, or pad=True."
            )

    def usable(self, store: Store, cells: Array) -> Array | None:
        return None if self.pad else np.asarray(self._path(store, cells)[1].all(axis=1))

    def all_usable(self, store: Store) -> Array | None:
        return None if self.pad else np.asarray(store.rows_after() >= self.length - 1)

    def _path(self, store: Store, cells: Array) -> tuple[Array, Array]:
        return path(store, cells, self.length)

    def rows(self, store: Store, cells: Array) -> dict[str, Array]:
        return _sequences(store, *self._path(store, cells))


@dataclass(frozen=True)
class DPER(Sampler):
    """Whole episodes in proportion to priority ** alpha (DistRL's trajectory replay); see `trajectory_priority`.

    A batch is of episodes: arrays `[batch, longest, ...]`, filled up with last rows, `valid` False there. Keys name
    episodes; a new one gets the highest priority so far.
    """

    alpha: float = 0.5
    beta: float = 0.0

    needs_order = uses_priorities = True

    def __post_init__(self) -> None:
        _check_number("alpha", self.alpha)
        _check_number("beta", self.beta)

    def selector(self, table: Table) -> Selector:
        return EpisodeSelector(table, self.alpha)

    def check(self, schema: Schema) -> None:
        if not any(name in schema for name in (*ENDINGS, "episode_start")):
            raise ConfigError(f"DPER samples whole episodes, and rows have none of {', '.join(ENDINGS)}.")

    def span(self, store: Store) -> int:
        return store.table.cells

    def rows(self, store: Store, cells: Array) -> dict[str, Array]:
        length, at = 1, cells
        while not store.flat_cut.take(at).all():
            at = np.where(store.flat_cut.take(at), at, store.following(at))
            length += 1
        return _sequences(store, *path(store, cells, length))


class EpisodeSelector(PrioritySelector):
    """As by priority, but an item counts only once it is known to begin a whole episode."""

    def inserted(self, cells: Cells, keys: Array) -> None:
        self._tree.set(cells, 0.0)

    def completed(self, cells: Array) -> None:
        """Episodes that begin here are complete."""
        super().inserted(cells, cells)

    def updated(self, cells: Array, priorities: Array) -> None:
        """Other rows than an episode's first have no priority, and an episode has always some."""
        first = self.weights[cells] > 0
        super().updated(cells[first], np.maximum(priorities[first], _LEAST))

    def _weights(self, priorities: Array | np.float64) -> Array:
        return np.maximum(super()._weights(priorities), np.finfo(float).tiny)

    @property
    def episodes(self) -> Array:
        """The cells of their first rows."""
        return np.flatnonzero(self.weights[: self._table.cells])


def trajectory_priority(
    td_errors: Array, ratios: Array, logprobs: Array, *, w1: float = 50.0, w2: float = 1.0, w3: float = 0.01
) -> float:
    """DPER's priority of one episode: weighted means of |TD error|, of the ratios learner / behaviour (each at most
    10) and of the surprisal -log pi; at least 1e-6. (DistRL, section 5.3; the weights are those of its code.)"""
    mean = w1 * np.abs(td_errors).mean() + w2 * np.minimum(ratios, 10.0).mean() - w3 * np.mean(logprobs)
    return float(max(mean, _LEAST))


def path(store: Store, cells: Array, length: int) -> tuple[Array, Array]:
    """`[n, length]` cells from each on, and which of them belong to the same episode as the first."""
    cells_at, there = np.empty((len(cells), length), np.int64), np.empty((len(cells), length), bool)
    goes_on = np.ones(len(cells), bool)
    for t in range(length):
        cells_at[:, t], there[:, t] = cells, goes_on
        goes_on = goes_on & ~store.flat_cut.take(cells)
        cells = np.where(goes_on, store.following(cells), cells)
    return cells_at, there


def _sequences(store: Store, cells: Array, there: Array) -> dict[str, Array]:
    flat = cells.reshape(-1)
    batch = {name: store.take(name, flat) for name in store.schema}
    if store.tails is not None:
        batch.update(_next_obs(store, flat))
    batch = {name: value.reshape(*cells.shape, *value.shape[1:]) for name, value in batch.items()}
    batch["valid"] = there & batch["valid"] if "valid" in batch else there
    return batch


def _terminal(store: Store) -> str | None:
    """The array that says that nothing comes after a row; `truncated` does not."""
    return next((name for name in ("terminated", "done") if name in store.schema), None)


def _stored_next(store: Store) -> list[str]:
    """Arrays of next observations that rows have themselves."""
    return [name for name in store.schema if name.split(".")[0] == "next_obs"]


def _check_number(name: str, value: object, most: float = math.inf) -> None:
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not 0 <= float(value) <= most or math.isinf(value):  # type: ignore[arg-type]
        upper = "of at least 0" if math.isinf(most) else f"from 0 to {most:g}"
        raise ConfigError(f"{name} is {value!r}; it must be a number {upper}.")


def _next_obs(store: Store, cells: Array) -> dict[str, Array]:
    names = [name for name in store.schema if name.split(".")[0] == "obs"]
    return {"next_" + name: store.observed_after(name, cells) for name in names}
