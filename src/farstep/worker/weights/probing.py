"""The worker's side of probes: measures the divergence between its own weights and each published version."""

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
"""The worker keeps this many times more rows than the head, because the worker is some chunks ahead."""


class Probing:
    """Compares the worker's weights with the version of each probe."""

    def __init__(self, comparison: Comparison, window: int, rows: int) -> None:
        self._comparison, self._rows = comparison, rows
        self.recent = RecentProbeRows(_MEMORY * rows)
        self._divergences: deque[float] = deque(maxlen=window)
        self._cached: tuple[tuple[int, tuple[int, ...]], dict[str, Array]] | None = None
        """Version, chunk indices and result of the last evaluation; cached, because successive probes often use the
        same rows."""
        self._latest: tuple[int, Sequence[ProbeRows], dict[str, Array]] | None = None
        """Version, rows and learner's arrays of the latest probe that could be compared."""
        self._newest_probe = -1
        self._note = self._reported_note = ""
        self.compared = -1
        """The newest version with which the worker's weights were compared."""

    @property
    def divergences(self) -> tuple[float, ...]:
        """The divergences since the last pull, newest first; infinite if a divergence could not be measured."""
        return tuple(self._divergences)

    @property
    def newest_probe(self) -> int:
        """The newest version of which a probe has arrived; -1: none."""
        return self._newest_probe

    def clear(self) -> None:
        """Discard the divergences."""
        self._divergences.clear()

    def remember(self, index: int, version: int, rows: Rows, steps: int) -> None:
        """Copy the rows of a complete chunk that a later probe may use."""
        self.recent.add(probe_rows_of(self._comparison, index, version, rows, steps, self._rows))

    def pulled(self, version: int) -> float:
        """Discard the divergences of the old weights after a pull.

        Returns:
            The remaining divergence between the pulled weights and the probe of the same version; 0 without such a
            probe. It is positive if transfer rounds weights, or if the policy depends on more than its parameters.
        """
        self._divergences.clear()
        if self._latest is None or self._latest[0] != version:
            return 0.0
        _, probed, learner = self._latest
        return max(0.0, self._comparison.compare(self._described(version, probed), learner))

    def compare(self, probe: Probe, frames: Sequence[BytesLike], held: int) -> None:
        """Measure the divergence between version `held` and the probe's version. Ignore old probes."""
        if held < 0 or probe.version <= max(self._newest_probe, held):
            return
        self._newest_probe = probe.version
        self._divergences.appendleft(math.inf)  # replaced below if the divergence can be measured
        probed = self.recent.find(probe.indices)
        if not probed:
            return
        local = self._described(held, probed)
        learner = _like(local, probe.keys, frames)
        self._latest = (probe.version, probed, learner)
        if self._comparison.estimates and any(own := [rows_of_chunk.version == held for rows_of_chunk in probed]):
            # An estimate is valid only for rows whose actions were sampled with the current weights.
            mine = np.repeat(own, [rows_of_chunk.rows for rows_of_chunk in probed])
            local, learner = ({name: array[mine] for name, array in side.items()} for side in (local, learner))
        self._divergences[0] = self._comparison.compare(local, learner)
        self._note = self._comparison.note
        if self._divergences[0] < math.inf:
            self.compared = probe.version

    def take_note(self) -> str:
        """Why the last divergence could not be measured; "" if it could, or if this was already reported."""
        note, reported, self._reported_note = self._note, self._reported_note, self._note or self._reported_note
        return note if note != reported else ""

    def _described(self, held: int, probed: Sequence[ProbeRows]) -> dict[str, Array]:
        about = (held, tuple(rows_of_chunk.index for rows_of_chunk in probed))
        if self._cached is None or self._cached[0] != about:
            self._cached = (about, self._comparison.describe(joined(probed)))
        return self._cached[1]


def _like(local: Mapping[str, Array], keys: Sequence[str], frames: Sequence[BytesLike]) -> dict[str, Array]:
    """The arrays of a probe. Raise `AgentError` if their names or sizes differ from the worker's own arrays."""
    theirs = {key: memoryview(frame).nbytes for key, frame in zip(keys, frames, strict=False)}
    ours = {key: array.nbytes for key, array in local.items()}
    if theirs != ours:
        raise AgentError(
            f"for the same observations, the agent returns {theirs} (bytes per array) on the learner and {ours} on the "
            "worker. Let distribution(obs) or log_prob(obs, action) return the same arrays on both."
        )
    return {key: np.frombuffer(f, np.float32).reshape(local[key].shape) for key, f in zip(keys, frames, strict=True)}
