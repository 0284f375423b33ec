"""`make_vec`: a Gymnasium VectorEnv with its environments on workers; the caller chooses the actions."""

from __future__ import annotations

import dataclasses
import reprlib
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import cloudpickle
import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from farstep.config.env import EnvConfig, check_count
from farstep.config.launch import LaunchConfig, LocalConfig
from farstep.core import Array, Nested
from farstep.errors import ConfigError, EndedError, RemoteEnvError, WireError, unknown_name
from farstep.event import Event, EventKind
from farstep.head.events import EventLog
from farstep.head.members.worker_records import ResetRequest
from farstep.head.stepper import Info, Stepper
from farstep.resources import machine_use
from farstep.rollout.program import Program
from farstep.rollout.progress import Phase
from farstep.rollout.sources import Source
from farstep.schema import leaves, nest, space_schema
from farstep.sync import Always

if TYPE_CHECKING:
    from farstep.observe.diagnosis import Diagnosis, RunMonitor


def make_vec(
    env_name: str | EnvSpec | Callable[..., Any] | list[Callable[..., Any]] | tuple[Callable[..., Any], ...],
    num_envs: int | None = None,
    config: LaunchConfig | Mapping[str, object] | None = None,
    autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Any] = (),
) -> ClusterVectorEnv:
    """Make a Gymnasium VectorEnv that behaves like `SyncVectorEnv` but runs its environments on workers.

    Args:
        env_name: A Gymnasium id, an `EnvSpec`, a callable that returns an environment, or a list of callables, one per
            environment, as `SyncVectorEnv` takes them.
        num_envs: Total number of environments. None: 1, or the length of the list.
        config: Where workers run: a launch configuration, or a mapping of the options of `LocalConfig`. None: on this
            machine, one worker per core.
        autoreset_mode: When an ended environment is reset: an `AutoresetMode`, its name or its value; default
            NEXT_STEP.
        env_kwargs: Keyword arguments for the environment, or for the callables; default none.
        wrappers: Wrappers for each environment, applied in order, as in `EnvConfig.wrappers`; default none.

    Returns:
        The vector environment; its workers are running.

    Raises:
        ConfigError: An option is invalid, or contradicts another.
        FarstepError: The workers did not start, or an environment could not be constructed.

    Example:
        envs = farstep.make_vec("CartPole-v1", num_envs=64)
    """
    launch = (config if isinstance(config, LaunchConfig) else LocalConfig.of(config)).resolved()
    thunks: Sequence[Callable[..., Any]] = ()
    if isinstance(env_name, (list, tuple)):
        thunks = _checked_thunks(env_name, num_envs)
        env_name = thunks[0]
    elif not isinstance(env_name, (str, EnvSpec)) and not callable(env_name):
        hint = " Call list() on it first." if isinstance(env_name, Iterable) else ""
        if isinstance(env_name, gymnasium.Env):
            hint = " Pass a function that makes the environment: each worker calls it."
        raise ConfigError(
            f"make_vec's env_name is {reprlib.repr(env_name)}; expected a Gymnasium id, an EnvSpec, a callable that "
            f"returns an environment, or a list of such callables.{hint}"
        )
    num_envs = check_count("num_envs", (len(thunks) or 1) if num_envs is None else num_envs)
    if num_envs % launch.nodes:
        raise ConfigError(f"num_envs={num_envs} is not a multiple of nodes={launch.nodes}.")
    if not launch.fewest_nodes == launch.nodes == launch.most_nodes:
        raise ConfigError(
            f"make_vec steps all of its {num_envs} environments together, so it needs all nodes at all times; "
            f"{type(launch).__name__} has min_nodes={launch.fewest_nodes}, nodes={launch.nodes} and "
            f"max_nodes={launch.most_nodes}. Leave min_nodes and max_nodes out."
        )
    if launch.coordinator is not None:
        raise ConfigError(
            f"make_vec steps all of its {num_envs} environments together, so no coordinator can park its workers. "
            "Leave coordinator out, or use a farstep.ClusterEnv."
        )
    env_config = EnvConfig(
        type="factory" if callable(env_name) else "gymnasium",
        env_name=env_name,
        env_kwargs=env_kwargs or {},
        wrappers=wrappers,
        envs_per_node=num_envs // launch.nodes,
    )
    return ClusterVectorEnv(env_config, launch, _mode(autoreset_mode), thunks)


def _checked_thunks(thunks: Sequence[Any], num_envs: int | None) -> Sequence[Callable[..., Any]]:
    if not thunks or not all(callable(thunk) for thunk in thunks):
        raise ConfigError(
            f"make_vec got {reprlib.repr(thunks)}; expected a list of callables, one per environment, at least one."
        )
    if num_envs is not None and num_envs != len(thunks):
        raise ConfigError(f"num_envs is {num_envs!r} with a list of {len(thunks)} callables; leave num_envs out.")
    return tuple(thunks)


