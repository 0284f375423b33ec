"""The state that triggers test: written steps, published versions, updates and time.

Steps are counted per actor and key, from 0. A ledger is used by one thread, and its clock advances only by `tick`.
"""

from __future__ import annotations

import copy
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence

from farstep.errors import ConfigError, unknown_name

Actor = Hashable
"""Id of an actor, e.g. the index of a worker. In messages to other processes, ids must be plain data."""
Span = tuple[int, int]
"""The oldest and the newest version among some steps."""

_HISTORY = 2048  # writes kept individually per actor and key; older ones are merged


class _Track:
    """The writes of one actor to one key."""

    def __init__(self) -> None:
        self._ends, self._arrivals, self._oldest, self._newest = (array("q") for _ in range(4))

    @property
    def end(self) -> int:
        return self._ends[-1] if self._ends else 0

    def add(self, steps: int, arrival: int, span: Span) -> None:
        self._ends.append(self.end + steps)
        self._arrivals.append(arrival)
        self._oldest.append(span[0])
        self._newest.append(span[1])
        if len(self._ends) == 2 * _HISTORY:
            old = slice(_HISTORY)
            self._oldest[old] = array("q", [min(self._oldest[old])])
            self._newest[old] = array("q", [max(self._newest[old])])
            self._arrivals[old] = self._arrivals[_HISTORY - 1 : _HISTORY]
            self._ends[old] = self._ends[_HISTORY - 1 : _HISTORY]

    def cut(self, end: int) -> None:
        """Remove writes beyond step `end`."""
        beyond = slice(bisect_right(self._ends, end), None)
        for each in (self._ends, self._arrivals, self._oldest, self._newest):
            del each[beyond]

    def arrival_of(self, steps: int) -> int:
        """Return the value of `Ledger.changes` at which the first `steps` steps were complete."""
        return self._arrivals[bisect_left(self._ends, steps)]

    def span(self, start: int, stop: int) -> Span:
        window = slice(bisect_right(self._ends, start), bisect_left(self._ends, stop) + 1)
        return min(self._oldest[window]), max(self._newest[window])


