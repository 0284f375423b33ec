"""What a user should hear of how workers do, each thing once: warnings to the `farstep` logger."""

from __future__ import annotations

import logging

from farstep.config.env import WeightsConfig
from farstep.core import SyncRule
from farstep.sync.rules import threshold_of

log = logging.getLogger("farstep")
_STARVED_S = 5.0
"""A stream that drops what arrives and hands out nothing for so long says so."""


class UserWarnings:
    """What was said of the present agent, and of the present stream."""

    def __init__(self, rule: SyncRule, weights: WeightsConfig) -> None:
        self._rule, self._weights = rule, weights
        self.inference = self._unmeasured = self._incomparable = ""
        self._told_left = False
        self._starved: object = None
        """The latest call that was told to be starving."""

    def forget(self) -> None:
        """Workers are to act with another agent."""
        self._unmeasured, self._told_left = "", False

    def note_inference(self, note: str) -> None:
        """How workers call the agent."""
        if note.startswith("eager:") and note != self.inference:
            log.warning("workers call the agent as it is, not on the fast path, since %s", note[7:])
        self.inference = note

    def note_incomparable(self, why: str) -> None:
        """Warn that no divergence can be measured with this agent."""
        if why != self._incomparable:
            log.warning(
                "workers pull every version, as without kl_threshold, since policies cannot be compared: %s", why
            )
        self._incomparable = why

    def note_unmeasured(self, note: str) -> None:
        """Why a divergence came to no number."""
        if note != self._unmeasured:
            log.warning("%s; that counts as too far, so workers pull every such version, as without kl_threshold", note)
        self._unmeasured = note

    def note_left(self, left: float) -> None:
        """A worker has just pulled, and this is how far it is from the learner still."""
        threshold = threshold_of(self._rule)
        if self._told_left or self._unmeasured or threshold is None or left <= threshold:
            return
        self._told_left = True
        causes = ["weights.half rounds"] if self._weights.half else []
        causes += ["weights.only leaves out"] if self._weights.only is not None else []
        log.warning(
            "the divergence is still %.3g > %g right after a pull, so workers pull every version, as without "
            "kl_threshold: %s what the policy uses. Let that travel as it is, or choose a threshold "
            "above what is left",
            left,
            threshold,
            " and ".join(causes) or "get_parameters() leaves out",
        )

    def note_starving(self, call: object, waited_s: float, dropped: int) -> None:
        """A call was handed nothing for so long, while so many chunks were dropped as too old."""
        if dropped and waited_s >= _STARVED_S and call is not self._starved:
            self._starved = call
            log.warning(
                "a stream has handed out nothing for %.0f s; chunks that it dropped as too old meanwhile: %d. Versions "
                "are published faster than chunks are rolled: raise max_staleness or publish less often",
                waited_s,
                dropped,
            )