def _mode(value: AutoresetMode | str) -> AutoresetMode:
    """Return the autoreset mode for a mode, its name or its value."""
    for mode in AutoresetMode:
        if value in (mode, mode.name, mode.value):
            return mode
    raise ConfigError(unknown_name("autoreset_mode", str(value), [mode.name for mode in AutoresetMode]))


class ClusterVectorEnv(VectorEnv[Any, Any, Any]):
    """The vector environment that `make_vec` returns.

    If an environment or a worker fails, the call raises. No environment is restarted, because the learner would not
    notice that a new episode has begun.
    """

    def __init__(
        self,
        env_config: EnvConfig,
        config: LaunchConfig,
        autoreset_mode: AutoresetMode,
        thunks: Sequence[Callable[..., Any]] = (),
    ) -> None:
        self.closed = True  # until workers run
        self._monitor: RunMonitor | None = None
        self._closing = threading.RLock()
        self.num_envs = config.nodes * env_config.envs_per_node
        self.autoreset_mode = autoreset_mode
        source = dataclasses.replace(Source.of(env_config), thunks=thunks)
        program = Program(source, Always(), autoreset_mode=autoreset_mode.value)
        self._events = EventLog()
        self._stepper = Stepper(config, program, env_config.envs_per_node, self._events)
        self._finalizer = weakref.finalize(self, Stepper.close, self._stepper)
        self.closed = False
        try:
            self.single_observation_space, self.single_action_space = self._stepper.start()
            described = self._stepper.call("describe", ())[0]
            self._at_launch = (time.monotonic(), machine_use(self._stepper.server.local_pids()))
        except BaseException:
            self.close()
            raise
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._obs, self._obs_schema = space_schema(self.single_observation_space, "obs")
        self._action, self._action_schema = space_schema(self.single_action_space, "action")
        self._done = np.zeros(self.num_envs, bool)
        self.metadata = {**described["metadata"], "autoreset_mode": autoreset_mode}
        self.render_mode = described["render_mode"]
        if isinstance(env_config.env_name, EnvSpec):
            self.spec = env_config.env_name
        elif isinstance(env_config.env_name, str) and env_config.env_name in gymnasium.registry:
            self.spec = gymnasium.spec(env_config.env_name)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Nested, dict[str, Any]]:
        """Reset all environments, or those that `options["reset_mask"]` selects, as `SyncVectorEnv` does.

        Args:
            seed: One seed per environment; an integer stands for `seed, seed + 1, ...`. None: do not seed.
            options: Passed to `reset` of each environment, except `reset_mask`, a bool array `[num_envs]`.

        Returns:
            `obs, info`.

        Raises:
            ValueError: `seed` or `reset_mask` has the wrong length.
            FarstepError: A worker or an environment failed.
        """
        seeds: list[int | None] | None = None
        if isinstance(seed, (int, np.integer)):
            seeds = [int(seed) + i for i in range(self.num_envs)]
        elif seed is not None:
            seeds = [None if entry is None else int(entry) for entry in seed]
            if len(seeds) != self.num_envs:
                raise ValueError(f"seed has {len(seeds)} entries; expected num_envs={self.num_envs}, one for each.")
        rest = None if options is None else dict(options)  # do not change the caller's dict
        mask = _checked_mask(rest.pop("reset_mask"), self.num_envs) if rest and "reset_mask" in rest else None
        payload = cloudpickle.dumps(rest) if rest is not None else None
        infos = self._stepper.reset(ResetRequest(seeds, mask, payload))
        self._done[slice(None) if mask is None else mask] = False
        return self._observation(0), self._merged(infos)

    def step(self, actions: Nested) -> tuple[Nested, Array, Array, Array, dict[str, Any]]:
        """Step every environment once.

        Args:
            actions: One action per environment, batched as `action_space` is.

        Returns:
            `obs, reward, terminated, truncated, info`; the arrays are copies.

        Raises:
            ConfigError: `actions` do not have the form of `action_space`.
            EndedError: The mode is DISABLED, and an ended environment was not reset before this step.
            FarstepError: A worker or an environment failed.
        """
        self._stepper.server.raise_failure()
        if self.autoreset_mode == AutoresetMode.DISABLED and self._done.any():
            raise EndedError(
                f"environments {np.flatnonzero(self._done).tolist()} have ended; with autoreset_mode=DISABLED call "
                'reset(options={"reset_mask": ...}) for them before the next step.'
            )
        infos = self._stepper.step(self._checked(actions))
        blocks = self._stepper.blocks
        reward, terminated, truncated = (blocks[key][0, 0].copy() for key in ("reward", "terminated", "truncated"))
        self._done = terminated | truncated
        return self._observation(1), reward, terminated, truncated, self._merged(infos)

    def stats(self) -> dict[str, Any]:
        """Return how workers spent their time.

        Returns:
            The entry `time` of `ClusterEnv.stats`: seconds of each activity under `workers` (the sum) and `per_worker`.
        """
        times = self._stepper.times
        with self._stepper.server.locked():
            return {"time": {"workers": times.total(), "per_worker": times.per_worker()}}

    def events(self, kinds: EventKind | Collection[EventKind] | None = None, since: float = 0.0) -> list[Event]:
        """Return the latest events of the workers, at most 1,000, as `ClusterEnv.events` does; also after `close`.

        Args:
            kinds: The kinds to return, such as `"lost"` or `["lost", "stuck"]`; None: all.
            since: Unix time in seconds; only later events are returned.

        Returns:
            The events, oldest first.

        Raises:
            ConfigError: A kind is unknown.
        """
        return self._events.events(kinds, since)

    def scale(self, nodes: int | None = None, *, workers: int | None = None) -> None:
        """Refuse: every step needs all environments, so no worker can be parked.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "make_vec steps all environments together, so its number of workers is fixed: scale works only for a "
            "farstep.ClusterEnv. Close this environment and make another one with more or fewer environments."
        )

    def diagnose(self) -> Diagnosis:
        """Say what the program is waiting for, from its counters of the last half minute, or since the last call.

        Returns:
            The cause in one sentence, with the numbers behind it and the remedy, as `ClusterEnv.diagnose`.
        """
        from farstep.observe.diagnosis import RunMonitor  # not at launch: `farstep.observe` imports the terminal

        server = self._stepper.server
        if self._monitor is None:
            self._monitor = RunMonitor(server.events, *self._at_launch)
        return self._monitor.diagnoses(self.stats(), machine_use(server.local_pids()))[0]

    def _checked(self, actions: Nested) -> dict[str, Array]:
        try:
            arrays = {name: np.asarray(leaf) for name, leaf in leaves(self._action, actions)}
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ConfigError(f"actions do not have the structure of {self.action_space}: {error!r}") from error
        for name, array in arrays.items():
            expected = (self.num_envs, *self._action_schema[name].shape)
            if array.shape != expected:
                raise ConfigError(f"{name} has shape {list(array.shape)}; expected {list(expected)}.")
            if array.dtype.hasobject:
                raise ConfigError(f"{name} is an array of Python objects; an array of numbers is expected.")
        return arrays

    def _observation(self, row: int) -> Nested:
        return nest(self._obs, {name: self._stepper.blocks[name][0, row].copy() for name in self._obs_schema})

    def _merged(self, infos: Sequence[Info]) -> dict[str, Any]:
        """Merge the infos as Gymnasium does."""
        merged: dict[str, Any] = {}
        for slot, final, info in infos:
            if final:
                merged = self._add_info(merged, final, slot)  # type: ignore[arg-type]
            merged = self._add_info(merged, info, slot)  # type: ignore[arg-type]
        return merged

    def render(self) -> tuple[Any, ...] | None:
        """Return the rendered frame of every environment."""
        return self._call("render", "render", ())

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Get an attribute of every environment, or call it if it is a method.

        Args:
            name: Name of the attribute.
            *args: Positional arguments of the method.
            **kwargs: Keyword arguments of the method.

        Returns:
            One value per environment. The values must be plain data or arrays.

        Raises:
            WireError: A value cannot be sent.
            RemoteEnvError: The environment raised.
        """
        return self._call(name, "call", (name, args, kwargs))

    def _call(self, name: str, method: str, *arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        try:
            return self._stepper.call(method, *arguments)
        except RemoteEnvError as error:
            if error.where.phase != Phase.IDLE.label:
                raise
            reason = error.message.partition(": ")[2]
        raise WireError(f"{name!r} succeeded, but its value cannot be sent: {reason} Return its numbers instead.")

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of every environment, as `call` does."""
        return self.call(name)

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of every environment's random generator."""
        return self.get_attr("np_random_seed")

    def set_attr(self, name: str, values: list[Any] | tuple[Any, ...] | object) -> None:
        """Set an attribute of every environment.

        Args:
            name: Name of the attribute.
            values: A list or tuple with one value per environment, or one value for all.

        Raises:
            ValueError: The number of values is not the number of environments.
        """
        each = list(values) if isinstance(values, (list, tuple)) else [values] * self.num_envs
        if len(each) != self.num_envs:
            raise ValueError(f"{len(each)} values for {self.num_envs} environments; give one, or one for each.")
        self._call(name, "set_attr", *((name, each[record.columns]) for record in self._stepper.server.records))

    def close_extras(self, **kwargs: Any) -> None:
        """End the workers; `close` calls this."""
        with self._closing:  # a concurrent call waits for the first
            self._finalizer()


def _checked_mask(mask: object, num_envs: int) -> Array:
    """Apply Gymnasium's rules for a reset mask."""
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"options['reset_mask'] is a {type(mask).__name__}; it must be a NumPy array.")
    if mask.shape != (num_envs,):
        raise ValueError(f"options['reset_mask'] has shape {list(mask.shape)}; expected [{num_envs}].")
    if mask.dtype != np.bool_:
        raise TypeError(f"options['reset_mask'] has dtype {mask.dtype}; expected bool.")
    if not mask.any():
        raise ValueError("options['reset_mask'] selects no environment; leave it out, or set at least one.")
    return mask
