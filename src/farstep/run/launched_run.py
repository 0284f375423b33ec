"""The workers of a `ClusterEnv`, from `launch` to `close`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium

from farstep.config.env import EnvConfig
from farstep.config.launch import LaunchConfig
from farstep.elastic.run_share import RunShare
from farstep.errors import ClosedError
from farstep.head.collector import Collector
from farstep.head.events import EventLog
from farstep.run.launch_monitor import LaunchMonitor

if TYPE_CHECKING:
    from farstep.observe.diagnosis import Diagnosis
    from farstep.observe.status import StatusPage

Space = gymnasium.spaces.Space[Any]


class LaunchedRun:
    """The collector of a run, and the run's share of its coordinator. Creating it waits for the share.

    Args:
        env_config: Which environments to run.
        config: Where to run them.
        seed: The root seed.
        events: Receives events.
        check_open: Raises if the wait for the share is to end.
    """

    def __init__(
        self,
        env_config: EnvConfig,
        config: LaunchConfig,
        seed: int,
        events: EventLog,
        check_open: Callable[[], None],
    ) -> None:
        num_workers = config.num_workers(env_config.envs_per_node)
        self.share = RunShare(config, num_workers, events.emit, check_open, per_session=env_config.release_idle)
        try:
            self.collector = Collector(env_config, config, seed, events)
        except BaseException:
            self.share.close()
            raise
        self._page: StatusPage | None = None
        """None before the first call of `status_page`."""
        self._page_lock = threading.RLock()  # `close` may run in any thread during a garbage collection
        self._closed = False

    def start(self) -> None:
        """Start the workers."""
        server = self.collector.server
        self.spaces = self.collector.start()
        """The observation space and the action space of one environment."""
        self.num_stacked_frames = server.handshake.num_stacked_frames
        """Frames per stacked observation; 0 if none are stacked."""
        self._monitor = LaunchMonitor(server)
        self.share.drive(server)

    def stats(self) -> dict[str, Any]:
        """The counters for `ClusterEnv.stats`."""
        found = self.collector.snapshot()
        found["slots"]["waited_seconds"] = self.share.waited_seconds()
        return found | {"devices": self.share.device_times()}

    def diagnoses(self, metrics: Sequence[Mapping[str, float]]) -> list[Diagnosis]:
        """Return what `ClusterEnv.diagnose` does, then further causes that are independent of it."""
        return self._monitor.diagnoses(self.stats(), self.collector.kl_threshold, metrics)

    def status_page(self, title: str) -> StatusPage:
        """Return the page that shows the run in a browser. The first call starts its server.

        Raises:
            ClosedError: The run is closed.
            RunError: The server could not be started.
        """
        from farstep.observe.status import StatusPage  # not at launch: most programs show no page

        with self._page_lock:
            if self._closed:
                raise ClosedError("this ClusterEnv is closed; make a new one.")
            if self._page is None:
                collector = self.collector
                monitor = LaunchMonitor(collector.server)  # its own: a diagnosis covers the time since the last one

                def diagnoses() -> list[Diagnosis]:
                    return monitor.diagnoses(self.stats(), collector.kl_threshold)

                events = collector.server.events.events
                self._page = StatusPage(self.stats, events, diagnoses, collector.kl_threshold, title)
            return self._page

    def close(self) -> None:
        """End the workers, and then give their slots back."""
        try:
            with self._page_lock:
                self._closed = True
                if self._page is not None:
                    self._page.close()
        finally:
            try:
                self.collector.close()
            finally:
                self.share.close()


class Launch:
    """Launches a run when it is first needed, and closes it once. Any thread may call its methods.

    Args:
        env_config: Which environments to run.
        config: Where to run them.
        seed: The root seed.
        events: Receives events.
    """

    def __init__(self, env_config: EnvConfig, config: LaunchConfig, seed: int, events: EventLog) -> None:
        self._options = (env_config, config, seed, events)
        self._run: LaunchedRun | None = None
        self._launching = threading.Lock()
        self._closing = threading.RLock()
        self._closed = False

    def run(self) -> LaunchedRun:
        """Return the run; launch it if it is not running.

        Raises:
            ClosedError: `close` was called.
            FarstepError: The workers could not be started.
        """
        with self._launching:
            self.check_open()
            if self._run is None:
                run = LaunchedRun(*self._options, self.check_open)
                # If close() is never called, this closes at garbage collection or at interpreter exit.
                self._finalizer = weakref.finalize(self, run.close)
                self._run = run
                try:
                    self.check_open()  # another thread may have called close() before self._run was set
                    run.start()
                except Exception:
                    self.close()
                    raise
                except BaseException:  # after Ctrl-C, the next call launches again
                    self._run = None
                    self._finalizer()
                    raise
            return self._run

    def check_open(self) -> None:
        """Raise `ClosedError` if `close` was called."""
        if self._closed:
            raise ClosedError("this ClusterEnv is closed; make a new one.")

    def close(self) -> None:
        """End the run, if it was launched. Further calls do nothing; a concurrent call waits for the first."""
        self._closed = True
        with self._closing:
            if self._run is not None:
                self._finalizer()

    @property
    def state(self) -> str:
        """The state of the run in a few words."""
        if self._run is not None:
            return self._run.collector.server.state
        return "closed" if self._closed else "not launched"

    @property
    def inference(self) -> str:
        """How workers call the agent; empty before the first rollout."""
        return self._run.collector.inference if self._run is not None else ""
