"""The training loop: runs a learner, logs its metrics, evaluates its agent, writes checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import torch

from farstep.agents.base_weights import base_hash
from farstep.checkpoint import folder as checkpoint
from farstep.checkpoint.checks import Count, check_torch_generator, converted
from farstep.checkpoint.files import Refused
from farstep.cluster_env import ClusterEnv, check_saved
from farstep.errors import CheckpointError
from farstep.event import RUN_RESUMED
from farstep.learners.loop.checkpoints.checkpoint_schedule import CheckpointSchedule
from farstep.learners.loop.checkpoints.journal import Journal
from farstep.learners.loop.checkpoints.saving import check_agent, check_base, join_state, saved_parameters, split_state
from farstep.learners.loop.diagnosing import RunDiagnosis
from farstep.learners.loop.evaluation import EvaluationResult, Evaluator
from farstep.learners.loop.iteration import CheckpointMarker
from farstep.learners.loop.iteration import Iteration as Iteration
from farstep.learners.loop.iteration import Loop as Loop
from farstep.learners.loop.limits import Limits as Limits
from farstep.learners.loop.progress import Progress as Progress
from farstep.learners.loop.stop_signals import Stopped as Stopped
from farstep.learners.loop.stop_signals import StopSignals
from farstep.learners.loop.timing import Timer, WorkerTimer
from farstep.learners.networks.agent import NetworkAgent, check_sent


class Learner(Protocol):
    """The interface of a learner that `Training` uses.

    A learner collects rows, updates its agent and publishes it in its own way, and reports regularly:

        def run(self, env, loop):
            going = True
            while going:
                batch = env.collect(self.agent)
                metrics = ...  # update the agent
                env.publish(self.agent)
                going = loop.report(Iteration(metrics=metrics, updates=1, ...))
    """

    @property
    def agent(self) -> NetworkAgent:
        """The agent. It acts on workers, and the learner updates it."""
        ...

    @property
    def synchronous(self) -> bool:
        """Whether workers wait during updates, and every iteration has its batch; such a run can resume exactly."""
        ...

    def run(self, env: ClusterEnv, loop: Loop) -> None:
        """Learn until `loop.report` returns False.

        Args:
            env: The environments to train in.
            loop: The training loop.
        """
        ...

    def state(self) -> dict[str, object]:
        """Return the state for a checkpoint. The agent's parameters are saved separately.

        Returns:
            Numbers, text, arrays and tensors, or mappings and lists of these, by name.
        """
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state. If it does not fit, raise any exception before changing anything.

        Args:
            state: What `state` returned.
        """
        ...


class Sink(Protocol):
    """Receives the metrics of a run."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of an update or an evaluation.

        Args:
            step: Number of environment steps so far.
            metrics: Values by name.
        """
        ...


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    """The state of a run in a checkpoint. The restored objects check the contents of the mappings."""

    agent: dict[str, Any]
    learner: dict[str, Any]
    progress: dict[str, Any]
    torch: torch.Tensor
    version: Count
    env: dict[str, Any] | None = None
    """None if the environments cannot replay episodes."""
    journal: dict[str, Any] | None = None
    base: str = ""
    """Content hash of the agent's base, whose parameters are not in `agent`; empty if it has none."""
    inference: Literal["local", "local-cpu", "served"] | None = None
    """What `inference="auto"` has chosen; None with another option, or if it is saved in `env`."""


