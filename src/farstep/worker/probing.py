"""A worker's side of probes: its own rows, and what probes said of the weights in use."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from farstep.agents.divergence import Comparison
from farstep.core import Array, BytesLike
from farstep.errors import AgentError
from farstep.rollout.probe_rows import ProbeRows, RecentProbeRows, joined, probe_rows_of
from farstep.rollout.rows import Rows
from farstep.wire.messages import Probe

_MEMORY = 4
"""Rows that a worker remembers for each that the head does, since it is ahead of it."""


class Probing:
    """Compares the weights in use with every version it is told of."""

    def __init__(self, comparison: Comparison, window: int, rows: int) -> None:
        self._comparison, self._rows = comparison, rows
        self._recent = RecentProbeRows(_MEMORY * rows)
        self._divergences: deque[float] = deque(maxlen=window)
        self._known: tuple[tuple[int, tuple[int, ...]], dict[str, Array]] | None = None
        """What the weights in use said last, and of what: published in a row, versions are probed on the same rows."""
        self._latest: tuple[int, Sequence[ProbeRows], dict[str, Array]] | None = None
        """Version, rows and answers of the latest probe that could be compared."""
        self._heard = -1
        self._note = self._noted = ""
        self.compared = -1
        """The newest version that the weights in use could be compared with."""

    @property
    def divergences(self) -> tuple[float, ...]:
        """Since the last pull, newest first."""
        return tuple(self._divergences)

    def remember(self, index: int, version: int, rows: Rows, steps: int) -> None:
        """A chunk is complete: keep the rows that a probe may ask about."""
        self._recent.add(probe_rows_of(self._comparison, index, version, rows, steps, self._rows))

    def pulled(self, version: int) -> float:
        """New weights are in use: what was said of the old ones is void.

        Returns how far they are still from the learner's, by the probe that they were pulled for (else 0): what travels
        may be rounded, or not be all that the policy uses.
        """
        self._divergences.clear()
        if self._latest is None or self._latest[0] != version:
            return 0.0
        _, probed, learner = self._latest
        return max(0.0, self._comparison.compare(self._described(version, probed), learner))

    def hear(self, probe: Probe, frames: Sequence[BytesLike], held: int) -> None:
        """Compare with what the head's policy says; a late or repeated probe says nothing new."""
        if held < 0 or probe.version <= max(self._heard, held):
            return
        self._heard = probe.version
        self._divergences.appendleft(math.inf)  # until somebody can tell how far it is, it is too far
        probed = self._recent.find(probe.indices)
        if not probed:
            return
        local = self._described(held, probed)
        learner = _like(local, probe.keys, frames)
        self._latest = (probe.version, probed, learner)
        if self._comparison.estimates and any(own := [rows_of_chunk.version == held for rows_of_chunk in probed]):
            mine = np.repeat(
                own, [rows_of_chunk.rows for rows_of_chunk in probed]
            )  # whose actions are of the weights in use
            local, learner = ({name: array[mine] for name, array in side.items()} for side in (local, learner))
        self._divergences[0] = self._comparison.compare(local, learner)
        self._note = self._comparison.note
        if self._divergences[0] < math.inf:
            self.compared = probe.version

    def take_note(self) -> str:
        """Why a comparison came to no number, if that was not told yet; else ""."""
        note, noted, self._noted = self._note, self._noted, self._note or self._noted
        return note if note != noted else ""

    def _described(self, held: int, probed: Sequence[ProbeRows]) -> dict[str, Array]:
        about = (held, tuple(rows_of_chunk.index for rows_of_chunk in probed))
        if self._known is None or self._known[0] != about:
            self._known = (about, self._comparison.describe(joined(probed)))
        return self._known[1]


def _like(local: Mapping[str, Array], keys: Sequence[str], frames: Sequence[BytesLike]) -> dict[str, Array]:
    """A probe's arrays, which must be shaped as our own."""
    theirs = {key: memoryview(frame).nbytes for key, frame in zip(keys, frames, strict=False)}
    ours = {key: array.nbytes for key, array in local.items()}
    if theirs != ours:
        raise AgentError(
            f"the learner describes its policy by {theirs} (bytes per array) and the worker by {ours}, for the same "
            "observations. It must be described by the same arrays on both."
        )
    return {key: np.frombuffer(f, np.float32).reshape(local[key].shape) for key, f in zip(keys, frames, strict=True)}
