"""Checks every node: starts one worker on each node through the engine, as a run would, and collects reports."""

from __future__ import annotations

import dataclasses
import json
import platform
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import cloudpickle

from farstep.config.env import EnvConfig
from farstep.config.launch import EngineConfig, LaunchConfig, LocalConfig, SlurmConfig, SSHConfig
from farstep.core import Received
from farstep.doctor.findings import Finding, Report, ok, problem, warning
from farstep.doctor.probe import Probe
from farstep.errors import FarstepError, WireError, WorkerError, counted
from farstep.head.events import EventLog
from farstep.head.members.worker_records import WorkerRecord
from farstep.head.server import Server
from farstep.head.tickets.records import IssuedTicket
from farstep.launch.cluster import ClusterLauncher
from farstep.launch.daemon.node_daemon import UNANSWERED
from farstep.launch.engines.engine_processes import ENDED
from farstep.launch.engines.slurm import NEVER_STARTS
from farstep.rollout.program import Program
from farstep.rollout.sources import Source
from farstep.sync import Always
from farstep.version import VERSION
from farstep.wire import messages as m
from farstep.wire.codec import unpack
from farstep.wire.versions import versions

_CALL_S = 60.0
"""Time limit in seconds for a node to answer a call."""
_MAKE_S = 120.0
"""Time limit in seconds for building and resetting the environment."""
_PINGS = 20
_SMALLEST, _LARGEST = 256 * 2**10, 64 * 2**20
_ENOUGH_S = 0.3
"""Minimum duration, in seconds, of a transfer that measures the throughput."""
_REPEAT_S = 2.0
"""A transfer that takes fewer seconds is repeated, and the fastest counts."""
_SLOW_MB = 10.0
"""The doctor warns if the throughput is below this, in MB/s."""
_LATE_MS = 100.0
"""The doctor warns if a round trip takes longer than this, in milliseconds."""
_CLOCK_S = 1.0
"""The doctor warns if clocks differ by more than this, in seconds."""
_REPORT_S = 3.0
"""Seconds between progress messages while waiting for nodes."""
_FIXES = {
    "No such file": "set the path of Python on the nodes: --python PATH.",
    "No module named": f"install farstep {VERSION} for that Python, or --setup '. ENV/bin/activate' --python python.",
    "--time specification": "write --time-limit as minutes, HH:MM:SS or D-HH:MM:SS.",
    "node configuration is not available": "request fewer cores, GPUs or nodes, or choose another --partition.",
    "feature specification": "'sinfo --format %f' lists the valid values of --slurm-constraint.",
    "Invalid account": "'sacctmgr show user $USER withassoc' lists your accounts: set --slurm-account.",
    "generic resource (gres)": "'sinfo --format \"%P %G\"' lists GPUs: change --partition or --gpus-per-node.",
    "SLURM_CONF is right": "run 'sinfo'; if it fails, set SLURM_CONF to the path of the cluster's slurm.conf.",
    "no Kubernetes cluster is configured": "set KUBECONFIG to a file with which 'kubectl get pods' works.",
    "the Kubernetes API server at": "run 'kubectl get pods'; if it fails, choose another context with --kube-context.",
    UNANSWERED: "open the head's ports to the nodes, or set --head-address to an address that they can reach.",
}
"""Fixes for errors of engines, by a part of the error message."""
_OTHERWISE = "fix the cause that this text names, then run the doctor again."


