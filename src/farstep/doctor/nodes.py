"""Every node, through the engine as a run would use it: one worker on each, which is asked and then sent home."""

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
from farstep.doctor.findings import Finding, Say, ok, problem, warning
from farstep.doctor.probe import Probe
from farstep.errors import FarstepError, WireError, WorkerError, counted
from farstep.head.members.worker_records import WorkerRecord
from farstep.head.server import Server
from farstep.head.tickets.records import IssuedTicket
from farstep.launch.cluster import ClusterLauncher
from farstep.launch.daemon.node_daemon import UNANSWERED
from farstep.launch.engine_processes import ENDED
from farstep.launch.slurm import NEVER_STARTS
from farstep.rollout.program import Program
from farstep.rollout.sources import Source
from farstep.sync import Always
from farstep.version import VERSION
from farstep.wire import messages as m
from farstep.wire.codec import unpack
from farstep.wire.versions import versions

_ASK_S = 60.0
"""How long a node may take to answer anything."""
_MAKE_S = 120.0
_PINGS = 20
_SMALLEST, _LARGEST = 256 * 2**10, 64 * 2**20
_ENOUGH_S = 0.3
"""A transfer that takes so long says how fast the line is."""
_REPEAT_S = 2.0
_SLOW_MB = 10.0
_LATE_MS = 100.0
_CLOCK_S = 1.0
_NOTE_S = 3.0
_FIXES = {
    "No such file": "say where Python is there: --python PATH.",
    "No module named": f"install farstep {VERSION} for that Python, or --setup '. ENV/bin/activate' --python python.",
    "--time specification": "say --time-limit as minutes, HH:MM:SS or D-HH:MM:SS.",
    "node configuration is not available": "ask for fewer cores, GPUs or nodes, or say another --partition.",
    "feature specification": "'sinfo --format %f' lists what --slurm-constraint may say.",
    "Invalid account": "'sacctmgr show user $USER withassoc' lists your accounts: say --slurm-account.",
    "generic resource (gres)": "'sinfo --format \"%P %G\"' lists GPUs: change --partition or --gpus-per-node.",
    "is SLURM_CONF right": "run 'sinfo'; if it fails, set SLURM_CONF to the path of the cluster's slurm.conf.",
    "no Kubernetes cluster is configured": "set KUBECONFIG to a file with which 'kubectl get pods' works.",
    "the Kubernetes API server at": "run 'kubectl get pods'; if it fails, choose another context with --kube-context.",
    UNANSWERED: "open the head's ports to the nodes, or set --head-address to an address that they can reach.",
}
"""What to do about what engines say."""
_OTHERWISE = "fix the cause that this text names, then run the doctor again."


def nodes(config: LaunchConfig, env: Mapping[str, object] | None, wait_s: float, say: Say) -> Iterator[Finding]:
    """Start an agent and a worker on each node, ask them, end them."""
    needed = config.workers_on_node * config.cpus_per_worker
    try:
        visit = Visit(_small(config, needed, wait_s))
    except FarstepError as error:
        yield problem(f"it does not start: {error}", _fix_of(str(error)))
        return
    try:
        yield from visit.wait_for_nodes(wait_s, say)
        for record in visit.there():
            place = visit.place_of(record)
            say(f"asking {place}")
            try:
                yield from _one(visit, record, place, config, needed, env)
            except WorkerError as error:
                yield problem(
                    f"{place}: {error.message}", "run farstep's own worker there by hand, or look at its log."
                )
    except FarstepError as error:
        misfits = list(visit.refused())
        yield from misfits or [problem(str(error), _fix_of(str(error)))]
    finally:
        say("ending")
        visit.close()


def _fix_of(error: str) -> str:
    """The remedy for an engine's error message."""
    return next((fix for words, fix in _FIXES.items() if words in error), _OTHERWISE)


def _small(config: LaunchConfig, cpus: int, wait_s: float) -> LaunchConfig:
    """The same nodes and cores with one worker on each; nodes that cannot come must not end the others."""
    timeouts = dataclasses.replace(config.timeouts, step_s=_MAKE_S + _ASK_S)
    shared: dict[str, Any] = {
        "workers_per_node": 1,
        "cpus_per_worker": cpus,
        "restart_budget": 0,
        "timeouts": timeouts,
    }
    if isinstance(config, LocalConfig):
        return dataclasses.replace(config, **shared, transport="tcp")
    assert isinstance(config, EngineConfig)
    # SLURM gives nodes that must come together as one job, on machines of their own; that is what a run would get.
    fewest = config.min_nodes if isinstance(config, SlurmConfig) else 1
    return dataclasses.replace(config, **shared, min_nodes=fewest, max_nodes=None, queue_s=wait_s + _ASK_S)