class Ledger:
    """Written steps, published versions, updates and time of a workflow.

    Args:
        keys: Names of all arrays of a row. Without names, every write counts for all keys, and triggers may name any
            key.
        now: The time now, in seconds on the caller's clock.
    """

    def __init__(self, keys: Iterable[str] = (), now: float = 0.0) -> None:
        self.keys = tuple(dict.fromkeys(keys))
        self.changes = 0
        """Increases with every change."""
        self.started = self.now = now
        """Time of creation and time now, in seconds on the caller's clock."""
        self.env_steps = 0
        """Number of steps of single environments for which all keys were written."""
        self.learner_steps = 0
        """Number of updates of the learner."""
        self.versions: dict[str, int] = {}
        """The newest version of every published object."""
        self._tracks: dict[Actor, dict[str, _Track]] = {}  # by key; only "" while all keys have the same steps
        self._touched: dict[Actor, int] = {}
        """For each actor, its last change, in the order of changes."""
        self.present: frozenset[Actor] | None = None
        """The actors that `DataKeyTrigger(n="all")` waits for; None: `members` was not called."""
        self.quorum = 1
        """Number of actors that must be present for `DataKeyTrigger(n="all")` to fire."""

    # ---- events ----

    def wrote(
        self, actor: Actor, steps: int, version: int | Span, keys: Sequence[str] | None = None, envs: int = 1
    ) -> None:
        """Record that an actor wrote its next steps.

        Args:
            actor: The actor.
            steps: Number of steps, at least 1.
            version: The version that acted, or the oldest and the newest of several versions.
            keys: The keys that were written; default: all.
            envs: Environments per step; default: 1.

        Raises:
            ConfigError: A number is below 1, or a key is unknown.
        """
        if steps < 1 or envs < 1:
            raise ConfigError(f"{actor!r} wrote {steps} steps of {envs} environments; expected at least 1 of each.")
        if keys is not None and not self.keys:
            raise ConfigError(
                f"only the keys {list(keys)} were written, but the ledger does not know all keys; use "
                "Ledger(keys=[...])."
            )
        self._known(keys)
        tracks = self._tracks.setdefault(actor, {"": _Track()})
        if keys is not None and "" in tracks:
            tracks = self._tracks[actor] = {name: copy.deepcopy(tracks[""]) for name in self.keys}
        before = self.written(actor)
        self._touch(actor)
        for track in self._select(actor, keys):
            track.add(steps, self.changes, version if isinstance(version, tuple) else (version, version))
        self.env_steps += (self.written(actor) - before) * envs

    def withdrew(self, actor: Actor) -> None:
        """Remove the incomplete steps of an actor, which have only some of the keys, because they were lost.

        Args:
            actor: The actor.
        """
        end = self.written(actor)
        for track in self._tracks.get(actor, {}).values():
            track.cut(end)
        self._touch(actor)

    def _touch(self, actor: Actor) -> None:
        self.changes += 1
        self._touched.pop(actor, None)
        self._touched[actor] = self.changes

    def members(self, present: Iterable[Actor], quorum: int = 1) -> None:
        """Record which actors are present.

        Args:
            present: The actors.
            quorum: Number of actors that must be present for `DataKeyTrigger(n="all")` to fire; default: 1.
        """
        found = frozenset(present)
        if (found, quorum) != (self.present, self.quorum):
            self.present, self.quorum = found, quorum
            self.changes += 1

    def published(self, name: str, version: int) -> None:
        """Record the version of a published object. An older version is ignored.

        Args:
            name: Name of the object.
            version: Its version.
        """
        if version > self.versions.get(name, version - 1):
            self.versions[name] = version
            self.changes += 1

    def learned(self, steps: int = 1) -> None:
        """Record updates of the learner.

        Args:
            steps: Number of updates; default: 1.
        """
        self.learner_steps += steps
        self.changes += 1

    def tick(self, now: float) -> None:
        """Advance the clock.

        Args:
            now: The time now, in seconds; a time before `self.now` is ignored.
        """
        if now > self.now:
            self.now = now
            self.changes += 1

    # ---- queries ----

    @property
    def actors(self) -> Collection[Actor]:
        """The actors that have written, in order of their first write."""
        return self._tracks.keys()

    def touched_since(self, change: int) -> Iterator[Actor]:
        """Yield the actors whose steps changed recently.

        Args:
            change: A value of `changes`.

        Yields:
            The actors whose steps changed after `change`, the latest first.
        """
        for actor in reversed(self._touched):
            if self._touched[actor] <= change:
                return
            yield actor

    def written(self, actor: Actor, keys: Sequence[str] | None = None) -> int:
        """Return the number of steps that an actor has written.

        Args:
            actor: The actor.
            keys: Count only steps for which all of these keys were written; default: all keys.

        Returns:
            The number of steps; 0 for an unknown actor.

        Raises:
            ConfigError: A key is unknown.
        """
        return min(track.end for track in self._select(actor, keys)) if actor in self._tracks else 0

    def reached(self, actor: Actor, steps: int, keys: Sequence[str] | None = None) -> int | None:
        """Return when an actor had written a number of steps.

        Args:
            actor: The actor.
            steps: Number of steps, counted from 0.
            keys: Count only steps for which all of these keys were written; default: all keys.

        Returns:
            The value of `changes` after the write that reached this number; None if it was not reached yet.

        Raises:
            ConfigError: A key is unknown.
        """
        tracks = self._select(actor, keys) if actor in self._tracks else []
        if not tracks or any(track.end < steps for track in tracks):
            return None
        return max(track.arrival_of(steps) for track in tracks)

    def span(self, actor: Actor, start: int, stop: int, keys: Sequence[str] | None = None) -> Span:
        """Return the oldest and the newest version of an actor's steps.

        Args:
            actor: The actor.
            start: The first step.
            stop: The step after the last step; all earlier steps must be written.
            keys: Use the versions of these keys; default: all keys.

        Returns:
            The oldest and the newest version.
        """
        return self._select(actor, keys)[0].span(start, stop)

    def _select(self, actor: Actor, keys: Sequence[str] | None) -> list[_Track]:
        known, tracks = self._known(keys), self._tracks[actor]
        return [tracks[""]] if "" in tracks else [tracks[name] for name in known]

    def _known(self, keys: Sequence[str] | None) -> Sequence[str]:
        """Return these keys, or all keys for None. Raise `ConfigError` for an unknown key."""
        if keys is None or not self.keys:
            return self.keys
        for key in keys:
            if key not in self.keys:
                raise ConfigError(unknown_name("key", key, self.keys))
        return keys
