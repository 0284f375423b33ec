"""The workers of a `ClusterEnv`, from `launch` to `close`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium

from farstep.config.env import EnvConfig
from farstep.config.launch import LaunchConfig, LocalConfig
from farstep.elastic.coordinator.run_share import RunShare
from farstep.errors import ClosedError
from farstep.head.collector import Collector
from farstep.head.events import EventLog
from farstep.head.interrupts import Interrupts
from farstep.rollout.sources import Source
from farstep.run.launch_monitor import LaunchMonitor
from farstep.run.run_page import RunPage
from farstep.sync.rules import rule_of, threshold_of

if TYPE_CHECKING:
    from farstep.observe.diagnosis import Diagnosis
    from farstep.observe.status import StatusPage

Space = gymnasium.spaces.Space[Any]


class LaunchedRun:
    """The collector of a run, and the run's share of its coordinator.

    Args:
        env_config: Which environments to run.
        config: Where to run them.
        seed: The root seed.
        events: Receives events.
        share: The run's share; `close` gives it back.
    """

    def __init__(
        self, env_config: EnvConfig, config: LaunchConfig, seed: int, events: EventLog, share: RunShare
    ) -> None:
        self.share = share
        self.collector = Collector(env_config, config, seed, events)
        self.is_started = False

    def start(self, on_begun: Callable[[], None] | None = None) -> None:
        """Start the workers. Call `on_begun` before the wait for them."""
        server = self.collector.server
        self.spaces = self.collector.start(on_begun)
        """The observation space and the action space of one environment."""
        self.num_stacked_frames = server.handshake.num_stacked_frames
        """Frames per stacked observation; 0 if none are stacked."""
        self._monitor = LaunchMonitor(server)
        self.page_monitor = LaunchMonitor(server)
        """That of the status page: a diagnosis covers the time since the last one of the same monitor."""
        self.share.drive(server.slots)
        self.is_started = True

    def stats(self) -> dict[str, Any]:
        """The counters for `ClusterEnv.stats`."""
        found = self.collector.snapshot()
        found["slots"]["waited_seconds"] = self.share.waited_seconds()
        return found | self.share.snapshot()

    def diagnoses(self, metrics: Sequence[Mapping[str, float]]) -> list[Diagnosis]:
        """Return what `ClusterEnv.diagnose` does, then further causes that are independent of it."""
        return self._monitor.diagnoses(self.stats(), self.collector.kl_threshold, metrics)

    def close(self) -> None:
        """End the workers, and then give their slots back."""
        try:
            self.collector.close()
        finally:
            self.share.close()


class LaunchProgress:
    """What the status page shows of a run, from before its launch until its end (a `RunView`)."""

    def __init__(self, env_config: EnvConfig, events: EventLog) -> None:
        self.title, self.events = env_config.label, events.events
        self.kl_threshold = threshold_of(rule_of(env_config.sync, env_config.kl_threshold))
        self.share: RunShare | None = None
        """None before the launch."""
        self.run: LaunchedRun | None = None
        """None while the run has no slots yet."""
        self.name = ""
        """Name of the run in the status of its coordinator; empty: that of the script."""
        self.is_command = False
        """Whether `farstep train` runs it: then remedies name its options instead of arguments in Python."""

    def stats(self) -> dict[str, Any]:
        """The counters for `ClusterEnv.stats`; empty until the start of workers was requested."""
        run = self.run
        return run.stats() if run is not None and run.collector.server.has_begun else {}

    def diagnoses(self) -> list[Diagnosis]:
        """Return the diagnoses of a running run, or what the run waits for."""
        return self.for_user(self._diagnoses())

    def for_user(self, found: list[Diagnosis]) -> list[Diagnosis]:
        """Return the diagnoses with remedies that fit how the run was started: options, or arguments in Python."""
        from farstep.observe.diagnosis import with_options

        return [with_options(each) for each in found] if self.is_command else found

    def _diagnoses(self) -> list[Diagnosis]:
        from farstep.observe.diagnosis import MIN_NODES_OPTIONS, MIN_NODES_REMEDY, Diagnosis

        share, run = self.share, self.run
        if share is None:
            return [Diagnosis(cause="starting", text="The run is waiting for the first call that needs workers.")]
        if share.waiting_for:
            return [Diagnosis(cause="no slots", text=f"The run is waiting for {share.waiting_for}.")]
        if run is None or not run.is_started:
            workers = "workers to start" if run is None else run.collector.server.waiting_for()
            return [Diagnosis(cause="starting", text=f"The run is waiting for {workers}.")]
        if nodes := run.collector.server.awaited_nodes():
            text = f"The run is waiting for nodes: {nodes}."
            if run.collector.server.lacks_server():  # which no option makes unnecessary
                return [Diagnosis(cause="no nodes", text=text)]
            return [Diagnosis(cause="no nodes", text=text, remedy=MIN_NODES_REMEDY, options_remedy=MIN_NODES_OPTIONS)]
        return run.page_monitor.diagnoses(run.stats(), self.kl_threshold)

    def unconnected_nodes(self) -> str:
        """Describe the nodes that are not connected; empty if all are connected."""
        run = self.run
        return run.collector.server.unconnected_nodes() if run is not None else ""

    def forget(self) -> None:
        """Show the run as before its launch, because the launch was interrupted."""
        self.share = self.run = None


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
        self.on_begun: Callable[[], None] | None = None
        """Called when the launch waits for workers: what can be refused at once has been checked."""
        self.progress = LaunchProgress(env_config, events)
        """What the status page shows."""
        self._page = RunPage(self.progress)
        weakref.finalize(self, self._page.close)

    def status_page(self) -> StatusPage:
        """Return the page that shows the run in a browser, also before its launch. The first call starts its server.

        Raises:
            ClosedError: The run is closed.
            RunError: The server could not be started.
        """
        self.check_open()
        return self._page.open()

    def run(self) -> LaunchedRun:
        """Return the run; launch it if it is not running.

        Raises:
            ClosedError: `close` was called.
            FarstepError: The workers could not be started.
        """
        with self._launching:
            self.check_open()
            if self._run is None:
                run = self._launched()
                # If close() is never called, this closes at garbage collection or at interpreter exit.
                self._finalizer = weakref.finalize(self, _close, self._page, run)
                self._run = run
                try:
                    self.check_open()  # another thread may have called close() before self._run was set
                    run.start(self.on_begun)
                except Exception:
                    self.close()
                    raise
                except BaseException:  # after Ctrl-C, the next call launches again
                    try:
                        run.close()
                    finally:
                        self._finalizer.detach()
                        self._run = None
                        self.progress.forget()
                    raise
            return self._run

    def _launched(self) -> LaunchedRun:
        """Wait for the run's share, and return the run, before its start."""
        env_config, config, _, events = self._options
        if isinstance(config, LocalConfig):  # on nodes, other environments may be registered
            Source.of(env_config).check()
        num_workers = config.num_workers(env_config.envs_per_node)
        share: RunShare | None = None
        try:
            with Interrupts().deferred():  # otherwise Ctrl-C could leave a registered run with no owner
                name, per_session = self.progress.name, env_config.release_idle
                share = RunShare(config, num_workers, events.emit, name=name, per_session=per_session)
            self.progress.share = share
            share.wait(self.check_open)
            run = LaunchedRun(*self._options, share)
        except BaseException:
            self.progress.forget()
            if share is not None:
                share.close()
            raise
        self.progress.run = run
        return run

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
            else:
                self._page.close()

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


def _close(page: RunPage, run: LaunchedRun) -> None:
    """Show the last data, then end the workers."""
    try:
        page.close()
    finally:
        run.close()
