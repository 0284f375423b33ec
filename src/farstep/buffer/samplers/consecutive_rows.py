"""Samplers whose items are consecutive rows of an episode: n-step transitions and sequences."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from farstep.buffer.samplers.sampler import Sampler, check_number, next_obs, stored_next
from farstep.buffer.samplers.single_rows import Uniform
from farstep.buffer.selectors import Selector
from farstep.buffer.storage.store import Store
from farstep.buffer.storage.table import Table
from farstep.config.env import check_count
from farstep.core import Array
from farstep.errors import ConfigError
from farstep.schema import Schema


@dataclass(frozen=True)
class Composed(Sampler):
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
class NStep(Composed):
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
        check_number("gamma", self.gamma, 1.0)

    def check(self, schema: Schema) -> None:
        if "reward" not in schema:
            raise ConfigError("NStep sums rewards, but the rows have no array 'reward'.")

    @property
    def reach(self) -> int:  # type: ignore[override]
        return self.n

    def span(self, store: Store) -> int:
        return self.n + (not stored_next(store))

    def _last(self, store: Store, cells: Array) -> tuple[Array, Array]:
        """Return the cell of the last row, and the number of steps, of each transition."""
        steps = np.ones(len(cells), np.int64)
        for _ in range(self.n - 1):
            has_next = ~store.flat_cut.take(cells)
            cells = np.where(has_next, store.following(cells), cells)
            steps += has_next
        return cells, steps

    def usable(self, store: Store, cells: Array) -> Array | None:
        if store.tails is not None or stored_next(store):
            return None
        last, _ = self._last(store, cells)  # the last row must have a next row, or be terminal
        has_next = ~store.flat_cut.take(last)
        terminal = _terminal(store)
        return has_next if terminal is None else has_next | store.take(terminal, last).astype(bool)

    def all_usable(self, store: Store) -> Array | None:
        if store.tails is not None or stored_next(store):
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
        stored = stored_next(store)
        batch.update({name: store.take(name, last) for name in stored} if stored else next_obs(store, last))
        return batch


@dataclass(frozen=True)
class Sequence(Composed):
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
        return sequences(store, *self._path(store, cells))


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


def sequences(store: Store, cells: Array, is_valid: Array) -> dict[str, Array]:
    """Return a batch of sequences from the cells and flags of `path`."""
    flat = cells.reshape(-1)
    batch = {name: store.take(name, flat) for name in store.schema}
    if store.tails is not None:
        batch.update(next_obs(store, flat))
    batch = {name: value.reshape(*cells.shape, *value.shape[1:]) for name, value in batch.items()}
    batch["valid"] = is_valid & batch["valid"] if "valid" in batch else is_valid
    return batch


def _terminal(store: Store) -> str | None:
    """Name of the array that marks terminal rows; None if there is none. After a terminal row, the value is 0."""
    return next((name for name in ("terminated", "done") if name in store.schema), None)