def nodes(config: LaunchConfig, env: Mapping[str, object] | None, wait_s: float, report: Report) -> Iterator[Finding]:
    """Check each node with a node daemon and one worker, then stop both.

    Args:
        config: The launch configuration, as for a run.
        env: Fields of an `EnvConfig` to build and reset on each node; None: no environment is built.
        wait_s: Seconds to wait for nodes.
        report: Called with progress messages.

    Yields:
        One finding per check.
    """
    needed = config.workers_on_node * config.cpus_per_worker
    try:
        run = ProbeRun(_small(config, needed, wait_s))
    except FarstepError as error:
        yield problem(f"workers cannot be started: {error}", _fix_of(str(error)))
        return
    try:
        yield from run.wait_for_nodes(wait_s, report)
        for record in run.ready():
            place = run.place_of(record)
            report(f"checking {place}")
            try:
                yield from _node(run, record, place, config, needed, env)
            except WorkerError as error:
                yield problem(
                    f"{place}: {error.message}", "run 'python -m farstep.worker' there by hand, or look at its log."
                )
    except FarstepError as error:
        refused = list(run.refused())
        yield from refused or [problem(str(error), _fix_of(str(error)))]
    finally:
        report("stopping the workers")
        run.close()


def _fix_of(error: str) -> str:
    """Return what to do about an engine's error message."""
    return next((fix for words, fix in _FIXES.items() if words in error), _OTHERWISE)


def _small(config: LaunchConfig, cpus: int, wait_s: float) -> LaunchConfig:
    """Return the configuration with one worker per node and the same cores. A missing node does not end the run."""
    timeouts = dataclasses.replace(config.timeouts, step_s=_MAKE_S + _CALL_S)
    shared: dict[str, Any] = {
        "workers_per_node": 1,
        "cpus_per_worker": cpus,
        "restart_budget": 0,
        "timeouts": timeouts,
    }
    if isinstance(config, LocalConfig):
        return dataclasses.replace(config, **shared, transport="tcp")
    assert isinstance(config, EngineConfig)
    # Keep `min_nodes`, because SLURM puts this many nodes into one job: the doctor must make the same request as a run.
    fewest = config.min_nodes if isinstance(config, SlurmConfig) else 1
    return dataclasses.replace(config, **shared, min_nodes=fewest, max_nodes=None, queue_s=wait_s + _CALL_S)


def _node(
    run: ProbeRun, record: WorkerRecord, place: str, config: LaunchConfig, needed: int, env: Mapping[str, object] | None
) -> Iterator[Finding]:
    about = run.call(record, "about")
    address = run.address_of(record)
    same = ", ".join(f"{name} {version}" for name, version in versions().items() if name not in ("protocol", "python"))
    yield ok(
        f"{place}: {f'reached the head at {address}, ' if address else ''}{same}, Python {about['python']}, as here"
    )
    if about["python"] != platform.python_version():
        yield warning(
            f"{place}: Python {about['python']}, here {platform.python_version()}", "install the same version."
        )
    yield _resources(place, about, config, needed)
    if config.cpu_affinity != "off":
        yield ok(f"{place}: workers are pinned to cores, here to {about['cores']}")
    offset, uncertainty = run.clock_of(record)
    if abs(offset) - uncertainty > _CLOCK_S:
        yield warning(
            f"{place}: its clock is {offset:+.1f} s off", "run an NTP client there; logs are hard to compare."
        )
    else:
        yield ok(f"{place}: its clock agrees within {abs(offset) + uncertainty:.3f} s")
    yield from _connection(run, record, place)
    if env is not None:
        error = run.call(record, "make", json.dumps(env), _MAKE_S, timeout_s=_MAKE_S + _CALL_S)
        if error:
            yield problem(
                f"{place}: {env['env_name']} cannot be built:\n{error}",
                f"install what it needs for {about['executable']} there, or name its module: 'module:Id'.",
            )
        else:
            yield ok(f"{place}: {env['env_name']} can be built and reset")


def _resources(place: str, about: Mapping[str, Any], config: LaunchConfig, needed: int) -> Finding:
    cpus, gpus = about["cpus"], about["gpus"]
    text = f"{place}: {cpus} cores, {about['memory'] / 2**30:,.1f} GiB of memory, {gpus} GPUs"
    if gpus < config.gpus_per_node:
        other = ", or change --partition" if isinstance(config, SlurmConfig) else "; 'nvidia-smi' there lists them"
        return problem(f"{text}, but gpus_per_node={config.gpus_per_node}", f"lower --gpus-per-node{other}.")
    if cpus < needed:
        return warning(f"{text}, for workers that need {needed} cores", f"set --workers-per-node to {cpus} or fewer.")
    return ok(text)


