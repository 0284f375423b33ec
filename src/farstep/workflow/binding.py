"""Binds a workflow's buffer to its environments, and rejects options that would deadlock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from farstep.buffer.bound_arrays import internals_of
from farstep.buffer.replay import Buffer
from farstep.errors import ConfigError, unknown_name
from farstep.schema import Schema, Structure
from farstep.workflow.triggers import DataKeyTrigger


def check_triggers(
    triggers: Sequence[DataKeyTrigger], schema: Schema, num_workers: int, on_demand: bool = False
) -> None:
    """Raise `ConfigError` if a trigger waits for too many workers, or for an array that does not exist.

    Args:
        triggers: The triggers.
        schema: The arrays of a row.
        num_workers: Largest number of workers.
        on_demand: Whether workers roll only when `Workflow.next_rollout` is called.
    """
    for trigger in triggers:
        if (needed := trigger.min_actors) is not None and needed > num_workers:
            raise ConfigError(
                f"{trigger!r} waits for {needed} actors; there are {num_workers} workers. Lower n, or "
                'wait for all present workers with n="all".'
            )
        if on_demand and trigger.n is not None and trigger.n > num_workers:
            raise ConfigError(
                f"{trigger!r} waits for {trigger.n} windows, but next_rollout requests one window of each of "
                f"{num_workers} workers. Lower n, or do not use next_rollout."
            )
        for name in (name for stage in trigger.stages for name in stage or ()):
            if name not in schema:
                raise ConfigError(unknown_name(f"key of {trigger!r}", name, schema))


def bind_buffer(
    buffer: Buffer,
    schema: Schema,
    structures: Mapping[str, Structure],
    num_envs: int,
    consuming: Sequence[DataKeyTrigger],
    steps: int,
) -> None:
    """Allocate the buffer's arrays for the rows of the environments, unless the buffer already has arrays.

    Args:
        buffer: The buffer of the workflow.
        schema: The arrays of a row.
        structures: How these arrays are nested.
        num_envs: Number of environments, one column each.
        consuming: The triggers that consume rows.
        steps: Steps per chunk.

    Raises:
        ConfigError: The buffer already has different arrays, or too few rows for the triggers.
    """
    if buffer.is_cyclic and not buffer.is_bound:
        buffer.bind(schema, num_envs, structures)
    if consuming:
        buffer.keep_in_place()
    if not buffer.is_cyclic:
        return
    store = internals_of(buffer).store
    fits = buffer.is_pooled or store.columns == num_envs
    if not fits or ((consuming or buffer.is_pooled) and dict(buffer.schema) != schema):
        raise ConfigError(
            f"the buffer has {store.num_slots} columns for {', '.join(buffer.schema)}; the environment "
            f"has {num_envs} slots and {', '.join(schema)}. Leave out spec, or make a new buffer."
        )
    largest = [(leaf.size * leaf.windows_per_actor, math.gcd(leaf.size, steps)) for leaf in consuming]
    needed = max([steps, *(rows + steps - common for rows, common in largest)])
    rows = store.rows // (num_envs if buffer.is_pooled else 1)
    if rows < needed:
        raise ConfigError(
            f"the buffer has room for {rows} rows of each of {num_envs} environments; {needed} "
            f"are needed at a time. Raise capacity to at least {needed * num_envs}."
        )


def check_limiter(buffer: Buffer, chunk_rows: int, most_samples: int) -> None:
    """Raise `ConfigError` if the limiter never allows a chunk to be inserted, or a consumer's rows to be sampled.

    Args:
        buffer: The buffer of the workflow.
        chunk_rows: Largest number of rows of a chunk.
        most_samples: Largest number of rows that a consumer samples at once.
    """
    if most_samples > buffer.limiter.most_samples():
        raise ConfigError(
            f"a consumer samples {most_samples} rows at once, but the limiter never allows this many "
            f"({buffer.limiter}); widen the limiter, or sample fewer rows."
        )
    if buffer.limiter.never_inserts(chunk_rows):
        raise ConfigError(
            f"a chunk of {chunk_rows} rows never fits this limiter ({buffer.limiter}); widen the limiter, or make "
            "chunks shorter (steps=...)."
        )
