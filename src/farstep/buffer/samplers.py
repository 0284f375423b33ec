"""Samplers choose the items of a batch and build its arrays.

A sampler is only a set of options: frozen, comparable, and saved in checkpoints. Its `selector` draws the items.
Samplers of single rows (`FIFO`, `LIFO`, `Uniform`, `Prioritized`, `MinHeap`, `MaxHeap`) are also used as removers.
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

_MIN_PRIORITY = 1e-6
"""The lowest priority of an episode."""


class Sampler:
    """Base class of samplers; by default an item is a single row.

    Your own sampler must define only `selector`; override other methods if necessary.
    """

    once = False
    """Whether an item is removed after one sample, unless `max_times_sampled` is given."""
    needs_order = False
    """Whether rows must stay in the order of their episodes. Then only the oldest rows may be removed."""
    uses_priorities = False
    """Whether `update_priorities` has an effect."""
    beta: float = 0.0
    """Exponent of importance weights."""
    reach: int = 1
    """Number of rows that `usable` reads per cell."""
    item_rows: tuple[int, int] = (1, 1)
    """Minimum and maximum number of rows per item, as far as known before drawing. The limiter uses the minimum to
    decide about a batch, then counts its actual rows."""

    def selector(self, table: Table) -> Selector:
        """Make the selector that draws items of one buffer.

        Args:
            table: The items of the buffer.

        Returns:
            A new selector.
        """
        raise NotImplementedError

    def check(self, schema: Schema) -> None:
        """Check that rows have the arrays that the sampler needs.

        Args:
            schema: The arrays of a row.

        Raises:
            ConfigError: An array is missing.
        """

    def check_room(self, rows: int) -> None:
        """Check that the buffer is large enough to sample anything.

        Args:
            rows: Rows per environment slot.

        Raises:
            ConfigError: An item needs more consecutive rows than this.
        """

    def usable(self, store: Store, cells: Array) -> Array | None:
        """Determine at which rows an item can start.

        Args:
            store: The rows.
            cells: The cells of the rows to test.

        Returns:
            One bool per cell, or None if items can start at all of them.
        """
        return None

    def all_usable(self, store: Store) -> Array | None:
        """Return `usable` for all cells of the store. Override this method if there is a faster way.

        Args:
            store: The rows.

        Returns:
            One bool per cell of the store, or None if items can start at all of them.
        """
        return self.usable(store, np.arange(store.table.cells))

    def span(self, store: Store) -> int:
        """Return the number of consecutive rows that an item may need, including its own row.

        Args:
            store: The rows. If rows do not store their next observations, an item also needs the row after its last
                row.

        Returns:
            The maximum number of rows, at least 1.
        """
        return self.reach + (store.tails is not None)

    def count_rows(self, batch: Mapping[str, Array]) -> int:
        """Return the number of rows in a batch for the limiter. Padding of sequences does not count.

        Args:
            batch: The batch that `rows` returned.

        Returns:
            The number of rows.
        """
        valid = batch.get("valid")
        if valid is not None and valid.ndim > 1:
            return int(np.count_nonzero(valid))
        return len(next(iter(batch.values())))

    def rows(self, store: Store, cells: Array) -> dict[str, Array]:
        """Make a batch of items.

        Args:
            store: The rows.
            cells: The cell of the first row of each item.

        Returns:
            Arrays `[batch, ...]` by name.
        """
        batch = {name: store.take(name, cells) for name in store.schema}
        if store.tails is not None:
            batch.update(_next_obs(store, cells))
        return batch


def check_sampler(what: str, value: object) -> Sampler:
    """Return the sampler. Raise `ConfigError` for any other object."""
    if not isinstance(value, Sampler):
        hint = "; create an instance: add ()" if isinstance(value, type) else ""
        raise ConfigError(f"{what} is {value!r}; expected a sampler such as farstep.buffer.Uniform(){hint}.")
    return value


def with_beta(sampler: Sampler, beta: float) -> Sampler:
    """Return a copy of the sampler with another exponent of importance weights."""
    if isinstance(sampler, _Composed):
        return replace(sampler, by=with_beta(sampler.by, beta))
    if not isinstance(sampler, (Prioritized, DPER)):
        raise ConfigError(f"{sampler!r} has no beta; only Prioritized(...) and DPER(...) have importance weights.")
    return replace(sampler, beta=beta)


def check_remover(remover: Sampler, sampler: Sampler) -> None:
    """Raise `ConfigError` if the remover does not choose single rows, or would break an order that the sampler
    needs."""
    if sampler.needs_order and type(remover) is not FIFO:
        raise ConfigError(
            f"{sampler!r} needs rows in order, so only the oldest rows can be removed; leave out remover."
        )
    if isinstance(remover, FullBatch):
        raise ConfigError(
            "remover=FullBatch(), but a remover chooses single rows. To remove the oldest rows first, "
            "leave out remover."
        )
    if remover.needs_order:
        raise ConfigError(f"remover={remover!r}; a remover must be a sampler of single rows.")


@dataclass(frozen=True)
class Uniform(Sampler):
    """Single rows, all equally likely, with replacement."""

    def selector(self, table: Table) -> Selector:
        return UniformSelector(table)


@dataclass(frozen=True)
class FIFO(Sampler):
    """The oldest rows, oldest first; each is sampled once."""

    once = True

    def selector(self, table: Table) -> Selector:
        return OrderSelector(table, newest=False)


@dataclass(frozen=True)
class LIFO(Sampler):
    """The newest rows, newest first; each is sampled once."""

    once = True

    def selector(self, table: Table) -> Selector:
        return OrderSelector(table, newest=True)


@dataclass(frozen=True)
class FullBatch(FIFO):
    """All rows of the buffer, oldest first; each is sampled once.

    `sample(batch_size)` waits for at least `batch_size` rows and returns all of them.
    """


@dataclass(frozen=True)
class Prioritized(Sampler):
    """Single rows in proportion to their priority, with replacement (Schaul et al. 2016, proportional variant).

        P(i) = priority_i ** alpha / sum_k priority_k ** alpha
        weight_i = (N * P(i)) ** -beta / max_j (N * P(j)) ** -beta      N: rows in the buffer; j: rows in the batch

    A new row gets the highest priority so far, initially 1. If all priorities are 0, all rows are equally likely.

    Args:
        alpha: Exponent of the priorities, at least 0; with 0, priorities have no effect. Default: 0.6.
        beta: Exponent of the importance weights in `SampleInfo.weights`, at least 0; see `Buffer.set_beta`. Default:
            0.4.

    Raises:
        ConfigError: `alpha` or `beta` is not a finite number of at least 0.
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
    """The rows of lowest priority, lowest first; new rows have priority 1."""

    uses_priorities = True

    def selector(self, table: Table) -> Selector:
        return HeapSelector(table, highest=False)


