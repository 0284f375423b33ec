"""`ClusterEnv`: the class through which a user's process runs environments on workers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from farstep.batch import Batch, Part
from farstep.checkpoint.files import Refused
from farstep.config.env import EnvConfig, check_count
from farstep.config.launch import LaunchConfig, LocalConfig
from farstep.core import Agent, Array, Nested
from farstep.errors import CheckpointError, counted
from farstep.event import Event, EventKind, check_kind
from farstep.head.collector import Collector
from farstep.head.events import EventLog
from farstep.head.saving.resuming import cannot_replay
from farstep.rollout.seeds import fresh_root, resumed_root
from farstep.run import arguments
from farstep.run.infos import merged_infos, with_acting
from farstep.run.launched_run import Launch, LaunchedRun, Space
from farstep.run.parts import Parts

if TYPE_CHECKING:
    from farstep.observe.diagnosis import Diagnosis
    from farstep.observe.status import StatusPage


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
        arguments.check_min_workers(self.config, self.num_workers)
        self._events = EventLog()
        self._launch = Launch(self.env_config, self.config, self.seed, self._events)

    def __repr__(self) -> str:
        workers, label = counted(self.num_workers, "worker"), self.env_config.label
        return f"<ClusterEnv {label}: num_envs={self.num_envs} on {workers}, {self._launch.state}>"

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

    def _launched(self) -> LaunchedRun:
        run = self._launch.run()
        if not hasattr(self, "frame_stack"):
            self.observation_space, self.action_space = run.spaces
            self.frame_stack = run.num_stacked_frames
        return run

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
        with self._launched().share.device_token(self._launch.check_open) as device:
            yield device

    @property
    def has_coordinator(self) -> bool:
        """Whether the run shares slots and devices with other runs (option `coordinator`)."""
        return self.config.coordinator is not None

    def close(self) -> None:
        """End all workers and free their resources. Further calls do nothing; a concurrent call waits for the first."""
        self._launch.close()

    def __enter__(self) -> Self:
        self.launch()
        return self

    def __exit__(self, *error: object) -> None:
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
        request = arguments.reset_request(self.env_config, self.num_envs, seed, options)
        batch = self._launched().collector.reset(request).copy()
        return batch.last_obs, merged_infos(batch)

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
        # A copy is cheap, and many loops keep a step's arrays.
        batch = collector_for(self, agent).one_batch(1, infos=True).copy()
        info = with_acting(merged_infos(batch), batch)
        return batch.last_obs, batch["reward"][0], batch["terminated"][0], batch["truncated"][0], info

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
        steps, rollout_epochs = check_count("steps", steps), arguments.check_rollouts(rollout_epochs)
        return collector_for(self, agent).one_batch(steps, rollouts=rollout_epochs)

    def parts(self, agent: Agent, steps: int = 128) -> Parts:
        """Collect a rollout synchronously, and yield its parts as they arrive.

        A part has the stages (`EnvConfig.transfer`) of one worker's chunk that arrived together. If a worker is lost
        after some stages were yielded, they are yielded again for the chunk of its replacement. A part with
        `complete=True` (the last part of a chunk) is yielded only once. The rollout does not wait for absent workers.

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
        return (yield from collector_for(self, agent).parts(steps))

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
        steps, max_staleness = check_count("steps", steps), arguments.check_staleness(max_staleness)
        rollout_epochs = arguments.check_rollouts(rollout_epochs, max_staleness + 1)
        if num_chunks is not None:
            num_chunks, rollout_epochs = check_count("num_chunks", num_chunks) * rollout_epochs, 1
        return self._stream(agent, steps, max_staleness, num_chunks, rollout_epochs)

    def _stream(
        self, agent: Agent, steps: int, max_staleness: int, num_chunks: int | None, rollouts: int
    ) -> Generator[Batch]:
        yield from collector_for(self, agent).stream(steps, max_staleness, num_chunks, rollouts)

    def scale(self, nodes: int | None = None, *, workers: int | None = None) -> None:
        """Change the number of workers or nodes during a run. The most recent call wins; any thread may call this.

        Workers that are not needed are parked: they finish and send their current chunks, then their processes are
        suspended. They keep their memory, environments and episodes, and use no core. They continue within
        milliseconds, or after about 0.2 s over TCP if they have to reconnect. Their environments are missing from
        batches meanwhile (`batch.slots`). Workers on released nodes finish and send their current chunks, and then end.

        The call does not wait until workers are parked, run or have started. If more nodes are needed, it waits until
        the engine has accepted or refused the request, at most a minute.

        Args:
            nodes: New number of nodes, from `min_nodes` to `max_nodes` of the launch configuration. All workers of
                these nodes run.
            workers: New number of workers that run, from 1 to `num_workers`; the others, those with the highest
                numbers, are parked. If the nodes have too few workers, more nodes are requested; none is released.
                With a coordinator, this is a request: at most this number of workers run, and the numbers of its
                slots decide which.

        Raises:
            ConfigError: Not exactly one argument was given, it is outside its range, or the launcher has no nodes.
            LaunchError: More nodes are needed, and the engine refuses them.
        """
        arguments.check_scale(self.config, self.num_workers, nodes, workers)
        run = self._launched()
        if workers is not None:
            run.share.scale(run.collector.server.slots, workers)
        elif nodes is not None:
            run.collector.server.slots.scale_nodes(nodes)

    # ---- checkpoints ----

    def save(self) -> dict[str, Any]:
        """Return the state of the workers, for `resume` in another process. Call it between batches.

        Returns:
            Plain data and arrays: the version, and for each worker its episode counters, random states and recurrent
            states; also for parked workers. `active_workers`: the number of workers that were not parked; missing
            if none was parked, or with a coordinator, which decides again. `inference`: what `"auto"` has chosen.

        Raises:
            FarstepError: A worker failed and could not be replaced.
        """
        collector = self._launched().collector
        saved = {"version": self.version, "workers": [] if self.cannot_replay else collector.save()}
        if self.chosen_inference is not None:
            saved["inference"] = self.chosen_inference
        active = len(collector.server.tickets.presence.wanted)
        is_chosen = active < self.num_workers and not self.has_coordinator  # otherwise it is the share of this moment
        return {**saved, "active_workers": active} if is_chosen else saved

    @property
    def cannot_replay(self) -> str:
        """The reason why `resume` cannot replay the episodes that are in progress; empty if it can."""
        return cannot_replay(self.env_config)

    def resume(self, agent: Agent, saved: Mapping[str, Any], actions: Sequence[Mapping[str, Array]]) -> None:
        """Restore what another process saved: version, random states, recurrent states and episodes.

        Episodes in progress are replayed: each environment is reset with its seed and takes its recorded actions again.
        Some episodes restart with unused seeds instead: if `cannot_replay` has a reason, if their worker was being
        replaced, or if the number of workers changed. As many workers are parked as when `save` was called; with a
        coordinator, it decides.

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
        root, inference = resumed_root(self.seed, version), saved.get("inference")
        self._launched().collector.resume(agent, version, root, workers, actions, inference)
        active = saved.get("active_workers")
        if active is not None and active < self.num_workers and not self.has_coordinator:
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
        return self._launched().collector.publish(agent)

    @property
    def version(self) -> int:
        """The newest published version."""
        return self._launched().collector.version()

    @property
    def inference(self) -> str:
        """How workers act, in words: `fast: ...` if they replay a recording of `act`, otherwise why not or how, such as
        `eager: ...` or `served on cpu, ...`; empty before the first rollout."""
        return self._launch.inference

    @property
    def chosen_inference(self) -> str | None:
        """What `inference="auto"` has chosen: `local`, `served`, or `local-cpu` if workers act on the CPU although they
        have GPUs. None before, and with another option."""
        return self._launched().collector.choice.chosen

    def stats(self) -> dict[str, Any]:
        """Return counters and rates of the run. Launches the workers if necessary.

        Returns:
            Plain data by name; docs/metrics.md lists the names.

        Raises:
            FarstepError: The workers could not be started, or the `ClusterEnv` is closed.
        """
        return self._launched().stats()

    def diagnose(self, metrics: Sequence[Mapping[str, float]] = ()) -> Diagnosis:
        """Say what the run is waiting for, from its counters of the last half minute, or since the last call.

        Args:
            metrics: Metrics of the latest updates, oldest first, with the names that `farstep train` logs, such as
                `train/actor/clip_fraction`. With enough of them (5 to 20), causes of slow learning are recognized, too.

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
        """Address of a page that shows the run in a browser on this machine. The first access starts the page's server,
        which `close` ends. Before and during the launch, the page says what the run is waiting for. The address has a
        token: give it only to people who may see the run."""
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


