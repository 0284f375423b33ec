"""Evaluation of one version of the agent in separate environments, while training continues."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from farstep.cluster_env import ClusterEnv
from farstep.config.env import EnvConfig
from farstep.config.launch import InProcessConfig, LaunchConfig, LocalConfig
from farstep.errors import counted
from farstep.event import Emit, traceback_of
from farstep.learners.networks.nets import ActorCritic

EVALUATION_SLOTS = 8
"""Environments of an evaluation, unless it has fewer episodes."""
_STEPS = 64
_MAX_STEPS = 50_000
"""Steps of each environment after which an evaluation is cut off, so that endless episodes cannot block a run."""


@dataclass(frozen=True)
class EvaluationResult:
    """Returns and lengths of the episodes of one evaluation."""

    step: int
    """Environment steps of training before the evaluation started."""
    version: int
    """Version of the evaluated weights."""
    returns: np.ndarray
    """Returns of the episodes."""
    lengths: np.ndarray
    """Lengths of the episodes, in steps."""

    def summary(self) -> str:
        """Return the result in one sentence."""
        mean = f": mean return {self.returns.mean():.4g}" if len(self.returns) else ""
        episodes = counted(len(self.returns), "episode")
        return f"evaluated version {self.version} in {episodes} at step {self.step:,}{mean}"

    def metrics(self) -> dict[str, float]:
        """Return the metrics to log; none if no episode ended."""
        if not len(self.returns):
            return {}
        return {
            "eval/return_mean": float(self.returns.mean()),
            "eval/return_std": float(self.returns.std()),
            "eval/length_mean": float(self.lengths.mean()),
            "eval/version": self.version,
            "eval/step": self.step,
        }


class Evaluator:
    """Evaluates one version of an agent at a time, in a background thread and on a separate worker process.

    The worker starts with the first evaluation. With `InProcessConfig`, `start` evaluates in the caller's thread and
    returns when the evaluation has finished, so that a debugger works. Every slot contributes its first episodes,
    whatever their length, so that short episodes are not over-represented.

    Args:
        env_config: The environments; `envs_per_node` of them run in parallel.
        episodes: Episodes of an evaluation.
        seed: Seed of the environments; every evaluation uses the same episodes.
        after: Called with the agent and the step after each evaluation, in the evaluation's thread; None: nothing.
        launch: Where the worker runs; None: one process of this machine.
    """

    def __init__(
        self,
        env_config: EnvConfig,
        episodes: int,
        seed: int,
        after: Callable[[ActorCritic, int], None] | None = None,
        launch: LaunchConfig | None = None,
    ) -> None:
        self._episodes, self._seed, self._after = episodes, seed, after
        self._slots = env_config.envs_per_node
        self._env = ClusterEnv(env_config, launch or LocalConfig(workers_per_node=1))
        self.emit: Emit = self._env.emit_event
        """Receives the events of evaluations; `Training` adds them to those of its own environments."""
        self._agent: ActorCritic | None = None
        self._thread: threading.Thread | None = None
        self._result: EvaluationResult | None = None
        self._error: Exception | None = None

    @property
    def busy(self) -> bool:
        """Whether an evaluation is in progress."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, agent: ActorCritic, version: int, step: int) -> None:
        """Start an evaluation of the agent's current parameters, with the most likely actions.

        Args:
            agent: The agent; it is copied.
            version: Version of its weights.
            step: Environment steps of training so far.
        """
        if self._agent is None:
            self._agent = copy.deepcopy(agent).cpu()
            self._agent.greedy = True
        self._agent.load_state_dict(agent.state_dict())
        if isinstance(self._env.config, InProcessConfig):
            self._run(version, step)
            return
        self._thread = threading.Thread(target=self._run, args=(version, step), name="farstep-evaluation", daemon=True)
        self._thread.start()

    def take(self) -> EvaluationResult | None:
        """Return the result of an evaluation that has finished since the last call.

        Returns:
            The result; None if there is none, or if the evaluation failed, which is emitted as a warning.
        """
        if self.busy:
            return None
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            text = f"an evaluation failed and is skipped: {type(error).__name__}: {error}"
            self.emit("warned", text, traceback=traceback_of(error))
        result, self._result = self._result, None
        if result is not None:
            self.emit("evaluated", result.summary())
        return result

    def wait(self) -> None:
        """Wait for the evaluation in progress; its number of steps is limited, and each step has a deadline."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, version: int, step: int) -> None:
        try:
            assert self._agent is not None
            self._result = EvaluationResult(step, version, *self._run_episodes(self._agent))
            if self._after is not None:
                self._after(self._agent, step)
        except Exception as error:
            self._error = error

    def _run_episodes(self, agent: ActorCritic) -> tuple[np.ndarray, np.ndarray]:
        """Run the episodes, distributed evenly over the slots; return their returns and lengths."""
        self._env.reset(seed=self._seed)
        quotas = [self._episodes // self._slots + (i < self._episodes % self._slots) for i in range(self._slots)]
        returns: list[list[float]] = [[] for _ in quotas]
        lengths: list[list[int]] = [[] for _ in quotas]
        for _ in range(0, _MAX_STEPS, _STEPS):
            if all(len(finished) >= quota for finished, quota in zip(returns, quotas, strict=True)):
                break
            ended = self._env.collect(agent, _STEPS).episodes
            for slot, value, length in zip(ended["slot"], ended["return"], ended["length"], strict=True):
                returns[slot].append(float(value))
                lengths[slot].append(int(length))
        else:
            text = f"an evaluation was cut off: some episodes did not end within {_MAX_STEPS} steps"
            self.emit("warned", text)
        chosen = [
            (r, n)
            for rs, ns, k in zip(returns, lengths, quotas, strict=True)
            for r, n in zip(rs[:k], ns[:k], strict=True)
        ]
        return np.array([r for r, _ in chosen]), np.array([n for _, n in chosen])

    def close(self) -> None:
        """Stop the worker and the evaluation in progress."""
        self._env.close()
        self.wait()