@dataclass(frozen=True)
class MaxHeap(Sampler):
    """The rows of highest priority, highest first; new rows have priority 1."""

    uses_priorities = True

    def selector(self, table: Table) -> Selector:
        return HeapSelector(table, highest=True)


@dataclass(frozen=True)
class _Composed(Sampler):
    """Base class of samplers whose items have several rows; another sampler chooses the first row."""

    by: Sampler = field(default_factory=Uniform, kw_only=True)
    """Chooses the first row of each item."""

    needs_order = True

    def __post_init__(self) -> None:
        if not isinstance(self.by, Sampler) or self.by.needs_order:
            raise ConfigError(f"by={self.by!r}; {type(self).__name__} needs a sampler of single rows.")

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
    """Transitions over `n` steps of one episode.

        reward = r_0 + gamma * r_1 + ... + gamma ** (steps - 1) * r_(steps - 1)
        discount = gamma ** steps, or 0 if the episode terminated
        target = reward + discount * V(next_obs)

    The batch has the arrays of the first row, and three more: `steps` (`n`, or fewer if the episode ends earlier),
    `discount`, and `next_obs`, the observation after the last step. `terminated`, `truncated` and `done` are taken from
    the last step.

    If rows are inserted as a `Batch` or have an array `next_obs`, a transition can start at every row; near the newest
    row it has fewer steps. Otherwise `next_obs` is the observation of the next row. It is then unknown close to the
    newest row and close to a truncation, so no transition starts there.

    Args:
        n: Maximum number of steps, at least 1. Default: 3.
        gamma: Discount per step, from 0 to 1. Default: 0.99.
        by: Chooses the first row: a sampler of single rows. Default: `Uniform()`.

    Raises:
        ConfigError: An option is out of range, or the rows have no array `reward`.
    """

    n: int = 3
    gamma: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("n", self.n)
        _check_number("gamma", self.gamma, 1.0)

    def check(self, schema: Schema) -> None:
        if "reward" not in schema:
            raise ConfigError("NStep sums rewards, but the rows have no array 'reward'.")

    @property
    def reach(self) -> int:  # type: ignore[override]
        return self.n

    def span(self, store: Store) -> int:
        return self.n + (not _stored_next(store))

    def _last(self, store: Store, cells: Array) -> tuple[Array, Array]:
        """Return the cell of the last row, and the number of steps, of each transition."""
        steps = np.ones(len(cells), np.int64)
        for _ in range(self.n - 1):
            has_next = ~store.flat_cut.take(cells)
            cells = np.where(has_next, store.following(cells), cells)
            steps += has_next
        return cells, steps

    def usable(self, store: Store, cells: Array) -> Array | None:
        if store.tails is not None or _stored_next(store):
            return None
        last, _ = self._last(store, cells)  # the last row must have a next row, or be terminal
        has_next = ~store.flat_cut.take(last)
        terminal = _terminal(store)
        return has_next if terminal is None else has_next | store.take(terminal, last).astype(bool)

    def all_usable(self, store: Store) -> Array | None:
        if store.tails is not None or _stored_next(store):
            return None
        after = store.rows_after()
        usable = after >= self.n
        if (terminal := _terminal(store)) is not None:
            usable |= store.take(terminal, store.ahead(np.minimum(after, self.n - 1))).astype(bool)
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
        terminal = _terminal(store)
        batch["discount"] = self.gamma**steps * (1.0 if terminal is None else ~batch[terminal].astype(bool))
        stored = _stored_next(store)
        batch.update({name: store.take(name, last) for name in stored} if stored else _next_obs(store, last))
        return batch


