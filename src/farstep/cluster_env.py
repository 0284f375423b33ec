"""`ClusterEnv`: the class through which a user's process runs environments on workers."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Collection, Container, Generator, Iterator, Mapping, Sequence
from operator import itemgetter
from types import NoneType, TracebackType
from typing import TYPE_CHECKING, Any, Self

import cloudpickle
import gymnasium
import numpy as np
from gymnasium.vector import VectorEnv

from farstep.batch import Batch, Part
from farstep.checkpoint.files import Refused
from farstep.config.env import EnvConfig, check_count
from farstep.config.launch import InProcessConfig, LaunchConfig, LocalConfig
from farstep.core import Agent, Array, Nested
from farstep.elastic.coordinator_client import CoordinatorClient
from farstep.elastic.device_ledger import DeviceLedger
from farstep.errors import CheckpointError, ClosedError, ConfigError, counted
from farstep.event import Event, EventKind, check_kind
from farstep.head.collector import Collector
from farstep.head.events import EventLog
from farstep.head.members.worker_records import ResetRequest
from farstep.resources import machine_use
from farstep.rollout.seeds import fresh_root, resumed_root
from farstep.schema import map_leaves, nest
from farstep.sync import Always

if TYPE_CHECKING:
    from farstep.observe.diagnosis import Diagnosis, RunMonitor
    from farstep.observe.status import StatusPage

Space = gymnasium.spaces.Space[Any]
_MAX_STALENESS = 1000


class ClusterEnv:
    """Environments on workers. Each worker acts with its own copy of the agent and returns whole rollouts.

    Workers start with the first call that needs them, and end with `close` or the `with` block.

    Args:
        env_config: Which environments to run: an `EnvConfig`, or a mapping of its options.
        config: Where to run them: a `LocalConfig`, `SlurmConfig`, `SSHConfig`, `RayConfig`, `KubernetesConfig` or
            `InProcessConfig`, or a mapping of the options of `LocalConfig`. None: on this machine, one worker per core.

    Raises:
        ConfigError: An option is unknown, out of range, or contradicts another.

    Attributes:
        env_config: The `EnvConfig`.
        config: The launch configuration.
        num_envs: Number of environments on all nodes, including absent nodes. `batch.slots` lists the environments of a
            batch.
        num_workers: Number of workers on all nodes, including absent nodes.
        seed: The root seed, configured or drawn at random.
        observation_space: Space of one environment's observations; set by `launch`.
        action_space: Space of one environment's actions; set by `launch`.
        frame_stack: Frames per stacked observation, if a wrapper of the environments (Gymnasium's
            `FrameStackObservation`) or EnvPool stacks them; otherwise 0. Set by `launch`.

    Example:
        with farstep.ClusterEnv({"env_name": "CartPole-v1", "envs_per_node": 64}) as env:
            for _ in range(100):
                batch = env.collect(agent, steps=128)
                learn(agent, batch)
    """

    def __init__(
        self,
        env_config: EnvConfig | Mapping[str, object],
        config: LaunchConfig | Mapping[str, object] | None = None,
    ) -> None:
        self.env_config = EnvConfig.of(env_config)
        self.config = (config if isinstance(config, LaunchConfig) else LocalConfig.of(config)).resolved()
        self.num_envs = self.config.most_nodes * self.env_config.envs_per_node
        self.num_workers = self.config.num_workers(self.env_config.envs_per_node)
        self.seed = fresh_root() if self.env_config.seed is None else self.env_config.seed
        self._collector: Collector | None = None
        self._events = EventLog()
        self._launching = threading.Lock()
        self._closing = threading.RLock()
        self._closed = False
        self._coordinator: CoordinatorClient | None = None
        """None before the launch, and for a run that shares nothing."""
        if self.config.coordinator is not None and self.config.min_workers > self.num_workers:
            raise ConfigError(
                f"min_workers is {self.config.min_workers}, but this run has {counted(self.num_workers, 'worker')}."
            )
        self._devices = DeviceLedger()
        self._monitor: RunMonitor | None = None
        """None before the first call of `diagnose`."""
        self._status_page: StatusPage | None = None
        """None before the first access to `status_url`."""

    def __repr__(self) -> str:
        idle = "closed" if self._closed else "not launched"
        state = idle if self._collector is None else self._collector.server.state
        workers = f"{self.num_workers} worker{'s' * (self.num_workers > 1)}"
        return f"<ClusterEnv {self._name}: num_envs={self.num_envs} on {workers}, {state}>"

    @property
    def _name(self) -> str:
        name = self.env_config.env_name
        return name if isinstance(name, str) else getattr(name, "__qualname__", getattr(name, "id", repr(name)))

    # ---- start and end ----

    def launch(self) -> tuple[Space, Space]:
        """Start the workers, unless they run already.

        Returns:
            The observation space and the action space of one environment.

        Raises:
            LaunchError: The workers could not be started.
            RemoteEnvError: An environment could not be constructed.
            ClosedError: The `ClusterEnv` is closed.
        """
        self._launched()
        return self.observation_space, self.action_space

    def _launched(self) -> Collector:
        with self._launching:
            self._check_open()
            if self._collector is None:
                client, workers = self._join_coordinator()
                try:
                    collector = Collector(self.env_config, self.config, self.seed, self._events)
                except BaseException:
                    _close(None, client)
                    raise
                # If close() is never called, this closes at garbage collection or at interpreter exit.
                self._finalizer = weakref.finalize(self, _close, collector, client)
                self._collector, self._coordinator = collector, client
                try:
                    self._check_open()  # another thread may have called close() before self._collector was set
                    self.observation_space, self.action_space = collector.start()
                    self.frame_stack = collector.server.handshake.num_stacked_frames
                    self._at_launch = (time.monotonic(), machine_use(collector.server.local_pids()))
                    if client is not None:
                        collector.server.scale_workers(workers)
                        client.drive(collector.server)
                except Exception:
                    self.close()
                    raise
                except BaseException:  # after Ctrl-C, the next call launches again
                    self._collector = self._coordinator = None
                    self._finalizer()
                    raise
            return self._collector

    def _join_coordinator(self) -> tuple[CoordinatorClient | None, int]:
        """Wait for slots of the coordinator, if there is one. Return the client and the number of slots."""
        config = self.config
        if config.coordinator is None:
            return None, self.num_workers
        client = CoordinatorClient(
            config.coordinator, config.priority, config.min_workers, self.num_workers, self._events.emit
        )
        try:
            return client, client.wait(self._check_open)
        except BaseException:
            client.close()
            raise

    @contextlib.contextmanager
    def device_token(self) -> Iterator[int]:
        """Context manager: wait for one of the coordinator's devices, and return it at the end.

        Runs get devices in the order of their requests, so runs that take a device for each update take turns. Without
        a coordinator, nothing is shared and this does not wait.

        Returns:
            The number of the device; 0 without a coordinator.

        Raises:
            ConfigError: The coordinator has no devices.
            ClosedError: The `ClusterEnv` was closed meanwhile.

        Example:
            with env.device_token() as index:
                learner.to(f"cuda:{index}")
                update(learner, batch)
                learner.to("cpu")
        """
        self._launched()
        coordinator = self._coordinator
        token = contextlib.nullcontext(0) if coordinator is None else coordinator.device_token(self._check_open)
        with self._devices.held(token) as device:
            yield device

    @property
    def has_coordinator(self) -> bool:
        """Whether the run shares slots and devices with other runs (option `coordinator`)."""
        return self.config.coordinator is not None

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this ClusterEnv is closed; make a new one.")

    def close(self) -> None:
        """End all workers and free their resources. Further calls do nothing; a concurrent call waits for the first."""
        self._closed = True
        with self._closing:
            if self._status_page is not None:
                self._status_page.close()
            if self._collector is not None:
                self._finalizer()

    def __enter__(self) -> Self:
        self.launch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- acting ----

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Nested, dict[str, Any]]:
        """Start new episodes in all environments, or in some of them.

        Args:
            seed: New root seed, which also restarts the count of episodes at 0. None: keep the seed and start the next
                episodes.
            options: Passed to `reset` of each environment, except `reset_mask`: a bool array `[num_envs]` that selects
                the environments to reset.

        Returns:
            `obs, info` with one row per environment, as in Gymnasium.

        Raises:
            ConfigError: An argument is invalid.
            FarstepError: A worker or an environment failed and could not be replaced.
        """
        if options is not None and not isinstance(options, Mapping):
            raise ConfigError(f"reset got options={options!r}; expected a mapping, e.g. {{'reset_mask': ...}}.")
        rest = dict(options or {})
        mask = rest.pop("reset_mask", None)
        if mask is not None:
            mask = np.asarray(mask)
            if mask.shape != (self.num_envs,) or mask.dtype != bool:
                raise ConfigError(
                    f"reset_mask has shape {list(mask.shape)} and dtype {mask.dtype}; expected [{self.num_envs}] and "
                    "bool."
                )
        root = self.env_config.check_reset(seed, mask is not None)
        roots = None if root is None else [root] * self.num_envs
        request = ResetRequest(roots, mask, cloudpickle.dumps(rest) if rest else None, rest or None)
        batch = self._launched().reset(request).copy()
        return batch.last_obs, _merged(batch)

    def step(self, agent: Agent) -> tuple[Nested, Array, Array, Array, dict[str, Any]]:
        """Step every environment once. The workers choose the actions, and reset ended environments (SAME_STEP).

        Args:
            agent: The policy; if its parameters have changed, they are published first.

        Returns:
            `obs, reward, terminated, truncated, info` with one row per environment, as in Gymnasium. `info` also has
            `action`, all other arrays that `act` returned except a recurrent `state`, and `version`, `valid` and
            `episode_start` as in a batch. An entry of an environment's own info with one of these names gets the prefix
            `env_`.

        Raises:
            FarstepError: A worker, an environment or the agent failed and could not be replaced.
        """
        collector = self._launched()
        collector.adopt(agent)
        batch = collector.one_batch(1, infos=True).copy()  # a copy is cheap, and many loops keep a step's arrays
        return (
            batch.last_obs,
            batch["reward"][0],
            batch["terminated"][0],
            batch["truncated"][0],
            _with_acting(_merged(batch), batch),
        )

    def collect(self, agent: Agent, steps: int = 128, rollout_epochs: int = 1) -> Batch:
        """Collect rollouts of every environment synchronously, with the agent's current parameters.

        Args:
            agent: The policy; if its parameters have changed, they are published first.
            steps: Steps of each environment per rollout; default 128.
            rollout_epochs: Consecutive rollouts in the batch, all with the same parameters; default 1.

        Returns:
            A batch of shape `[steps, rollout_epochs * num_envs]`. Each slot has one column per rollout, in the order of
            collection.

        Raises:
            ConfigError: `steps` or `rollout_epochs` is not a positive integer, or `rollout_epochs` exceeds the limit.
            FarstepError: A worker, an environment or the agent failed and could not be replaced.
        """
        steps, rollout_epochs = check_count("steps", steps), _check_rollouts(rollout_epochs)
        collector = self._launched()
        collector.adopt(agent)
        return collector.one_batch(steps, rollouts=rollout_epochs)

    def parts(self, agent: Agent, steps: int = 128) -> Parts:
        """Collect a rollout synchronously, and yield its parts as they arrive.

        A part is one stage (`EnvConfig.transfer`) of one worker's chunk. If a worker is lost after some stages of its
        chunk were yielded, its replacement rolls another chunk, and the same stages are yielded again for that chunk. A
        part with `complete=True` (the last stage) is yielded only once. The rollout does not wait for absent workers.

        Args:
            agent: The policy; if its parameters have changed, they are published first.
            steps: Steps of each environment; default 128.

        Returns:
            An iterator over parts; its `batch` is the whole rollout.

        Raises:
            ConfigError: `steps` is not a positive integer.
            FarstepError: While iterating: a worker, an environment or the agent failed and could not be replaced.
        """
        return Parts(self._parts(agent, check_count("steps", steps)))

    def _parts(self, agent: Agent, steps: int) -> Generator[Part, None, Batch]:
        collector = self._launched()
        collector.adopt(agent)
        return (yield from collector.parts(steps))

    def stream(
        self,
        agent: Agent,
        steps: int = 128,
        max_staleness: int = 1,
        num_chunks: int | None = None,
        rollout_epochs: int = 1,
    ) -> Generator[Batch]:
        """Yield batches indefinitely; workers collect the next batches while the learner updates.

        Workers get new weights only when `publish` is called. Leaving the loop, or any other call that collects,
        cancels the rollouts in progress.

        Args:
            agent: The policy; if its parameters have changed, they are published first.
            steps: Steps of each environment per chunk; default 128.
            max_staleness: Maximum age of a row in versions when its batch is yielded: the newest version minus the
                version that acted. Older rows are dropped. Default 1. With `kl_threshold`, an older row is kept if its
                policy was measured to be close to a version within the bound.
            num_chunks: Build each batch from the first `num_chunks * rollout_epochs` chunks to arrive. None: from
                `rollout_epochs` chunks of every worker.
            rollout_epochs: Consecutive rollouts per batch; default 1. All rollouts of a batch count as one for
                `max_staleness`.

        Returns:
            An iterator over batches.

        Raises:
            ConfigError: A number is out of range.
            FarstepError: While iterating: a worker, an environment or the agent failed and could not be replaced.

        Example:
            for batch in env.stream(agent, steps=64, max_staleness=2):
                learn(agent, batch)
                env.publish(agent)
        """
        steps, max_staleness = check_count("steps", steps), check_count("max_staleness", max_staleness, minimum=0)
        if max_staleness > _MAX_STALENESS:
            raise ConfigError(
                f"max_staleness is {max_staleness}; at most {_MAX_STALENESS} batches may be in progress at a time."
            )
        rollout_epochs = _check_rollouts(rollout_epochs, max_staleness + 1)
        if num_chunks is not None:
            num_chunks, rollout_epochs = check_count("num_chunks", num_chunks) * rollout_epochs, 1
        return self._stream(agent, steps, max_staleness, num_chunks, rollout_epochs)

    def _stream(
        self, agent: Agent, steps: int, max_staleness: int, num_chunks: int | None, rollouts: int
    ) -> Generator[Batch]:
        collector = self._launched()
        collector.adopt(agent)
        yield from collector.stream(steps, max_staleness, num_chunks, rollouts)

    def scale(self, nodes: int | None = None, *, workers: int | None = None) -> None:
        """Change the number of workers or nodes during a run. The most recent call wins; any thread may call this.

        Workers that are not needed are parked: they finish and send their current chunks, then their processes are
        suspended. They keep their memory, environments and episodes, and use no core. They continue within
        milliseconds, or after about 0.2 s over TCP if they have to reconnect. Their environments are missing from
        batches meanwhile (`batch.slots`). The call does not wait until workers are parked or run. If more nodes are
        needed, it waits until the engine has accepted or refused the request, at most a minute.

        Workers on released nodes first finish and send their current chunks, and then end. New nodes contribute to
        batches as soon as they have started.

        Args:
            nodes: New number of nodes, from `min_nodes` to `max_nodes` of the launch configuration. All workers of
                these nodes run.
            workers: New number of workers that run, from 1 to `num_workers`; the others, those with the highest
                numbers, are parked. If the nodes have too few workers, more nodes are requested; none is released.
                With a coordinator, this is a request: at most this number of workers run.

        Raises:
            ConfigError: Not exactly one argument was given, it is outside its range, or the launcher has no nodes.
            LaunchError: More nodes are needed, and the engine refuses them.
        """
        if (nodes is None) == (workers is None):
            raise ConfigError(f"scale got nodes={nodes} and workers={workers}; expected one of them.")
        if workers is not None:
            if not 1 <= check_count("workers", workers) <= self.num_workers:
                raise ConfigError(
                    f"scale got {counted(workers, 'worker')}; expected 1 to {self.num_workers} (workers_per_node for "
                    "each of max_nodes nodes, at most one per environment)."
                )
            self._scale_workers(workers)
            return
        assert nodes is not None
        if self.config.coordinator is not None:
            raise ConfigError(
                f"scale got nodes={nodes}, but the coordinator decides how many workers of this run may run; use "
                "scale(workers=...) to request more or fewer."
            )
        if isinstance(self.config, (LocalConfig, InProcessConfig)):
            raise ConfigError(
                f"scale got nodes={nodes}, but {type(self.config).__name__} has no nodes to add or release. Use "
                f"scale(workers={nodes}) to choose the number of workers."
            )
        low, high = self.config.fewest_nodes, self.config.most_nodes
        if not low <= check_count("nodes", nodes) <= high:
            raise ConfigError(
                f"scale got {nodes} nodes; {type(self.config).__name__} allows {low} to {high} (min_nodes, max_nodes)."
            )
        self._launched().server.scale(nodes)

    def _scale_workers(self, workers: int) -> None:
        collector = self._launched()
        if self._coordinator is None:
            collector.server.scale_workers(workers)
            return
        if workers < self.config.min_workers:
            raise ConfigError(f"scale got {counted(workers, 'worker')}; min_workers is {self.config.min_workers}.")
        self._coordinator.want(workers)

    # ---- checkpoints ----

    def save(self) -> dict[str, Any]:
        """Return the state of the workers, for `resume` in another process. Call it between batches.

        Returns:
            Plain data and arrays: the version, and for each worker its episode counters, random states and recurrent
            states; also for parked workers. `active_workers`: how many were not parked, if some were.

        Raises:
            FarstepError: A worker failed and could not be replaced.
        """
        collector = self._launched()
        saved = {"version": self.version, "workers": [] if self.cannot_replay else collector.save()}
        active = collector.server.tickets.presence.wanted
        return saved if active == self.num_workers else {**saved, "active_workers": active}

    @property
    def cannot_replay(self) -> str:
        """The reason why `resume` cannot replay the episodes that are in progress; empty if it can."""
        config = self.env_config
        if config.type in ("vector", "envpool"):
            return f"environments of type {config.type!r} cannot be stepped one by one"
        if not config.seed_episodes:
            return "with seed_episodes=False, the random states of environments are unknown"
        if config.stagger is not None:
            return "staggered environments start at new offsets"
        if config.kl_threshold is not None or not isinstance(config.sync, (Always, NoneType)):
            return "workers may have acted with older weights, which are not kept"
        return ""

    def resume(self, agent: Agent, saved: Mapping[str, Any], actions: Sequence[Mapping[str, Array]]) -> None:
        """Restore what another process saved: version, random states, recurrent states and episodes.

        Episodes in progress are replayed: each environment is reset with its seed and takes its recorded actions again.
        Some episodes restart with unused seeds instead: if `cannot_replay` has a reason, if their worker was being
        replaced, or if the number of workers changed. As many workers are parked as were when `save` was called.

        Args:
            agent: The agent, with the parameters that it had when `save` was called.
            saved: What `save` returned.
            actions: For each slot, the actions of its episode in progress, by their names in a batch.

        Raises:
            CheckpointError: `saved` or `actions` do not fit this agent and these environments; nothing was changed.
        """
        try:
            check_saved(self, agent, saved, actions)
        except Refused as error:
            raise CheckpointError(
                f"the environments cannot be resumed: {error}. Pass what save() returned for the same environments and "
                "the same agent."
            ) from None
        version, workers = saved["version"], saved["workers"]
        if reason := self.cannot_replay:
            self._events.emit("warned", f"restarting all episodes instead of resuming them: {reason}")
            workers = []
        self._launched().resume(agent, version, resumed_root(self.seed, version), workers, actions)
        active = saved.get("active_workers")
        if active is not None and active < self.num_workers and self._coordinator is None:
            self.scale(workers=active)

    # ---- versions and statistics ----

    def publish(self, agent: Agent) -> int:
        """Publish the agent's parameters as a new version. Any thread may call this; batches stay valid.

        Args:
            agent: The agent. Its parameters are copied while no consumer updates them.

        Returns:
            The new version.

        Raises:
            AgentError: The agent's parameters cannot be read, or have changed in number, shape or type.
            PublishTimeout: A consumer of a running workflow did not finish its update in time.
        """
        return self._launched().publish(agent)

    @property
    def version(self) -> int:
        """The newest published version."""
        return self._launched().version()

    @property
    def inference(self) -> str:
        """How workers call the agent: `fast`, or the reason why the fast path is not used; empty before the first
        rollout."""
        return self._collector.inference if self._collector is not None else ""

    def stats(self) -> dict[str, Any]:
        """Return counters and rates of the run. Launches the workers if necessary.

        Returns:
            Plain data by name; docs/metrics.md lists the names.

        Raises:
            FarstepError: The workers could not be started, or the `ClusterEnv` is closed.
        """
        return self._launched().snapshot() | {"devices": self._devices.snapshot()}

    def diagnose(self, metrics: Sequence[Mapping[str, float]] = ()) -> Diagnosis:
        """Say what the run is waiting for, from its counters of the last half minute, or since the last call.

        Args:
            metrics: Metrics of the latest updates, oldest first, with the names that `farstep train` logs, such as
                `train/actor/clip_fraction`. With at least 20 of them, causes of slow learning are recognized, too.

        Returns:
            The cause in one sentence, with the numbers behind it and the remedy; docs/waiting.md lists all causes.
            Before there is enough data its cause is `"unknown"`.

        Raises:
            ConfigError: `metrics` is not a list of mappings from names to numbers.
            FarstepError: The workers could not be started, or the `ClusterEnv` is closed.
        """
        return diagnoses_of(self, metrics)[0]

    @property
    def status_url(self) -> str:
        """Address of a page that shows the run in a browser on this machine. The first access launches the workers if
        necessary and starts the page's server, which `close` ends. Whoever has the address can see the run."""
        return status_page_of(self).url

    def events(self, kinds: EventKind | Collection[EventKind] | None = None, since: float = 0.0) -> list[Event]:
        """Return the latest events of the run, at most 1,000. Also works before `launch` and after `close`.

        Args:
            kinds: The kinds to return, such as `"lost"` or `["lost", "stuck"]`; None: all.
            since: Unix time in seconds; only later events are returned. Pass the `time` of the last event you have
                seen.

        Returns:
            The events, oldest first.

        Raises:
            ConfigError: A kind is unknown, or an argument has a wrong type.
        """
        return self._events.events(kinds, since)

    def emit_event(
        self, kind: EventKind, text: str, *, worker: int | None = None, node: str = "", traceback: str = ""
    ) -> None:
        """Add your own event to the events of the run, and log it. Any thread may call this.

        Args:
            kind: The kind, such as `"checkpointed"`, `"evaluated"` or `"warned"`.
            text: One sentence.
            worker: Index of the worker, if the event concerns one.
            node: Name of the host, if the event concerns one.
            traceback: For a failure, its traceback or output.

        Raises:
            ConfigError: The kind is unknown.
        """
        check_kind(kind)
        self._events.emit(kind, text, worker=worker, node=node, traceback=traceback)


