"""What a worker is told to run: travels pickled with `Welcome`, head to worker only."""

from __future__ import annotations

from dataclasses import dataclass

import cloudpickle

from farstep.core import SyncRule
from farstep.errors import ConfigError
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

    def pickled(self) -> bytes:
        try:
            return bytes(cloudpickle.dumps(self))
        except Exception as error:
            raise ConfigError(
                "the environment's factory, arguments or wrappers cannot be sent to workers: "
                f"{type(error).__name__}: {error}. Give a dotted path ('package.module:function'), or build what "
                "cannot travel inside the factory."
            ) from error
