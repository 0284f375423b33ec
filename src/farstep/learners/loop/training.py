"""The loop around a learner: batches in, metrics and checkpoints out, and a clean end however it comes."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
import torch

from farstep.batch import Batch
from farstep.checkpoint import folder as checkpoint
from farstep.checkpoint.checks import Count, Finite, check_torch_generator, converted
from farstep.checkpoint.files import Refused
from farstep.cluster_env import ClusterEnv, check_saved
from farstep.learners.loop.evaluation import Evaluated, Evaluator
from farstep.learners.loop.guards import Guards
from farstep.learners.loop.journal import Journal
from farstep.learners.loop.saving import check_agent, put_together, taken_apart
from farstep.learners.loop.timing import Timer
from farstep.learners.networks.nets import ActorCritic

log = logging.getLogger("farstep")
_LAST_EPISODES = 100
_GRACE_S = 10.0
"""How long a synchronous run that is told to stop waits for the rollout under way, to be able to go on exactly."""


class Learner(Protocol):
    """What the loop needs: where batches come from, and what is done with one."""

    agent: ActorCritic

    @property
    def synchronous(self) -> bool:
        """Nothing is rolled while it learns, so that a run can go on exactly where it was saved."""
        ...

    def batches(self, env: ClusterEnv) -> Iterator[Batch]: ...

    def update(self, batch: Batch, version: int, progress: float, timer: Timer) -> dict[str, float]: ...

    def state(self) -> dict[str, object]: ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; raise before anything is changed if it does not fit."""
        ...


class Sink(Protocol):
    """Where metrics go."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...


@dataclass
class Progress:
    """How far a run is; all of it is in its checkpoints."""

    steps: int = 0
    updates: int = 0
    seconds: float = 0.0
    episodes: int = 0
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST_EPISODES))
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=_LAST_EPISODES))
    next_evaluation: int = 0

    def state(self) -> dict[str, object]:
        return {**vars(self), "returns": list(self.returns), "lengths": list(self.lengths)}

    @classmethod
    def of(cls, state: object) -> Progress:
        """Restore what `state` returned; raises `Refused` if it is malformed."""
        saved = converted("progress", state, _SavedProgress)
        if len(saved.returns) != len(saved.lengths):
            raise Refused(f"progress has {len(saved.returns)} returns and {len(saved.lengths)} lengths of episodes")
        last = {"returns": deque(saved.returns, _LAST_EPISODES), "lengths": deque(saved.lengths, _LAST_EPISODES)}
        return cls(**{**msgspec.structs.asdict(saved), **last})


class _SavedProgress(msgspec.Struct, forbid_unknown_fields=True):
    steps: Count
    updates: Count
    seconds: Annotated[float, msgspec.Meta(ge=0, le=2**40)]
    episodes: Count
    returns: Annotated[list[Finite], msgspec.Meta(max_length=_LAST_EPISODES)]
    lengths: Annotated[list[Count], msgspec.Meta(max_length=_LAST_EPISODES)]
    next_evaluation: Count


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    """The state of a run in a checkpoint; the objects that are restored check the contents of the mappings."""

    agent: dict[str, Any]
    learner: dict[str, Any]
    progress: dict[str, Any]
    torch: torch.Tensor
    version: Count
    env: dict[str, Any] | None = None
    """None if the environments could not be led back."""
    journal: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When to stop, and how often to do what."""

    total_steps: int
    target_return: float | None = None
    checkpoint_every: int = 10
    eval_every: int | None = None


class Stopped(BaseException):
    """A signal asked the run to end; like KeyboardInterrupt, nobody on the way takes it for an error of theirs."""


