"""How many rows a buffer can hold, and how many cells its store needs for them."""

from __future__ import annotations

from farstep.errors import ConfigError
from farstep.resources import available_memory
from farstep.schema import Schema


def cells_of(capacity: int, columns: int, is_cyclic: bool) -> int:
    """Return the number of cells of a store with this capacity."""
    return (capacity // columns + spare_rows(is_cyclic)) * columns


def spare_rows(is_cyclic: bool) -> int:
    """Return the number of rows beyond the capacity: 1 with a remover, since it evicts after the new item is stored."""
    return 0 if is_cyclic else 1


def fitting_capacity(schema: Schema, capacity: int, columns: int, is_cyclic: bool, max_bytes: int | None) -> int:
    """Return the largest multiple of `columns` that neither `capacity` nor `max_bytes` exceeds."""
    row_bytes = max(1, sum(spec.nbytes for spec in schema.values()))
    if max_bytes is not None:
        capacity = min(capacity, max_bytes // row_bytes - spare_rows(is_cyclic))
    if capacity < columns:
        raise ConfigError(
            f"capacity or max_bytes leave room for only {capacity} rows of {row_bytes} bytes, less than one per "
            f"environment slot ({columns}). Raise capacity or max_bytes."
        )
    capacity -= capacity % columns
    if (needed := capacity * row_bytes) > available_memory():
        raise ConfigError(
            f"{capacity} rows of {row_bytes} bytes need {needed / 2**30:,.1f} GiB; this machine has "
            f"{available_memory() / 2**30:,.1f} GiB available. Lower capacity."
        )
    return capacity