def _connection(run: ProbeRun, record: WorkerRecord, place: str) -> Iterator[Finding]:
    median_ms = 1000 * run.round_trip_s(record)
    text = f"{place}: a round trip takes {median_ms:.2f} ms (median of {_PINGS})"
    if median_ms > _LATE_MS:
        yield warning(text, "prefer collect() or stream() with long rollouts: step() needs a round trip per step.")
    else:
        yield ok(text)
    sent, received = run.rates(record)
    text = f"{place}: {sent:,.0f} MB/s to it and {received:,.0f} MB/s from it, encrypted"
    if min(sent, received) < _SLOW_MB:
        yield warning(
            text, "send fewer bytes: kl_threshold and weights={'half': True} to it, smaller observations from it."
        )
    else:
        yield ok(text)


class ProbeRun:
    """A run with one `Probe` per node. It calls the methods of one probe at a time, and is the server's `Client`."""

    def __init__(self, config: LaunchConfig) -> None:
        source = Source.of(EnvConfig(type="factory", env_name=Probe))
        program = Program(source, Always(), autoreset_mode="Disabled")
        self._config = config
        self._server = Server(config, program, 1, 0, 0, self, EventLog())
        self._request, self._answers = 0, dict[int, Any]()
        try:
            with self._server.locked():
                self._server.raise_failure()
            self._server.begin()
        except BaseException:
            self._server.close()
            raise

    def close(self) -> None:
        self._server.close()

    # ---- nodes ----

    @property
    def _launcher(self) -> ClusterLauncher | None:
        launcher = self._server.supervisor.launcher
        return launcher if isinstance(launcher, ClusterLauncher) else None

    def wait_for_nodes(self, wait_s: float, report: Report) -> Iterator[Finding]:
        """Wait until all nodes are ready, or until no more nodes can be expected. Yield findings about missing
        nodes."""
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            if self._server.wait_until(self._complete, min(deadline, time.monotonic() + _REPORT_S)):
                break
            whereabouts = self._server.supervisor.whereabouts()
            if NEVER_STARTS in whereabouts:
                break
            report(f"waiting for {whereabouts}")
        wanted, ready = len(self._server.records), len(self.ready())
        if ready == wanted:
            yield ok(f"all nodes connected: {wanted}")
            return
        yield from self.refused()
        with self._server.locked():
            launcher, waiting = self._launcher, self._server.supervisor.whereabouts()
            connected = len(launcher.nodes()) if launcher else wanted
            logs = launcher.logs() if launcher else ""
        if connected > ready:
            late = counted(connected - ready, "node")
            text = f"{late} connected, but no worker was ready there within {wait_s:g} s; {waiting}"
            yield problem(text, "raise --wait-s; workers may import slowly from a shared file system.")
        if connected < wanted:
            text = f"{wanted - connected} of {counted(wanted, 'node')} did not connect; {waiting}\n{logs}".rstrip()
            yield problem(text, self._fix(waiting, logs))

    def _fix(self, waiting: str, logs: str) -> str:
        """Return what to do about nodes that did not connect."""
        if NEVER_STARTS in waiting:
            return "request fewer nodes, cores or minutes, or choose another --partition."
        if isinstance(self._config, SSHConfig) and ENDED in waiting and UNANSWERED not in logs:
            return "fix the problems of these hosts that are listed above."
        return (
            "if they need more time, raise --wait-s; if they cannot reach the head, open its ports or set "
            "--head-address."
        )

    def refused(self) -> Iterator[Finding]:
        for host, (why, remedy) in (self._launcher.refusals.hosts if self._launcher else {}).items():
            yield problem(f"{host} {why}", remedy)

    def _complete(self) -> bool | None:
        ready = len(self.ready())
        if self._launcher is None:
            return True if ready == len(self._server.records) else None
        return True if ready and ready >= min(self._launcher.expected(), len(self._server.records)) else None

    def ready(self) -> list[WorkerRecord]:
        return [record for record in self._server.records if record.ready]

    def _node_of(self, record: WorkerRecord) -> dict[str, Any]:
        found = (node for node in self._server.supervisor.launcher.nodes() if node["workers"] == [record.worker])
        return next(found, {})

    def place_of(self, record: WorkerRecord) -> str:
        place = self._node_of(record).get("place")
        return f"{record.host} ({place})" if place else f"{record.host}"

    def address_of(self, record: WorkerRecord) -> str:
        return str(self._node_of(record).get("address", ""))

    # ---- calls ----

    def call(self, record: WorkerRecord, name: str, *arguments: Any, timeout_s: float = _CALL_S) -> Any:
        """Call a method of the probe on a node and return its result."""
        server = self._server
        with server.locked():
            server.raise_failure()
            self._request += 1
            server.outbox.send(record, m.Call(self._request, "call"), [cloudpickle.dumps(((name, arguments, {}), {}))])
        request = self._request
        answered = server.wait_until(lambda: True if request in self._answers else None, time.monotonic() + timeout_s)
        if not answered:
            raise WorkerError(f"the worker did not answer within {timeout_s:g} s", record.where(record.phase))
        answer = self._answers.pop(request)
        if isinstance(answer, WorkerError):
            raise answer
        return answer[0]

    def clock_of(self, record: WorkerRecord) -> tuple[float, float]:
        """Measure how many seconds the node's clock is ahead of the head's clock. Also return the uncertainty in
        seconds."""
        best = (0.0, float("inf"))
        for _ in range(5):
            before = time.time()
            clock = float(self.call(record, "clock"))
            after = time.time()
            best = min(best, (clock - (before + after) / 2, (after - before) / 2), key=lambda pair: pair[1])
        return best

    def round_trip_s(self, record: WorkerRecord) -> float:
        return statistics.median(self._seconds(record, "ping") for _ in range(_PINGS))

    def rates(self, record: WorkerRecord) -> tuple[float, float]:
        """Measure the throughput to and from the node in MB/s, over the connection that rollouts use."""
        overhead = self.round_trip_s(record)
        return self._rate(record, "take", overhead), self._rate(record, "give", overhead)

    def _rate(self, record: WorkerRecord, name: str, overhead: float) -> float:
        count = _SMALLEST
        while True:
            argument = bytes(count) if name == "take" else count
            seconds = self._seconds(record, name, argument)
            if seconds > _ENOUGH_S or count >= _LARGEST:
                break
            count *= 4
        if seconds < _REPEAT_S:  # take the fastest of three, because other load only slows a transfer down
            seconds = min(seconds, *(self._seconds(record, name, argument) for _ in range(2)))
        return count / 1e6 / max(seconds - overhead, 1e-6)

    def _seconds(self, record: WorkerRecord, name: str, *arguments: Any) -> float:
        began = time.monotonic()
        self.call(record, name, *arguments)
        return time.monotonic() - began

    # ---- head.server.Client ----

    def version(self) -> int:
        return 0

    def make_ticket(self, issued: IssuedTicket) -> tuple[m.Ticket, list[Any]]:
        raise AssertionError("the doctor issues no tickets")

    def on_message(self, record: WorkerRecord, message: m.FromWorker, received: Received) -> None:
        if isinstance(message, m.Reply):
            if len(received.frames) != 2 or not isinstance(answer := unpack(received.frames[1]), list) or not answer:
                raise WireError("a reply without its value.")
            self._answers[message.request] = answer

    def on_error(self, record: WorkerRecord, failure: m.Failure, error: WorkerError) -> None:
        if failure.request is not None:
            self._answers[failure.request] = error

    def on_parked(self, record: WorkerRecord) -> None:
        """Never called: probes do not scale."""

    def on_lost(self, record: WorkerRecord) -> None:
        pass
