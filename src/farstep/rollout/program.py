"""What a worker is told to run: travels pickled with `Welcome`, head to worker only."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import cloudpickle

from farstep.config.env import ALL_WEIGHTS, Stagger, WeightsConfig
from farstep.config.transfer import ALL_AT_ONCE, TransferTrigger
from farstep.core import SyncRule
from farstep.errors import ConfigError, described
from farstep.rollout.sources import Source
from farstep.sync.rules import name_of


@dataclass(frozen=True)
class Program:
    """The environments of a run and how its workers behave."""

    source: Source
    sync: SyncRule
    inference: str = "auto"
    weights: WeightsConfig = ALL_WEIGHTS
    transfer: TransferTrigger = ALL_AT_ONCE
    compression: str = "none"
    codecs: tuple[str, ...] = ()
    """What the head can decompress."""
    autoreset_mode: str = ""
    """Set for `make_vec`, whose workers follow Gymnasium's semantics and do not act."""
    seed: int = 0
    stagger: Stagger | None = None
    num_slots: int = 0
    """Environments of all workers together; known where they are staggered."""

    def pickled(self) -> bytes:
        if (script := sys.modules.get("__mp_main__")) is not None:
            # In a process that multiprocessing started, the script's classes travel as those of `__main__` do.
            cloudpickle.register_pickle_by_value(script)
        try:
            return bytes(cloudpickle.dumps(self))
        except Exception as error:
            self._check_parts()
            raise ConfigError(
                "the environment's factory, arguments or wrappers cannot be sent to workers: "
                f"{described(error)}. Give a dotted path ('package.module:function'), or build what "
                "cannot travel inside the factory."
            ) from error

    def _check_parts(self) -> None:
        """Refuse, by name, what is not the environment's and cannot be sent."""
        for what, part in ((f"sync rule {name_of(self.sync)}", self.sync), ("predicate weights.only", self.weights)):
            try:
                cloudpickle.dumps(part)
            except Exception as error:
                raise ConfigError(
                    f"the {what} cannot be sent to workers: {described(error)}. Keep locks, open files, "
                    "environments and the like out of it."
                ) from error
