"""What a worker runs. The head sends the pickled program with the message `Welcome`; workers never send pickles."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import cloudpickle

from farstep.config.env import ALL_WEIGHTS, Stagger, WeightsConfig
from farstep.config.inference import ServedInference
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
    """The codecs that the head can decompress."""
    autoreset_mode: str = ""
    """Gymnasium's autoreset mode, for `make_vec`; empty if workers choose the actions."""
    seed: int = 0
    stagger: Stagger | None = None
    num_slots: int = 0
    """Maximum number of environments of the run; used only with `stagger`."""
    serving: ServedInference | None = None
    """How acting servers act; None: each worker acts with its own copy of the agent."""
    is_serving_optional: bool = False
    """Whether workers may act themselves although there are acting servers (`inference="auto"`)."""

    def pickled(self) -> bytes:
        """The program as bytes; raises `ConfigError` if a part of it cannot be pickled."""
        if (script := sys.modules.get("__mp_main__")) is not None:
            # In a process that multiprocessing started, the user's script is the module `__mp_main__`. Pickle its
            # classes by value, as cloudpickle does for `__main__`.
            cloudpickle.register_pickle_by_value(script)
        try:
            return bytes(cloudpickle.dumps(self))
        except Exception as error:
            self._check_parts()
            raise ConfigError(
                "the environment's factory, arguments or wrappers cannot be sent to workers: "
                f"{described(error)}. Pass a dotted path ('package.module:function'), or create objects that cannot "
                "be pickled inside the factory."
            ) from error

    def _check_parts(self) -> None:
        """Raise a more specific `ConfigError` if the sync rule or `weights.only` cannot be pickled."""
        for what, part in ((f"sync rule {name_of(self.sync)}", self.sync), ("predicate weights.only", self.weights)):
            try:
                cloudpickle.dumps(part)
            except Exception as error:
                raise ConfigError(
                    f"the {what} cannot be sent to workers: {described(error)}. It must not contain locks, open "
                    "files, environments or other objects that cannot be pickled."
                ) from error
