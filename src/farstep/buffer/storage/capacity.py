"""How many rows a buffer can hold, and how many cells its store needs for them."""

from __future__ import annotations

from farstep.errors import ConfigError
from farstep.resources import available_memory


def cells_of(capacity: int, columns: int, is_cyclic: bool) -> int:
    """Return the number of cells of a store with this capacity."""
    return (capacity // columns + spare_rows(is_cyclic)) * columns


def spare_rows(is_cyclic: bool) -> int:
    """Return the number of rows beyond the capacity: 1 with a remover, since it evicts after the new item is stored."""
    return 0 if is_cyclic else 1


def index_bytes(*, is_linked: bool, num_sparse: int, has_priorities: bool) -> int:
    """Return the bytes of memory per row beside its arrays: key, counters, free cells, links and weight.

    Args:
        is_linked: Whether links hold the order of rows.
        num_sparse: Number of `SparseRows`: observations after episodes, and older frames of each stacked array.
        has_priorities: Whether a sum tree holds a weight for each row.
    """
    table, cut, free, sparse = 8 + 2 * 4, 1, 8 + 1, 4 * num_sparse
    links = 2 * 8 + 2 * 8 if is_linked else 0  # both directions, and the log of keys, which is up to twice too long
    tree = -(-8 * 4 // 3) if has_priorities else 0  # each level has a quarter of the nodes of the one below
    return table + cut + free + sparse + links + tree


def fitting_capacity(
    row_bytes: int, capacity: int, columns: int, is_cyclic: bool, max_bytes: int | None, row_index_bytes: int
) -> int:
    """Return the largest multiple of `columns` that neither `capacity` nor `max_bytes` exceeds.

    Args:
        row_bytes: Bytes of the arrays of a row.
        capacity: Wanted number of rows.
        columns: Number of columns with an equal share each.
        is_cyclic: Whether rows stay in order.
        max_bytes: Maximum number of bytes of the arrays of all rows; None: no limit.
        row_index_bytes: Further bytes of memory per row (`index_bytes`).

    Raises:
        ConfigError: There is no room for one row per column, or the machine has too little memory.
    """
    if max_bytes is not None:
        capacity = min(capacity, max_bytes // max(1, row_bytes) - spare_rows(is_cyclic))
    if capacity < columns:
        raise ConfigError(
            f"capacity or max_bytes leave room for only {capacity} rows of {row_bytes} bytes, less than one per "
            f"environment slot ({columns}). Raise capacity or max_bytes."
        )
    capacity -= capacity % columns
    total = row_bytes + row_index_bytes
    if (needed := capacity * total) > available_memory():
        raise ConfigError(
            f"{capacity} rows of {total} bytes need {needed / 2**30:,.1f} GiB; this machine has "
            f"{available_memory() / 2**30:,.1f} GiB available. Lower capacity."
        )
    return capacity
