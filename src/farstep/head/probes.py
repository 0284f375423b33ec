"""The head's side of probes: after a publish, one evaluation of the new policy for all workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from farstep.agents.divergence import Comparison
from farstep.core import Array
from farstep.head.worker_records import Seat
from farstep.rollout.probe_rows import Pick, Picks, joined
from farstep.rollout.rows import Rows
from farstep.wire.messages import Chunk
from farstep.worker.probing import picked

_AHEAD = 64
"""Probes that may wait for a worker: it looks at the latest few, and they take room on the way to it."""


@dataclass(frozen=True)
class Question:
    """What one worker's probe is about."""

    worker: int
    incarnation: int
    picks: Sequence[Pick]

    @property
    def orders(self) -> list[int]:
        return [pick.order for pick in self.picks]


class Prober:
    """Remembers rows of every worker's latest chunks, and asks the learner's policy about them."""

    def __init__(self, comparison: Comparison, seats: Sequence[Seat], rows: int) -> None:
        self._comparison, self._rows = comparison, rows
        self._seats = seats
        self._picks = [Picks(rows) for _ in seats]
        self._incarnations = [-1] * len(seats)
        self._unanswered = [0] * len(seats)
        """Probes sent to each worker since its last chunk."""

    @property
    def method(self) -> str:
        """The agent's method that describes the policy."""
        return self._comparison.method

    def remember(self, seat: Seat, chunk: Chunk, rows: Rows, steps: int) -> None:
        """A chunk was accepted: keep the rows that a probe may ask about."""
        picks = self._picks[seat.worker]
        if self._incarnations[seat.worker] != seat.incarnation:
            picks.clear()  # a replaced worker remembers nothing of what its predecessor sent
            self._incarnations[seat.worker] = seat.incarnation
        picks.add(picked(self._comparison, chunk.order, chunk.version, rows, steps, self._rows))
        self._unanswered[seat.worker] = 0

    def questions(self) -> list[Question]:
        """What to ask now, for each worker that is there; one that is long busy with a chunk has probes enough."""
        found = []
        for seat in self._seats:
            self._unanswered[seat.worker] += 1
            if not seat.ready or self._unanswered[seat.worker] > _AHEAD:
                continue
            same = self._incarnations[seat.worker] == seat.incarnation
            picks = self._picks[seat.worker].all() if same else ()
            found.append(Question(seat.worker, seat.incarnation, picks))
        return found

    def answers(self, questions: Sequence[Question]) -> list[dict[str, Array]]:
        """What the policy says to each, in one evaluation; nothing where there is nothing to ask about."""
        picks = [pick for question in questions for pick in question.picks]
        if not picks:
            return [{} for _ in questions]
        said = self._comparison.describe(joined(picks))
        ends = np.cumsum([sum(pick.rows for pick in question.picks) for question in questions])
        parts = {name: np.split(array, ends[:-1]) for name, array in said.items()}
        return [
            {name: part[i] for name, part in parts.items()} if question.picks else {}
            for i, question in enumerate(questions)
        ]
