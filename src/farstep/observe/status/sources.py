"""Where the status page gets its data: from a running `ClusterEnv`, or from the folder of a run."""

from __future__ import annotations

import os
import shlex
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

from farstep.checkpoint.folder import numbered
from farstep.errors import FarstepError, RunError
from farstep.event import Event
from farstep.observe.diagnosis import Diagnosis
from farstep.observe.event_files import read_events
from farstep.observe.files import read_rows
from farstep.observe.run_folder import RunFolder
from farstep.observe.run_status import EVALUATION, EVALUATION_STEP, RETURN, RunStatus, phase_label, reached_target
from farstep.observe.status import view
from farstep.observe.status.openmetrics import exposition
from farstep.observe.status.series import Series
from farstep.observe.status.view import WeightCounts

_SAMPLE_S = 5.0
"""Seconds between two samples of speed and return while the page is not open."""
_WINDOW_S = 30.0
"""Seconds over which the page shows where the time goes."""
_RUN_OPTIONS = ("env", "num_envs", "workers", "launcher", "seed", "kl_threshold", "inference", "device")


class RunView(Protocol):
    """What the page shows of a run of this process."""

    title: str
    """Name of the run."""
    kl_threshold: float | None
    """The divergence above which workers pull weights; None: they do not pull by divergence."""

    def stats(self) -> dict[str, Any]:
        """Return the counters of the run, or some of them, as `ClusterEnv.stats`; empty before it has any."""
        ...

    def events(self) -> list[Event]:
        """Return the latest events, oldest first."""
        ...

    def diagnoses(self) -> list[Diagnosis]:
        """Return what the run is waiting for."""
        ...

    def unconnected_nodes(self) -> str:
        """Return what the launcher knows about nodes that are not connected; empty if all are connected."""
        ...