def _one(
    visit: Visit, record: WorkerRecord, place: str, config: LaunchConfig, needed: int, env: Mapping[str, object] | None
) -> Iterator[Finding]:
    about = visit.ask(record, "about")
    address = visit.address_of(record)
    same = ", ".join(f"{name} {version}" for name, version in versions().items() if name not in ("protocol", "python"))
    yield ok(
        f"{place}: {f'reached the head at {address}, ' if address else ''}{same}, Python {about['python']}, as here"
    )
    if about["python"] != platform.python_version():
        yield warning(f"{place}: Python {about['python']}, here {platform.python_version()}", "use one version.")
    yield _resources(place, about, config, needed)
    offset, doubt = visit.clock_of(record)
    if abs(offset) - doubt > _CLOCK_S:
        yield warning(
            f"{place}: its clock is {offset:+.1f} s off", "run an NTP client there; logs are hard to compare."
        )
    else:
        yield ok(f"{place}: its clock agrees within {abs(offset) + doubt:.3f} s")
    yield from _line(visit, record, place)
    if env is not None:
        wrong = visit.ask(record, "make", json.dumps(env), _MAKE_S, timeout_s=_MAKE_S + _ASK_S)
        if wrong:
            yield problem(
                f"{place}: {env['env_name']} cannot be made:\n{wrong}",
                f"install what it needs for {about['executable']} there, or name its module: 'module:Id'.",
            )
        else:
            yield ok(f"{place}: {env['env_name']} can be made and reset")


def _resources(place: str, about: Mapping[str, Any], config: LaunchConfig, needed: int) -> Finding:
    cpus, gpus = about["cpus"], about["gpus"]
    text = f"{place}: {cpus} cores, {about['memory'] / 2**30:,.1f} GiB of memory, {gpus} GPUs"
    if gpus < config.gpus_per_node:
        other = ", or change --partition" if isinstance(config, SlurmConfig) else "; 'nvidia-smi' there lists them"
        return problem(f"{text}, but gpus_per_node={config.gpus_per_node}", f"lower --gpus-per-node{other}.")
    if cpus < needed:
        return warning(f"{text}, for workers that want {needed} cores", f"say --workers-per-node {cpus} or fewer.")
    return ok(text)


def _line(visit: Visit, record: WorkerRecord, place: str) -> Iterator[Finding]:
    median_ms = 1000 * visit.round_trip_s(record)
    text = f"{place}: a round trip takes {median_ms:.2f} ms (median of {_PINGS})"
    if median_ms > _LATE_MS:
        yield warning(text, "prefer collect() or stream() with long rollouts: step() pays for each step.")
    else:
        yield ok(text)
    there, back = visit.rates(record)
    text = f"{place}: {there:,.0f} MB/s to it and {back:,.0f} MB/s from it, encrypted"
    if min(there, back) < _SLOW_MB:
        yield warning(text, "send less: kl_threshold and weights={'half': True} to it, smaller observations from it.")
    else:
        yield ok(text)


