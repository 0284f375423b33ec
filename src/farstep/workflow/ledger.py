"""What has happened in a workflow: triggers look at it, the workflow writes it down.

Steps are counted per actor and key, in the actor's own steps since it began. One thread uses a ledger; its only clock
is what `tick` is told.
"""

from __future__ import annotations

import copy
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence

from farstep.errors import ConfigError, unknown_name

Actor = Hashable
"""What tells actors apart, e.g. a worker's number; a message to another process needs one of plain data."""
Span = tuple[int, int]
"""The oldest and the newest version of some steps."""

_HISTORY = 2048  # arrivals remembered one by one per actor and key; much older ones are put together


class _Track:
    """How far one actor has written one key, arrival by arrival."""

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
            self._arrivals[old] = self._arrivals[:1]
            self._ends[old] = self._ends[_HISTORY - 1 : _HISTORY]

    def cut(self, end: int) -> None:
        """Forget arrivals beyond `end`."""
        kept = slice(bisect_right(self._ends, end), None)
        for each in (self._ends, self._arrivals, self._oldest, self._newest):
            del each[kept]

    def arrival_of(self, steps: int) -> int:
        """When the first `steps` steps were there."""
        return self._arrivals[bisect_left(self._ends, steps)]

    def span(self, start: int, stop: int) -> Span:
        window = slice(bisect_right(self._ends, start), bisect_left(self._ends, stop) + 1)
        return min(self._oldest[window]), max(self._newest[window])


class Ledger:
    """Steps written, versions published, updates made, time passed.

    `keys` names all arrays that travel. Without names every write is of all keys, and triggers may name any.
    """

    def __init__(self, keys: Iterable[str] = (), now: float = 0.0) -> None:
        self.keys = tuple(dict.fromkeys(keys))
        self.changes = 0
        """Increases with every change."""
        self.started = self.now = now
        """Seconds on the caller's clock, at the beginning and at present."""
        self.env_steps = 0
        """Steps of single environments that have arrived whole."""
        self.learner_steps = 0
        self.versions: dict[str, int] = {}
        """The newest version of every published object."""
        self._tracks: dict[Actor, dict[str, _Track]] = {}  # by key; under "" alone while all keys are alike
        self._touched: dict[Actor, int] = {}
        """Per actor, its last change; in order of change."""
        self.present: frozenset[Actor] | None = None
        """The actors that `DataKeyTrigger(n="all")` waits for; None: `members` was not called."""
        self.quorum = 1
        """Actors that must be present for `DataKeyTrigger(n="all")` to fire."""

    # What happens

    def wrote(
        self, actor: Actor, steps: int, version: int | Span, keys: Sequence[str] | None = None, envs: int = 1
    ) -> None:
        """`actor` wrote its next `steps` steps, each of `envs` environments, of these keys (None: of all)."""
        if steps < 1 or envs < 1:
            raise ConfigError(f"{actor!r} wrote {steps} steps of {envs} environments; expected at least 1 of each.")
        if keys is not None and not self.keys:
            raise ConfigError(f"some keys were written, {list(keys)}; name all there are first: Ledger(keys=[...]).")
        self._known(keys)
        tracks = self._tracks.setdefault(actor, {"": _Track()})
        if keys is not None and "" in tracks:
            tracks = self._tracks[actor] = {name: copy.deepcopy(tracks[""]) for name in self.keys}
        before = self.written(actor)
        self._touch(actor)
        for track in self._select(actor, keys):
            track.add(steps, self.changes, version if isinstance(version, tuple) else (version, version))
        self.env_steps += (self.written(actor) - before) * envs

    def took_back(self, actor: Actor) -> None:
        """What `actor` wrote on some keys and not on all was lost; it goes on where all are."""
        end = self.written(actor)
        for track in self._tracks.get(actor, {}).values():
            track.cut(end)
        self._touch(actor)

    def _touch(self, actor: Actor) -> None:
        self.changes += 1
        self._touched.pop(actor, None)
        self._touched[actor] = self.changes

    def members(self, present: Iterable[Actor], quorum: int = 1) -> None:
        """Note which actors are present, and that triggers need at least `quorum` of them to fire."""
        found = frozenset(present)
        if (found, quorum) != (self.present, self.quorum):
            self.present, self.quorum = found, quorum
            self.changes += 1

    def published(self, name: str, version: int) -> None:
        """A named object has a new version; one that is not newer changes nothing."""
        if version > self.versions.get(name, version - 1):
            self.versions[name] = version
            self.changes += 1

    def learned(self, steps: int = 1) -> None:
        """The learner made `steps` updates."""
        self.learner_steps += steps
        self.changes += 1

    def tick(self, now: float) -> None:
        """It is `now`; time does not go back."""
        if now > self.now:
            self.now = now
            self.changes += 1

    # What triggers ask

    @property
    def actors(self) -> Collection[Actor]:
        """Those that have written, in the order of their first write."""
        return self._tracks.keys()

    def touched_since(self, change: int) -> Iterator[Actor]:
        """Actors whose steps changed after `change`, the latest first."""
        for actor in reversed(self._touched):
            if self._touched[actor] <= change:
                return
            yield actor

    def written(self, actor: Actor, keys: Sequence[str] | None = None) -> int:
        """How many steps are there on all of these keys (None: on all there are)."""
        return min(track.end for track in self._select(actor, keys)) if actor in self._tracks else 0

    def reached(self, actor: Actor, steps: int, keys: Sequence[str] | None = None) -> int | None:
        """The change by which `actor` had `steps` (at least 1) on all of these keys; None if it has not."""
        tracks = self._select(actor, keys) if actor in self._tracks else []
        if not tracks or any(track.end < steps for track in tracks):
            return None
        return max(track.arrival_of(steps) for track in tracks)

    def span(self, actor: Actor, start: int, stop: int, keys: Sequence[str] | None = None) -> Span:
        """The oldest and the newest version of steps that are there."""
        return self._select(actor, keys)[0].span(start, stop)

    def _select(self, actor: Actor, keys: Sequence[str] | None) -> list[_Track]:
        known, tracks = self._known(keys), self._tracks[actor]
        return [tracks[""]] if "" in tracks else [tracks[name] for name in known]

    def _known(self, keys: Sequence[str] | None) -> Sequence[str]:
        """These keys, or all; one that is unknown is refused."""
        if keys is None or not self.keys:
            return self.keys
        for key in keys:
            if key not in self.keys:
                raise ConfigError(unknown_name("key", key, self.keys))
        return keys
