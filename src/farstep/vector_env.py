"""make_vec: a strict Gymnasium VectorEnv over farstep's workers, for learners that act themselves."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from farstep.config import EnvConfig, LaunchConfig, LocalConfig
from farstep.core import Array, Nested, Received
from farstep.errors import ConfigError, EndedError
from farstep.head.cluster import Cluster
from farstep.head.rollouts import Rollouts, base_rows
from farstep.head.seats import Seat
from farstep.head.tickets import Order
from farstep.spec import ArraySpec, Schema, leaves, nest, space_schema
from farstep.sync import Always
from farstep.wire import messages as m
from farstep.wire.codec import unpack
from farstep.worker.program import Program
from farstep.worker.sources import Source


def make_vec(
    env_name: str | Callable[..., Any],
    num_envs: int = 1,
    config: LaunchConfig | Mapping[str, object] | None = None,
    autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Any] = (),
) -> ClusterVectorEnv:
    """A VectorEnv that behaves as `SyncVectorEnv` does, its environments spread over workers.

    `env_name` is a Gymnasium id or a callable that returns one environment. `num_envs` is the total.
    """
    launch = config if isinstance(config, LaunchConfig) else LocalConfig.of(config)
    if num_envs % launch.nodes:
        raise ConfigError(f"num_envs={num_envs} does not divide over nodes={launch.nodes}.")
    env_config = EnvConfig(
        type="factory" if callable(env_name) else "gymnasium",
        env_name=env_name,
        env_kwargs=env_kwargs or {},
        wrappers=wrappers,
        envs_per_node=num_envs // launch.nodes,
    )
    return ClusterVectorEnv(env_config, launch, AutoresetMode(autoreset_mode))


class ClusterVectorEnv(VectorEnv[Any, Any, Any]):
    """Made by `make_vec`. A failure of an environment or a worker raises: nothing is restarted behind the
    learner's back, since it would step into an episode it never began."""

    def __init__(self, env_config: EnvConfig, config: LaunchConfig, autoreset_mode: AutoresetMode) -> None:
        self.closed = True  # until there is something to close
        self.num_envs = config.nodes * env_config.envs_per_node
        self._mode = autoreset_mode
        assert env_config.env_name is not None
        source = Source(env_config.type, env_config.env_name, dict(env_config.env_kwargs), list(env_config.wrappers))
        program = Program(source, Always(), autoreset_mode=autoreset_mode.value)
        self._cluster = Cluster(config, program, env_config.envs_per_node, 0, 0, self)
        self._finalizer = weakref.finalize(self, Cluster.close, self._cluster)
        self._server = self._cluster.server
        self.closed = False
        try:
            self._launch(source)
        except BaseException:
            self.close()
            raise

    def _launch(self, source: Source) -> None:
        self._server.start()
        self._server.wait_ready()
        assert self._server.spaces is not None
        self.single_observation_space, self.single_action_space = self._server.spaces
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._obs, self._obs_schema = space_schema(self.single_observation_space, "obs")
        self._action, self._action_schema = space_schema(self.single_action_space, "action")
        self._rollouts = Rollouts(self._server.seats, self._obs, self._obs_schema)
        self._replies: dict[int, Any] = {}
        self._requests = 0
        self._steps = 0
        self._reset: tuple[list[int | None] | None, Array | None, bytes | None] | None = None
        self._done = np.zeros(self.num_envs, bool)
        self._lay(self._action_schema)
        described = self._call("describe", ())[0]
        self.metadata = {**described["metadata"], "autoreset_mode": self._mode}
        self.render_mode = described["render_mode"]
        if isinstance(source.env_name, str) and source.env_name in gymnasium.registry:
            self.spec = gymnasium.spec(source.env_name)

    def _lay(self, actions: Schema) -> None:
        self._action_schema = actions
        rows = {**base_rows(self._obs_schema, "<f8"), **actions}
        if self._rollouts.fit(1, 1, rows, {}):
            assert self._rollouts.layout is not None and self._rollouts.memory is not None
            message = self._rollouts.layout.message(self._rollouts.generation)
            for seat in self._server.seats:
                self._server.send(seat, message, fds=[self._rollouts.memory.fd])

    # ---- Gymnasium's calls ----

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Nested, dict[str, Any]]:
        seeds: list[int | None] | None = None
        if isinstance(seed, (int, np.integer)):
            seeds = [int(seed) + i for i in range(self.num_envs)]
        elif seed is not None:
            seeds = list(seed)
            if len(seeds) != self.num_envs:
                raise ValueError(f"seed has {len(seeds)} entries; with num_envs={self.num_envs} it needs as many.")
        rest = None if options is None else dict(options)  # the caller's dict stays as it is
        mask = _checked_mask(rest.pop("reset_mask"), self.num_envs) if rest and "reset_mask" in rest else None
        payload = cloudpickle.dumps(rest) if rest is not None else None
        self._reset = (seeds, mask, payload)
        infos = self._roll(0)
        self._done[slice(None) if mask is None else mask] = False
        return self._observation(0), infos

    def step(self, actions: Nested) -> tuple[Nested, Array, Array, Array, dict[str, Any]]:
        self._server.raise_failure()
        if self._mode == AutoresetMode.DISABLED and self._done.any():
            raise EndedError(
                f"environments {np.flatnonzero(self._done).tolist()} have ended; with autoreset_mode=DISABLED call "
                'reset(options={"reset_mask": ...}) for them before the next step.'
            )
        self._write_actions(actions)
        infos = self._roll(1)
        blocks = self._rollouts.blocks
        reward, terminated, truncated = (blocks[key][0, 0].copy() for key in ("reward", "terminated", "truncated"))
        self._done = terminated | truncated
        return self._observation(1), reward, terminated, truncated, infos

    def _write_actions(self, actions: Nested) -> None:
        try:
            arrays = {name: np.asarray(leaf) for name, leaf in leaves(self._action, actions)}
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ConfigError(f"actions do not have the form of {self.action_space}: {error!r}") from error
        for name, array in arrays.items():
            expected = (self.num_envs, *self._action_schema[name].shape)
            if array.shape != expected:
                raise ConfigError(f"{name} has shape {list(array.shape)}; expected {list(expected)}.")
            if array.dtype.hasobject:
                raise ConfigError(f"{name} is an array of Python objects; an array of numbers is expected.")
        schema = {name: ArraySpec.of(array) for name, array in arrays.items()}
        if schema != self._action_schema:  # an environment gets its action in the dtype that it was given in
            self._lay(schema)
        for name, array in arrays.items():
            self._rollouts.blocks[name][0, 0] = array

    def _observation(self, row: int) -> Nested:
        return nest(self._obs, {name: self._rollouts.blocks[name][0, row].copy() for name in self._obs_schema})

    def _roll(self, steps: int) -> dict[str, Any]:
        """One ticket for every worker, and their infos merged as Gymnasium merges them."""
        server = self._server
        with server.locked():
            server.raise_failure()
            self._steps = steps
            server.tickets.open(None, None, 1)
            server.grant()
        try:
            arrived = server.wait(lambda: server.tickets.take(0))
        finally:
            self._reset = None
            with server.locked():
                if server.tickets.is_open:
                    server.cancel()
        infos: dict[str, Any] = {}
        for a in arrived:
            if a.chunk.infos:
                first = server.seats[a.order.worker].first
                for i, final, info in unpack(a.chunk.infos):
                    infos = self._add_info(infos, final or {}, first + i)
                    infos = self._add_info(infos, info, first + i)
        return infos

    def render(self) -> tuple[Any, ...] | None:
        return self._call("render", ())

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """An attribute of every environment, or the results of calling it."""
        return self._call("call", (name, args, kwargs))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        return self.call(name)

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of every environment's generator."""
        return self.get_attr("np_random_seed")

    def set_attr(self, name: str, values: list[Any] | tuple[Any, ...] | object) -> None:
        each = list(values) if isinstance(values, (list, tuple)) else [values] * self.num_envs
        if len(each) != self.num_envs:
            raise ValueError(f"{len(each)} values for {self.num_envs} environments; give one, or one for each.")
        parts = [(name, each[seat.first : seat.stop]) for seat in self._server.seats]
        self._call("set_attr", *parts)

    def _call(self, name: str, *arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Do something on every worker; `arguments` is one tuple for all, or one each."""
        server = self._server
        parts = arguments if len(arguments) == len(server.seats) else arguments * len(server.seats)
        with server.locked():
            server.raise_failure()
            server.call_errors.clear()
            self._replies = {}
            self._requests += 1
            for seat, args in zip(server.seats, parts, strict=True):
                server.send(seat, m.Call(self._requests, name, cloudpickle.dumps((args, {}))))

        def done() -> bool | None:
            return True if len(self._replies) + len(server.call_errors) >= len(server.seats) else None

        server.wait(done)
        if server.call_errors:
            raise server.call_errors[0]
        return tuple(value for worker in sorted(self._replies) for value in self._replies[worker] or ())

    def close_extras(self, **kwargs: Any) -> None:
        self._finalizer()
        if hasattr(self, "_rollouts"):
            self._rollouts.close()

    # ---- the server's side ----

    def version(self) -> int:
        return 0  # the learner acts: there is no policy on the workers

    def make_ticket(self, order: Order) -> tuple[m.Ticket, list[Any]]:
        seat = self._server.seats[order.worker]
        part = slice(seat.first, seat.stop)
        reset, frames = None, []
        if self._reset is not None:
            seeds, mask, options = self._reset
            reset = m.Reset(seeds and seeds[part], None if mask is None else mask[part].tobytes(), options)
        elif not self._server.shares_memory:
            frames = [self._rollouts.blocks[name][0, 0, part].tobytes() for name in self._action_schema]
        return m.Ticket(order.seq, order.lane, self._steps, 0, reset, infos=True), frames

    def on_message(self, seat: Seat, message: m.FromWorker, received: Received) -> None:
        match message:
            case m.Chunk():
                if self._server.tickets.order(message.ticket) is not None and message.keys:
                    self._rollouts.store(seat, 0, self._steps, message, received)
                self._server.tickets.accept(seat.worker, message.ticket, 0, message)
            case m.Reply() if message.request == self._requests:
                self._replies[seat.worker] = unpack(message.payload)


def _checked_mask(mask: object, num_envs: int) -> Array:
    """Gymnasium's own rules for a reset mask."""
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"options['reset_mask'] is a {type(mask).__name__}; it must be a NumPy array.")
    if mask.shape != (num_envs,):
        raise ValueError(f"options['reset_mask'] has shape {list(mask.shape)}; expected [{num_envs}].")
    if mask.dtype != np.bool_:
        raise TypeError(f"options['reset_mask'] has dtype {mask.dtype}; expected bool.")
    if not mask.any():
        raise ValueError("options['reset_mask'] selects no environment; leave it out, or set at least one.")
    return mask