@dataclass(frozen=True)
class Sequence(_Composed):
    """Consecutive rows of one episode, as arrays `[batch, length, ...]`.

    The array `valid` is False at padded rows.

    Args:
        length: Rows per sequence, at least 1. Default: 2.
        pad: Whether a sequence may be shorter than `length`, because its episode ends or because it reaches the newest
            row. Such a sequence is padded with copies of its last row. Default: False.
        by: Chooses the first row: a sampler of single rows. Default: `Uniform()`.

    Raises:
        ConfigError: An option is out of range, or the buffer has room for fewer than `length` rows per environment
            slot.
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
                f"{self!r} needs {self.length} consecutive rows, but the buffer has room for only {rows} per "
                "environment, so nothing could ever be sampled. Raise capacity, lower length, or set pad=True."
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
    """Whole episodes in proportion to their priority, with replacement (trajectory replay of DistRL).

        P(i) = priority_i ** alpha / sum_k priority_k ** alpha

    A batch has arrays `[batch, longest, ...]`, where `longest` is the length of its longest episode. Shorter episodes
    are padded with copies of their last row; the array `valid` is False at these copies. Keys identify episodes. A new
    episode gets the highest priority so far, initially 1. Compute priorities with `trajectory_priority`.

    Args:
        alpha: Exponent of the priorities, at least 0. Default: 0.5.
        beta: Exponent of the importance weights, as in `Prioritized`; with 0, all weights are 1. Default: 0.

    Raises:
        ConfigError: An option is out of range, or the rows do not mark the ends of episodes.
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
            raise ConfigError(f"DPER samples whole episodes, but the rows have none of {', '.join(ENDINGS)}.")

    def span(self, store: Store) -> int:
        return store.table.cells

    def rows(self, store: Store, cells: Array) -> dict[str, Array]:
        length, at = 1, cells
        while not store.flat_cut.take(at).all():
            at = np.where(store.flat_cut.take(at), at, store.following(at))
            length += 1
        return _sequences(store, *path(store, cells, length))


