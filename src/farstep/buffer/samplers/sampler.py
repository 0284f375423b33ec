"""The base class of samplers, and what its subclasses share."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping

import numpy as np

from farstep.buffer.selectors import Selector
from farstep.buffer.storage.store import Store
from farstep.buffer.storage.table import Table
from farstep.core import Array
from farstep.errors import ConfigError
from farstep.schema import Schema


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
            batch.update(next_obs(store, cells))
        return batch


def stored_next(store: Store) -> list[str]:
    """Return the names of the arrays of next observations that are stored with each row."""
    return [name for name in store.schema if name.split(".")[0] == "next_obs"]


def check_number(name: str, value: object, most: float = math.inf) -> None:
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not 0 <= float(value) <= most or math.isinf(value):  # type: ignore[arg-type]
        upper = "of at least 0" if math.isinf(most) else f"from 0 to {most:g}"
        raise ConfigError(f"{name} is {value!r}; it must be a number {upper}.")


def next_obs(store: Store, cells: Array) -> dict[str, Array]:
    names = [name for name in store.schema if name.split(".")[0] == "obs"]
    return {"next_" + name: store.observed_after(name, cells) for name in names}
