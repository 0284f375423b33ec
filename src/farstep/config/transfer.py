"""Configuration of when, and in which order, workers send the arrays of a chunk."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from farstep.config.base import Options as _Config
from farstep.config.field_docs import show_fields
from farstep.errors import ConfigError, unknown_name

_REST = "*"


@show_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class TransferTrigger(_Config):
    """When, and in which order, workers without shared memory send the arrays of a chunk.

    By default a worker sends a chunk when it is complete. With a condition (`size`, `episode_end`, `max_bytes`,
    `seconds`), it sends finished rows earlier, while it still rolls the chunk. `a | b` sends when either trigger does,
    `a & b` when both do. Pass the trigger as `EnvConfig.transfer`.
    """

    keys: Sequence[Sequence[str]] = ()
    """Stages: groups of array names. The groups are sent in order, one message per group. `obs` includes `obs.camera`
    unless another stage names `obs.camera`; it does not include `last_obs` or `final_obs`. `*` stands for all arrays
    that no stage names; without `*`, they belong to the last stage."""
    size: int | None = None
    """Send when this many rows are waiting. None: no such condition."""
    episode_end: bool = False
    """Send when an episode has ended."""
    max_bytes: int | None = None
    """Send when this many bytes are waiting. None: no such condition."""
    seconds: float | None = None
    """Send when the oldest row has waited this many seconds. None: no such condition."""
    max_senders: int | None = None
    """Maximum number of workers that send their last stage at the same time. On a slow connection, a limit completes
    the first chunks earlier. None: no limit."""
    also: Sequence[TransferTrigger] = ()
    """Further triggers that must hold before rows are sent; set by `first & second`."""

    def __post_init__(self) -> None:
        for name in ("size", "max_bytes", "max_senders"):
            if getattr(self, name) is not None:
                self._at_least(name, 1)
        seconds = self.seconds
        is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if seconds is not None and not (is_number and 0 < seconds < math.inf):
            raise ConfigError(f"TransferTrigger.seconds is {self.seconds!r}; expected a number of seconds above 0.")
        if not isinstance(self.episode_end, bool):
            raise ConfigError(f"TransferTrigger.episode_end is {self.episode_end!r}; expected True or False.")
        if self.keys is None:
            object.__setattr__(self, "keys", ())
        if isinstance(self.keys, str) or not isinstance(self.keys, Sequence):
            raise ConfigError(f"TransferTrigger.keys is {self.keys!r}; {self._EXPECTED}")
        for stage in self.keys:
            if isinstance(stage, str) or not isinstance(stage, Sequence) or not all(isinstance(n, str) for n in stage):
                raise ConfigError(f"TransferTrigger.keys has {stage!r}; {self._EXPECTED}")
        names = [name for stage in self.keys for name in stage]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"TransferTrigger.keys names {', '.join(twice)} twice; name each array once.")
        object.__setattr__(self, "keys", tuple(tuple(stage) for stage in self.keys))
        if not isinstance(self.also, tuple) or not all(isinstance(each, TransferTrigger) for each in self.also):
            raise ConfigError(f"TransferTrigger.also is {self.also!r}; join triggers by &: first & second.")

    _EXPECTED = "expected groups of array names, e.g. (('reward', 'value', 'last_obs'), ('obs', 'action'))."

    NO_TRIGGER: ClassVar[str] = (
        "a TransferTrigger does not call a consumer: it decides when workers send rows, and belongs in the "
        'environment\'s configuration, {"transfer": TransferTrigger(...)}. To call a consumer when rows have arrived, '
        "use flow.on(DataKeyTrigger(n=..., size=...), consumer)."
    )

    def __or__(self, other: object) -> Self:
        """Return a trigger that sends rows when either trigger does."""
        other, shared = self._joined(other)
        first: dict[str, Any] = {}
        for name in ("size", "max_bytes", "seconds"):
            given = [each for each in (getattr(self, name), getattr(other, name)) if each is not None]
            first[name] = min(given, default=None)
        return dataclasses.replace(self, **shared, **first, episode_end=self.episode_end or other.episode_end)

    def __and__(self, other: object) -> Self:
        """Return a trigger that sends rows when the conditions of both hold."""
        other, shared = self._joined(other)
        return dataclasses.replace(self, **shared, also=(other,))

    __rand__ = __ror__ = __and__

    def _joined(self, other: object) -> tuple[TransferTrigger, dict[str, Any]]:
        """Return the other trigger, and `keys` and `max_senders` of the joint trigger; at most one trigger may set
        each."""
        if not isinstance(other, TransferTrigger):
            raise ConfigError(self.NO_TRIGGER)
        if self.also or other.also:
            raise ConfigError("a TransferTrigger made with & cannot be joined again; join by | first, then by &.")
        shared: dict[str, Any] = {}
        for name in ("keys", "max_senders"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine and theirs and mine != theirs:
                raise ConfigError(
                    f"two joined TransferTriggers have different {name}, {mine} and {theirs}; give only one."
                )
            shared[name] = mine or theirs
        return other, shared

    @classmethod
    def dual(cls, size: int | None = None, max_senders: int | None = None) -> Self:
        """Return a trigger with two stages: first the arrays that advantages need, then observations and actions
        (ARTOS).

        Args:
            size: As in `TransferTrigger`.
            max_senders: As in `TransferTrigger`.

        Returns:
            The trigger.
        """
        return cls(keys=((_REST,), ("obs", "action")), size=size, max_senders=max_senders)

    @property
    def sends_early(self) -> bool:
        """Whether rows may be sent before their chunk is complete."""
        return self.episode_end or not (self.size is None and self.max_bytes is None and self.seconds is None)

    @property
    def watches_ends(self) -> bool:
        """Whether a condition depends on the ends of episodes."""
        return self.episode_end or any(each.watches_ends for each in self.also)

    def due(self, rows: int, nbytes: int, seconds: float, ended: bool) -> bool:
        """Return whether to send now.

        Args:
            rows: Number of rows waiting.
            nbytes: Number of bytes waiting.
            seconds: Seconds since the oldest of these rows was rolled.
            ended: Whether an episode ended in the waiting rows.

        Returns:
            True if the conditions hold.
        """
        due = (
            (self.size is not None and rows >= self.size)
            or (self.max_bytes is not None and nbytes >= self.max_bytes)
            or (self.seconds is not None and seconds >= self.seconds)
            or (self.episode_end and ended)
        )
        return rows > 0 and due and all(each.due(rows, nbytes, seconds, ended) for each in self.also)

    def split(self, names: Sequence[str]) -> list[list[str]]:
        """Split arrays into stages.

        Args:
            names: Names of all arrays of a chunk.

        Returns:
            The array names of each stage: at least one stage, and a stage may be empty.
        """
        found: list[list[str]] = [[] for _ in self.keys or ((),)]
        homes = {name: i for i, stage in enumerate(self.keys) for name in stage}
        rest = homes.get(_REST, len(found) - 1)
        for name in names:
            path = name
            while path not in homes and "." in path:
                path = path.rpartition(".")[0]
            found[homes.get(path, rest)].append(name)
        return found

    def check(self, names: Sequence[str]) -> None:
        """Check that `keys` names only arrays that exist.

        Args:
            names: Names of all arrays of a chunk.

        Raises:
            ConfigError: `keys` has a name that no array has.
        """
        for entry in (name for stage in self.keys for name in stage):
            if entry != _REST and not any(name == entry or name.startswith(entry + ".") for name in names):
                raise ConfigError(unknown_name("array in TransferTrigger.keys", entry, names))


ALL_AT_ONCE = TransferTrigger()
"""A chunk is sent as a whole, when it is complete."""
