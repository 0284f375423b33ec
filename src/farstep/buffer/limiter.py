"""When rows may be inserted and sampled: counters and two inequalities, as in Reverb, without waiting.

    diff = inserts * samples_per_insert - samples

Both sides count rows, whatever a sampler's items are: a sample of 8 sequences of 20 rows is 160 samples, one of 8
transitions of `NStep` 8, one of whole episodes as many as they have steps (rows that fill up a batch do not count).
How many rows episodes, or sequences with `pad`, have is known only once they are drawn: such a batch may bring `diff`
below `min_diff`, and the next one waits for longer.

Sampling `n` rows needs `min_size` rows and may not bring `diff` below `min_diff`; inserting `n` rows may not bring it
above `max_diff`, unless the rows do not even reach `min_size`. Deletions change the size and not `diff`.

If a reader cannot get its samples, the next insertion passes even above `max_diff`. Otherwise reader and writer would
deadlock: the rows that the reader needs may have been deleted or evicted, may not form a sequence yet, or `diff` may be
too low for the reader's request and too high for the writer's.
"""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from farstep.config.env import check_count
from farstep.errors import ConfigError, unknown_name

_OPTIONS = ("samples_per_insert", "min_size", "min_diff", "max_diff")
_STEPS = 4096  # as far as a narrow band is followed


