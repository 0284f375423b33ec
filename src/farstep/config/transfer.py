"""In which parts, and when, what workers have rolled travels to the head."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from farstep.config.base import Options as _Config
from farstep.errors import ConfigError, unknown_name

_REST = "*"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransferTrigger(_Config):
    """When, and in which order, the arrays of a chunk travel from workers that share no memory with the head.

    The end of a chunk sends what is left; any condition given here sends rows sooner, while it is still being rolled.
    """

    keys: Sequence[Sequence[str]] = ()
    """Stages: names of arrays, group by group; a group travels in a message of its own, before the next one. `obs`
    means `obs.camera`, too, unless that is named elsewhere; `last_obs` and `final_obs` are names of their own; `*` is
    whatever no stage names (without it, that travels in the last)."""
    size: int | None = None
    """Send when this many rows wait."""
    episode_end: bool = False
    """Send when an episode has ended."""
    max_bytes: int | None = None
    """Send when this many bytes wait."""
    seconds: float | None = None
    """Send when the oldest row has waited this long."""
    in_turn: int | None = None
    """How many workers may send their last stage at a time, so that some chunks are complete while others wait; None:
    all of them, and on a slow connection all are complete at the end."""
    also: Sequence[TransferTrigger] = ()
    """Others that must say so, too, before rows are sent (`first & second`)."""

    def __post_init__(self) -> None:
        for name in ("size", "max_bytes", "in_turn"):
            if getattr(self, name) is not None:
                self._at_least(name, 1)
        if self.seconds is not None and not (isinstance(self.seconds, (int, float)) and 0 < self.seconds < math.inf):
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
            raise ConfigError(f"TransferTrigger.keys names {', '.join(twice)} twice; an array travels once.")
        object.__setattr__(self, "keys", tuple(tuple(stage) for stage in self.keys))
        if not isinstance(self.also, tuple) or not all(isinstance(each, TransferTrigger) for each in self.also):
            raise ConfigError(f"TransferTrigger.also is {self.also!r}; join triggers by &: first & second.")

    _EXPECTED = "expected groups of array names, e.g. (('reward', 'value', 'last_obs'), ('obs', 'action'))."

    NO_TRIGGER: ClassVar[str] = (
        "a TransferTrigger calls nobody: it says when workers send what they have rolled, and belongs into the "
        'environment\'s configuration, {"transfer": TransferTrigger(...)}. Who is called when rows have arrived says '
        "flow.on(DataKeyTrigger(n=..., size=...), consumer)."
    )

    def __or__(self, other: object) -> Self:
        """Rows are sent when either says so."""
        other, shared = self._joined(other)
        first: dict[str, Any] = {}
        for name in ("size", "max_bytes", "seconds"):
            given = [each for each in (getattr(self, name), getattr(other, name)) if each is not None]
            first[name] = min(given, default=None)
        return dataclasses.replace(self, **shared, **first, episode_end=self.episode_end or other.episode_end)

    def __and__(self, other: object) -> Self:
        """Rows are sent when both say so."""
        other, shared = self._joined(other)
        return dataclasses.replace(self, **shared, also=(other,))

    __rand__ = __ror__ = __and__

    def _joined(self, other: object) -> tuple[TransferTrigger, dict[str, Any]]:
        """The other one, and stages and turns, of which only one of the two may say something."""
        if not isinstance(other, TransferTrigger):
            raise ConfigError(self.NO_TRIGGER)
        if self.also or other.also:
            raise ConfigError("transfer triggers that were joined by & cannot be joined further; join by | first.")
        shared: dict[str, Any] = {}
        for name in ("keys", "in_turn"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine and theirs and mine != theirs:
                raise ConfigError(
                    f"two joined TransferTriggers have {name} of their own, {mine} and {theirs}; give one."
                )
            shared[name] = mine or theirs
        return other, shared

    @classmethod
    def dual(cls, size: int | None = None, in_turn: int | None = None) -> Self:
        """What advantages are computed of first (ARTOS: dual-stage pipeline), observations and actions after it."""
        return cls(keys=((_REST,), ("obs", "action")), size=size, in_turn=in_turn)

    @property
    def sends_early(self) -> bool:
        """Whether rows may travel before their chunk is done."""
        return self.episode_end or not (self.size is None and self.max_bytes is None and self.seconds is None)

    @property
    def watches_ends(self) -> bool:
        """Whether ends of episodes matter."""
        return self.episode_end or any(each.watches_ends for each in self.also)

    def due(self, rows: int, nbytes: int, seconds: float, ended: bool) -> bool:
        """Whether to send now: so many rows and bytes wait, the first for so long, and an episode `ended` in them."""
        due = (
            (self.size is not None and rows >= self.size)
            or (self.max_bytes is not None and nbytes >= self.max_bytes)
            or (self.seconds is not None and seconds >= self.seconds)
            or (self.episode_end and ended)
        )
        return rows > 0 and due and all(each.due(rows, nbytes, seconds, ended) for each in self.also)

    def split(self, names: Sequence[str]) -> list[list[str]]:
        """These arrays, stage by stage; always at least one stage, and a stage may be empty."""
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
        """Refuse stages with a name that no array has."""
        for entry in (name for stage in self.keys for name in stage):
            if entry != _REST and not any(name == entry or name.startswith(entry + ".") for name in names):
                raise ConfigError(unknown_name("array in TransferTrigger.keys", entry, names))


ALL_AT_ONCE = TransferTrigger()
"""A chunk travels whole, when it is done."""
