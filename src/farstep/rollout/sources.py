"""Builds environments: from a Gymnasium id, a factory, a VectorEnv or EnvPool."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import gymnasium
from gymnasium.envs.registration import EnvSpec, find_highest_version, get_env_id, load_env_creator, parse_env_id

from farstep.config.env import EnvConfig, is_dotted_path
from farstep.errors import ConfigError, described, install_extra
from farstep.rollout.nested_launch import import_as_worker


@dataclass(frozen=True)
class Source:
    """Describes the environments to build. The head sends it, pickled with all callables, to authenticated workers."""

    type: str
    env_name: str | EnvSpec | Callable[..., Any]
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    wrappers: Sequence[Any] = ()
    seed_episodes: bool = True
    thunks: Sequence[Callable[..., Any]] = ()
    """One factory per slot, used instead of `env_name`."""
    info_keys: Sequence[str] = ()
    """Entries of infos that every row records."""

    @classmethod
    def of(cls, config: EnvConfig) -> Source:
        assert config.env_name is not None
        return cls(
            config.type,
            config.env_name,
            dict(config.env_kwargs),
            list(config.wrappers),
            config.seed_episodes,
            info_keys=config.info_keys,
        )

    @property
    def is_vector(self) -> bool:
        """Whether a single object steps all environments of a worker."""
        return self.type in ("vector", "envpool")

    def modules(self) -> list[str]:
        """Return the modules that define environments and wrappers, as far as they are known before building."""
        wrappers = [wrapper[0] if isinstance(wrapper, tuple) else wrapper for wrapper in self.wrappers]
        return modules_of([*(self.thunks or (self.env_name,)), *wrappers])

    def check(self, load: bool = False) -> None:
        """Check what can be checked without building an environment.

        An id is not checked if a module that has not been imported may register it: one with a module or a namespace,
        or one beside a wrapper that does not belong to Gymnasium.

        Args:
            load: Also import the environment's module and the modules of wrappers, as workers do. This finds missing
                packages, unknown names and wrong arguments of factories.

        Raises:
            ConfigError: As `build` does, if a name does not exist, an id is certainly not registered, or a factory does
                not accept the arguments.
        """
        name = self.env_name
        paths = [wrapper[0] if isinstance(wrapper, (tuple, list)) else wrapper for wrapper in self.wrappers]
        for path in paths:
            _check_path(path, load)
        if self.type == "envpool":
            with _advice(name, self.env_kwargs):
                _find_module("envpool")
        elif isinstance(name, str) and (":" in name if self.type == "gymnasium" else _is_path(name)):
            _check_path(name, load, is_id=self.type == "gymnasium")
            if load and self.type != "gymnasium":
                with _advice(name, self.env_kwargs):
                    _check_arguments(name, [*self.env_kwargs, *(["num_envs"] if self.is_vector else [])])
        elif isinstance(name, str) and self.type == "gymnasium":
            with _advice(name, self.env_kwargs):
                if load:
                    _load(name)
                if all(_module_of(path).partition(".")[0] == "gymnasium" for path in paths):
                    _check_id(name)

    def build(self, slot: int = 0) -> gymnasium.Env[Any, Any]:
        """Build the environment of a slot.

        Raises:
            ConfigError: The environment cannot be built as configured; the message says what to change.
        """
        name = self.thunks[slot] if self.thunks else self.env_name
        with _advice(name, self.env_kwargs):
            if isinstance(name, EnvSpec) or self.type == "gymnasium":
                env = _make(name, self.env_kwargs)
            else:
                env = _callable(name)(**self.env_kwargs)
        if not isinstance(env, gymnasium.Env):
            _refuse_agents(name, env)
            raise ConfigError(
                f"the factory {name!r} returned a {type(env).__name__}; expected a gymnasium.Env "
                "(use type='vector' for one that returns a VectorEnv)."
            )
        for wrapper in self.wrappers:
            env = _wrap(env, wrapper)
        return env

    def build_vector(self, num_envs: int, seed: int) -> Any:
        """Build one object for `num_envs` environments: a Gymnasium VectorEnv or an EnvPool.

        Raises:
            ConfigError: The environment cannot be built as configured; the message says what to change.
        """
        with _advice(self.env_name, self.env_kwargs):
            if self.type == "envpool":
                import envpool

                # Use the thread limit of this worker, because other workers share the machine.
                threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
                options = {"num_envs": num_envs, "seed": seed, "num_threads": threads, **self.env_kwargs}
                return envpool.make(str(self.env_name), env_type="gymnasium", **options)
            assert not isinstance(self.env_name, EnvSpec)
            if isinstance(self.env_name, str) and not _is_path(self.env_name):
                env = gymnasium.make_vec(self.env_name, num_envs, **self.env_kwargs)
            else:
                env = _callable(self.env_name)(num_envs=num_envs, **self.env_kwargs)
        if not isinstance(env, gymnasium.vector.VectorEnv):
            _refuse_agents(self.env_name, env)
            raise ConfigError(
                f"{self.env_name!r} returned a {type(env).__name__}; type='vector' expects a "
                "gymnasium.vector.VectorEnv (use type='factory' for a single environment)."
            )
        for wrapper in self.wrappers:
            env = _wrap(env, wrapper)
        if env.num_envs != num_envs:
            raise ConfigError(
                f"{self.env_name!r} returned {env.num_envs} environments; num_envs={num_envs} was requested."
            )
        return env


def _make(name: Any, kwargs: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    if isinstance(name, str):
        _register_atari(name)
        _check_version(name)
    # Disable the environment checker, because it would repeat its warnings in every worker.
    return gymnasium.make(name, **{"disable_env_checker": True, **kwargs})


def _register_atari(name: str) -> None:
    if name.startswith("ALE/") and name not in gymnasium.registry:
        importlib.import_module("ale_py")  # registers its environments


def _check_id(name: str) -> None:
    """Raise an error of Gymnasium or `ConfigError` if an id is not registered; of namespaces, only Atari's is known."""
    if "/" in name and not (name.startswith("ALE/") and "ale_py" in sys.modules):
        return
    _check_version(name)
    namespace, stem, version = parse_env_id(name)
    if name not in gymnasium.registry and (version is not None or find_highest_version(namespace, stem) is None):
        gymnasium.spec(name)


