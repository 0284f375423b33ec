"""ClusterEnv: the DETACH head that a user holds."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Container, Generator, Iterator, Mapping, Sequence
from operator import itemgetter
from types import NoneType, TracebackType
from typing import Any, Self

import cloudpickle
import gymnasium
import numpy as np
from gymnasium.vector import VectorEnv

from farstep.batch import Batch, Part
from farstep.checkpoint.files import Refused
from farstep.config.env import EnvConfig, check_count
from farstep.config.launch import LaunchConfig, LocalConfig
from farstep.core import Agent, Array, Nested
from farstep.errors import CheckpointError, ClosedError, ConfigError
from farstep.head.collector import Collector
from farstep.head.members.worker_records import ResetRequest
from farstep.rollout.seeds import fresh_root, resumed_root
from farstep.schema import map_leaves, nest
from farstep.sync import Always

Space = gymnasium.spaces.Space[Any]
_MAX_STALENESS = 1000
log = logging.getLogger("farstep")


class ClusterEnv:
    """Environments on workers that act with a local copy of the agent; batches come back whole.

    `env_config` says which environments (see `EnvConfig`), `config` where they run (see `LocalConfig`).
    """

    def __init__(
        self,
        env_config: EnvConfig | Mapping[str, object],
        config: LaunchConfig | Mapping[str, object] | None = None,
    ) -> None:
        self.env_config = EnvConfig.of(env_config)
        self.config = (config if isinstance(config, LaunchConfig) else LocalConfig.of(config)).resolved()
        self.num_envs = self.config.most_nodes * self.env_config.envs_per_node
        """With nodes that may be missing, of all of them; `batch.slots` says whose rows a batch has."""
        self.num_workers = self.config.num_workers(self.env_config.envs_per_node)
        self.seed = fresh_root() if self.env_config.seed is None else self.env_config.seed
        self._collector: Collector | None = None
        self._launching = threading.Lock()
        """Of several threads whose calls are the first, one launches and the others wait."""
        self._closing = threading.RLock()
        self._closed = False

    def __repr__(self) -> str:
        name = self.env_config.env_name
        name = name if isinstance(name, str) else getattr(name, "__qualname__", getattr(name, "id", repr(name)))
        idle = "closed" if self._closed else "not launched"
        state = idle if self._collector is None else self._collector.server.state
        workers = f"{self.num_workers} worker{'s' * (self.num_workers > 1)}"
        return f"<ClusterEnv {name}: num_envs={self.num_envs} on {workers}, {state}>"

    # ---- life ----

    def launch(self) -> tuple[Space, Space]:
        """Start the workers; returns the spaces of one environment. Later calls only return them."""
        self._launched()
        return self.observation_space, self.action_space

    def _launched(self) -> Collector:
        with self._launching:
            self._check_open()
            if self._collector is None:
                collector = Collector(self.env_config, self.config, self.seed)
                # Also when nobody calls close(): at garbage collection and at the interpreter's end.
                self._finalizer = weakref.finalize(self, Collector.close, collector)
                self._collector = collector
                try:
                    self._check_open()  # another thread may have closed it before there was anything to close
                    self.observation_space, self.action_space = collector.start()
                except Exception:
                    self.close()
                    raise
                except BaseException:  # Ctrl-C: nothing is wrong with it, and the next call launches again
                    self._collector = None
                    self._finalizer()
                    raise
            return self._collector

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this ClusterEnv is closed; make a new one.")

    def close(self) -> None:
        """End all workers and free everything; idempotent, and a second call waits until the first is done."""
        self._closed = True
        with self._closing:
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
        """Begin new episodes everywhere, or where `options["reset_mask"]` says; with a seed, from episode 0."""
        if options is not None and not isinstance(options, Mapping):
            raise ConfigError(f"reset got options={options!r}; expected a mapping, e.g. {{'reset_mask': ...}}.")
        rest = dict(options or {})
        mask = rest.pop("reset_mask", None)
        if mask is not None:
            mask = np.asarray(mask)
            if mask.shape != (self.num_envs,) or mask.dtype != bool:
                raise ConfigError(
                    f"reset_mask has shape {list(mask.shape)} and dtype {mask.dtype}; "
                    f"expected [{self.num_envs}] and bool."
                )
        root = self.env_config.check_reset(seed, mask is not None)
        roots = None if root is None else [root] * self.num_envs
        order = ResetRequest(roots, mask, cloudpickle.dumps(rest) if rest else None)
        batch = self._launched().one_batch(0, infos=True, reset=order).copy()
        return batch.last_obs, _merged(batch)

    def step(self, agent: Agent) -> tuple[Nested, Array, Array, Array, dict[str, Any]]:
        """Step every environment once; the workers act, and reset ended environments at once (SAME_STEP).

        Args:
            agent: The policy; if its parameters have changed, they are published first.

        Returns:
            `obs, reward, terminated, truncated, info` with one row per environment, as in Gymnasium. `info` also has
            what the workers did: `action`, everything else that `act` returned except a recurrent `state`, and
            `version`, `valid` and `episode_start` as in a batch. If an environment's info has one of these names, it
            gets the prefix `env_`.

        Raises:
            FarstepError: A worker, an environment or the agent failed for good; the error names it.
        """
        collector = self._launched()
        collector.adopt(agent)
        batch = collector.one_batch(1, infos=True).copy()  # a step's arrays are kept by many loops, and small
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
            steps: Steps of each environment per rollout.
            rollout_epochs: Consecutive rollouts in the batch, all with the same parameters.

        Returns:
            Rows `[steps, rollout_epochs * num_envs]`. Each slot has one column per rollout, in the order of collection.

        Raises:
            ConfigError: `steps` or `rollout_epochs` is not a positive integer, or there is no room for that many
                rollouts.
            FarstepError: A worker, an environment or the agent failed for good; the error names it.
        """
        steps, rollout_epochs = check_count("steps", steps), _check_rollouts(rollout_epochs)
        collector = self._launched()
        collector.adopt(agent)
        return collector.one_batch(steps, rollouts=rollout_epochs)

    def parts(self, agent: Agent, steps: int = 128) -> Parts:
        """Collect a rollout synchronously, and yield its parts in order of arrival.

        A part is a stage (`EnvConfig.transfer`) of one worker's chunk. If a worker is lost after some stages of its
        chunk were yielded, they are repeated from another chunk; the last stage, which makes the part `complete`, is
        yielded once. The rollout does not wait for absent workers.

        Args:
            agent: The policy; if its parameters have changed, they are published first.
            steps: Steps of each environment.

        Returns:
            An iterator over parts; its `batch` is the whole rollout.

        Raises:
            ConfigError: `steps` is not a positive integer.
            FarstepError: While iterating: a worker, an environment or the agent failed for good; the error names it.
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
    ) -> Iterator[Batch]:
        """Yield batches indefinitely, collected while the learner updates.

        Workers get new weights when `publish` is called. Leaving the loop cancels the rollouts in progress, and so does
        any other call that collects.

        Args:
            agent: The policy; if its parameters have changed, they are published first.
            steps: Steps of each environment per chunk.
            max_staleness: Versions that a row may be behind the newest one when its batch is yielded; older rows are
                dropped. With `kl_threshold`, a row may be older if its policy was found close to a version within the
                bound.
            num_chunks: Build each batch from the first `num_chunks * rollout_epochs` chunks to arrive. None: from
                `rollout_epochs` chunks of every worker.
            rollout_epochs: Consecutive rollouts per batch. Staleness is counted in batches, not in rollouts.

        Returns:
            An iterator over batches.

        Raises:
            ConfigError: A number is out of range, or there is no room for that many rollouts.
            FarstepError: While iterating: a worker, an environment or the agent failed for good; the error names it.
        """
        steps, max_staleness = check_count("steps", steps), check_count("max_staleness", max_staleness, minimum=0)
        if max_staleness > _MAX_STALENESS:
            raise ConfigError(
                f"max_staleness is {max_staleness}; at most {_MAX_STALENESS} batches may be under way at a time."
            )
        rollout_epochs = _check_rollouts(rollout_epochs, max_staleness + 1)
        if num_chunks is not None:
            num_chunks, rollout_epochs = check_count("num_chunks", num_chunks) * rollout_epochs, 1
        return self._stream(agent, steps, max_staleness, num_chunks, rollout_epochs)

    def _stream(
        self, agent: Agent, steps: int, max_staleness: int, num_chunks: int | None, rollouts: int
    ) -> Iterator[Batch]:
        collector = self._launched()
        collector.adopt(agent)
        yield from collector.stream(steps, max_staleness, num_chunks, rollouts)

    def adopt(self, agent: Agent) -> Collector:
        """Make workers act with this agent, for a workflow that takes chunks itself."""
        collector = self._launched()
        collector.adopt(agent)
        return collector

    def scale(self, nodes: int) -> None:
        """Have so many nodes from now on, between `min_nodes` and `max_nodes` of the launch configuration.

        Nodes that are given up hand over what they are doing; new ones are part of batches as soon as they are there.
        """
        low, high = self.config.fewest_nodes, self.config.most_nodes
        if not low <= check_count("nodes", nodes) <= high:
            raise ConfigError(
                f"scale got {nodes} nodes; {type(self.config).__name__} allows {low} to {high} (min_nodes, max_nodes)."
            )
        self._launched().server.scale(nodes)

    # ---- what outlives this process ----

    def save(self) -> dict[str, Any]:
        """What workers must know to go on in another process, as plain data and arrays; between batches."""
        return {"version": self.version, "workers": [] if self.cannot_replay else self._launched().save()}

    @property
    def cannot_replay(self) -> str:
        """Why another process could not lead these environments back to where they are; "" if it could."""
        config = self.env_config
        if config.type in ("vector", "envpool"):
            return f"environments of type {config.type!r} cannot be stepped one by one"
        if not config.seed_episodes:
            return "with seed_episodes=False, only an environment itself knows its random numbers"
        if config.stagger is not None:
            return "staggered environments are brought to new places"
        if config.kl_threshold is not None or not isinstance(config.sync, (Always, NoneType)):
            return "workers may have acted with older weights, which are not kept"
        return ""

    def check_saved(self, agent: Agent, saved: object, actions: Sequence[Mapping[str, Array]]) -> None:
        """Check the arguments of `resume` without changing anything.

        Args:
            agent: As in `resume`.
            saved: As in `resume`.
            actions: As in `resume`.

        Raises:
            farstep.checkpoint.files.Refused: `resume` would refuse these arguments; the message gives the reason.
        """
        self._launched().check_saved(agent, saved, actions)

    def resume(self, agent: Agent, saved: Mapping[str, Any], actions: Sequence[Mapping[str, Array]]) -> None:
        """Go on with an agent where another process saved: versions, random numbers, recurrent states and episodes.

        `actions` are those that each slot's episode in progress was given, by the names they have in a batch: its
        environment is reset with the same seed and takes them again. Where that cannot be (other workers than then, a
        worker that was being replaced, `cannot_replay`), episodes begin anew, with seeds not used before.

        Raises:
            CheckpointError: If `saved` or `actions` do not fit this agent and these environments; nothing has changed.
        """
        try:
            self.check_saved(agent, saved, actions)
        except Refused as error:
            raise CheckpointError(
                f"environments cannot go on from what was saved: {error}. Pass what save() returned for the same "
                "environments and the same agent."
            ) from None
        version, workers = saved["version"], saved["workers"]
        if reason := self.cannot_replay:
            log.warning("episodes begin anew: %s", reason)
            workers = []
        self._launched().resume(agent, version, resumed_root(self.seed, version), workers, actions)

    # ---- the policy ----

    def publish(self, agent: Agent) -> int:
        """Make the agent's parameters the newest version; returns it. Batches in hand stay valid."""
        return self._launched().publish(agent)

    @property
    def version(self) -> int:
        """The newest published version."""
        return self._launched().version()

    @property
    def inference(self) -> str:
        """How workers call the agent: `fast`, or why not."""
        return self._collector.inference if self._collector is not None else ""

    def stats(self) -> dict[str, Any]:
        """Counters as plain data; the guide lists them. Launches, as every call does."""
        return self._launched().snapshot()


