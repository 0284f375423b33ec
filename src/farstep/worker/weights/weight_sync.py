"""Decides before each ticket whether the worker pulls weights, and does so."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

from farstep.agents.divergence import Comparison, comparing_method
from farstep.core import BytesLike, SyncRule, SyncState
from farstep.errors import ConfigError, described
from farstep.rollout.progress import COUNT, PHASE, Phase
from farstep.schema import Schema, Structure
from farstep.sync.rules import Always, divergence_of, name_of, probes_of, rows_of, threshold_of
from farstep.wire import messages as m
from farstep.worker.acting import Actor
from farstep.worker.weights.probing import Probing
from farstep.worker.weights.sources import Weights


class PullTotals(NamedTuple):
    """Number and size of the pulls since the last chunk."""

    pulls: int = 0
    nbytes: int = 0


class WeightSync:
    """Keeps the weights of a worker's agent as new as the sync rule and the tickets require."""

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self.rule: SyncRule = Always()
        self.weights: Weights | None = None
        """Where to pull from; None until the head has sent `Parameters` for the current agent."""
        self.probing: Probing | None = None
        """None if the rule measures no divergence, or if the agent's policies cannot be compared."""
        self.passed = -1
        """The newest version that the current weights count as: their own, or a later version whose probe they
        passed."""
        self.divergence: float | None = None
        """The running divergence of the current weights; None if the rule measures none."""
        self._pulled_at = time.monotonic()
        self._totals = PullTotals()
        self._was_suspended = False
        """Whether the worker was suspended since its last chunk, so that it may have missed probes."""

    def close(self) -> None:
        """Release the source of weights and discard measurements, because the agent is being replaced."""
        self.probing, self.divergence, self.passed = None, None, -1
        if self.weights is not None:
            self.weights.close()
            self.weights = None

    def start_probing(self, actor: Actor, obs: Structure, schema: Schema, state: Structure) -> Schema:
        """From now on, measure divergence, if the rule needs it and the agent's policies can be compared.

        Args:
            actor: The new agent.
            obs: The structure of observations.
            schema: Schema of the arrays that `act` returns.
            state: Structure of the recurrent state; empty if the agent has none.

        Returns:
            The schema of a policy's description; empty if nothing is measured.
        """
        window = probes_of(self.rule)
        if not window or not comparing_method(actor.policy.agent, schema):
            return {}
        comparison = Comparison(actor.policy, obs, actor.structure["action"], state or None, schema)
        description = comparison.check(actor.example)
        self.probing = Probing(comparison, window, rows_of(self.rule))
        return description

    def compare(self, probe: m.Probe, frames: Sequence[BytesLike], actor: Actor) -> None:
        """Compare the current weights with the version of a probe."""
        if self.probing is None:
            return
        self._words[PHASE] = Phase.ACT
        self._words[COUNT] += 1
        self.probing.compare(probe, frames, actor.version)
        self._words[PHASE] = Phase.IDLE

    def unparked(self) -> None:
        """Discard the running divergence, because the worker was parked."""
        self._was_suspended = True
        if self.probing is not None:
            self.probing.clear()

    def pull_if_needed(self, ticket: m.Ticket, actor: Actor | None) -> None:
        """Pull weights if the sync rule decides to, or if the current weights are too old for the ticket.

        Raises:
            ConfigError: The sync rule raised.
        """
        if actor is not None and self.weights is not None and self.needs_pull(ticket, actor):
            self._pull(actor, self.weights)

    def needs_pull(self, ticket: m.Ticket, actor: Actor) -> bool:
        """Whether to pull weights before the chunk of this ticket. Raise `ConfigError` if the sync rule raised."""
        if self.weights is None or not ticket.steps:
            return False
        # A divergence that cannot be measured counts as infinite.
        divergences = self.probing.divergences if self.probing is not None else (math.inf,) * (probes_of(self.rule) > 0)
        newest = self.weights.newest()
        if self._was_suspended and self.probing is not None and newest > max(actor.version, self.probing.compared):
            divergences = (math.inf, *divergences)  # it missed the probe of the newest version
        self._was_suspended = False
        state = SyncState(actor.version, newest, time.monotonic() - self._pulled_at, divergences)
        wanted = self._should_pull(state)
        self.passed = self._counts_as(state)
        return wanted or self.passed < ticket.min_version

    def take_totals(self) -> PullTotals:
        """Return and reset the totals of the pulls since the last chunk."""
        totals, self._totals = self._totals, PullTotals()
        return totals

    def _should_pull(self, state: SyncState) -> bool:
        self._words[PHASE] = Phase.LOAD  # an error in this phase ends the run, because the rule would raise again
        try:
            self.divergence = divergence_of(self.rule, state) if self.probing is not None else None
            return state.newest > state.held and bool(self.rule.should_pull(state))
        except Exception as error:
            raise ConfigError(
                f"the sync rule {name_of(self.rule)} raised {described(error)} for {state}, so the worker cannot "
                "decide whether to pull weights. Make should_pull(state) return a bool for every "
                "farstep.core.SyncState."
            ) from error

    def _counts_as(self, state: SyncState) -> int:
        """The newest version that the current weights count as (see `passed`) if the worker does not pull."""
        if self.probing is not None:
            return max(state.held, self.probing.compared)
        return state.newest if state.held >= 0 and threshold_of(self.rule) == math.inf else state.held

    def _pull(self, actor: Actor, weights: Weights) -> None:
        self._words[PHASE] = Phase.LOAD
        self._words[COUNT] += 1
        version, nbytes = weights.load(actor.loader)
        actor.loaded(version)
        self._pulled_at, self.passed = time.monotonic(), actor.version
        pulls, total = self._totals
        self._totals = PullTotals(pulls + 1, total + nbytes)
        if self.probing is not None:
            self._words[PHASE] = Phase.ACT
            self._words[COUNT] += 1
            self.divergence = self.probing.pulled(version)
