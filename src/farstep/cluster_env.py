"""ClusterEnv: the DETACH head that a user holds."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import cloudpickle
import gymnasium
import numpy as np
from gymnasium.vector import VectorEnv

from farstep.agents.policy import ship
from farstep.batch import Batch
from farstep.config import EnvConfig, LaunchConfig, LocalConfig
from farstep.core import Agent, Array, Nested, Received
from farstep.errors import AgentError, ClosedError, ConfigError, HandshakeError
from farstep.head.cluster import Cluster
from farstep.head.parameters import ParameterStore
from farstep.head.rollouts import Rollouts, base_rows
from farstep.head.seats import Seat
from farstep.head.stats import Counters
from farstep.head.tickets import Arrived, Order
from farstep.spec import Schema, differences, space_schema
from farstep.sync import Always
from farstep.wire import messages as m
from farstep.wire.codec import unpack
from farstep.worker.program import Program
from farstep.worker.seeds import fresh_root
from farstep.worker.sources import Source

Space = gymnasium.spaces.Space[Any]
log = logging.getLogger("farstep")


class ClusterEnv:
    """Environments on workers that act with a local copy of the agent; batches come back whole.

    `env_config` says which environments (see `EnvConfig`), `config` where they run (see `LocalConfig`).
    """

    _add_info: Any = VectorEnv._add_info  # Gymnasium's own form of batched infos

    def __init__(
        self,
        env_config: EnvConfig | Mapping[str, object],
        config: LaunchConfig | Mapping[str, object] | None = None,
    ) -> None:
        self.env_config = EnvConfig.of(env_config)
        self.config = config if isinstance(config, LaunchConfig) else LocalConfig.of(config)
        self.num_envs = self.config.nodes * self.env_config.envs_per_node
        self.num_workers = self.config.num_workers(self.env_config.envs_per_node)
        self.seed = fresh_root() if self.env_config.seed is None else self.env_config.seed
        self._cluster: Cluster | None = None
        self._closed = False
        self._agent: Agent | None = None
        self._agent_id = 0
        self._answers: dict[int, m.AgentReady] = {}
        self._store: ParameterStore | None = None
        self._agent_schemas: tuple[Schema, Schema] = ({}, {})
        self._steps = 0
        self._reset: m.Reset | None = None
        self._infos = False
        self._sessions = 0

    # ---- life ----

    def launch(self) -> tuple[Space, Space]:
        """Start the workers; returns the spaces of one environment. Later calls only return them."""
        if self._closed:
            raise ClosedError("this ClusterEnv is closed; make a new one.")
        if self._cluster is None:
            self._start()
        return self.observation_space, self.action_space

    def _start(self) -> None:
        config, env_config = self.config, self.env_config
        assert env_config.env_name is not None
        source = Source(env_config.type, env_config.env_name, dict(env_config.env_kwargs), list(env_config.wrappers))
        program = Program(source, env_config.sync or Always(), env_config.inference, seed=self.seed)
        cluster = Cluster(config, program, env_config.envs_per_node, self.seed, config.restart_budget, self)
        self._cluster = cluster
        # Also when nobody calls close(): at garbage collection and at the interpreter's end.
        self._finalizer = weakref.finalize(self, Cluster.close, cluster)
        self._server = cluster.server
        self._counters = Counters(self.num_workers)
        try:
            self._server.start()
            self._server.wait_ready()
            assert self._server.spaces is not None
            self.observation_space: Space = self._server.spaces[0]
            self.action_space: Space = self._server.spaces[1]
            obs, self._obs_schema = space_schema(self.observation_space, "obs")
            self._rollouts = Rollouts(cluster.seats, obs, self._obs_schema)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all workers and free everything; idempotent."""
        self._closed = True
        if self._cluster is not None:
            self._finalizer()
            if hasattr(self, "_rollouts"):
                self._rollouts.close()
            if self._store is not None:
                self._store.close()
                self._store = None
            self._agent = None

    def __enter__(self) -> Self:
        self.launch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- the user's calls ----

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Nested, dict[str, Any]]:
        """Begin new episodes everywhere, or where `options["reset_mask"]` says; with a seed, from episode 0."""
        self.launch()
        rest = dict(options or {})
        mask = rest.pop("reset_mask", None)
        if mask is not None:
            mask = np.asarray(mask)
            if mask.shape != (self.num_envs,) or mask.dtype != bool:
                raise ConfigError(
                    f"reset_mask has shape {list(mask.shape)} and dtype {mask.dtype}; "
                    f"expected [{self.num_envs}] and bool."
                )
        if seed is not None:
            chosen = np.ones(self.num_envs, bool) if mask is None else mask
            for slot in np.flatnonzero(chosen):
                self._server.roots[slot] = int(seed)
                self._server.resume[slot] = 0
        payload = cloudpickle.dumps(rest) if rest else None
        self._reset = m.Reset(None if seed is None else [int(seed)], None if mask is None else mask.tobytes(), payload)
        try:
            batch = self._one_batch(0, infos=True).copy()
        finally:
            self._reset = None
        return batch.last_obs, self._merged(batch)

    def step(self, agent: Agent) -> tuple[Nested, Array, Array, Array, dict[str, Any]]:
        """One step everywhere, workers act; ended environments are reset at once (SAME_STEP)."""
        self._adopt(agent)
        batch = self._one_batch(1, infos=True).copy()  # a step's arrays are kept by many loops, and small
        return (
            batch.last_obs,
            batch["reward"][0],
            batch["terminated"][0],
            batch["truncated"][0],
            self._merged(batch),
        )

    def collect(self, agent: Agent, steps: int = 128) -> Batch:
        """A synchronous rollout of `steps` steps of every environment, with the agent's present parameters."""
        _check_count("steps", steps)
        self._adopt(agent)
        return self._one_batch(steps, infos=False)

    def stream(
        self, agent: Agent, steps: int = 128, max_staleness: int = 1, num_chunks: int | None = None
    ) -> Iterator[Batch]:
        """Batches without end, rolled while the learner works; see DESIGN section 3 for `max_staleness`.

        New weights reach the workers when `publish` is called. Leaving the loop cancels what is under way.
        """
        _check_count("steps", steps)
        _check_count("max_staleness", max_staleness, minimum=0)
        if num_chunks is not None:
            _check_count("num_chunks", num_chunks)
        return self._stream(agent, steps, max_staleness, num_chunks)

    def _stream(self, agent: Agent, steps: int, max_staleness: int, num_chunks: int | None) -> Iterator[Batch]:
        self._adopt(agent)
        session = self._open(steps, max_staleness, num_chunks, None, infos=False)
        try:
            while True:
                yield self._next_batch()
                if session != self._sessions:
                    raise ClosedError("another call on this ClusterEnv ended the stream; open a new one.")
                with self._server.locked():
                    self._server.tickets.release()
        finally:
            if session == self._sessions and not self._closed:
                self._end_session()

    def publish(self, agent: Agent) -> int:
        """Make the agent's parameters the newest version; returns it. Batches in hand stay valid."""
        self.launch()
        self._server.raise_failure()
        if self._agent is not agent:
            self._adopt(agent)
        else:
            assert self._store is not None
            with self._server.locked():
                self._store.publish(agent)
                self._announce()
        assert self._store is not None
        return self._store.version

    def stats(self) -> dict[str, Any]:
        """Counters as plain data (DESIGN section 6)."""
        self.launch()
        with self._server.locked():
            return self._counters.snapshot(self._server, self.version())

    # ---- the agent ----

    def _adopt(self, agent: Agent) -> None:
        """Make workers act with this agent and its present parameters."""
        self.launch()
        self._server.raise_failure()
        if agent is self._agent:
            assert self._store is not None
            with self._server.locked():
                if self._store.publish_if_changed(agent):
                    self._announce()
            return
        for method in ("act", "get_parameters"):
            if not callable(getattr(agent, method, None)):
                raise AgentError(
                    f"{type(agent).__name__} has no {method}(); an agent needs act(obs) and get_parameters()."
                )
        began = time.monotonic()
        payload = ship(agent)
        self._end_session()
        with self._server.locked():
            store = ParameterStore(agent, self._agent_id + 1, self.num_workers)  # raises before anything changed
            if self._store is not None:
                self._store.close()
            self._store, self._agent_id, self._answers = store, self._agent_id + 1, {}
            self._server.stage = [entry for entry in self._server.stage if isinstance(entry[0], m.Lay)]
            self._tell(m.Ship(self._agent_id), [payload])
            self._tell(self._store.message(), fds=[self._store.memory.fd])
            self._announce()
        self._agent = None
        self._server.wait(lambda: True if len(self._answers) == self.num_workers else None)
        self._agree()
        self._agent = agent
        self._server.start_s["agent"] = time.monotonic() - began

    def _agree(self) -> None:
        """All workers' copies of the agent must return the same arrays."""
        first = self._answers[0]
        for worker, answer in self._answers.items():
            found = differences(first.schema, answer.schema) + differences(first.state, answer.state)
            if found:
                raise HandshakeError(
                    f"the agent returns other arrays on worker {worker} than on worker 0: {'; '.join(found)}."
                )
        self._agent_schemas = (first.schema, first.state)
        self._rollouts.structures = {**self._rollouts.structures, **unpack(first.structure)}
        self._rollouts.state = unpack(first.state_structure) or None
        self.inference = first.inference
        """How workers call the agent: `fast`, or why not."""
        if self.inference.startswith("eager:"):
            log.warning("workers call the agent as it is, not on the fast path, since %s", self.inference[7:])

    def _tell(self, message: m.FromHead, frames: list[Any] | None = None, fds: list[int] | None = None) -> None:
        """Tell every worker that is there, and those that come later."""
        frames, fds = frames or [], fds or []
        kind = type(message)
        self._server.stage = [entry for entry in self._server.stage if not isinstance(entry[0], kind)]
        self._server.stage.append((message, frames, fds))
        for seat in self._server.seats:
            if seat.ready:
                self._server.send(seat, message, frames, fds)

    def _announce(self) -> None:
        """Workers without shared memory hear of a version by message."""
        if not self._server.shares_memory:
            self._tell(m.Newest(self.version()))

    def version(self) -> int:
        """The newest published version."""
        return self._store.version if self._store is not None else 0

    # ---- batches (make_ticket and on_message are the server's side) ----

    def _open(
        self, steps: int, max_staleness: int | None, num_chunks: int | None, batches: int | None, infos: bool
    ) -> int:
        self._end_session()
        with self._server.locked():
            rows = {**base_rows(self._obs_schema), **self._agent_schemas[0]}
            lanes = self._server.tickets.lanes_needed(max_staleness, num_chunks)
            if self._rollouts.fit(lanes, max(steps, 1), rows, self._agent_schemas[1]):
                assert self._rollouts.layout is not None and self._rollouts.memory is not None
                message = self._rollouts.layout.message(self._rollouts.generation)
                self._tell(message, fds=[self._rollouts.memory.fd])
            self._steps, self._infos, self._num_chunks = steps, infos, num_chunks
            self._server.tickets.open(max_staleness, num_chunks, batches)
            self._sessions += 1
        return self._sessions

    def _end_session(self) -> None:
        with self._server.locked():
            if self._server.tickets.is_open:
                self._server.cancel()

    def _one_batch(self, steps: int, infos: bool) -> Batch:
        self._open(steps, None, None, 1, infos)
        try:
            return self._next_batch()
        finally:
            if not self._closed:
                self._end_session()

    def _next_batch(self) -> Batch:
        began = time.monotonic()

        def ready() -> list[Arrived] | None:
            return self._server.tickets.take(self.version())

        def granted() -> list[Arrived] | None:
            found = ready()
            if found is None:
                self._server.grant()
            return found

        with self._server.locked():  # until it is copied: a ticket given meanwhile could write into its lanes
            self._server.grant()
            arrived = self._server.wait(granted)
            assemble = self._rollouts.batch if self._num_chunks is None else self._rollouts.copied
            batch = assemble(arrived, self._steps)
            self._counters.wait["learner"] += time.monotonic() - began
            self._counters.batch(batch, len(arrived), self.version())
        return batch

    def make_ticket(self, order: Order) -> tuple[m.Ticket, list[Any]]:
        reset = self._reset
        if reset is not None:
            seat = self._server.seats[order.worker]
            part = slice(seat.first, seat.stop)
            mask = None if reset.mask is None else reset.mask[part]
            seeds: Any = None if reset.seeds is None else [reset.seeds[0]] * seat.num_envs
            reset = m.Reset(seeds, mask, reset.options)
        return m.Ticket(order.seq, order.lane, self._steps, order.min_version, reset, self._infos), []

    def on_message(self, seat: Seat, message: m.FromWorker, received: Received) -> None:
        match message:
            case m.Chunk():
                self._take(seat, message, received)
            case m.AgentReady() if message.agent == self._agent_id:
                self._answers[seat.worker] = message
            case m.WeightRequest() if self._store is not None:
                self._server.send(seat, m.Weights(self._store.version), [self._store.payload()])

    def _take(self, seat: Seat, chunk: m.Chunk, received: Received) -> None:
        tickets, steps = self._server.tickets, self._steps
        order = tickets.order(chunk.ticket)
        if order is None or order.worker != seat.worker:
            return  # cancelled, or its worker was given up: counted then
        self._rollouts.check(seat, chunk, steps, self.version())
        began = time.monotonic()
        if chunk.keys:
            nbytes = self._rollouts.store(seat, order.lane, steps, chunk, received)
            self._counters.wait["transfer"] += time.monotonic() - began
        else:
            nbytes = self._rollouts.chunk_bytes(seat, steps)
        tickets.accept(seat.worker, chunk.ticket, chunk.version, chunk)
        self._server.resume[seat.first : seat.stop] = np.frombuffer(chunk.resume, np.int64)
        self._counters.chunk(seat.worker, chunk, nbytes)

    def _merged(self, batch: Batch) -> dict[str, Any]:
        """Infos of one step in Gymnasium's batched form."""
        infos: dict[str, Any] = {}
        for first, per_env in batch.infos:
            for i, info in enumerate(per_env):
                infos = self._add_info(infos, info, first + i)
        final = batch.final_obs
        for k, slot in enumerate(final.slot):
            episode = {
                "r": batch.episodes["return"][k],
                "l": batch.episodes["length"][k],
                "t": batch.episodes["time"][k],
            }
            last = {"final_obs": _entry(final.obs, k), "episode": episode}
            infos = self._add_info(infos, last, int(slot))
        return infos


def _entry(obs: Nested, k: int) -> Nested:
    if isinstance(obs, dict):
        return {key: _entry(sub, k) for key, sub in obs.items()}
    if isinstance(obs, tuple):
        return tuple(_entry(sub, k) for sub in obs)
    return obs[k]


def _check_count(name: str, value: int, minimum: int = 1) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < minimum:
        raise ConfigError(f"{name} is {value!r}; it must be an integer of at least {minimum}.")
