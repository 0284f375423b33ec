"""Lets a scaling rule choose the number of workers of a workflow after each update."""

from __future__ import annotations

from farstep.cluster_env import ClusterEnv
from farstep.elastic.scaling import Rule, Scaling, no_effect
from farstep.workflow.objects import ModelBlock
from farstep.workflow.registry import Registry
from farstep.workflow.run_state import RunState


class Autoscaler:
    """Applies a scaling rule to the environments of a workflow.

    Args:
        rule: Chooses the number of workers.
        env: The environments.
        state: The state of the workflow.
        registry: The triggers of the workflow.
        objects: Where consumers publish the noise scale.
    """

    def __init__(self, rule: Rule, env: ClusterEnv, state: RunState, registry: Registry, objects: ModelBlock) -> None:
        self._scaling = Scaling(rule, env.num_workers)
        self._env, self._state, self._registry, self._objects = env, state, registry, objects
        self._scaled_at: int | None = None
        """Number of updates when the rule last chose; None before the first run."""
        self._problem = no_effect(rule, env.num_workers)
        """Why the rule has no effect; empty if it has one, or after the warning."""

    def update(self, chunk_steps: int) -> None:
        """Let the rule choose the number of workers, if there was an update since it last chose."""
        updates = self._state.ledger.learner_steps
        if updates == self._scaled_at:
            return
        if self._problem:
            self._env.emit_event("warned", self._problem)
            self._problem = ""
        before, is_first = self._scaling.workers, self._scaled_at is None
        self._scaled_at = updates
        window = max((leaf.size for leaf in self._registry.consuming), default=chunk_steps)
        rows = window * self._env.num_envs / self._env.num_workers
        noise_scale = self._objects.number("noise_scale")
        fewest = max((leaf.min_actors or 1 for leaf in self._registry.by_data), default=1)  # fewer never fire a trigger
        fewest = max(fewest, self._env.config.min_workers)
        workers = self._scaling.choose(updates, rows, self._buffer_fill(), noise_scale, fewest)
        if is_first or workers != before:
            self._env.scale(workers=workers)

    def _buffer_fill(self) -> float | None:
        """Return the fraction of the buffer that holds rows which a consumer has not read; for replay, the limiter's
        fill."""
        state = self._state
        if not self._registry.consuming:
            return state.buffer.limiter.fill
        return min(1.0, max(state.retention.backlog(), default=0) * self._env.num_envs / state.buffer.capacity)
