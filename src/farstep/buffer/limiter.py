"""Rate limiters: they bound how far inserting and sampling may get ahead of each other, as in Reverb.

    size = inserts - deletes
    diff = inserts * samples_per_insert - samples

    n rows may be inserted if  size + n <= min_size  or  diff + n * samples_per_insert <= max_diff
    n rows may be sampled if   size >= min_size      and diff - n >= min_diff

Both sides count rows, not items of the sampler. A batch of 8 sequences of 20 rows counts as 160 samples; 8 transitions
of `NStep` count as 8; an episode counts as its number of steps; padding does not count. The length of episodes, and of
sequences with `pad`, is known only after drawing. Such a batch may bring `diff` below `min_diff`; the next sample then
waits longer.

While a reader is starved, one insertion is allowed even above `max_diff`. Otherwise reader and writer could deadlock:
the rows that the reader needs may have been deleted or evicted, or may not form a sequence yet. Also, `diff` may be too
low for the reader's request and, at the same time, too high for the writer's.

A limiter only decides; `Buffer` does the waiting.
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
_SIMULATED_STEPS = 4096  # number of inserts and samples that `_deadlock_at` simulates


@dataclass
class RateLimiter:
    """Bounds `diff = inserts * samples_per_insert - samples`; see the module for the inequalities.

    `MinSize`, `SampleToInsertRatio`, `Queue` and `Stack` make the usual limiters. `Buffer.limit` changes the options of
    a limiter in use and wakes waiting threads.

    Args:
        samples_per_insert: Number of samples that each inserted row adds to `diff`, above 0.
        min_size: Number of rows that the buffer must hold before sampling is allowed, at least 1.
        min_diff: Sampling may not bring `diff` below this; `-math.inf`: no bound.
        max_diff: Inserting may not bring `diff` above this; `math.inf`: no bound.
        inserts: Rows inserted so far.
        samples: Rows sampled so far.
        deletes: Rows removed so far, for any reason.

    Raises:
        ConfigError: An option is out of range, or reader and writer would deadlock with these options.
    """

    samples_per_insert: float
    min_size: int
    min_diff: float
    max_diff: float

    inserts: int = 0
    samples: int = 0
    deletes: int = 0

    _is_taken = False  # not annotated, so not a field: checkpoints do not save it
    has_starved_reader = False  # not a field either
    """Whether a reader could not get its samples, and no row has been inserted or sampled since."""

    def __post_init__(self) -> None:
        self.check()

    def take(self) -> None:
        """Reserve the limiter for one buffer; a limiter counts the rows of only one buffer.

        Raises:
            ConfigError: Another buffer uses this limiter.
        """
        if self._is_taken:
            raise ConfigError(
                f"this limiter ({self}) already counts the rows of another buffer, and each buffer would wait for the "
                "other's rows; make one limiter for each buffer."
            )
        self._is_taken = True

    def check(self) -> None:
        """Check the options.

        Raises:
            ConfigError: An option is out of range, or reader and writer would deadlock with these options.
        """
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
                f"{first} rows inserted nothing could be sampled yet, and both sides could deadlock. Lower min_diff."
            )
        if (stuck := self._deadlock_at()) is not None:
            raise ConfigError(
                f"at diff={stuck:g} one more row would exceed max_diff={self.max_diff:g} and one more sample would "
                f"fall below min_diff={self.min_diff:g}, so reader and writer would deadlock. Raise max_diff or lower "
                "min_diff."
            )
        if self.max_diff < spi * first:
            warnings.warn(
                f"max_diff={self.max_diff:g} is less than samples_per_insert * min_size = {spi * first:g}: after the "
                f"first {first} rows, inserting waits until {spi * first - self.max_diff:g} samples have been taken.",
                stacklevel=4,
            )

    def check_reachable(self, capacity: int, uses_per_row: float = math.inf, fewest_uses: int = 1) -> None:
        """Check that a buffer can satisfy this limiter.

        Args:
            capacity: Rows that the buffer can hold.
            uses_per_row: How often a row can be sampled before it is removed (`max_times_sampled`); infinite without a
                limit.
            fewest_uses: Minimum number of samples that a stored row can still provide. This is the minimum number of
                rows per item, since the item may have only one use left.

        Raises:
            ConfigError: The buffer can never hold `min_size` rows; one item needs more samples than the limiter ever
                allows at once; or the writer would wait for more samples than the rows can provide.
        """
        if self.min_size > capacity:
            raise ConfigError(
                f"min_size={self.min_size} of the limiter is more than the {capacity} rows that the buffer can hold, "
                "so nothing could ever be sampled. Raise capacity or lower min_size."
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
                f"max_diff={self.max_diff:g} of the limiter is too large for the {capacity} rows of this buffer. A row "
                f"is removed after max_times_sampled samples and may have few left (at least {fewest_uses} each), so "
                "rows would be evicted before they are sampled. Raise capacity to at least "
                f"{math.ceil(self.max_diff / fewest_uses)}, or lower the limiter's max_diff."
            )

    def change(
        self, changes: Mapping[str, float], capacity: int, uses_per_row: float = math.inf, fewest_uses: int = 1
    ) -> None:
        """Change options. If one of them is invalid, change none.

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
        except BaseException:  # also catches a warning that is turned into an error
            for name, value in before.items():
                setattr(self, name, value)
            raise

    def _deadlock_at(self) -> float | None:
        """Return the `diff` at which single inserts and samples deadlock; None if they do not."""
        spi, low, high = self.samples_per_insert, self.min_diff, self.max_diff
        if high - low >= spi + 1:
            return None
        # With bounds this narrow, only one side can proceed at any time, so there is only one possible sequence of
        # calls.
        inserts, samples = self.min_size, 0
        for _ in range(_SIMULATED_STEPS):
            diff = inserts * spi - samples
            if diff - 1 >= low:
                samples += 1
            elif diff + spi <= high:
                inserts += 1
            else:
                return diff
        return None

    # ---- decisions ----

    @property
    def diff(self) -> float:
        """`inserts * samples_per_insert - samples`."""
        return self.inserts * self.samples_per_insert - self.samples

    @property
    def size(self) -> int:
        """Number of rows in the buffer: `inserts - deletes`."""
        return self.inserts - self.deletes

    def can_insert(self, n: int = 1) -> bool:
        """Return whether `n` rows may be inserted at once: `has_room(n)`, or a reader is starved.

        Args:
            n: Number of rows.

        Returns:
            True if the insertion is allowed.

        Raises:
            ConfigError: `n` is not an integer of at least 0.
        """
        return self.has_starved_reader or self.has_room(n)

    def has_room(self, n: int = 1) -> bool:
        """Return whether inserting `n` rows at once keeps `diff` within `max_diff`, or the size within `min_size`.

        Args:
            n: Number of rows.

        Returns:
            True if the insertion is within the bounds.

        Raises:
            ConfigError: `n` is not an integer of at least 0.
        """
        if n.__class__ is not int or n < 0:
            n = check_count("n", n, minimum=0)
        if self.inserts - self.deletes + n <= self.min_size:
            return True
        return (self.inserts + n) * self.samples_per_insert - self.samples <= self.max_diff

    def can_sample(self, n: int = 1) -> bool:
        """Return whether `n` rows may be sampled at once.

        Args:
            n: Number of rows.

        Returns:
            True if there are `min_size` rows and sampling keeps `diff` at or above `min_diff`.

        Raises:
            ConfigError: `n` is not an integer of at least 0.
        """
        if n.__class__ is not int or n < 0:
            n = check_count("n", n, minimum=0)
        return self.size >= self.min_size and self.diff - n >= self.min_diff

    def room(self, n: int) -> int:
        """Return how many rows may be inserted now.

        Args:
            n: Number of rows to insert, at least 1.

        Returns:
            The largest number up to `n`; at least 1 if a reader is starved.
        """
        if self.has_room(n):
            return n
        low, high = 0, n  # has_room(low) or low is 0, not has_room(high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.has_room(middle) else (low, middle)
        return low or int(self.has_starved_reader)

    @property
    def fill(self) -> float | None:
        """Where `diff` is between its bounds: 0 if sampling has to wait, 1 if inserting has to. None: a bound is
        infinite."""
        if math.isinf(self.max_diff - self.min_diff):
            return None
        return min(1.0, max(0.0, (self.diff - self.min_diff) / (self.max_diff - self.min_diff)))

    def most_samples(self) -> float:
        """Compute the largest number of rows that can ever be sampled at once.

        Returns:
            The number of rows; infinite without a bound.
        """
        reach = max(self.max_diff, self.samples_per_insert * self.min_size)
        return reach - self.min_diff

    def never_inserts(self, n: int) -> bool:
        """Return whether a batch is too large to ever be inserted at once.

        Args:
            n: Number of rows.

        Returns:
            True if `n` rows exceed the bounds, no matter how many samples are taken before.
        """
        return n > self.min_size and n * self.samples_per_insert + self.min_diff > self.max_diff

    # ---- counters ----

    def insert(self, n: int = 1) -> None:
        """Count inserted rows. `Buffer` calls this; it does not check whether the rows were allowed.

        Args:
            n: Number of rows. Default: 1.

        Raises:
            ConfigError: `n` is not an integer of at least 0.
        """
        self.inserts += n if n.__class__ is int and n >= 0 else check_count("n", n, minimum=0)
        self.has_starved_reader = False

    def sample(self, n: int = 1) -> None:
        """Count sampled rows. `Buffer` calls this; it does not check whether the rows were allowed.

        Args:
            n: Number of rows. Default: 1.

        Raises:
            ConfigError: `n` is not an integer of at least 0.
        """
        self.samples += n if n.__class__ is int and n >= 0 else check_count("n", n, minimum=0)
        self.has_starved_reader = False

    def delete(self, n: int = 1) -> None:
        """Count removed rows. `Buffer` calls this.

        Args:
            n: Number of rows. Default: 1.

        Raises:
            ConfigError: `n` is not an integer of at least 0.
        """
        self.deletes += n if n.__class__ is int and n >= 0 else check_count("n", n, minimum=0)

    def __str__(self) -> str:
        return (
            f"{self.inserts} inserted, {self.samples} sampled, {self.deletes} deleted; samples_per_insert="
            f"{self.samples_per_insert:g}, min_size={self.min_size}, diff={self.diff:g} within "
            f"[{self.min_diff:g}, {self.max_diff:g}]"
        )