class LiveSource:
    """Shows a run of this process."""

    def __init__(self, run: RunView) -> None:
        self._run = run
        self._lock = threading.RLock()  # `close` may run in any thread during a garbage collection
        self._pid = os.getpid()
        self._title = run.title
        self._options: list[list[str]] = []
        self._status: RunStatus | None = None
        self._diagnosis: Diagnosis | None = None
        self._rates, self._returns, self._evaluations = Series(), Series(), Series()
        self._began_s = time.monotonic()
        self._stats_now: dict[str, Any] = {}
        self._weights_before = WeightCounts()
        self._times: deque[tuple[float, Mapping[str, Any]]] = deque()
        """Times of workers and learner at moments of the last half minute."""
        self._closed = threading.Event()
        self._sampler = threading.Thread(target=self._sample_regularly, name="farstep-status-samples", daemon=True)
        self._sampler.start()

    @property
    def is_live(self) -> bool:
        return not self._closed.is_set()

    def describe(self, title: str, config: Mapping[str, Any], total_steps: int) -> None:
        """Say what the run is, if a training loop knows it.

        Args:
            title: Name of the run.
            config: Options of the run.
            total_steps: Environment steps of the whole run.
        """
        with self._lock:
            self._title, self._options = title, view.shown_options(config, _RUN_OPTIONS)
            self._status = RunStatus(total_steps, config.get("target_return"))

    def resumed(self, step: int) -> None:
        """Continue the progress at this step, and count weights from the version that the run has now."""
        with self._lock:
            if self._status is not None:
                self._status.step = step
            self._stats_now = {}
        self._sample()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of an update, as a sink of a training loop."""
        with self._lock:
            if self._status is not None:
                self._status.update(step, metrics, time.monotonic())
            if RETURN in metrics:
                self._returns.add(step, metrics[RETURN])
            if EVALUATION in metrics:
                self._evaluations.add(metrics.get(EVALUATION_STEP, step), metrics[EVALUATION])

    def diagnosed(self, diagnosis: Diagnosis) -> None:
        """Show this diagnosis from now on, unless the run waits for its launch or for slots."""
        self._diagnosis = diagnosis

    def close(self) -> None:
        """Keep the last data; the page says that the run has ended."""
        if os.getpid() == self._pid and not self._closed.is_set():  # a fork has no sampler
            self._sample()
            self._closed.set()
            if threading.current_thread() is not self._sampler:
                self._sampler.join(_SAMPLE_S)

    def _sample_regularly(self) -> None:
        self._sample()
        while not self._closed.wait(_SAMPLE_S):
            self._sample()

    def _sample(self) -> None:
        """Read the counters; keep the last ones if the run has ended."""
        try:
            stats = self._run.stats()
        except FarstepError:  # the run is failing
            return
        if not stats:  # the run is waiting for its launch
            return
        now = time.monotonic()
        with self._lock:
            if not self._stats_now and "versions" in stats:
                self._weights_before = WeightCounts.of(stats)
            self._stats_now = stats
            self._rates.add(now - self._began_s, stats["steps_per_second"])
            if self._status is None and (mean := stats.get("episodes", {}).get("return_mean")) is not None:
                self._returns.add(stats["steps"], mean)
            self._times.append((now, stats["time"]))
            while len(self._times) > 2 and now - self._times[1][0] > _WINDOW_S:
                self._times.popleft()

    def read(self) -> dict[str, Any]:
        if self.is_live:
            self._sample()
        with self._lock:
            stats, status = self._stats_now, self._status
            times = self._times[-1][1] if self._times else {}
            before = self._times[0][1] if len(self._times) > 1 else {}
            data: dict[str, Any] = {
                "live": self.is_live,
                "time": time.time(),
                "run": {"title": self._title, "options": self._options},
                "progress": self._progress(status, stats),
                "series": {
                    "return": self._returns.rounded(),
                    "evaluation": self._evaluations.rounded(),
                    "rate": self._rates.rounded(),
                },
                "metrics": view.metrics_view(status.latest) if status is not None else {},
            }
        diagnoses, events = self._diagnoses(), self._run.events()
        failure = [] if data["live"] else view.failure_view(events)
        data |= {"diagnoses": failure or [view.diagnosis_view(each) for each in diagnoses]}
        data |= {"state": view.state_view(diagnoses) if data["live"] else "failed" if failure else "ended"}
        data |= {"events": view.events_view(events)}
        if stats:
            data |= {
                "rate": stats["steps_per_second"],
                "kl_threshold": self._run.kl_threshold,
                "workers": view.workers_view(stats, self._unconnected_nodes()),
                "acting": view.acting_view(stats),
                "hosts": view.hosts_view(stats),
                "slots": view.slots_view(stats),
                "buffer": view.buffer_view(stats),
                "times": {
                    part: view.times_view(view.difference(times[part], before.get(part, {})))
                    for part in ("workers", "learner")
                    if part in times
                },
            }
        if "versions" in stats:
            data |= {"lags": view.lags_view(stats), "weights": view.weights_view(stats, self._weights_before)}
        return data

    def _progress(self, status: RunStatus | None, stats: Mapping[str, Any]) -> dict[str, Any]:
        if status is None:
            return {"steps": stats.get("steps", 0)}
        return {
            "steps": status.step,
            "total_steps": status.total_steps,
            "seconds_left": status.seconds_left(time.monotonic()) if self.is_live else None,
            "target_return": status.target_return if status.reached_target else None,
        }

    def _diagnoses(self) -> Sequence[Diagnosis]:
        try:
            found = self._run.diagnoses() if self.is_live else []
        except FarstepError:
            found = []
        is_waiting = bool(found) and found[0].cause in view.WAITING
        return found if self._diagnosis is None or is_waiting else [self._diagnosis]

    def _unconnected_nodes(self) -> str:
        try:
            return self._run.unconnected_nodes() if self.is_live else ""
        except FarstepError:  # the run is failing
            return ""

    def metrics(self) -> str:
        self._sample()
        with self._lock:
            latest = dict(self._status.latest) if self._status is not None else {}
            stats, title = self._stats_now, self._title
        diagnoses = self._diagnoses()
        exposed = {
            "run": {"title": title},
            "diagnosis": {
                "causes": [diagnosis.cause for diagnosis in diagnoses],
                "problems": sum(diagnosis.is_problem for diagnosis in diagnoses),
            },
        }
        return exposition(stats, latest, exposed)  # outside the lock, for which the training loop may wait


class FolderSource:
    """Shows a run from the files of its folder, whether or not it has ended.

    Args:
        folder: The folder.

    Raises:
        RunError: The folder has no metrics and no events yet.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._config = folder.read_config()
        if not folder.metrics_file.exists() and not folder.events_file.exists():
            raise RunError(f"{folder.path} has no metrics and no events yet; wait for the first update of the run.")

    @property
    def is_live(self) -> bool:
        return False

    def read(self) -> dict[str, Any]:
        folder, run = self._folder, self._config.get("run", {})
        rows = read_rows(folder.metrics_file) if folder.metrics_file.exists() else []
        events = read_events(folder.events_file) if folder.events_file.exists() else []
        returns, evaluations, rates = Series(), Series(), Series()
        latest: dict[str, Any] = {}
        for row in rows:
            latest |= row
            if row.get(RETURN) is not None:
                returns.add(row["step"], row[RETURN])
            if row.get(EVALUATION) is not None:
                evaluations.add(row.get(EVALUATION_STEP, row["step"]), row[EVALUATION])
        for before, row in pairwise(row for row in rows if row.get("seconds") is not None):
            if row["seconds"] > before["seconds"]:
                speed = (row["step"] - before["step"]) / (row["seconds"] - before["seconds"])
                rates.add(row["seconds"], speed)
        target = run.get("target_return")
        total_steps, is_at_target = run.get("total_steps"), reached_target(target, latest)
        is_complete = is_at_target or (total_steps is not None and latest.get("step", 0) >= total_steps)
        return {
            "live": False,
            "state": self._state(is_complete, events),
            "time": events[-1].time if events else None,
            "run": {
                "title": f"{self._config.get('algorithm', '')} on {run.get('env', '')}",
                "options": view.shown_options(run, _RUN_OPTIONS),
            },
            "progress": {
                "steps": latest.get("step", 0),
                "total_steps": total_steps,
                "target_return": target if is_at_target else None,
            },
            "series": {"return": returns.rounded(), "evaluation": evaluations.rounded(), "rate": rates.rounded()},
            "metrics": view.metrics_view(latest),
            "diagnoses": [] if self._folder.is_locked() or is_complete else view.failure_view(events),
            "events": view.events_view(events),
            "times": {"learner": view.times_view(_phases(rows))},
        }

    def _state(self, is_complete: bool, events: Sequence[Event]) -> str:
        """Return whether the run is still active, or how it ended and how to continue it."""
        folder = self._folder
        if (is_locked := folder.is_locked()) is None:
            return "from the files of the run folder"
        if is_locked:
            return "running; from the files of the run folder"
        if is_complete:
            return "ended"
        state = view.ending(events)
        if not numbered(folder.checkpoints):
            return f"{state}, without a checkpoint"
        learner, path = self._config.get("algorithm", "LEARNER"), shlex.quote(str(folder.path))
        return f"{state}; continue with: farstep train {learner} --resume {path}"

    def metrics(self) -> str:
        return exposition({}, self.read()["metrics"])


def _phases(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the seconds of each phase of the updates, over the whole run."""
    seconds: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            phase = name.removeprefix("time/")
            if phase != name and "/" not in phase and phase != "step" and value is not None:
                seconds[phase_label(phase)] = seconds.get(phase_label(phase), 0.0) + value
    return seconds
