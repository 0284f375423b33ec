"""`make_vec`: a Gymnasium VectorEnv with its environments on workers; the caller chooses the actions."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
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
from farstep.errors import ConfigError, EndedError, PendingStepError, RemoteEnvError, WireError
from farstep.event import Event, EventKind
from farstep.head.events import EventLog
from farstep.head.members.worker_records import ResetRequest
from farstep.head.stepping.lock_step import Info, LockStepHead
from farstep.head.stepping.stepper import Stepper
from farstep.rollout.program import Program
from farstep.rollout.progress import Phase
from farstep.rollout.sources import Source
from farstep.run.launch_monitor import LaunchMonitor
from farstep.run.run_page import RunPage
from farstep.run.stepper_view import StepperView
from farstep.run.vector_arguments import (
    ActionChecks,
    check_env_name,
    check_launch,
    checked_batch_size,
    checked_ids,
    checked_mask,
    checked_mode,
    checked_seeds,
    checked_thunks,
)
from farstep.schema import nest, space_schema
from farstep.sync import Always

if TYPE_CHECKING:
    from farstep.observe.diagnosis import Diagnosis

_OUTCOME = ("reward", "terminated", "truncated")


def make_vec(
    env_name: str | EnvSpec | Callable[..., Any] | list[Callable[..., Any]] | tuple[Callable[..., Any], ...],
    num_envs: int | None = None,
    config: LaunchConfig | Mapping[str, object] | None = None,
    autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Any] = (),
    batch_size: int | None = None,
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
        batch_size: Number of environments that `recv` returns, for learners that act while other environments step, as
            in EnvPool; needs local workers with shared memory. None: all.

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
        thunks = checked_thunks(env_name, num_envs)
        env_name = thunks[0]
    else:
        check_env_name(env_name)
    num_envs = check_count("num_envs", (len(thunks) or 1) if num_envs is None else num_envs)
    check_launch(launch, num_envs)
    env_config = EnvConfig(
        type="factory" if callable(env_name) else "gymnasium",
        env_name=env_name,
        env_kwargs=env_kwargs or {},
        wrappers=wrappers,
        envs_per_node=num_envs // launch.nodes,
    )
    size = checked_batch_size(batch_size, num_envs, launch)
    return ClusterVectorEnv(env_config, launch, checked_mode(autoreset_mode), thunks, size)


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
        batch_size: int | None = None,
    ) -> None:
        self.closed = True  # until workers run
        self._closing = threading.RLock()
        self.num_envs = config.nodes * env_config.envs_per_node
        self.batch_size = self.num_envs if batch_size is None else batch_size
        self.autoreset_mode = autoreset_mode
        self._must_reset = autoreset_mode == AutoresetMode.DISABLED
        source = dataclasses.replace(Source.of(env_config), thunks=thunks)
        program = Program(source, Always(), autoreset_mode=autoreset_mode.value)
        self._events = EventLog()
        self._stepper = Stepper(config, program, env_config.envs_per_node, self._events)
        view = StepperView(self._stepper, self._events, env_config.label)
        self._page = RunPage(view)
        self._finalizer = weakref.finalize(self, view.close, self._page)
        self.closed = False
        try:
            self.single_observation_space, self.single_action_space = self._stepper.start()
            described = self._stepper.call("describe", ())[0]
            self._monitor = LaunchMonitor(self._stepper.server)
            view.monitor = LaunchMonitor(self._stepper.server)
        except BaseException:
            self.close()
            raise
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._obs, self._obs_schema = space_schema(self.single_observation_space, "obs")
        self._actions = ActionChecks(self.single_action_space, self.action_space)
        self._done = np.zeros(self.num_envs, bool)
        """Which environments have ended, for autoreset mode DISABLED."""
        self._pending = False
        """Whether `step_async` was called and `step_wait` was not."""
        self._received = np.arange(self.num_envs)
        """The environments that the last `recv` returned."""
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
        infos = self._reset(seed, options)
        return self._observation(self._stepper.row), self._merged(infos)

    def _reset(self, seed: int | Sequence[int | None] | None, options: dict[str, Any] | None) -> Sequence[Info]:
        """Reset environments. Results of a step that is unfinished are discarded."""
        seeds = checked_seeds(seed, self.num_envs)
        rest = None if options is None else dict(options)  # do not change the caller's dict
        mask = checked_mask(rest.pop("reset_mask"), self.num_envs) if rest and "reset_mask" in rest else None
        payload = cloudpickle.dumps(rest) if rest is not None else None
        self._pending = False
        infos = self._stepper.reset(ResetRequest(seeds, mask, payload))
        self._done[slice(None) if mask is None else mask] = False
        return infos

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
        self._begin(actions)
        return self._results()

    def step_async(self, actions: Nested) -> None:
        """Begin a step of every environment, without waiting for it. `step_wait` returns its results.

        Args:
            actions: As for `step`.

        Raises:
            PendingStepError: A step is unfinished already.
            FarstepError: As `step`.
        """
        self._begin(actions)
        self._pending = True

    def step_wait(self) -> tuple[Nested, Array, Array, Array, dict[str, Any]]:
        """Wait for the step that `step_async` began, and return what `step` returns.

        Raises:
            PendingStepError: `step_async` was not called.
            FarstepError: As `step`.
        """
        if not self._pending:
            raise PendingStepError("step_wait was called without step_async; call step_async(actions) first.")
        self._pending = False
        return self._results()

    def _begin(self, actions: Nested) -> None:
        self._check_pending("step")
        if self._must_reset:
            self._check_ended(slice(None))
        self._stepper.begin_step(self._actions.checked(actions, self.num_envs))

    def _results(self) -> tuple[Nested, Array, Array, Array, dict[str, Any]]:
        infos = self._stepper.finish_step()
        row = self._stepper.row
        reward, terminated, truncated = row["reward"].copy(), row["terminated"].copy(), row["truncated"].copy()
        if self._must_reset:
            self._done = terminated | truncated
        return self._observation(self._stepper.next_obs), reward, terminated, truncated, self._merged(infos)

    # ---- steps of some environments, as EnvPool has them ----

    def async_reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """Reset all environments. The next calls of `recv` return their first observations, with reward 0.

        Args:
            seed: As for `reset`.
            options: As for `reset`, but without `reset_mask`.

        Raises:
            ConfigError: The workers are not local processes with shared memory, or `options` has a `reset_mask`.
            FarstepError: As `reset`.
        """
        lock_step = self._partial_steps()
        if options and "reset_mask" in options:
            raise ConfigError("async_reset resets all environments; leave options['reset_mask'] out.")
        infos = self._reset(seed, options)
        for name, target in self._stepper.next_obs.items():
            target[...] = self._stepper.row[name]
        for key in _OUTCOME:
            self._stepper.row[key][...] = 0
        lock_step.reset_done(infos)

    def send(self, actions: Nested, env_id: Array | Sequence[int] | None = None) -> None:
        """Begin a step of some environments, without waiting for it.

        Args:
            actions: One action for each environment in `env_id`. They are cast to the dtype of the action space.
            env_id: Numbers of the environments. None: those that the last `recv` returned.

        Raises:
            ConfigError: `env_id` or `actions` are invalid, or `actions` cannot be cast.
            PendingStepError: One of the environments has not been received since its last action.
            EndedError: As `step`.
            FarstepError: A worker failed.
        """
        lock_step = self._partial_steps()
        self._stepper.server.raise_failure()
        if self._pending:
            raise PendingStepError("send was called after step_async; call step_wait first.")
        chosen = checked_ids(self._received if env_id is None else env_id, self.num_envs)
        unread = lock_step.in_flight[chosen] | np.isin(chosen, list(lock_step.ready))
        if unread.any():
            raise PendingStepError(
                f"environments {chosen[unread].tolist()} have a step whose result was not received; call recv before "
                "the next action for them."
            )
        self._check_ended(chosen)
        for name, array in self._actions.checked(actions, len(chosen)).items():
            target = self._stepper.row[name]
            if not np.can_cast(array.dtype, target.dtype, "same_kind"):
                raise ConfigError(f"{name} has dtype {array.dtype}, which cannot be cast to {target.dtype}.")
            target[chosen] = array
        self._stepper.send(chosen)

    def recv(self) -> tuple[Nested, Array, Array, Array, dict[str, Any]]:
        """Wait until `batch_size` environments have finished a step, and return their results.

        Returns:
            `obs, reward, terminated, truncated, info` with `batch_size` rows, in the order in which the environments
            finished; `info["env_id"]` has their numbers.

        Raises:
            PendingStepError: Fewer than `batch_size` environments were reset or have an action.
            FarstepError: A worker or an environment failed. `reset` or `async_reset` continues after an environment's
                error.
        """
        lock_step = self._partial_steps()
        self._stepper.server.raise_failure()
        expected = len(lock_step.ready) + lock_step.num_in_flight
        if expected < self.batch_size:
            raise PendingStepError(
                f"recv waits for batch_size={self.batch_size} environments, but only {expected} were reset or have an "
                "action; call async_reset or send first."
            )
        chosen, infos = self._stepper.receive(self.batch_size)
        self._received = chosen
        reward, terminated, truncated = (self._stepper.row[key][chosen] for key in _OUTCOME)
        self._done[chosen] = terminated | truncated
        obs = nest(self._obs, {name: array[chosen] for name, array in self._stepper.next_obs.items()})
        info = {**_rows_of(self._merged(infos), chosen), "env_id": chosen}
        return obs, reward, terminated, truncated, info

    def _partial_steps(self) -> LockStepHead:
        if self._stepper.lock_step is None:
            raise ConfigError(
                "send, recv and async_reset need workers that share memory with this process; use "
                'farstep.LocalConfig(transport="shm"), or step_async and step_wait.'
            )
        return self._stepper.lock_step

    def _check_pending(self, name: str) -> None:
        self._stepper.server.raise_failure()
        lock_step = self._stepper.lock_step
        if self._pending or (lock_step is not None and lock_step.num_in_flight):
            raise PendingStepError(
                f"{name} was called while a step is unfinished; call {'step_wait' if self._pending else 'recv'} first."
            )

    def _check_ended(self, chosen: slice | Array) -> None:
        if self._must_reset and self._done[chosen].any():
            ended = np.arange(self.num_envs)[chosen][self._done[chosen]]
            raise EndedError(
                f"environments {ended.tolist()} have ended; with autoreset_mode=DISABLED call "
                'reset(options={"reset_mask": ...}) for them before the next step.'
            )

    def stats(self) -> dict[str, Any]:
        """Return counters and times of the workers.

        Returns:
            The entries `steps`, `steps_per_second` (since earlier calls of `stats`), `workers`, `slots` and `nodes` of
            `ClusterEnv.stats`, and of the entry `time` the seconds of each activity under `workers` (the sum) and
            `per_worker`.
        """
        return self._stepper.stats()

    @property
    def status_url(self) -> str:
        """Address of a page that shows the workers in a browser on this machine, as `ClusterEnv.status_url`. The first
        access starts the page's server, which `close` ends.

        Raises:
            ClosedError: The environment is closed.
            RunError: The server could not be started.
        """
        return self._page.open().url

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
        return self._monitor.diagnoses(self.stats())[0]

    def _observation(self, arrays: Mapping[str, Array]) -> Nested:
        if isinstance(self._obs, str):
            return arrays[self._obs].copy()
        return nest(self._obs, {name: arrays[name].copy() for name in self._obs_schema})

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
        self._check_pending(name)
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


def _rows_of(info: Mapping[str, Any], chosen: Array) -> dict[str, Any]:
    """The rows of some environments of infos that were merged for all."""
    return {key: _rows_of(value, chosen) if isinstance(value, dict) else value[chosen] for key, value in info.items()}