def _load(name: str) -> None:
    """Import the class of an id if it belongs to Gymnasium or Atari; raise if a package is missing."""
    _register_atari(name)
    entry_point = getattr(gymnasium.registry.get(name), "entry_point", None)
    if isinstance(entry_point, str) and entry_point.partition(".")[0] in ("gymnasium", "ale_py"):
        load_env_creator(entry_point)


def _check_path(path: str | Callable[..., Any], load: bool, is_id: bool = False) -> None:
    """Raise `ConfigError` if the module of a dotted path (or of an id `module:Id`) does not exist; if the module was
    imported before, or is imported here (`load`), also if it lacks the attribute or the id."""
    if not isinstance(path, str):
        return
    with _advice(path, {}):
        _find_module(module := _module_of(path))
        if load:
            import_as_worker(module)
        if module in sys.modules and not is_id:
            _callable(path)
        elif module in sys.modules and load:
            _check_id(path.partition(":")[2])


def _check_arguments(path: str, names: Sequence[str]) -> None:
    """Raise `TypeError` if a callable in an imported module certainly does not accept arguments with these names."""
    if _module_of(path) not in sys.modules:
        return
    try:
        # Not the signature of a wrapped function: the function that wraps it may accept further arguments.
        signature = inspect.signature(_callable(path), follow_wrapped=False)
    except (TypeError, ValueError):  # e.g. a function in C
        return
    try:
        signature.bind_partial(**dict.fromkeys(names))
    except TypeError as error:
        raise TypeError(f"{_callable(path).__qualname__}() {error}") from None


def _find_module(name: str) -> None:
    """Raise `ModuleNotFoundError` if a module does not exist. Only packages that contain it are imported."""
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        raise
    except Exception:  # of the package's own code; a worker will report it with its traceback
        return
    if found is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _check_version(name: str) -> None:
    """Raise `ConfigError` if this version of an id is not registered; name the newest registered version."""
    if name in gymnasium.registry or ":" in name:
        return
    with contextlib.suppress(gymnasium.error.Error):  # Gymnasium reports a malformed id itself
        namespace, stem, version = parse_env_id(name)
        newest = find_highest_version(namespace, stem)
        if version is not None and newest is not None:
            known = get_env_id(namespace, stem, newest)
            raise ConfigError(f"{name!r} is not registered; use the newest version, {known!r}.")


def explain_missing(name: object, error: gymnasium.error.DependencyNotInstalled | ModuleNotFoundError) -> str:
    """One sentence about a missing package: the pip command of farstep's extra, or the original error."""
    missing = error if isinstance(error, ModuleNotFoundError) else error.__cause__
    module = (getattr(missing, "name", None) or "").partition(".")[0]
    if command := install_extra(module):
        return f"{name!r} needs {module}, which is not installed. Install it: {command}"
    return f"{name!r} needs a package that is not installed: {error}"