def _close(collector: Collector | None, client: CoordinatorClient | None) -> None:
    """End the workers, and then give their slots back."""
    try:
        if collector is not None:
            collector.close()
    finally:
        if client is not None:
            client.close()


def collector_for(env: ClusterEnv, agent: Agent) -> Collector:
    """Launch the workers, give them the agent, and return the collector. For workflows."""
    collector = env._launched()
    collector.adopt(agent)
    return collector


def diagnoses_of(env: ClusterEnv, metrics: Sequence[Mapping[str, float]] = ()) -> list[Diagnosis]:
    """Return what `ClusterEnv.diagnose` does, then further causes that are independent of it."""
    from farstep.observe.diagnosis import RunMonitor  # not at launch: `farstep.observe` imports the terminal

    collector = env._launched()
    if env._monitor is None:
        env._monitor = RunMonitor(env._events, *env._at_launch)
    use = machine_use(collector.server.local_pids())
    return env._monitor.diagnoses(collector.snapshot(), use, collector.kl_threshold, metrics)


def status_page_of(env: ClusterEnv) -> StatusPage:
    """Return the status page of a run. The first call starts its server."""
    from farstep.observe.status import StatusPage  # not at launch: most programs show no page

    threshold = env._launched().kl_threshold
    with env._closing:
        if env._status_page is None:
            env._check_open()
            run = weakref.proxy(env)  # the page's threads must not keep the run alive
            events = env._events
            page = StatusPage(lambda: run.stats(), events.events, lambda: diagnoses_of(run), threshold, env._name)
            weakref.finalize(env, page.close)
            env._status_page = page
        return env._status_page


