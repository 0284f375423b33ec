"""What a worker is told to run: travels pickled inside `Welcome`, head to worker only."""

from __future__ import annotations

from dataclasses import dataclass

from farstep.core import SyncRule
from farstep.worker.sources import Source


@dataclass(frozen=True)
class Program:
    """The environments of a run and how its workers behave."""

    source: Source
    sync: SyncRule
    inference: str = "auto"
    autoreset_mode: str = ""
    """Set for `make_vec`, whose workers follow Gymnasium's semantics and do not act."""
    seed: int = 0
