"""Evaluation in environments of its own, pinned to one version of the agent, while training goes on."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from farstep.cluster_env import ClusterEnv
from farstep.config.env import EnvConfig
from farstep.config.launch import InProcessConfig, LaunchConfig, LocalConfig
from farstep.learners.networks.nets import ActorCritic

EVALUATION_SLOTS = 8
"""Environments of an evaluation, where it has as many episodes."""
_STEPS = 64
_MOST_STEPS = 50_000
"""Of each environment in an evaluation: one whose episodes do not end must not hold up the end of a run."""
log = logging.getLogger("farstep")


@dataclass(frozen=True)
class Evaluated:
    """What a version came to."""

    step: int
    """Environment steps that it had been trained for."""
    version: int
    returns: np.ndarray
    lengths: np.ndarray

    def metrics(self) -> dict[str, float]:
        """As they are logged; nothing if no episode ended."""
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
    """One evaluation at a time, in a thread, on a worker process of its own that starts with the first; or, launched
    inside this process, at once and in the caller's thread, where a debugger is.

    Every slot's first episodes count, however long they take, so that short ones are not preferred.
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
        self._agent: ActorCritic | None = None
        self._thread: threading.Thread | None = None
        self._result: Evaluated | None = None
        self._error: Exception | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, agent: ActorCritic, version: int, step: int) -> None:
        """Evaluate the agent's present parameters, greedily."""
        if self._agent is None:
            self._agent = copy.deepcopy(agent).cpu()
            self._agent.greedy = True
        self._agent.load_state_dict(agent.state_dict())
        if isinstance(self._env.config, InProcessConfig):
            self._run(version, step)
            return
        self._thread = threading.Thread(target=self._run, args=(version, step), name="farstep-evaluation", daemon=True)
        self._thread.start()

    def take(self) -> Evaluated | None:
        """The result of an evaluation that has ended since the last call; one that failed is told of and has none."""
        if self.busy:
            return None
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            log.warning("an evaluation failed and is left out: %s: %s", type(error).__name__, error)
        result, self._result = self._result, None
        return result

    def wait(self) -> None:
        """Until the evaluation under way is over; the number of its steps, and a deadline for each, bound that."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, version: int, step: int) -> None:
        try:
            assert self._agent is not None
            self._result = Evaluated(step, version, *self._episodes_of(self._agent))
            if self._after is not None:
                self._after(self._agent, step)
        except Exception as error:
            self._error = error

    def _episodes_of(self, agent: ActorCritic) -> tuple[np.ndarray, np.ndarray]:
        self._env.reset(seed=self._seed)
        share = [self._episodes // self._slots + (i < self._episodes % self._slots) for i in range(self._slots)]
        returns: list[list[float]] = [[] for _ in share]
        lengths: list[list[int]] = [[] for _ in share]
        for _ in range(0, _MOST_STEPS, _STEPS):
            if all(len(found) >= wanted for found, wanted in zip(returns, share, strict=True)):
                break
            ended = self._env.collect(agent, _STEPS).episodes
            for slot, value, length in zip(ended["slot"], ended["return"], ended["length"], strict=True):
                returns[slot].append(float(value))
                lengths[slot].append(int(length))
        else:
            log.warning("an evaluation was cut off: episodes have not ended after %d steps", _MOST_STEPS)
        chosen = [
            (r, n)
            for rs, ns, k in zip(returns, lengths, share, strict=True)
            for r, n in zip(rs[:k], ns[:k], strict=True)
        ]
        return np.array([r for r, _ in chosen]), np.array([n for _, n in chosen])

    def close(self) -> None:
        """End the worker; an evaluation under way ends with it."""
        self._env.close()
        self.wait()
