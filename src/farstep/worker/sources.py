"""Where environments come from: a Gymnasium id, a factory, a VectorEnv, or EnvPool."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium

from farstep.config import EnvConfig, is_dotted_path
from farstep.errors import ConfigError


@dataclass(frozen=True)
class Source:
    """What to build; travels to workers, so a callable in it is shipped after authentication."""

    type: str
    env_name: str | Callable[..., Any]
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    wrappers: Sequence[Any] = ()
    seed_episodes: bool = True

    @classmethod
    def of(cls, config: EnvConfig) -> Source:
        assert config.env_name is not None
        return cls(config.type, config.env_name, dict(config.env_kwargs), list(config.wrappers), config.seed_episodes)

    @property
    def is_vector(self) -> bool:
        """Whether one object steps all environments of a worker."""
        return self.type in ("vector", "envpool")

    def build(self) -> gymnasium.Env[Any, Any]:
        """One environment."""
        if self.type == "gymnasium":
            env = _make(str(self.env_name), self.env_kwargs)
        else:
            env = _callable(self.env_name)(**self.env_kwargs)
            if not isinstance(env, gymnasium.Env):
                raise ConfigError(
                    f"the factory {self.env_name!r} returned a {type(env).__name__}; expected a gymnasium.Env "
                    "(use type='vector' for one that returns a VectorEnv)."
                )
        for wrapper in self.wrappers:
            env = _wrap(env, wrapper)
        return env

    def build_vector(self, num_envs: int, seed: int) -> Any:
        """One object for `num_envs` environments: a Gymnasium VectorEnv or an EnvPool."""
        if self.type == "envpool":
            import envpool

            # As many threads as the worker may use, not as the machine has: other workers need theirs.
            threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
            options = {"num_envs": num_envs, "seed": seed, "num_threads": threads, **self.env_kwargs}
            return envpool.make(str(self.env_name), env_type="gymnasium", **options)
        if isinstance(self.env_name, str) and not _is_path(self.env_name):
            with _advice(self.env_name):
                env = gymnasium.make_vec(self.env_name, num_envs, **self.env_kwargs)
        else:
            env = _callable(self.env_name)(num_envs=num_envs, **self.env_kwargs)
        if not isinstance(env, gymnasium.vector.VectorEnv):
            raise ConfigError(
                f"{self.env_name!r} returned a {type(env).__name__}; type='vector' expects a "
                "gymnasium.vector.VectorEnv (use type='factory' for a single environment)."
            )
        for wrapper in self.wrappers:
            env = _wrap(env, wrapper)
        if env.num_envs != num_envs:
            raise ConfigError(
                f"{self.env_name!r} returned {env.num_envs} environments where num_envs={num_envs} was asked for."
            )
        return env


def _make(name: str, kwargs: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    if name.startswith("ALE/") and name not in gymnasium.registry:
        importlib.import_module("ale_py")  # registers its environments
    # The checker warns about the same things in every worker; a user runs it once where they write the environment.
    with _advice(name):
        return gymnasium.make(name, **{"disable_env_checker": True, **kwargs})


@contextlib.contextmanager
def _advice(name: str) -> Iterator[None]:
    """Say what to do about an environment that is registered elsewhere and not here."""
    try:
        yield
    except gymnasium.error.UnregisteredEnv as error:
        raise ConfigError(
            f"{type(error).__name__}: {error} A worker knows only what it imports: if your script registers {name!r}, "
            f"do that in a module of its own and name it ('your_module:{name}'), or pass the class with type='factory'."
        ) from error


def _wrap(env: Any, wrapper: Any) -> Any:
    if isinstance(wrapper, (tuple, list)):
        function, kwargs = wrapper
        return _callable(function)(env, **kwargs)
    return _callable(wrapper)(env)


def _is_path(name: str) -> bool:
    """Whether `name` is the dotted path of something rather than a registered id."""
    return name not in gymnasium.registry and is_dotted_path(name)


def _callable(path: str | Callable[..., Any]) -> Callable[..., Any]:
    if callable(path):
        return path
    module, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    found = getattr(importlib.import_module(module), attribute)
    if not callable(found):
        raise ConfigError(f"{path!r} is a {type(found).__name__}, not a callable.")
    return found  # type: ignore[no-any-return]
