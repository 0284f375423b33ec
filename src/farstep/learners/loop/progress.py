"""The progress of a training run: its counters and the latest episodes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from farstep.checkpoint.checks import Count, Finite, converted
from farstep.checkpoint.files import Refused
from farstep.config.field_docs import show_fields
from farstep.observe.run_status import LAST_EPISODES


@show_fields
@dataclass
class Progress:
    """Counters of a run. Checkpoints save all of them."""

    steps: int = 0
    """Environment steps."""
    updates: int = 0
    """Number of updates of the learner."""
    seconds: float = 0.0
    """Training time in seconds, including earlier parts of a resumed run."""
    episodes: int = 0
    """Episodes that have ended."""
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=LAST_EPISODES))
    """Returns of the last 100 episodes."""
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=LAST_EPISODES))
    """Lengths of the last 100 episodes, in steps."""
    next_evaluation: int = 0
    """Number of environment steps at which the next evaluation is due."""
    restarts: int = 0
    """Restarts of workers after failures, including earlier parts of a resumed run."""

    def state(self) -> dict[str, object]:
        """Return the counters for a checkpoint.

        Returns:
            All fields by name; returns and lengths as lists.
        """
        return {**vars(self), "returns": list(self.returns), "lengths": list(self.lengths)}

    @classmethod
    def of(cls, state: object) -> Progress:
        """Restore the counters from a checkpoint.

        Args:
            state: The result of `state`.

        Returns:
            The progress.

        Raises:
            Refused: The state is malformed.
        """
        saved = converted("progress", state, _SavedProgress)
        if len(saved.returns) != len(saved.lengths):
            raise Refused(
                f"progress has {len(saved.returns)} returns and {len(saved.lengths)} lengths of episodes; expected the "
                "same number of each"
            )
        last = {"returns": deque(saved.returns, LAST_EPISODES), "lengths": deque(saved.lengths, LAST_EPISODES)}
        return cls(**{**msgspec.structs.asdict(saved), **last})


class _SavedProgress(msgspec.Struct, forbid_unknown_fields=True):
    steps: Count
    updates: Count
    seconds: Annotated[float, msgspec.Meta(ge=0, le=2**40)]
    episodes: Count
    returns: Annotated[list[Finite], msgspec.Meta(max_length=LAST_EPISODES)]
    lengths: Annotated[list[Count], msgspec.Meta(max_length=LAST_EPISODES)]
    next_evaluation: Count
    restarts: Count = 0
