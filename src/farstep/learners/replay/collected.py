"""What arrived since the last report: steps, episodes and the age of rows."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np

from farstep.batch import Batch
from farstep.core import Array


@dataclass
class Arrivals:
    """Rows and episodes that arrived."""

    steps: int = 0
    """Environment steps."""
    returns: list[float] = field(default_factory=list)
    """Returns of the episodes that ended."""
    lengths: list[int] = field(default_factory=list)
    """Their lengths, in steps."""
    ages: list[Array] = field(default_factory=list)
    """Age of rows in versions, one array per chunk."""

    @property
    def lags(self) -> Array:
        """Age of each row in versions."""
        return np.concatenate(self.ages) if self.ages else np.zeros(0, np.int64)


class Collected:
    """Arrivals since the last `take`: one thread adds chunks, another takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrivals = Arrivals()
        self.total_steps = 0
        """Environment steps since the run began."""

    @property
    def steps(self) -> int:
        """Environment steps since the last `take`."""
        return self._arrivals.steps

    def add(self, batch: Batch, version: int) -> None:
        """Add the rows of a batch, at the time when `version` is the newest."""
        valid = batch["valid"]
        steps, ages = int(np.count_nonzero(valid)), version - batch["version"][valid].astype(np.int64)
        with self._lock:
            arrivals = self._arrivals
            arrivals.steps += steps
            arrivals.returns += batch.episodes["return"].tolist()
            arrivals.lengths += batch.episodes["length"].tolist()
            arrivals.ages.append(ages)
            self.total_steps += steps

    def take(self) -> Arrivals:
        """Return the arrivals since the last call."""
        with self._lock:
            taken, self._arrivals = self._arrivals, Arrivals()
        return taken