def event_log_of(env: ClusterEnv) -> EventLog:
    """Return the events of a run, for readers that subscribe to them."""
    return env._events


def check_saved(env: ClusterEnv, agent: Agent, saved: object, actions: Sequence[Mapping[str, Array]]) -> None:
    """Check the arguments of `ClusterEnv.resume` without changing anything; raise `Refused` with the reason."""
    env._launched().check_saved(agent, saved, actions)


def _check_rollouts(rollout_epochs: int, batches: int = 1) -> int:
    """Return `rollout_epochs`, or raise if `batches` batches of this many rollouts exceed the limit."""
    most = max(1, (_MAX_STALENESS + 1) // batches)
    if check_count("rollout_epochs", rollout_epochs) > most:
        raise ConfigError(
            f"rollout_epochs is {rollout_epochs}; expected 1 to {most}, since at most {_MAX_STALENESS + 1} rollouts "
            "may be in progress. Use fewer rollouts with more steps each."
        )
    return int(rollout_epochs)


class _Infos:
    """Merges the infos of a batch's columns with Gymnasium's code."""

    _add_info: Any = VectorEnv._add_info

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.merged: dict[str, Any] = {}

    def add(self, info: Mapping[str, Any], column: int) -> None:
        self.merged = self._add_info(self.merged, info, column)


def _merged(batch: Batch) -> dict[str, Any]:
    """Return the environments' infos in Gymnasium's batched form, one entry per column."""
    infos = _Infos(len(batch.slots))
    for first, per_env in batch.infos:
        column = int(np.searchsorted(batch.slots, first))
        for i, info in enumerate(per_env):
            infos.add(info, column + i)
    final = batch.final_obs
    for k, column in enumerate(final.slot):
        episode = {"r": batch.episodes["return"][k], "l": batch.episodes["length"][k], "t": batch.episodes["time"][k]}
        infos.add({"final_obs": map_leaves(itemgetter(k), final.obs), "episode": episode}, int(column))
    return infos.merged


def _with_acting(infos: dict[str, Any], batch: Batch) -> dict[str, Any]:
    """Add to the infos of a step what the workers recorded: actions, other outputs of `act`, versions."""
    row = {name: array[0] for name, array in batch.arrays.items()}
    acting = {key: nest(structure, row) for key, structure in batch.structures.items() if key != "obs"}
    acting |= {key: row[key] for key in ("version", "valid", "episode_start")}
    return {_renamed(key, acting): value for key, value in infos.items()} | acting


def _renamed(key: Any, taken: Container[str]) -> Any:
    """Return `env_<key>` if an array has the name of this info key; the key of its mask, `_key`, likewise."""
    if not isinstance(key, str):
        return key
    mask, name = ("_", key[1:]) if key.startswith("_") and key not in taken else ("", key)
    return f"{mask}env_{name}" if name in taken else key


class Parts(Iterator[Part]):
    """Iterator over the parts of one rollout, returned by `ClusterEnv.parts`.

    The rollout starts when the first part is requested. `close`, or another call that collects, cancels the rest.
    """

    def __init__(self, parts: Generator[Part, None, Batch]) -> None:
        self._parts = parts
        self._batch: Batch | None = None

    def __next__(self) -> Part:
        try:
            return next(self._parts)
        except StopIteration as end:
            self._batch = self._batch or end.value
            raise

    @property
    def batch(self) -> Batch:
        """The whole rollout, as `collect` returns it; consumes the remaining parts.

        Raises:
            ClosedError: The parts were closed, or the rollout failed.
        """
        for _ in self:
            pass
        if self._batch is None:
            raise ClosedError("these parts were closed, or failed, before the rollout was complete.")
        return self._batch

    def close(self) -> None:
        """Cancel the rest of the rollout."""
        self._parts.close()
