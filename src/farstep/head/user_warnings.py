"""Warnings to the `farstep` logger about how workers use the agent, each logged once."""

from __future__ import annotations

import logging

from farstep.config.env import WeightsConfig
from farstep.core import SyncRule
from farstep.sync.rules import threshold_of

log = logging.getLogger("farstep")
_STARVED_S = 5.0
"""Seconds without a batch after which a stream that drops stale chunks logs a warning."""


class UserWarnings:
    """Remembers what was logged about the current agent and the current stream."""

    def __init__(self, rule: SyncRule, weights: WeightsConfig) -> None:
        self._rule, self._weights = rule, weights
        self.inference = self._unmeasured = self._incomparable = ""
        self._warned_remaining = False
        self._starved: object = None
        """The last call for which starvation was logged."""

    def forget(self) -> None:
        """Re-enable warnings about the agent, because another agent is adopted."""
        self._unmeasured, self._warned_remaining = "", False

    def note_inference(self, note: str) -> None:
        """Store how workers call the agent, and warn if they do not use the fast path."""
        if note.startswith("eager:") and note != self.inference:
            log.warning("workers call the agent without the fast path, because %s", note[7:])
        self.inference = note

    def note_incomparable(self, why: str) -> None:
        """Warn that no divergence can be measured with this agent."""
        if why != self._incomparable:
            log.warning(
                "workers pull every version, as without kl_threshold, because policies cannot be compared: %s", why
            )
        self._incomparable = why

    def note_unmeasured(self, note: str) -> None:
        """Warn that a divergence is not a number, with the reason that a worker gave."""
        if note != self._unmeasured:
            log.warning(
                "%s; this counts as above the threshold, so workers pull every such version, as without kl_threshold",
                note,
            )
        self._unmeasured = note

    def note_remaining(self, divergence: float) -> None:
        """Warn if a worker's divergence from the learner is above the threshold although it has just pulled."""
        threshold = threshold_of(self._rule)
        if self._warned_remaining or self._unmeasured or threshold is None or divergence <= threshold:
            return
        self._warned_remaining = True
        causes = ["weights.half rounds"] if self._weights.half else []
        causes += ["weights.only leaves out"] if self._weights.only is not None else []
        log.warning(
            "the divergence is still %.3g > %g right after a pull, so workers pull every version, as without "
            "kl_threshold: %s what the policy uses. Send these weights unchanged, or choose a threshold above "
            "this divergence",
            divergence,
            threshold,
            " and ".join(causes) or "get_parameters() leaves out",
        )

    def note_starving(self, call: object, waited_s: float, dropped: int) -> None:
        """Warn if a call has waited too long for a batch while chunks were dropped as stale.

        Args:
            call: Identifies the call; it is warned about once.
            waited_s: Seconds that it has waited.
            dropped: Chunks dropped as stale meanwhile.
        """
        if dropped and waited_s >= _STARVED_S and call is not self._starved:
            self._starved = call
            log.warning(
                "a stream has yielded no batch for %.0f s; chunks dropped as too old meanwhile: %d. Versions are "
                "published faster than chunks are rolled: raise max_staleness or publish less often",
                waited_s,
                dropped,
            )
