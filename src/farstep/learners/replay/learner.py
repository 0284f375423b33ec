"""What all replay learners share: the agent, the loop around the buffer, and checkpoints of the learner's parts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from farstep.buffer.samplers import Sampler
from farstep.checkpoint.checks import check_keys
from farstep.cluster_env import ClusterEnv
from farstep.elastic.scaling import Rule
from farstep.learners.loop.iteration import Loop
from farstep.learners.loop.worker_scaling import WorkerScaling, check_scaling, chosen_rule
from farstep.learners.networks.agent import NetworkAgent
from farstep.learners.replay.batches import ReplayBatch
from farstep.learners.replay.config import UNUSABLE_RULES, LoopConfig
from farstep.learners.replay.loop import ReplayLoop
from farstep.learners.replay.saved_parts import SavedPart

A = TypeVar("A", bound=NetworkAgent)
_SCALING = "scaling"
"""Name of the scaling rule's state in checkpoints; missing if the run had no rule."""


class ReplayLearner(Generic[A]):
    """Runs the loop of a replay learner, and saves and restores its parts. Contains no algorithm.

    A subclass defines `sampler`, `names`, `parts` and `step`, and `explore` if its policy needs it. The loop, without
    logging, checkpoints and threads:

        buffer.insert(env.collect(learner.agent, steps))
        while buffer.limiter.can_sample(batch_size):
            metrics, priorities = learner.step(buffer.sample(batch_size))
        env.publish(learner.agent)

    Args:
        agent: The agent to train; it is moved to `device`.
        replay: Options of the replay buffer and the loop.
        seed: Seed of the sampler.
        device: Device of the learner, as torch names it.
        scaling: Rule that chooses the number of workers whenever weights are published; None: `replay.scaling`.
    """

    synchronous = False

    def __init__(self, agent: A, replay: LoopConfig, seed: int, device: str, scaling: Rule | None = None) -> None:
        self.device = torch.device(device)
        self.agent: A = agent.to(self.device)
        self._replay, self._seed = replay, seed
        rule = chosen_rule(replay.scaling, scaling, UNUSABLE_RULES)
        self._scaling = None if rule is None else WorkerScaling(rule, has_minibatches=False)
        self._resumed = False

    def run(self, env: ClusterEnv, loop: Loop) -> None:
        """Learn until `loop.report` returns False.

        Args:
            env: The environments to train in.
            loop: The training loop.
        """
        ReplayLoop(self, self._replay, self._seed, self._resumed, self._scaling).run(env, loop)

    # ---- for the loop (`ReplayAlgorithm`) ----

    @property
    def sampler(self) -> Sampler:
        """How items are sampled."""
        raise NotImplementedError

    @property
    def names(self) -> Collection[str]:
        """The arrays of a batch that `step` needs."""
        raise NotImplementedError

    def step(self, batch: ReplayBatch) -> tuple[Mapping[str, Tensor], Tensor | None]:
        """Update the agent on a batch.

        Args:
            batch: The items to learn from.

        Returns:
            Metrics by name, and the new priorities of the items, `[batch]`; None: items have no priorities.
        """
        raise NotImplementedError

    def explore(self, steps: int, num_envs: int) -> None:
        """Set how the agent explores, before it is published. By default nothing: the policy is stochastic.

        Args:
            steps: Environment steps so far.
            num_envs: Number of environments.
        """

    # ---- checkpoints ----

    @property
    def parts(self) -> Mapping[str, SavedPart]:
        """The parts of the learner's state by their names in checkpoints, without the agent's parameters."""
        raise NotImplementedError

    def state(self) -> dict[str, object]:
        """Return the learner's state for a checkpoint. The agent's parameters are saved separately.

        Returns:
            The states of its parts, e.g. networks and optimizers, by name.
        """
        scaling = None if self._scaling is None else self._scaling.state()
        parts = {name: part.state() for name, part in self.parts.items()}
        return parts if scaling is None else {**parts, _SCALING: scaling}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state.

        Args:
            state: What `state` returned.

        Raises:
            Refused: The state does not fit this learner; nothing has changed.
        """
        parts = self.parts
        check_keys("learner", {name: part for name, part in state.items() if name != _SCALING}, parts)
        checked = {name: part.check(f"learner.{name}", state[name]) for name, part in parts.items()}
        scaling = check_scaling(state.get(_SCALING))
        for name, part in parts.items():
            part.load(checked[name])
        if self._scaling is not None and scaling is not None:
            self._scaling.load(scaling)
        self._resumed = True