def MinSize(min_size: int) -> RateLimiter:  # noqa: N802 - named like a class, as all limiters
    """Allow sampling once the buffer holds `min_size` rows; always allow inserting.

    Args:
        min_size: Number of rows, at least 1.

    Returns:
        A limiter for one buffer.

    Raises:
        ConfigError: `min_size` is not an integer of at least 1.
    """
    return RateLimiter(1.0, min_size, -math.inf, math.inf)


def SampleToInsertRatio(  # noqa: N802
    samples_per_insert: float, min_size: int, error_buffer: float | tuple[float, float]
) -> RateLimiter:
    """Keep `samples / inserts` near a ratio. The side that is ahead by more than `error_buffer` samples waits.

    Args:
        samples_per_insert: The ratio, in rows sampled per row inserted; above 0.
        min_size: Number of rows that the buffer must hold before sampling is allowed, at least 1.
        error_buffer: A number: the maximum deviation of `diff` from `samples_per_insert * min_size`, in samples and in
            both directions. Or a pair `(min_diff, max_diff)`. The bounds must be at least `2 * max(1,
            samples_per_insert)` apart.

    Returns:
        A limiter for one buffer.

    Raises:
        ConfigError: An argument is out of range, or the bounds are too close, so that both sides would deadlock.
    """
    if not _is_real(samples_per_insert):
        raise ConfigError(f"samples_per_insert is {samples_per_insert!r}; it must be a number above 0.")
    if isinstance(error_buffer, tuple) and len(error_buffer) == 2 and all(map(_is_real, error_buffer)):
        low, high = error_buffer
    elif not isinstance(error_buffer, tuple) and _is_real(error_buffer):
        middle = check_count("min_size", min_size) * samples_per_insert
        low, high = middle - error_buffer, middle + error_buffer
    else:
        raise ConfigError(f"error_buffer is {error_buffer!r}; it must be a number, or (min_diff, max_diff).")
    needed = 2 * max(1.0, samples_per_insert)
    if not high - low >= needed:
        raise ConfigError(
            f"error_buffer={error_buffer!r} leaves {high - low:g} samples between the bounds; with samples_per_insert="
            f"{samples_per_insert:g} at least {needed:g} are needed, or inserting and sampling could deadlock. Raise "
            "error_buffer."
        )
    return RateLimiter(samples_per_insert, min_size, low, high)


def Queue(size: int) -> RateLimiter:  # noqa: N802
    """Sample every row exactly once; inserting waits while `size` rows are unsampled. Use it with `FIFO`.

    Args:
        size: Maximum number of unsampled rows, at least 1.

    Returns:
        A limiter for one buffer.

    Raises:
        ConfigError: `size` is not an integer of at least 1.
    """
    return RateLimiter(1.0, 1, 0.0, check_count("size", size))


def Stack(size: int) -> RateLimiter:  # noqa: N802
    """Sample every row exactly once; inserting waits while `size` rows are unsampled. Use it with `LIFO`.

    Args:
        size: Maximum number of unsampled rows, at least 1.

    Returns:
        A limiter for one buffer.

    Raises:
        ConfigError: `size` is not an integer of at least 1.
    """
    return Queue(size)


def check_limiter(value: object) -> RateLimiter:
    """Return the limiter. Raise `ConfigError` for any other object."""
    if not isinstance(value, RateLimiter):
        hint = "; make one, e.g. MinSize(1000)" if callable(value) else ""
        raise ConfigError(f"limiter is {value!r}; expected a limiter such as farstep.buffer.MinSize(1000){hint}.")
    return value


def _is_real(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and not math.isnan(value)