@contextlib.contextmanager
def _advice(source: str | EnvSpec | Callable[..., Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Turn errors of Gymnasium about missing packages, names and arguments into `ConfigError`s with advice.

    Errors that a user's own code raised pass unchanged.
    """
    name = source.id if isinstance(source, EnvSpec) else source
    try:
        yield
    except gymnasium.error.UnregisteredEnv as error:
        if not _is_from_library(error):
            raise
        if isinstance(name, str) and _is_factory(name):
            raise ConfigError(
                f"{name!r} is not a registered id, but a class or function; add type='factory' "
                "(on the command line: --env-type factory)."
            ) from error
        raise ConfigError(
            f"{described(error)} A worker knows only environments that its imported modules register. If your script "
            f"registers {name!r}, move the registration to a separate module and name that module "
            f"('your_module:{str(name).rpartition(':')[2]}'), or pass the class with type='factory'."
        ) from error
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError(explain_missing(name, error)) from error
    except ModuleNotFoundError as error:
        if install_extra(error.name or ""):
            raise ConfigError(explain_missing(name, error)) from error
        raise ConfigError(
            f"{name!r} cannot be imported: {error.__cause__ or error}. Install the module, start the run in the folder "
            "of the module, or add that folder to PYTHONPATH."
        ) from error
    except (AssertionError, TypeError, gymnasium.error.Error) as error:
        cause = error.__cause__ or error
        if not _is_from_library(cause):
            raise
        raise ConfigError(
            f"{name!r} cannot be built with the arguments {dict(kwargs)}: {str(cause).rstrip('.')}. Pass arguments "
            "of an environment as env_kwargs. To pass arguments to a wrapper, use your own function, which takes the "
            "environment and returns the wrapped environment."
        ) from error


def _refuse_agents(name: object, env: object) -> None:
    """Raise `ConfigError` with advice if this is a PettingZoo environment."""
    agents = getattr(env, "possible_agents", None)
    if agents is not None or any(kind.__module__.partition(".")[0] == "pettingzoo" for kind in type(env).__mro__):
        raise ConfigError(
            f"{name!r} returned a {type(env).__name__}, an environment of PettingZoo for several agents"
            f"{f' ({len(agents)})' if agents else ''}; farstep supports environments with one agent. Write a "
            "gymnasium.Env that is one agent's view and plays the others itself; or, if all agents share a policy, "
            "convert it to a VectorEnv (for example with SuperSuit) and use type='vector'."
        )


def _is_from_library(error: BaseException) -> bool:
    """Whether the traceback contains only code of this module, Gymnasium and EnvPool."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return all(module == __name__ or module.partition(".")[0] in ("gymnasium", "envpool") for module in modules)


def _wrap(env: Any, wrapper: Any) -> Any:
    function, kwargs = wrapper if isinstance(wrapper, (tuple, list)) else (wrapper, {})
    with _advice(function, kwargs):
        return _callable(function)(env, **kwargs)


def modules_of(parts: Sequence[Any]) -> list[str]:
    """Return the modules of environments, wrappers or classes, without those that are pickled by value."""
    by_value = {"", "__main__", "__mp_main__", *cloudpickle.list_registry_pickle_by_value()}
    return [name for name in dict.fromkeys(map(_module_of, parts)) if by_value.isdisjoint(_with_packages(name))]


def _module_of(part: Any) -> str:
    """Return the module of an environment, a wrapper or a class; empty if it is unknown."""
    if isinstance(part, str) and ":" not in part:
        part = gymnasium.registry.get(part, part)
    if isinstance(part, EnvSpec):
        part = part.entry_point
    if isinstance(part, str):
        return part.partition(":")[0] if ":" in part else part.rpartition(".")[0]
    return str(getattr(getattr(part, "func", part), "__module__", ""))  # `func`: of functools.partial


def _with_packages(name: str) -> list[str]:
    """Return the names of a module and of the packages that contain it."""
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def _is_path(name: str) -> bool:
    """Whether `name` is a dotted path rather than a registered id."""
    return name not in gymnasium.registry and is_dotted_path(name)


def _is_factory(name: str) -> bool:
    """Whether `name` is the dotted path `module:attribute` of a callable in a module that has been imported."""
    module, _, attribute = name.partition(":")
    return callable(getattr(sys.modules.get(module), attribute, None))


def _callable(path: str | Callable[..., Any]) -> Callable[..., Any]:
    if callable(path):
        return path
    module, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    found = getattr(imported := importlib.import_module(module), attribute, None)
    if found is None:
        near = difflib.get_close_matches(attribute, [name for name in dir(imported) if name[0] != "_"], n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{path!r} does not exist: the module {module!r} has no {attribute!r}.{hint}")
    if not callable(found):
        raise ConfigError(f"{path!r} is a {type(found).__name__}, not a callable.")
    return found  # type: ignore[no-any-return]
