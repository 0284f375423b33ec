"""A policy on the CPU that gets batches of different sizes, and replays one recording of `act` for each size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from farstep.agents.policy import FAST, Policy, same_randomness
from farstep.core import Array, Nested

_MAX_WORK = 1 << 22
"""Largest number of parameters times rows of a recorded batch. In larger batches the overhead of torch matters little,
and torch can use several threads."""
_MIN_USES = 8
"""A batch size is recorded when it has occurred this many times. A recording takes as long as about 20 calls."""
_MAX_SIZES = 64
"""Largest number of recorded batch sizes, each of which has its own buffers."""


class SizedPolicy(Policy):
    """Records `act` for each frequent batch size, if batches are small (see `Policy.accelerate`).

    Args:
        agent: The agent.
        slots: As in `Policy`.
    """

    def __init__(self, agent: Any, slots: Array | None = None) -> None:
        super().__init__(agent, "eager", False, slots)
        self._recorded: dict[int, Policy] = {}
        """Policies of the same agent, each with a recording for one batch size."""
        self._unchecked: set[int] = set()
        """Recorded sizes that have not acted since the last load of weights."""
        self._uses: Counter[int] = Counter()
        self._max_rows = 0

    def __call__(self, obs: Nested, state: Nested, episode_start: Any, rng: Sequence[Any] | None) -> dict[str, Any]:
        rows = len(episode_start)
        if rows <= self._max_rows:
            if rows not in self._recorded:
                self._note_batch(rows, obs, state, episode_start)
            elif rows in self._unchecked:
                self._unchecked.remove(rows)
                with same_randomness():
                    self._recorded[rows].check_after_load()
        if (recorded := self._recorded.get(rows)) is not None:
            return recorded(obs, state, episode_start, rng)
        return super().__call__(obs, state, episode_start, rng)

    def accelerate(self, obs: Nested, state: Nested, episode_start: Any) -> None:
        """Record `act` for batches of this size. If this is not possible, other sizes are not recorded either."""
        if not self.is_torch:
            super().accelerate(obs, state, episode_start)
            return
        if self._wants_slots:
            self.note = "eager: act takes slots, which change from batch to batch"
            return
        num_parameters = sum(tensor.numel() for tensor in self._torch.nn.Module.parameters(self.agent))
        self._max_rows = _MAX_WORK // max(1, num_parameters)
        if len(episode_start) > self._max_rows:
            self.note = "eager"
            return
        self._record_size(len(episode_start), obs, state, episode_start)
        self.note = self._recorded[len(episode_start)].note
        if self.note != FAST:
            self._max_rows = 0

    def check_after_load(self) -> None:
        """Have each recording compared with `act` before its next use."""
        self._unchecked = set(self._recorded)

    def _note_batch(self, rows: int, obs: Nested, state: Nested, episode_start: Any) -> None:
        """Count a batch of a size that is not recorded, and record the size if it is frequent."""
        self._uses[rows] += 1
        if self._uses[rows] == _MIN_USES and len(self._recorded) < _MAX_SIZES:
            with same_randomness():
                self._record_size(rows, obs, state, episode_start)

    def _record_size(self, rows: int, obs: Nested, state: Nested, episode_start: Any) -> None:
        policy = Policy(self.agent, "auto")
        policy.accelerate(obs, state, episode_start)
        self._recorded[rows] = policy