class EpisodeSelector(PrioritySelector):
    """Draws the first rows of complete episodes in proportion to priority; all other rows have weight 0."""

    def inserted(self, cells: Cells, keys: Array) -> None:
        self._tree.set(cells, 0.0)

    def completed(self, cells: Array) -> None:
        """Make the complete episodes that start at these cells available."""
        super().inserted(cells, cells)

    def updated(self, cells: Array, priorities: Array) -> None:
        """Set the priorities of episodes, at least `_MIN_PRIORITY`. Ignore cells at which no episode starts."""
        first = self.weights[cells] > 0
        super().updated(cells[first], np.maximum(priorities[first], _MIN_PRIORITY))

    def _weights(self, priorities: Array | np.float64) -> Array:
        return np.maximum(super()._weights(priorities), np.finfo(float).tiny)

    @property
    def episodes(self) -> Array:
        """The cells of the first rows of all complete episodes."""
        return np.flatnonzero(self.weights[: self._table.cells])


def trajectory_priority(
    td_errors: Array, ratios: Array, logprobs: Array, *, w1: float = 50.0, w2: float = 1.0, w3: float = 0.01
) -> float:
    """Compute the priority of one episode for `DPER` (DistRL, section 5.3, with the defaults of its code).

        priority = max(1e-6, w1 * mean(|td_error|) + w2 * mean(min(ratio, 10)) - w3 * mean(logprob))

    Args:
        td_errors: TD error of each step.
        ratios: For each step, the action's probability under the learner's policy, divided by its probability under the
            policy that acted.
        logprobs: For each step, the log-probability of the action.
        w1: Weight of the TD errors. Default: 50.
        w2: Weight of the ratios. Default: 1.
        w3: Weight of the surprisal, `-logprob`. Default: 0.01.

    Returns:
        The priority.
    """
    mean = w1 * np.abs(td_errors).mean() + w2 * np.minimum(ratios, 10.0).mean() - w3 * np.mean(logprobs)
    return float(max(mean, _MIN_PRIORITY))


def path(store: Store, cells: Array, length: int) -> tuple[Array, Array]:
    """Return the cells `[n, length]` of consecutive rows, and whether each row is in the first row's episode.

    After the end of the episode, its last cell is repeated.
    """
    cells_at, is_valid = np.empty((len(cells), length), np.int64), np.empty((len(cells), length), bool)
    continues = np.ones(len(cells), bool)
    for t in range(length):
        cells_at[:, t], is_valid[:, t] = cells, continues
        continues = continues & ~store.flat_cut.take(cells)
        cells = np.where(continues, store.following(cells), cells)
    return cells_at, is_valid


def _sequences(store: Store, cells: Array, is_valid: Array) -> dict[str, Array]:
    """Return a batch of sequences from the cells and flags of `path`."""
    flat = cells.reshape(-1)
    batch = {name: store.take(name, flat) for name in store.schema}
    if store.tails is not None:
        batch.update(_next_obs(store, flat))
    batch = {name: value.reshape(*cells.shape, *value.shape[1:]) for name, value in batch.items()}
    batch["valid"] = is_valid & batch["valid"] if "valid" in batch else is_valid
    return batch


def _terminal(store: Store) -> str | None:
    """Name of the array that marks terminal rows; None if there is none. After a terminal row, the value is 0."""
    return next((name for name in ("terminated", "done") if name in store.schema), None)


def _stored_next(store: Store) -> list[str]:
    """Return the names of the arrays of next observations that are stored with each row."""
    return [name for name in store.schema if name.split(".")[0] == "next_obs"]


def _check_number(name: str, value: object, most: float = math.inf) -> None:
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not 0 <= float(value) <= most or math.isinf(value):  # type: ignore[arg-type]
        upper = "of at least 0" if math.isinf(most) else f"from 0 to {most:g}"
        raise ConfigError(f"{name} is {value!r}; it must be a number {upper}.")


def _next_obs(store: Store, cells: Array) -> dict[str, Array]:
    names = [name for name in store.schema if name.split(".")[0] == "obs"]
    return {"next_" + name: store.observed_after(name, cells) for name in names}
