"""Changes the number of workers of a training after each update, as a scaling rule decides."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Annotated

import msgspec

from farstep.checkpoint.checks import Count, Finite, converted
from farstep.cluster_env import ClusterEnv
from farstep.elastic.noise_scale import GradientNoise
from farstep.elastic.scaling import NoiseScale, Rule, Scaling, no_effect, rule_of, uses_noise_scale
from farstep.errors import ConfigError


class SavedScaling(msgspec.Struct, forbid_unknown_fields=True):
    """The state of `WorkerScaling`."""

    workers: Annotated[int, msgspec.Meta(ge=1)]
    updates: Count = 0
    trace: Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)] = 0.0
    squared_norm: Finite = 0.0


class WorkerScaling:
    """Applies a scaling rule to the workers of a run.

    Args:
        rule: The rule.
        has_minibatches: Whether updates consist of minibatches, so that the noise scale can be estimated.
    """

    def __init__(self, rule: Rule, *, has_minibatches: bool) -> None:
        self._rule = rule
        self.noise = GradientNoise() if has_minibatches and uses_noise_scale(rule) else None
        """Receives the gradients of the first epoch of each update; None: they are not needed."""
        self.updates = 0
        """Updates when the rule last chose."""
        self._scaling: Scaling | None = None
        self._rows_per_worker, self._min_workers = 0.0, 1
        self._saved_workers: int | None = None
        """Workers that ran when the loaded checkpoint was written."""
        self._lacks_noise_scale = self._was_warned = False

    def start(
        self,
        env: ClusterEnv,
        update: int,
        rows: int,
        buffer_fill: float | None = None,
        sequences: int | None = None,
    ) -> None:
        """Set the number of workers before the first rollout: as the rule decides, or as in the loaded checkpoint.

        Args:
            env: The environments.
            update: Updates so far.
            rows: Rows of an update in which all workers take part; of replay learners, rows of one chunk of each.
            buffer_fill: As in `Signals`.
            sequences: Sequences of such an update if the agent is recurrent. `NoiseScale` then runs enough workers for
                two sequences, because the noise scale cannot be estimated from one.

        Raises:
            ConfigError: The rule returned something other than an integer, or needs a signal that does not exist.
        """
        if reason := no_effect(self._rule, env.num_workers):
            env.emit_event("warned", reason)
        scaling = self._scaling = Scaling(self._rule, env.num_workers)
        self._rows_per_worker, self._min_workers = rows / env.num_workers, env.config.min_workers
        if sequences is not None and isinstance(self._rule, NoiseScale):
            self._min_workers = max(self._min_workers, min(math.ceil(2 * env.num_workers / sequences), env.num_workers))
        if self._saved_workers is None:
            self._choose(update, buffer_fill)
        else:
            saved, self._saved_workers = self._saved_workers, None
            scaling.workers = max(self._min_workers, min(saved, env.num_workers))
        env.scale(workers=scaling.workers)

    def apply(self, env: ClusterEnv, update: int, buffer_fill: float | None = None) -> None:
        """Change the number of workers after an update.

        Args:
            env: The environments.
            update: Updates so far.
            buffer_fill: As in `Signals`.

        Raises:
            ConfigError: The rule returned something other than an integer, or needs a signal that does not exist.
        """
        assert self._scaling is not None
        if self._lacks_noise_scale and not self._was_warned:
            self._was_warned = True
            env.emit_event(
                "warned",
                f"the gradient noise scale is unknown after update {update}, so the scaling rule cannot use it: an "
                "update needs at least two rows, or two environments if the agent is recurrent",
            )
        before = self._scaling.workers
        self._choose(update, buffer_fill)
        if self._scaling.workers != before:
            env.scale(workers=self._scaling.workers)

    def _choose(self, update: int, buffer_fill: float | None) -> None:
        assert self._scaling is not None
        self.updates = update
        noise_scale = None if self.noise is None else self.noise.value
        self._scaling.choose(update, self._rows_per_worker, buffer_fill, noise_scale, self._min_workers)

    @property
    def metrics(self) -> dict[str, float]:
        """The number of workers that the rule chose, as a metric; empty before the first choice."""
        return {} if self._scaling is None else {"workers/active": self._scaling.workers}

    def end_update(self) -> dict[str, float]:
        """Update the noise scale with the gradients of an update; return it as a metric, if it is finite."""
        if self.noise is None:
            return {}
        value = self.noise.end_update()
        self._lacks_noise_scale = value is None
        return {} if value is None or math.isinf(value) else {"actor/noise_scale": value}

    def state(self) -> dict[str, object] | None:
        """Return the state for a checkpoint, except the `Damping` of `Fill`; None before the rule has chosen a number
        of workers."""
        workers = self._saved_workers if self._scaling is None else self._scaling.workers
        noise = {} if self.noise is None else {"trace": self.noise.trace, "squared_norm": self.noise.squared_norm}
        return None if workers is None else {"workers": workers, "updates": self.updates, **noise}

    def load(self, saved: SavedScaling) -> None:
        """Restore a checked state. `start` applies it."""
        self._saved_workers, self.updates = saved.workers, saved.updates
        if self.noise is not None:
            self.noise.trace, self.noise.squared_norm = saved.trace, saved.squared_norm


def check_scaling(state: Mapping[str, object] | None) -> SavedScaling | None:
    """Check a saved state; None if the run had no rule. Raise `Refused` if it is malformed."""
    return None if state is None else converted("scaling", state, SavedScaling)


def chosen_rule(text: str | None, rule: Rule | None, unusable: Mapping[type, str]) -> Rule | None:
    """Return a user's rule; without one, the rule that the option `scaling` describes; None if there is neither.

    Args:
        text: The option `scaling`.
        rule: The user's rule.
        unusable: For each kind of rule that the learner cannot follow, the reason.

    Raises:
        ConfigError: The text describes no rule, or the learner cannot follow the rule.
    """
    found = rule if rule is not None or text is None else rule_of(text)
    for kind, reason in unusable.items():
        if isinstance(found, kind):
            raise ConfigError(f"scaling is {(text if rule is None else rule)!r}, but {reason}")
    return found


def check_rule(text: str | None, unusable: Mapping[type, str]) -> None:
    """Raise `ConfigError` if the option `scaling` describes no rule, or a rule that the learner cannot follow."""
    chosen_rule(text, None, unusable)
