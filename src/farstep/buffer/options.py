"""The options of a buffer: checks them, and allocates contents for the rows of a schema."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from farstep.buffer.limiter import MinSize, RateLimiter, check_limiter
from farstep.buffer.samplers import FIFO, Sampler, check_remover, check_sampler
from farstep.buffer.storage.capacity import fitting_capacity, index_bytes
from farstep.buffer.storage.contents import Contents
from farstep.buffer.storage.frames import FrameStack
from farstep.config.env import check_count
from farstep.errors import ConfigError
from farstep.schema import Schema, Structure


@dataclass(frozen=True, kw_only=True)
class BufferOptions:
    """Checked options of a buffer; `make_options` fills in the defaults."""

    capacity: int
    sampler: Sampler
    remover: Sampler
    limiter: RateLimiter
    max_bytes: int | None
    max_times_sampled: int
    pooled: bool
    frame_stack: FrameStack | None = None

    def __post_init__(self) -> None:
        check_remover(self.remover, self.sampler)
        if not isinstance(self.pooled, bool):
            raise ConfigError(f"pooled is {self.pooled!r}; expected True or False.")
        self._check_limiter(self.capacity)
        self.sampler.check_room(self.capacity)
        if self.frame_stack is not None and not isinstance(self.frame_stack, FrameStack):
            raise ConfigError(
                f"frame_stack is {self.frame_stack!r}; expected farstep.buffer.FrameStack(num_frames), or None."
            )
        if self.frame_stack is not None and not self.is_cyclic:
            raise ConfigError(
                f"{self.unordered_reason}, but frame_stack takes older frames from the rows before. Leave out "
                "frame_stack."
            )

    @property
    def is_cyclic(self) -> bool:
        """Whether rows stay in the order of insertion and the oldest are evicted first."""
        keeps_order = self.sampler.needs_order or not self.max_times_sampled or isinstance(self.sampler, FIFO)
        # Otherwise items are removed in any order, which would leave holes in a ring.
        return type(self.remover) is FIFO and keeps_order

    @property
    def is_pooled(self) -> bool:
        """Whether all environment slots share the capacity although their rows stay in order."""
        return self.pooled and self.is_cyclic  # without order, slots share the capacity anyway

    @property
    def unordered_reason(self) -> str:
        """Why rows do not stay in order, as the start of an error message. Only valid if `is_cyclic` is False."""
        if type(self.remover) is not FIFO:
            return f"remover={self.remover!r} removes rows in any order"
        return f"{self.sampler!r} with max_times_sampled={self.max_times_sampled} removes rows in any order"

    @property
    def uses_per_row(self) -> float:
        """Maximum number of times that a row can be sampled before it is removed."""
        return self.max_times_sampled * self.sampler.item_rows[1] or math.inf

    def _check_limiter(self, capacity: int) -> None:
        self.limiter.check_reachable(capacity, self.uses_per_row, self.sampler.item_rows[0])

    def fitted(self, schema: Schema, columns: int) -> BufferOptions:
        """Return these options with the capacity that fits rows of `schema` in `columns` environment slots.

        Raises:
            ConfigError: The sampler cannot work with these arrays, or memory is too small.
        """
        check_count("columns", columns)
        if not schema:
            raise ConfigError("a buffer needs at least one array.")
        self.sampler.check(schema)
        if columns > 1 and not self.is_cyclic:
            raise ConfigError(f"{self.unordered_reason}, so rows of all environments share one column.")
        shares = 1 if self.is_pooled else columns
        rows, index = self._array_bytes(schema), self._index_bytes(schema)
        capacity = fitting_capacity(rows, self.capacity, shares, self.is_cyclic, self.max_bytes, index)
        self._check_limiter(capacity)
        self.sampler.check_room(capacity // shares)
        return replace(self, capacity=capacity)

    def row_bytes(self, schema: Schema) -> int:
        """Return the bytes of memory per row of `schema`: those of its arrays, each frame of a stack once, and of its
        place in the index.

        Observations after the last row of an episode, and the older frames of its first row, are stored in addition.
        """
        return self._array_bytes(schema) + self._index_bytes(schema)

    def _array_bytes(self, schema: Schema) -> int:
        stored = schema if self.frame_stack is None else self.frame_stack.stored(schema)
        return sum(spec.nbytes for spec in stored.values())

    def _index_bytes(self, schema: Schema) -> int:
        has_tails = self.is_cyclic and any(name.split(".")[0] == "obs" for name in schema)
        num_stacks = 0 if self.frame_stack is None else len(self.frame_stack.arrays)
        return index_bytes(
            is_linked=self.is_pooled, num_sparse=has_tails + num_stacks, has_priorities=self.sampler.uses_priorities
        )

    def allocate(
        self, schema: Schema, columns: int, structures: Mapping[str, Structure], rng: np.random.Generator
    ) -> Contents:
        """Allocate contents for rows of `schema`; `structures` says how their arrays are nested."""
        remover = None if self.is_cyclic else self.remover
        return Contents(
            schema, self.capacity, columns, structures, self.sampler, remover, rng, self.is_pooled, self.frame_stack
        )

    def check_in_place(self, is_linked: bool) -> None:
        """Check that rows are in the order of their cells, for readers that access the cells directly.

        Args:
            is_linked: Whether a list of links holds the order of rows.

        Raises:
            ConfigError: They are not.
        """
        if self.is_cyclic and not is_linked:
            return
        reason = "rows were removed by delete() or max_times_sampled" if self.is_cyclic else self.unordered_reason
        reason = "the buffer is pooled" if self.is_pooled else reason
        raise ConfigError(
            f"{reason}, but a DataKeyTrigger takes rows in order of insertion. Give the trigger consume=False and "
            "min_new=k, or use a new buffer with FIFO() as remover and a sampler without max_times_sampled."
        )


def make_options(
    capacity: int,
    sampler: Sampler,
    *,
    remover: Sampler | None,
    limiter: RateLimiter | None,
    max_bytes: int | None,
    max_times_sampled: int | None,
    pooled: bool,
    frame_stack: FrameStack | None,
) -> BufferOptions:
    """Check the arguments of `Buffer` and fill in their defaults; see its docstring."""
    uses = int(check_sampler("sampler", sampler).once) if max_times_sampled is None else max_times_sampled
    return BufferOptions(
        capacity=check_count("capacity", capacity),
        sampler=check_sampler("sampler", sampler),
        remover=check_sampler("remover", remover or FIFO()),
        limiter=MinSize(1) if limiter is None else check_limiter(limiter),
        max_bytes=None if max_bytes is None else check_count("max_bytes", max_bytes),
        max_times_sampled=check_count("max_times_sampled", uses, minimum=0),
        pooled=pooled,
        frame_stack=frame_stack,
    )