class Visit:
    """A run whose workers are asked one at a time (a client of the server, see `Client`)."""

    def __init__(self, config: LaunchConfig) -> None:
        source = Source.of(EnvConfig(type="factory", env_name=Probe))
        program = Program(source, Always(), autoreset_mode="Disabled")
        self._config = config
        self._server = Server(config, program, 1, 0, 0, self)
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

    def wait_for_nodes(self, wait_s: float, say: Say) -> Iterator[Finding]:
        """Until all are there, or no more can be expected; what is known of those that are not."""
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            if self._server.wait_until(self._complete, min(deadline, time.monotonic() + _NOTE_S)):
                break
            whereabouts = self._server.supervisor.whereabouts()
            if NEVER_STARTS in whereabouts:
                break
            say(f"waiting: {whereabouts}")
        asked, ready = len(self._server.records), len(self.there())
        if ready == asked:
            yield ok(f"all nodes came: {asked}")
            return
        yield from self.refused()
        with self._server.locked():
            launcher, waiting = self._launcher, self._server.supervisor.whereabouts()
            came = len(launcher.nodes()) if launcher else asked
            logs = launcher.logs() if launcher else ""
        if came > ready:
            late = counted(came - ready, "node")
            text = f"{late} came, but no worker was ready there within {wait_s:g} s; {waiting}"
            yield problem(text, "raise --wait-s; workers may import slowly from a shared file system.")
        if came < asked:
            text = f"{asked - came} of {counted(asked, 'node')} did not come; {waiting}\n{logs}".rstrip()
            yield problem(text, self._fix(waiting, logs))

    def _fix(self, waiting: str, logs: str) -> str:
        """What may bring nodes that did not come."""
        if NEVER_STARTS in waiting:
            return "ask for fewer nodes, cores or minutes, or say another --partition."
        if isinstance(self._config, SSHConfig) and ENDED in waiting and UNANSWERED not in logs:
            return "put right what is said of these hosts above."
        return "if they need longer, --wait-s; if the head does not answer them, open its ports or say --head-address."

    def refused(self) -> Iterator[Finding]:
        for host, different in (self._launcher.refused if self._launcher else {}).items():
            yield problem(f"{host} does not fit: {different}", "install the same versions there.")

    def _complete(self) -> bool | None:
        ready = len(self.there())
        if self._launcher is None:
            return True if ready == len(self._server.records) else None
        return True if ready and ready >= min(self._launcher.expected(), len(self._server.records)) else None

    def there(self) -> list[WorkerRecord]:
        return [record for record in self._server.records if record.ready]

    def _node_of(self, record: WorkerRecord) -> dict[str, Any]:
        found = (node for node in self._server.supervisor.launcher.nodes() if node["workers"] == [record.worker])
        return next(found, {})

    def place_of(self, record: WorkerRecord) -> str:
        place = self._node_of(record).get("place")
        return f"{record.host} ({place})" if place else f"{record.host}"

    def address_of(self, record: WorkerRecord) -> str:
        return str(self._node_of(record).get("address", ""))

    # ---- questions ----

    def ask(self, record: WorkerRecord, name: str, *arguments: Any, timeout_s: float = _ASK_S) -> Any:
        """What the probe's method returns there."""
        server = self._server
        with server.locked():
            server.raise_failure()
            self._request += 1
            server.send(record, m.Call(self._request, "call"), [cloudpickle.dumps(((name, arguments, {}), {}))])
        request = self._request
        answered = server.wait_until(lambda: True if request in self._answers else None, time.monotonic() + timeout_s)
        if not answered:
            raise WorkerError(f"it did not answer within {timeout_s:g} s", record.where(record.phase))
        answer = self._answers.pop(request)
        if isinstance(answer, WorkerError):
            raise answer
        return answer[0]

    def clock_of(self, record: WorkerRecord) -> tuple[float, float]:
        """How far its clock is ahead of ours, and how uncertain that is, in seconds."""
        best = (0.0, float("inf"))
        for _ in range(5):
            before = time.time()
            theirs = float(self.ask(record, "clock"))
            after = time.time()
            best = min(best, (theirs - (before + after) / 2, (after - before) / 2), key=lambda pair: pair[1])
        return best

    def round_trip_s(self, record: WorkerRecord) -> float:
        return statistics.median(self._seconds(record, "ping") for _ in range(_PINGS))

    def rates(self, record: WorkerRecord) -> tuple[float, float]:
        """Megabytes per second to it and from it, over the connection that rollouts take."""
        overhead = self.round_trip_s(record)
        return self._rate(record, "take", overhead), self._rate(record, "give", overhead)

    def _rate(self, record: WorkerRecord, name: str, overhead: float) -> float:
        count = _SMALLEST
        while True:
            what = bytes(count) if name == "take" else count
            seconds = self._seconds(record, name, what)
            if seconds > _ENOUGH_S or count >= _LARGEST:
                break
            count *= 4
        if seconds < _REPEAT_S:  # the best of three: whatever else the machines do only makes it slower
            seconds = min(seconds, *(self._seconds(record, name, what) for _ in range(2)))
        return count / 1e6 / max(seconds - overhead, 1e-6)

    def _seconds(self, record: WorkerRecord, name: str, *arguments: Any) -> float:
        began = time.monotonic()
        self.ask(record, name, *arguments)
        return time.monotonic() - began

    # ---- the server's side ----

    def version(self) -> int:
        return 0

    def make_ticket(self, issued: IssuedTicket) -> tuple[m.Ticket, list[Any]]:
        raise AssertionError("nothing is rolled")

    def on_message(self, record: WorkerRecord, message: m.FromWorker, received: Received) -> None:
        if isinstance(message, m.Reply):
            if len(received.frames) != 2 or not isinstance(answer := unpack(received.frames[1]), list) or not answer:
                raise WireError("a reply without its value.")
            self._answers[message.request] = answer

    def on_error(self, record: WorkerRecord, failure: m.Failure, error: WorkerError) -> None:
        if failure.request is not None:
            self._answers[failure.request] = error

    def on_lost(self, record: WorkerRecord) -> None:
        pass
