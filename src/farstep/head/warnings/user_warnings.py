"""Warnings about the agent and the environments, each emitted once."""

from __future__ import annotations

from farstep.config.env import WeightsConfig
from farstep.core import SyncRule
from farstep.event import Emit
from farstep.sync.rules import threshold_of

STARVED_S = 5.0
"""Seconds without a batch after which a stream that drops stale chunks emits a warning."""

STALE_REMEDY = (
    "Raise max_staleness (async-ppo: --staleness-threshold, impala: --max-staleness), publish less often, or roll "
    "shorter chunks."
)


class UserWarnings:
    """Remembers which warnings were emitted about the environments, the current agent and the current stream."""

    def __init__(self, rule: SyncRule, weights: WeightsConfig, env_label: str, emit: Emit) -> None:
        self._rule, self._weights, self._env_label, self._emit = rule, weights, env_label, emit
        self.silent = False
        """Whether `note_inference` does not warn."""
        self.inference = self._unmeasured = self._incomparable = ""
        self._warned_remaining = self._warned_out_of_bounds = self._warned_reward = False
        self._starved: object = None
        """The last call for which starvation was reported."""

    def forget(self) -> None:
        """Re-enable warnings about the agent, because another agent is adopted."""
        self._unmeasured, self._warned_remaining = "", False

    def note_inference(self, note: str) -> None:
        """Store how workers call the agent, and warn if they do not use the fast path."""
        before, self.inference = self.inference, note
        if self.silent or note == before:
            return
        path, eager, reason = note.partition("eager: ")
        if eager:
            caller = "acting servers" if path else "workers"
            skipped = "CUDA graphs" if "cuda" in path else "the fast path"
            self._emit("warned", f"{caller} call the agent without {skipped}, because {reason}")
        if note.startswith("served") and not note.endswith("own act"):
            self._emit(
                "warned",
                "acting servers act on rows of several workers at once, so a network's actions are not bit for bit "
                "those of inference='local', and may differ between runs with the same seed",
            )

    def note_incomparable(self, why: str) -> None:
        """Warn that no divergence can be measured with this agent."""
        if why != self._incomparable:
            self._emit(
                "warned",
                f"workers pull every version, as without kl_threshold, because policies cannot be compared: {why}",
            )
        self._incomparable = why

    def note_unmeasured(self, note: str) -> None:
        """Warn that a divergence is not a number, with the reason that a worker gave."""
        if note != self._unmeasured:
            self._emit(
                "warned",
                f"{note}; this counts as above the threshold, so workers pull every such version, as without "
                "kl_threshold",
            )
        self._unmeasured = note

    def note_out_of_bounds(self, note: str) -> None:
        """Warn that environments return observations outside their space, with an example that a worker gave."""
        if not self._warned_out_of_bounds:
            self._emit(
                "warned",
                f"observations of {self._env_label} are outside its observation space: {note}. The run uses them as "
                "they are. Correct the bounds of observation_space, or clip or rescale observations in a wrapper such "
                "as gymnasium.wrappers.TransformObservation",
            )
        self._warned_out_of_bounds = True

    def note_bad_reward(self, note: str) -> None:
        """Warn that a reward is NaN or infinite, with the value and slot that a worker gave."""
        if not self._warned_reward:
            self._emit(
                "warned",
                f"{self._env_label} returned the reward {note}. farstep passes it on, so returns and gradients "
                "computed from it are not finite either. Correct the environment, or clip its rewards with a wrapper",
            )
        self._warned_reward = True

    def note_remaining(self, divergence: float) -> None:
        """Warn if a worker's divergence from the learner is above the threshold although it has just pulled."""
        threshold = threshold_of(self._rule)
        if self._warned_remaining or self._unmeasured or threshold is None or divergence <= threshold:
            return
        self._warned_remaining = True
        causes = ["weights.half rounds"] if self._weights.half else []
        causes += ["weights.only leaves out"] if self._weights.only is not None else []
        cause = " and ".join(causes) or "get_parameters() leaves out"
        self._emit(
            "warned",
            f"the divergence is still {divergence:.3g} > {threshold:g} right after a pull, so workers pull every "
            f"version, as without kl_threshold: {cause} what the policy uses. Send these weights unchanged, or choose "
            "a threshold above this divergence",
        )

    def note_starving(self, call: object, waited_s: float, dropped: int) -> None:
        """Warn if a call has waited too long for a batch while chunks were dropped as stale.

        Args:
            call: Identifies the call; it is warned about once.
            waited_s: Seconds that it has waited.
            dropped: Chunks dropped as stale meanwhile.
        """
        if dropped and waited_s >= STARVED_S and call is not self._starved:
            self._starved = call
            self._emit(
                "warned",
                f"a stream has yielded no batch for {waited_s:.0f} s; chunks dropped as too old meanwhile: {dropped}. "
                f"Versions are published faster than chunks are rolled. {STALE_REMEDY}",
            )