@dataclass
class RateLimiter:
    """The general form; `MinSize`, `SampleToInsertRatio`, `Queue` and `Stack` are its usual settings.

    The four options may be changed while it is in use; `Buffer.limit` does so and wakes whoever waits.
    """

    samples_per_insert: float
    min_size: int
    min_diff: float
    max_diff: float

    inserts: int = 0
    samples: int = 0
    deletes: int = 0

    _is_taken = False  # no field: a checkpoint does not know of it
    has_starved_reader = False  # no field either
    """Whether a reader did not get its samples, and nothing was inserted or sampled since."""

    def __post_init__(self) -> None:
        self.check()

    def take(self) -> None:
        """It is a buffer's, and nobody else's: it counts that one's rows."""
        if self._is_taken:
            raise ConfigError(
                f"this limiter ({self}) counts the rows of another buffer already, and would let each wait for the "
                "other's; make one for each buffer."
            )
        self._is_taken = True

    def check(self) -> None:
        """Refuse options with which nobody could ever go on."""
        spi, first = self.samples_per_insert, self.min_size
        if not (_is_real(spi) and 0 < spi < math.inf):
            raise ConfigError(f"samples_per_insert is {spi!r}; it must be a number above 0.")
        check_count("min_size", first)
        for name in ("min_diff", "max_diff"):
            if not _is_real(getattr(self, name)):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be a number, or infinite.")
        if self.min_diff > spi * first:
            raise ConfigError(
                f"min_diff={self.min_diff:g} is more than samples_per_insert * min_size = {spi * first:g}: with "
                f"{first} rows inserted nothing could be sampled yet, and in the end nothing at all. Lower min_diff."
            )
        if (stuck := self._standstill()) is not None:
            raise ConfigError(
                f"at a difference of {stuck:g} one more row would pass max_diff={self.max_diff:g} and one more sample "
                f"min_diff={self.min_diff:g}, so both would wait for ever. Raise max_diff or lower min_diff."
            )
        if self.max_diff < spi * first:
            warnings.warn(
                f"max_diff={self.max_diff:g} is less than samples_per_insert * min_size = {spi * first:g}: after the "
                f"first {first} rows nothing is inserted until {spi * first - self.max_diff:g} samples were taken.",
                stacklevel=4,
            )

    def check_reachable(self, capacity: int, uses_per_row: float = math.inf, fewest_uses: int = 1) -> None:
        """Refuse a buffer with which this limiter could never be satisfied.

        Args:
            capacity: Rows the buffer has room for.
            uses_per_row: Samples a row gives before it is removed (`max_times_sampled`); infinite without such a limit.
            fewest_uses: Samples that a row is sure to give: the fewest rows of an item, since the row may have been
                sampled all but once.

        Raises:
            ConfigError: The buffer never holds `min_size` rows, one item needs more samples than the limiter ever
                allows at once, or the rows never give the samples that the limiter makes the writer wait for.
        """
        if self.min_size > capacity:
            raise ConfigError(
                f"min_size={self.min_size} of the limiter is more than the {capacity} rows "
                "there is room for, so nothing could ever be sampled. Raise capacity or lower min_size."
            )
        if fewest_uses > self.most_samples():
            raise ConfigError(
                f"one item of this sampler counts as at least {fewest_uses} samples, and this limiter ({self}) never "
                f"allows more than {self.most_samples():g} at once, so nothing could ever be sampled. Raise max_diff, "
                "lower min_diff, or sample shorter sequences."
            )
        if math.isinf(self.max_diff):
            return
        if self.samples_per_insert > uses_per_row:
            raise ConfigError(
                f"samples_per_insert={self.samples_per_insert:g} of the limiter is more than the {uses_per_row:g} "
                "times that a row can be sampled here (max_times_sampled), so inserting would wait for samples "
                "that cannot be taken. Lower samples_per_insert or raise max_times_sampled."
            )
        if math.isfinite(uses_per_row) and self.max_diff > capacity * fewest_uses:
            raise ConfigError(
                f"max_diff={self.max_diff:g} of the limiter is more than the samples that the {capacity} rows of this "
                f"buffer are sure to give ({fewest_uses} each, since a row is removed after max_times_sampled samples "
                "and may have been sampled all but once), so rows would be evicted before they are sampled. Raise "
                f"capacity to at least {math.ceil(self.max_diff / fewest_uses)}, or lower the limiter's max_diff."
            )

    def change(
        self, changes: Mapping[str, float], capacity: int, uses_per_row: float = math.inf, fewest_uses: int = 1
    ) -> None:
        """Change options: all of them, or none if one is refused.

        Args:
            changes: New values by option.
            capacity: As in `check_reachable`.
            uses_per_row: As in `check_reachable`.
            fewest_uses: As in `check_reachable`.

        Raises:
            ConfigError: An option is unknown or out of range, or the buffer could never satisfy the limiter.
        """
        for name in changes:
            if name not in _OPTIONS:
                raise ConfigError(unknown_name("option of a limiter", name, _OPTIONS))
        before = {name: getattr(self, name) for name in _OPTIONS}
        for name, value in changes.items():
            setattr(self, name, value)
        try:
            self.check()
            self.check_reachable(capacity, uses_per_row, fewest_uses)
        except BaseException:  # also of a warning that is an error
            for name, value in before.items():
                setattr(self, name, value)
            raise

    def _standstill(self) -> float | None:
        """A difference at which, one by one, nothing can be inserted nor sampled, if it must come to that."""
        spi, low, high = self.samples_per_insert, self.min_diff, self.max_diff
        if high - low >= spi + 1:
            return None
        # In a band as narrow as this at most one of the two can be done at any time, so there is one way to go.
        inserts, samples = self.min_size, 0
        for _ in range(_STEPS):
            diff = inserts * spi - samples
            if diff - 1 >= low:
                samples += 1
            elif diff + spi <= high:
                inserts += 1
            else:
                return diff
        return None

    # ---- what may be done ----

    @property
    def diff(self) -> float:
        return self.inserts * self.samples_per_insert - self.samples

    @property
    def size(self) -> int:
        return self.inserts - self.deletes

    def can_insert(self, n: int = 1) -> bool:
        """Whether `n` rows may be inserted at once: `has_room(n)`, or a reader is starved.

        Args:
            n: Number of rows.

        Raises:
            ConfigError: `n` is not an integer of at least 0.
        """
        return self.has_starved_reader or self.has_room(n)

    def has_room(self, n: int = 1) -> bool:
        """Whether `n` rows can be inserted at once without exceeding `max_diff`, or without exceeding `min_size` rows.

        Args:
            n: Number of rows.

        Raises:
            ConfigError: `n` is not an integer of at least 0.
        """
        if n.__class__ is not int or n < 0:
            n = check_count("n", n, minimum=0)
        if self.inserts - self.deletes + n <= self.min_size:
            return True
        return (self.inserts + n) * self.samples_per_insert - self.samples <= self.max_diff

    def can_sample(self, n: int = 1) -> bool:
        if n.__class__ is not int or n < 0:
            n = check_count("n", n, minimum=0)
        return self.size >= self.min_size and self.diff - n >= self.min_diff

    def room(self, n: int) -> int:
        """How many of `n` rows may be inserted now; at least one if a reader is starved."""
        if self.has_room(n):
            return n
        low, high = 0, n  # has_room(low) or low is 0, not has_room(high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.has_room(middle) else (low, middle)
        return low or int(self.has_starved_reader)

    def most_samples(self) -> float:
        """How many samples can ever be taken at once."""
        reach = max(self.max_diff, self.samples_per_insert * self.min_size)
        return reach - self.min_diff

    def never_inserts(self, n: int) -> bool:
        """Whether `n` rows at once can never be inserted, however many samples were taken before."""
        return n > self.min_size and n * self.samples_per_insert + self.min_diff > self.max_diff

    # ---- what was done ----

    def insert(self, n: int = 1) -> None:
        self.inserts += n if n.__class__ is int and n >= 0 else check_count("n", n, minimum=0)
        self.has_starved_reader = False

    def sample(self, n: int = 1) -> None:
        self.samples += n if n.__class__ is int and n >= 0 else check_count("n", n, minimum=0)
        self.has_starved_reader = False

    def delete(self, n: int = 1) -> None:
        self.deletes += n if n.__class__ is int and n >= 0 else check_count("n", n, minimum=0)

    def __str__(self) -> str:
        return (
            f"{self.inserts} inserted, {self.samples} sampled, {self.deletes} deleted; samples_per_insert="
            f"{self.samples_per_insert:g}, min_size={self.min_size}, diff={self.diff:g} within "
            f"[{self.min_diff:g}, {self.max_diff:g}]"
        )


