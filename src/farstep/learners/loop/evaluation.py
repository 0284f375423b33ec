"""Evaluates a version of the agent in separate environments while training continues."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from farstep.batch import Batch
from farstep.cluster_env import ClusterEnv, event_log_of
from farstep.config.env import EnvConfig
from farstep.config.launch import InProcessConfig, LaunchConfig, LocalConfig
from farstep.errors import counted
from farstep.event import Emit, traceback_of
from farstep.learners.networks.agent import NetworkAgent

EVALUATION_SLOTS = 8
"""Number of environments of an evaluation; fewer if it has fewer episodes."""
_STEPS = 64
MAX_STEPS = 50_000
"""Maximum number of steps of each environment in an evaluation, so that endless episodes cannot block a run."""


@dataclass(frozen=True)
class EvaluationResult:
    """Returns and lengths of the episodes of one evaluation."""

    step: int
    """Environment steps of training when the evaluation started."""
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
    """Evaluates one version of an agent at a time, with a background thread and a separate worker process.

    The worker starts with the first evaluation. With `InProcessConfig`, `start` evaluates in the caller's thread and
    returns when the evaluation has finished, so that a debugger works. Each slot contributes a fixed number of
    episodes, so that short episodes are not over-represented.

    Args:
        env_config: The environments; `envs_per_node` is the number that runs in parallel.
        episodes: Number of episodes per evaluation.
        seed: Seed of the environments; every evaluation uses the same episodes.
        after: Called after each evaluation with the agent and the step, in the thread of the evaluation; None: no call.
        launch: Where the worker runs; None: in one process on this machine.
    """

    def __init__(
        self,
        env_config: EnvConfig,
        episodes: int,
        seed: int,
        after: Callable[[NetworkAgent, int], None] | None = None,
        launch: LaunchConfig | None = None,
    ) -> None:
        self._episodes, self._seed, self._after = episodes, seed, after
        self._env = ClusterEnv(env_config, launch or LocalConfig(workers_per_node=1))
        self._emit: Emit = self._env.emit_event
        self._agent: NetworkAgent | None = None
        self._thread: threading.Thread | None = None
        self._result: EvaluationResult | None = None
        self._error: Exception | None = None

    @property
    def busy(self) -> bool:
        """Whether an evaluation is in progress."""
        return self._thread is not None and self._thread.is_alive()

    def report_to(self, emit: Emit) -> None:
        """Add the events of evaluations, and those of their worker, to the events of a run. `Training` calls this.

        Args:
            emit: Emits an event of the run.
        """
        self._emit = emit
        event_log_of(self._env).relay(emit, "evaluation: ")

    def start(self, agent: NetworkAgent, version: int, step: int) -> None:
        """Start an evaluation of the agent's current parameters. The agent does not explore (`greedy`).

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
            The result. None if no evaluation has finished, or if it failed; a failure is emitted as a warning.
        """
        if self.busy:
            return None
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            text = f"an evaluation failed and is skipped: {type(error).__name__}: {error}"
            self._emit("warned", text, traceback=traceback_of(error))
        result, self._result = self._result, None
        if result is not None:
            self._emit("evaluated", result.summary())
        return result

    def wait(self) -> None:
        """Wait for the evaluation in progress. The wait is bounded: steps are limited, and each step has a deadline."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, version: int, step: int) -> None:
        try:
            assert self._agent is not None
            episodes = run_episodes(
                self._env, self._agent, self._episodes, self._seed, max_steps=MAX_STEPS, emit=self._emit
            )
            self._result = EvaluationResult(step, version, *episodes)
            if self._after is not None:
                self._after(self._agent, step)
        except Exception as error:
            self._error = error

    def close(self) -> None:
        """Stop the worker and the evaluation in progress."""
        self._env.close()
        self.wait()


def episode_quotas(episodes: int, slots: int) -> list[int]:
    """Return how many episodes each slot contributes."""
    return [episodes // slots + (i < episodes % slots) for i in range(slots)]


def run_episodes(
    env: ClusterEnv,
    agent: NetworkAgent,
    episodes: int,
    seed: int,
    *,
    max_steps: int,
    emit: Emit,
    on_progress: Callable[[int], None] | None = None,
    on_batch: Callable[[Batch], None] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Run episodes, distributed evenly over the slots. The first episodes of each slot count, of any length.

    Args:
        env: The environments.
        agent: The agent; its attribute `greedy` decides how it acts.
        episodes: Number of episodes.
        seed: Seed of the environments.
        max_steps: Maximum number of steps of each environment; episodes that are longer are abandoned with a warning.
        emit: Receives the warning.
        on_progress: Called after every 64 steps with the number of finished episodes; None: no call.
        on_batch: Called with each batch, which is valid during the call; None: no call.

    Returns:
        Returns of the episodes that ended, and their lengths.
    """
    env.reset(seed=seed)
    slots = env.num_envs
    quotas = episode_quotas(episodes, slots)
    found: list[list[tuple[float, int]]] = [[] for _ in quotas]
    for start in range(0, max_steps, _STEPS):
        batch = env.collect(agent, min(_STEPS, max_steps - start))
        if on_batch is not None:
            on_batch(batch)
        ended = batch.episodes
        for slot, value, length in zip(ended["slot"], ended["return"], ended["length"], strict=True):
            if len(found[slot]) < quotas[slot]:
                found[slot].append((float(value), int(length)))
        finished = sum(map(len, found))
        if on_progress is not None:
            on_progress(finished)
        if finished == episodes:
            break
    else:
        done = f"{finished:,} of {counted(episodes, 'episode')} ended"
        emit("warned", f"an evaluation was cut off: {done} within {max_steps:,} steps of each environment")
    chosen = [episode for of_slot in found for episode in of_slot]
    return np.array([value for value, _ in chosen]), np.array([length for _, length in chosen])