class Training:
    """Drives one learner until it is done, or told to stop."""

    def __init__(
        self,
        learner: Learner,
        env: ClusterEnv,
        limits: Limits,
        *,
        sink: Sink | None = None,
        checkpoints: Path | None = None,
        evaluator: Evaluator | None = None,
    ) -> None:
        self._learner, self._env, self._limits = learner, env, limits
        self.sink, self._checkpoints, self._evaluator = sink, checkpoints, evaluator
        self._journal = Journal() if checkpoints and learner.synchronous and not env.cannot_replay else None
        """Only such a run can go on exactly where it was."""
        self.progress = Progress()
        self._guards = Guards()
        self._timer = Timer()
        self._staggered = 0
        self._in_warmup = False
        self._reported_s = 0.0
        self._stop: signal.Signals | None = None
        self._collecting = False

    # ---- the loop ----

    def run(self) -> Progress:
        """Train; returns how far it came. A signal ends it after a checkpoint, and is raised as `Stopped`."""
        if self._done():
            log.warning(
                "nothing to do: the run has %s of %s steps, or its target return; ask for more to go on",
                f"{self.progress.steps:,}",
                f"{self._limits.total_steps:,}",
            )
            return self.progress
        began, before = time.monotonic(), self.progress.seconds
        self._reported_s = before
        with self._signals():
            try:
                for batch in self._batches():
                    self._one_update(batch, began - before)
                    if self._stop is not None:
                        raise Stopped(self._stop.name)
                    if self._done():
                        break
                    if self.progress.updates % self._limits.checkpoint_every == 0:
                        self.save()
            except Stopped:
                self.save()
                raise
            if self._in_warmup:
                log.warning(
                    "the run ended after %d updates, during critic warm-up, so its policy was not trained: lower "
                    "--critic-warmup-updates, or train for longer (--total-steps, --target-return)",
                    self.progress.updates,
                )
            self.save()  # before the evaluation, which may take long and be interrupted
            if self._stop is not None:
                raise Stopped(self._stop.name)
        self._finish_evaluation()
        return self.progress

    def _batches(self) -> Iterator[Batch]:
        batches = self._learner.batches(self._env)
        while True:
            with self._timer("collect"):
                self._collecting = True
                try:
                    if self._stop is not None and self._journal is None:  # told while a checkpoint was written
                        raise Stopped(self._stop.name)
                    batch = next(batches)
                finally:
                    self._collecting = False
            yield batch

    def _one_update(self, batch: Batch, began: float) -> None:
        progress, timer = self.progress, self._timer
        version = self._env.version
        lag = version - batch["version"][batch["valid"]].astype(np.int64)
        metrics = self._learner.update(batch, version, progress.steps / self._limits.total_steps, timer)
        if metrics.get("actor/skipped_steps") == 1.0:
            log.warning(
                "update %d changed nothing: no gradient in it was finite. Lower the learning rate, or scale rewards "
                "(normalize_reward)",
                progress.updates + 1,
            )
        self._in_warmup = "critic/warmup" in metrics
        with timer("publish"):
            self._env.publish(self._learner.agent)
        if self._journal is not None:
            self._journal.add(batch)
        progress.steps += int(batch["valid"].sum()) + self._discarded()
        progress.updates += 1
        progress.seconds = time.monotonic() - began
        progress.episodes += len(batch.episodes["return"])
        progress.returns.extend(batch.episodes["return"].tolist())
        progress.lengths.extend(batch.episodes["length"].tolist())
        self._report(metrics, lag)

    def _discarded(self) -> int:
        """Steps since the last update that brought staggered environments to their places: learned from by nobody, paid
        for all the same."""
        before, self._staggered = self._staggered, int(self._env.stats()["stagger_steps"])
        return self._staggered - before

    def _report(self, metrics: Mapping[str, float], lag: np.ndarray) -> None:
        progress, stats = self.progress, self._env.stats()
        found: dict[str, float] = {
            "update": progress.updates,
            "version": stats["versions"]["current"],
            "seconds": progress.seconds,
            "env/episodes": progress.episodes,
            "rate/steps_per_second": progress.steps / max(progress.seconds, 1e-9),
            "lag/versions_mean": float(lag.mean()) if lag.size else 0.0,
            "lag/versions_max": float(lag.max(initial=0)),
            "sync/weight_syncs": stats["weight_syncs"]["total"],
            "sync/weights_bytes": stats["bytes"]["weights_sent"],
            "sync/probes_bytes": stats["bytes"]["probes_sent"],
            "workers/alive": stats["workers"]["alive"],
            "workers/restarts": stats["workers"]["restarts"],
        }
        if progress.returns:
            found["env/return_mean"] = float(np.mean(progress.returns))
            found["env/length_mean"] = float(np.mean(progress.lengths))
        found |= {f"dropped/{cause.replace(' ', '_')}": count for cause, count in stats["dropped"].items() if count}
        found |= {f"train/{name}": value for name, value in metrics.items()}
        found |= self._evaluation()
        found |= self._timer.take() | {"time/step": progress.seconds - self._reported_s}
        self._reported_s = progress.seconds
        for warning in self._guards.observe(found):
            log.warning("%s", warning)
        if self.sink is not None:
            self.sink.log(progress.steps, found)

    def _done(self) -> bool:
        progress, limits = self.progress, self._limits
        if progress.steps >= limits.total_steps:
            return True
        target = limits.target_return
        enough = len(progress.returns) == _LAST_EPISODES
        return target is not None and enough and float(np.mean(progress.returns)) >= target

    # ---- evaluation ----

    def _evaluation(self) -> dict[str, float]:
        """What an evaluation found that has ended meanwhile; begins the next one when it is due."""
        evaluator, every = self._evaluator, self._limits.eval_every
        if evaluator is None or every is None:
            return {}
        found = evaluator.take()
        if self.progress.steps >= self.progress.next_evaluation and not evaluator.busy:
            evaluator.start(self._learner.agent, self._env.version, self.progress.steps)
            self.progress.next_evaluation = (self.progress.steps // every + 1) * every
        return found.metrics() if found is not None else {}

    def _finish_evaluation(self) -> None:
        """The final agent is always evaluated, once."""
        if self._evaluator is None:
            return
        last = self._evaluated()
        if last is None or last.step != self.progress.steps:
            self._evaluator.start(self._learner.agent, self._env.version, self.progress.steps)
            self._evaluated()

    def _evaluated(self) -> Evaluated | None:
        """What the evaluation under way finds, logged."""
        assert self._evaluator is not None
        with self._timer("evaluate"):
            self._evaluator.wait()
        found = self._evaluator.take()
        if found is not None and self.sink is not None:
            self.sink.log(
                self.progress.steps, {"seconds": self.progress.seconds, **found.metrics(), **self._timer.take()}
            )
        return found

    # ---- checkpoints ----

    def save(self) -> Path | None:
        """Write a checkpoint, whole or not at all."""
        if self._checkpoints is None:
            return None
        with self._timer("checkpoint"):
            state: dict[str, object] = {
                "agent": self._learner.agent.state_dict(),
                "learner": self._learner.state(),
                "progress": self.progress.state(),
                "torch": torch.get_rng_state(),
                "version": self._env.version,
            }
            if self._journal is not None:
                state["env"], state["journal"] = self._env.save(), self._journal.state()
            arrays, plain = taken_apart(state)
            return checkpoint.save(self._checkpoints, arrays, {"state": plain})

    def resume(self) -> None:
        """Continue from the newest checkpoint that fits this learner and these environments.

        Raises:
            CheckpointError: No checkpoint fits; learner, agent and environments are unchanged.
        """
        assert self._checkpoints is not None
        saved = checkpoint.load_with(self._checkpoints, self._restore)
        if self._journal is not None and saved.env is not None:
            self._env.resume(self._learner.agent, saved.env, self._journal.actions())
        else:
            self._env.resume(self._learner.agent, {"version": saved.version, "workers": []}, [])
        torch.set_rng_state(saved.torch)

    def _restore(self, loaded: checkpoint.Loaded) -> _Saved:
        """Restore everything except the environments; raises `Refused` before anything is changed if a part does not
        fit."""
        agent = self._learner.agent
        saved = converted("the state", put_together(loaded), _Saved)
        check_agent(agent, saved.agent)
        progress = Progress.of(saved.progress)
        check_torch_generator("torch", saved.torch.numpy())
        journal = self._check_env(saved)
        before = {name: tensor.clone() for name, tensor in agent.state_dict().items()}
        agent.load_state_dict(saved.agent)
        try:
            self._learner.load(saved.learner)
        except Exception as error:  # a user's own learner may raise anything
            agent.load_state_dict(before)
            if isinstance(error, Refused):
                raise
            raise Refused(f"the learner raised {type(error).__name__}: {error}") from error
        self.progress, self._journal = progress, journal
        return saved

    def _check_env(self, saved: _Saved) -> Journal | None:
        """The actions of episodes in progress, if environments can replay them."""
        if (saved.env is None) != (saved.journal is None):
            raise Refused("the state has only one of env and journal")
        if self._journal is None or saved.env is None:
            return self._journal
        if saved.env.get("version") != saved.version:
            raise Refused(f"the version is {saved.version}, and {saved.env.get('version')!r} of the environments")
        journal = Journal.of(saved.journal)
        check_saved(self._env, self._learner.agent, saved.env, journal.actions())
        return journal

    # ---- signals ----

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM end the run after a checkpoint; a second one ends it at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {signal.SIGINT: self._told, signal.SIGTERM: self._told, signal.SIGALRM: self._waited}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _told(self, number: int, frame: FrameType | None) -> None:
        if self._stop is not None:
            raise KeyboardInterrupt
        self._stop = signal.Signals(number)
        log.warning("%s: a checkpoint is written after this update; once more ends it at once", self._stop.name)
        if self._journal is None:
            self._waited(number, frame)
        else:
            signal.setitimer(signal.ITIMER_REAL, _GRACE_S)

    def _waited(self, number: int, frame: FrameType | None) -> None:
        """Nothing of a batch that is not there yet has been used: it can be left, but episodes begin anew then."""
        if self._collecting and self._stop is not None:
            self._journal = None
            raise Stopped(self._stop.name)