class Training:
    """Trains one learner until a limit is reached or a signal stops it.

    Args:
        learner: The learner, with its agent.
        env: The environments to train in.
        limits: When to stop, and how often to write checkpoints and to evaluate.
        sink: Receives the metrics of every update; None: discard metrics.
        checkpoints: Folder for checkpoints; None: no checkpoints.
        evaluator: Runs evaluations every `limits.eval_every` steps and at the end; None: no evaluations.

    Raises:
        ConfigError: `weights.only` of the environments leaves out parameters that the policy needs.

    Example:
        >>> training = Training(PPO(agent, config, seed=1), env, Limits(total_steps=100_000))
        >>> progress = training.run()
    """

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
        check_sent(learner.agent, env.env_config.weights)
        self._learner, self._env, self._limits = learner, env, limits
        self.sink, self.checkpoints, self._evaluator = sink, checkpoints, evaluator
        self.newest_checkpoint: CheckpointMarker | None = None
        """The newest checkpoint that this process wrote or resumed from."""
        self._had_folder = checkpoints is not None and checkpoints.parent.is_dir()
        """Whether the folder that contains `checkpoints` existed before the run, so that the run must not create it."""
        self._is_finished = False
        """Whether the last checkpoint of the run was written."""
        self._failed_to_save = False
        """Whether the last attempt to write a checkpoint failed."""
        replays = checkpoints and learner.synchronous and not env.cannot_replay
        self._journal = Journal(env.num_envs) if replays else None
        """None if the run cannot resume exactly."""
        self.progress = Progress()
        self._signals = StopSignals(self._journal is not None, self._drop_journal, env.emit_event)
        if evaluator is not None:
            evaluator.report_to(env.emit_event)
        self.diagnosis = RunDiagnosis(env)
        self.timer, self._worker_timer = Timer(), WorkerTimer()
        self._schedule = CheckpointSchedule(limits.checkpoint_every)
        self._stagger_steps = 0
        self._restarts_before = 0
        """Restarts of workers in earlier parts of a resumed run."""
        self._in_warmup = False
        self._start = self._reported_s = 0.0

    # ---- the loop ----

    def run(self) -> Progress:
        """Train until a limit is reached.

        Returns:
            The counters of the run, also available as `progress`.

        Raises:
            Stopped: SIGINT, SIGTERM or SIGHUP was received; a checkpoint was written.
            CheckpointError: The last checkpoint could not be written; the message names the one to resume from.
        """
        if reached := self._limits.reached(self.progress):
            self._warn(f"nothing to do: the run has reached {' and '.join(reached)}")
            return self.progress
        self._is_finished = False
        self._start = time.monotonic() - self.progress.seconds
        self._reported_s = self.progress.seconds
        with self._signals.installed():
            try:
                self._learner.run(self._env, self)
                self._signals.check()
            except Stopped:
                self.save_last()
                raise
            if self._in_warmup:
                self._warn(
                    f"the run ended after {self.progress.updates} updates, during critic warm-up, so its policy was "
                    "not trained: lower --critic-warmup-updates, or train for longer (--total-steps, --target-return)"
                )
            self.save_last()  # before the evaluation, which may take long and may be interrupted
            self._signals.check()
        self._finish_evaluation()
        return self.progress

    # ---- for the learner (`iteration.Loop`) ----

    @property
    def fraction_done(self) -> float:
        """Fraction of the run that is done, from 0 to 1."""
        return self.progress.steps / self._limits.total_steps

    @property
    def total_steps(self) -> int:
        """Environment steps of the whole run."""
        return self._limits.total_steps

    @property
    def steps_left(self) -> int:
        """Environment steps until the run ends."""
        return max(0, self._limits.total_steps - self.progress.steps)

    @property
    def stopping(self) -> bool:
        """Whether a signal has requested the run to stop."""
        return self._signals.is_received

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Measure the time in which the learner waits for rows. Meanwhile, a signal may abandon these rows.

        Returns:
            A context manager; waiting belongs inside.

        Raises:
            Stopped: A signal has requested the run to stop; raised at the start or inside.
        """
        with self.timer("collect"):
            self._signals.collecting = True
            try:
                self._signals.check_before_rollout()  # a signal may have arrived while a checkpoint was written
                yield
            finally:
                self._signals.collecting = False

    def report(self, iteration: Iteration) -> bool:
        """Log an iteration, start an evaluation and write a checkpoint if they are due.

        Args:
            iteration: What was done since the last report.

        Returns:
            Whether to continue.
        """
        progress, metrics = self.progress, iteration.metrics
        if any(metrics.get(f"{part}/skipped_steps") == 1.0 for part in ("actor", "critic")):
            self._warn(
                f"update {progress.updates + iteration.updates} changed nothing, because none of its gradients was "
                "finite. Lower the learning rate, or normalize rewards (normalize_reward, or a wrapper)"
            )
        self._in_warmup = "critic/warmup" in metrics
        if self._journal is not None and iteration.batch is not None:
            self._journal.add(iteration.batch)
        progress.steps += iteration.steps + self._new_stagger_steps()  # both count as training
        progress.updates += iteration.updates
        progress.seconds = time.monotonic() - self._start
        progress.episodes += len(iteration.returns)
        progress.returns.extend(iteration.returns)
        progress.lengths.extend(iteration.lengths)
        self._log(iteration)
        if self.stopping or self._limits.reached(progress):
            return False
        if self._schedule.due(progress.updates, time.monotonic()):
            self._save_if_possible()
        return True

    def _new_stagger_steps(self) -> int:
        """Return the number of steps since the last update that moved staggered environments to their offsets."""
        before, self._stagger_steps = self._stagger_steps, int(self._env.stats()["stagger_steps"])
        return self._stagger_steps - before

    def _log(self, iteration: Iteration) -> None:
        progress, stats, lags = self.progress, self._env.stats(), iteration.lags
        progress.restarts = self._restarts_before + stats["workers"]["restarts"]
        report: dict[str, float] = {
            "update": progress.updates,
            "train/actor/current_version": stats["versions"]["current"],
            "seconds": progress.seconds,
            "env/episodes": progress.episodes,
            "rate/steps_per_second": progress.steps / max(progress.seconds, 1e-9),
            "lag/versions_mean": float(lags.mean()) if lags.size else 0.0,
            "lag/versions_max": float(lags.max(initial=0)),
            "sync/pulls_per_worker": stats["pulls"]["total"] / self._env.num_workers,
            "bytes/weights_sent": stats["bytes"]["weights_sent"],
            "bytes/probes_sent": stats["bytes"]["probes_sent"],
            "workers/alive": stats["workers"]["alive"],
            "workers/restarts": progress.restarts,
        }
        if progress.returns:
            report["env/return_mean"] = float(np.mean(progress.returns))
            report["env/length_mean"] = float(np.mean(progress.lengths))
        if divergences := list(stats["divergence"].values()):
            report["sync/divergence_mean"] = float(np.mean(divergences))
            report["sync/divergence_max"] = max(divergences)
        report |= {f"dropped/{cause}": count for cause, count in stats["dropped"].items() if count}
        report |= {f"train/{name}": value for name, value in iteration.metrics.items()}
        report |= iteration.counters or {}
        report |= self._evaluation()
        report |= self.timer.take() | {"time/step": progress.seconds - self._reported_s}
        report |= self._worker_timer.take(stats)
        self._reported_s = progress.seconds
        self.diagnosis.observe(report)
        if self.sink is not None:
            self.sink.log(progress.steps, report)

    def _warn(self, text: str) -> None:
        self._env.emit_event("warned", text)

    # ---- evaluation ----

    def _evaluation(self) -> dict[str, float]:
        """Return the metrics of a finished evaluation. If the next evaluation is due, start it."""
        evaluator, every = self._evaluator, self._limits.eval_every
        if evaluator is None or every is None:
            return {}
        result = evaluator.take()
        if self.progress.steps >= self.progress.next_evaluation and not evaluator.busy:
            evaluator.start(self._learner.agent, self._env.version, self.progress.steps)
            self.progress.next_evaluation = (self.progress.steps // every + 1) * every
        return result.metrics() if result is not None else {}

    def _finish_evaluation(self) -> None:
        """Wait for the evaluation in progress. Then evaluate the final agent, unless this was already done."""
        if self._evaluator is None:
            return
        last = self._wait_for_evaluation()
        if last is None or last.step != self.progress.steps:
            self._evaluator.start(self._learner.agent, self._env.version, self.progress.steps)
            self._wait_for_evaluation()

    def _wait_for_evaluation(self) -> EvaluationResult | None:
        """Wait for the evaluation in progress, and log its result."""
        assert self._evaluator is not None
        with self.timer("evaluate"):
            self._evaluator.wait()
        result = self._evaluator.take()
        if result is not None and self.sink is not None:
            self.sink.log(
                self.progress.steps, {"seconds": self.progress.seconds, **result.metrics(), **self.timer.take()}
            )
        return result

    # ---- checkpoints ----

    def save_last(self) -> None:
        """Write the last checkpoint of the run, unless the learner has already requested it.

        Raises:
            CheckpointError: The checkpoint could not be written. The message names the one to resume from.
        """
        if self._is_finished:
            return
        self._is_finished = True
        try:
            self.save()
        except CheckpointError as error:
            older = self.newest_checkpoint
            rest = "it has no older checkpoint to --resume from"
            if older is not None:
                rest = f"--resume continues from checkpoint {older.number:06d} at step {older.step:,}"
            raise CheckpointError(
                f"{error} The run ended at step {self.progress.steps:,} without its last checkpoint; {rest}."
            ) from error

    def _save_if_possible(self) -> None:
        """Write a checkpoint. After a failure, the run continues until the next one is due."""
        began = time.monotonic()
        try:
            self.save()
            self._failed_to_save = False
        except CheckpointError as error:
            if not self._failed_to_save:
                self._warn(f"{error} The run continues, and tries again when the next checkpoint is due")
            self._failed_to_save = True
        self._schedule.wrote(began, time.monotonic())

    def save(self) -> Path | None:
        """Write a checkpoint atomically.

        Returns:
            The checkpoint's folder; None if the run has no folder for checkpoints.

        Raises:
            CheckpointError: The checkpoint could not be written; earlier checkpoints are intact.
        """
        if self.checkpoints is None:
            return None
        self._check_folder(self.checkpoints.parent)
        with self.timer("checkpoint"):
            state: dict[str, object] = {
                "agent": saved_parameters(self._learner.agent),
                "base": base_hash(self._learner.agent),
                "learner": self._learner.state(),
                "progress": self.progress.state(),
                "torch": torch.get_rng_state(),
                "version": self._env.version,
            }
            if self._journal is not None:
                state["env"], state["journal"] = self._env.save(), self._journal.state()
            elif self._env.chosen_inference is not None:
                state["inference"] = self._env.chosen_inference
            arrays, plain = split_state(state)
            folder = checkpoint.save(self.checkpoints, arrays, {"state": plain}, warn=self._warn)
        self.newest_checkpoint = CheckpointMarker(int(folder.name), self.progress.steps)
        self._env.emit_event("checkpointed", f"wrote checkpoint {folder.name} at step {self.progress.steps:,}")
        return folder

    def _check_folder(self, run: Path) -> None:
        """Raise `CheckpointError` if the run's folder is gone; no run could be resumed from a new one."""
        if not self._had_folder or os.path.lexists(run):  # which, unlike `is_dir`, raises no error of a file system
            return
        self.newest_checkpoint = None
        raise CheckpointError(
            f"the checkpoint could not be saved: the folder {run} was deleted or moved during the run. If it was "
            "moved, move it back. If it was deleted, its metrics and checkpoints are lost: start a new run."
        )

    def resume(self) -> None:
        """Continue from the newest checkpoint that fits this learner and these environments.

        Raises:
            CheckpointError: No checkpoint fits; learner, agent and environments are unchanged.
        """
        assert self.checkpoints is not None
        saved = checkpoint.load_with(self.checkpoints, self._restore, warn=self._warn)
        if self._journal is not None and saved.env is not None:
            self._env.resume(self._learner.agent, saved.env, self._journal.actions())
        else:
            env = {"version": saved.version, "workers": [], "inference": saved.inference}
            self._env.resume(self._learner.agent, env, [])
        torch.set_rng_state(saved.torch)
        found = self.newest_checkpoint
        assert found is not None
        self._env.emit_event("loaded", f"{RUN_RESUMED}{found.number:06d} at step {found.step:,}")

    def _restore(self, loaded: checkpoint.Loaded) -> _Saved:
        """Restore everything except the environments. If the state does not fit, raise `Refused` without changes."""
        agent = self._learner.agent
        saved = converted("the state", join_state(loaded), _Saved)
        check_base(agent, saved.base)
        check_agent(agent, saved.agent)
        progress = Progress.of(saved.progress)
        check_torch_generator("torch", saved.torch.numpy())
        journal = self._check_env(saved)
        before = {name: tensor.clone() for name, tensor in saved_parameters(agent).items()}
        agent.load_state_dict(saved.agent, strict=False)
        try:
            self._learner.load(saved.learner)
        except Exception as error:  # a user's own learner may raise anything
            agent.load_state_dict(before, strict=False)
            if isinstance(error, Refused):
                raise
            raise Refused(f"the learner raised {type(error).__name__}: {error}") from error
        self.progress, self._journal, self._restarts_before = progress, journal, progress.restarts
        self.newest_checkpoint = CheckpointMarker(int(loaded.folder.name), progress.steps)
        return saved

    def _check_env(self, saved: _Saved) -> Journal | None:
        """Check the saved environments. Return the actions of episodes in progress, if these can be replayed."""
        if (saved.env is None) != (saved.journal is None):
            raise Refused("the state has only one of env and journal; expected both or neither")
        if self._journal is None or saved.env is None:
            return self._journal
        if saved.env.get("version") != saved.version:
            raise Refused(
                f"the run has version {saved.version}, but its environments have {saved.env.get('version')!r}; "
                "expected the same version"
            )
        journal = Journal.of(saved.journal)
        check_saved(self._env, self._learner.agent, saved.env, journal.actions())
        return journal

    def _drop_journal(self) -> None:
        """Discard the journal. It lacks the actions of an abandoned rollout, so episodes restart on resume."""
        self._journal = None