def _check_rollouts(rollout_epochs: int, batches: int = 1) -> int:
    """Return the number of rollouts per batch, or raise if the rollouts of `batches` batches exceed the limit."""
    most = max(1, (_MAX_STALENESS + 1) // batches)
    if check_count("rollout_epochs", rollout_epochs) > most:
        raise ConfigError(
            f"rollout_epochs is {rollout_epochs}; expected 1 to {most}, since at most {_MAX_STALENESS + 1} rollouts "
            "may be in progress. Use fewer rollouts with more steps each."
        )
    return int(rollout_epochs)


class _Infos:
    """Infos of a batch's columns, put together by Gymnasium's own code."""

    _add_info: Any = VectorEnv._add_info

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.merged: dict[str, Any] = {}

    def add(self, info: Mapping[str, Any], column: int) -> None:
        self.merged = self._add_info(self.merged, info, column)


def _merged(batch: Batch) -> dict[str, Any]:
    """The environments' infos in Gymnasium's batched form, one entry per column."""
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
    """The infos of a step, and what the workers did in it."""
    row = {name: array[0] for name, array in batch.arrays.items()}
    acting = {key: nest(structure, row) for key, structure in batch.structures.items() if key != "obs"}
    acting |= {key: row[key] for key in ("version", "valid", "episode_start")}
    return {_own_name(key, acting): value for key, value in infos.items()} | acting


def _own_name(key: Any, taken: Container[str]) -> Any:
    """The key of an environment's info, or of its mask (`_key`), where the workers' arrays have taken that name."""
    if not isinstance(key, str):
        return key
    mask, name = ("_", key[1:]) if key.startswith("_") and key not in taken else ("", key)
    return f"{mask}env_{name}" if name in taken else key


class Parts(Iterator[Part]):
    """One synchronous rollout, part by part. It begins with the first; `close` or another call cancels the rest."""

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
        """The whole rollout, as `collect` returns it; waits for parts that nobody took."""
        for _ in self:
            pass
        if self._batch is None:
            raise ClosedError("these parts were closed, or failed, before the rollout was complete.")
        return self._batch

    def close(self) -> None:
        self._parts.close()