def MinSize(min_size: int) -> RateLimiter:  # noqa: N802 - one of the limiters, whatever makes it
    """Sample as soon as there are `min_size` rows; insert always."""
    return RateLimiter(1.0, min_size, -math.inf, math.inf)


def SampleToInsertRatio(  # noqa: N802
    samples_per_insert: float, min_size: int, error_buffer: float | tuple[float, float]
) -> RateLimiter:
    """Keep samples / inserts near a ratio: whoever runs ahead by more than `error_buffer` samples waits.

    A number allows as much on both sides of `samples_per_insert * min_size`; a pair is `min_diff` and `max_diff`.
    """
    if not _is_real(samples_per_insert):
        raise ConfigError(f"samples_per_insert is {samples_per_insert!r}; it must be a number above 0.")
    if isinstance(error_buffer, tuple) and len(error_buffer) == 2 and all(map(_is_real, error_buffer)):
        low, high = error_buffer
    elif not isinstance(error_buffer, tuple) and _is_real(error_buffer):
        middle = check_count("min_size", min_size) * samples_per_insert
        low, high = middle - error_buffer, middle + error_buffer
    else:
        raise ConfigError(f"error_buffer is {error_buffer!r}; it must be a number, or min_diff and max_diff.")
    needed = 2 * max(1.0, samples_per_insert)
    if not high - low >= needed:
        raise ConfigError(
            f"error_buffer={error_buffer!r} leaves {high - low:g} samples between the bounds; with samples_per_insert="
            f"{samples_per_insert:g} at least {needed:g} are needed, or inserting and sampling wait for each other for "
            "ever. Raise error_buffer."
        )
    return RateLimiter(samples_per_insert, min_size, low, high)


def Queue(size: int) -> RateLimiter:  # noqa: N802
    """Every row is sampled once, and at most `size` wait; for `FIFO`."""
    return RateLimiter(1.0, 1, 0.0, check_count("size", size))


def Stack(size: int) -> RateLimiter:  # noqa: N802
    """As `Queue`; for `LIFO`."""
    return Queue(size)


def check_limiter(value: object) -> RateLimiter:
    """Refuse what is none."""
    if not isinstance(value, RateLimiter):
        hint = "; make one, e.g. MinSize(1000)" if callable(value) else ""
        raise ConfigError(f"limiter is {value!r}; expected a limiter such as farstep.buffer.MinSize(1000){hint}.")
    return value


def _is_real(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and not math.isnan(value)