def collector_for(env: ClusterEnv, agent: Agent) -> Collector:
    """Launch the workers, give them the agent, and return the collector. For workflows."""
    collector = env._launched().collector
    collector.adopt(agent)
    return collector


def diagnoses_of(env: ClusterEnv, metrics: Sequence[Mapping[str, float]] = ()) -> list[Diagnosis]:
    """Return what `ClusterEnv.diagnose` does, then further causes that are independent of it."""
    return env._launch.progress.for_user(env._launched().diagnoses(metrics))


def advise_options(env: ClusterEnv) -> None:
    """From now on, let remedies of diagnoses name options of `farstep train` instead of arguments in Python."""
    env._launch.progress.is_command = True


def name_run(env: ClusterEnv, name: str) -> None:
    """Set the name under which `farstep coordinator status` shows a run. Call it before the launch."""
    env._launch.progress.name = name


def status_page_of(env: ClusterEnv) -> StatusPage:
    """Return the status page of a run. The first call starts its server."""
    return env._launch.status_page()


def call_when_begun(env: ClusterEnv, function: Callable[[], None]) -> None:
    """Call a function when the launch begins to wait for its workers; never if it is refused before."""
    env._launch.on_begun = function


def event_log_of(env: ClusterEnv) -> EventLog:
    """Return the events of a run, for readers that subscribe to them."""
    return env._events


def check_saved(env: ClusterEnv, agent: Agent, saved: object, actions: Sequence[Mapping[str, Array]]) -> None:
    """Check the arguments of `ClusterEnv.resume` without changing anything; raise `Refused` with the reason."""
    env._launched().collector.check_saved(agent, saved, actions)
