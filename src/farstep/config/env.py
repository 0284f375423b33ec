"""What to run: the configurations of environments, and checks that others share (where to run: `launch_config`).

All are frozen, keyword-only and checked at construction; a plain dict with the same keys is accepted
wherever one is expected.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import numbers
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from gymnasium.envs.registration import EnvSpec

from farstep.config.base import Options as _Config
from farstep.config.transfer import ALL_AT_ONCE, TransferTrigger
from farstep.core import SyncRule
from farstep.errors import AgentError, ConfigError, described

EnvType = Literal["gymnasium", "factory", "vector", "envpool"]
Inference = Literal["auto", "eager"]
Compression = Literal["auto", "none", "lz4", "zstd"]
StaggerInit = Literal["advance", "clock", "policy"]
StaggerOffsets = Literal["even", "random"]
StaggerEarly = Literal["partial", "gate"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsConfig(_Config):
    """Which parameters travel to workers, and in what form."""

    only: str | Sequence[str] | Callable[[str], bool] | None = None
    """Names that travel: a shell pattern (`actor.*`), several, or a predicate. What does not travel stays on workers as
    it was when the agent was first sent. None: all."""
    half: bool = False
    """Send float32 and float64 rounded to float16."""
    delta: bool = False
    """Send what changed since the version that a worker has, compressed without loss. Workers that share memory with
    the head read one common copy instead."""

    def __post_init__(self) -> None:
        for name in ("half", "delta"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"WeightsConfig.{name} is {getattr(self, name)!r}; expected True or False.")
        patterns = [self.only] if isinstance(self.only, str) else self.only
        if isinstance(patterns, Sequence) and patterns and all(isinstance(p, str) and p for p in patterns):
            object.__setattr__(self, "only", tuple(patterns))
        elif self.only is not None and not callable(self.only):
            raise ConfigError(
                f"WeightsConfig.only is {self.only!r}; expected a pattern such as 'actor.*', several, or a function of "
                "a parameter's name."
            )

    def travels(self, name: str) -> bool:
        """Whether the parameter of that name is sent to workers."""
        if self.only is None:
            return True
        if callable(self.only):
            try:
                return bool(self.only(name))
            except Exception as error:
                raise AgentError(
                    f"the predicate weights.only raised {described(error)}, for the parameter {name!r}. "
                    "Nobody knows now what travels: let it return True or False for every name of get_parameters()."
                ) from error
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.only)

    def idle_patterns(self, names: Sequence[str]) -> list[str]:
        """The patterns that choose none of these parameters."""
        patterns = () if self.only is None or callable(self.only) else self.only
        return [p for p in patterns if not any(fnmatch.fnmatchcase(name, p) for name in names)]


ALL_WEIGHTS = WeightsConfig()
"""Everything travels, as it is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stagger(_Config):
    """Environments spread over the horizon, so that a short rollout has rows of every part of an episode (Staggered
    Environment Resets, arXiv 2511.21011)."""

    horizon: int | None = None
    """Steps of an episode; one that has not ended by itself by then is truncated."""
    groups: int | Literal["auto"] = "auto"
    """How many groups of environments begin at different times; `auto`: horizon // steps of the first rollout. Never
    more than there are environments."""
    init: StaggerInit = "advance"
    """How an environment gets to its place: by steps with random actions (`advance`), with the agent's (`policy`), none
    of which you are given, or by a first episode that is cut short (`clock`)."""
    offsets: StaggerOffsets = "even"
    """Places of groups, evenly apart; or of each environment by itself, drawn from the seed (`random`)."""
    early: StaggerEarly = "partial"
    """When an episode ends before the horizon, begin the next at once (`partial`), or when its group does (`gate`)."""

    def __post_init__(self) -> None:
        if self.horizon is None:
            raise ConfigError("Stagger.horizon is missing; give the steps of an episode, e.g. {'horizon': 1000}.")
        self._at_least("horizon", 1)
        self._one_of("init", StaggerInit)
        self._one_of("offsets", StaggerOffsets)
        self._one_of("early", StaggerEarly)
        if self.groups == "auto":
            return
        if isinstance(self.groups, str):
            raise ConfigError(f"Stagger.groups is {self.groups!r}; expected 'auto' or a number of groups.")
        self._at_least("groups", 1)
        if self.groups > self.horizon:
            raise ConfigError(
                f"Stagger.groups is {self.groups} with horizon={self.horizon}; groups begin at different steps of the "
                "horizon, so there can be no more groups than steps."
            )
        if self.offsets == "random":
            raise ConfigError(
                f"Stagger has both groups={self.groups} and offsets='random', which gives every environment a place of "
                "its own; leave out one of the two."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvConfig(_Config):
    """Which environments to run, and how workers act in them."""

    type: EnvType = "gymnasium"
    """Where environments come from: a Gymnasium id, a factory, a VectorEnv, or EnvPool."""
    env_name: str | EnvSpec | Callable[..., Any] | None = None
    """Gymnasium or EnvPool id; `module:Id` imports the module first. For gymnasium also an `EnvSpec`, for factory and
    vector a dotted path (`package.module:function`) or a callable."""
    env_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Passed to the environment's constructor."""
    wrappers: Sequence[Any] = ()
    """Applied in order: a callable, a dotted path, or a pair of one of these and its keyword arguments."""
    envs_per_node: int = 1
    """Environments on each node; the total is nodes times this."""
    seed: int | None = None
    """Root of every environment's seeds; None draws one (see `env.seed`)."""
    seed_episodes: bool = True
    """Seed every episode of a slot, so that a replaced worker goes on with the same episodes. False: only the
    first, then each environment's own generator, as in Gymnasium's vectors; faster where
    seeding is costly (180 ms for Atari)."""
    kl_threshold: float | None = None
    """AAPS: pull weights when the running KL divergence exceeds this; None pulls every published version."""
    sync: SyncRule | None = None
    """When a worker pulls weights: `farstep.sync.Always()` (default), `EveryK`, `EverySeconds`, `MaxLag`, `AAPS`, or
    several, joined by `|`."""
    weights: WeightsConfig = ALL_WEIGHTS
    """Which parameters travel, and in what form; a mapping is accepted: `{"only": "actor.*", "half": True}`."""
    transfer: TransferTrigger = ALL_AT_ONCE
    """What of a chunk travels when, from workers without shared memory; a mapping is accepted: `{"size": 64}`."""
    compression: Compression = "auto"
    """Of chunks from workers without shared memory: `auto` measures, array by array, what the connection carries and
    what each of LZ4 and Zstandard (`farstep[compression]`) would cost; `lz4`, `zstd`: only that one; or `none`."""
    inference: Inference = "auto"
    """`auto` uses the fast path where it agrees with the agent's own `act`; `eager` never does."""
    stagger: Stagger | None = None
    """Spread environments over the horizon; a mapping is accepted: `{"horizon": 1000}`. None: all begin together."""

    def __post_init__(self) -> None:
        self._one_of("type", EnvType)
        self._one_of("inference", Inference)
        self._one_of("compression", Compression)
        self._at_least("envs_per_node", 1)
        object.__setattr__(self, "weights", WeightsConfig.of(self.weights))
        object.__setattr__(self, "transfer", TransferTrigger.of(self.transfer))
        if self.stagger is not None:
            object.__setattr__(self, "stagger", Stagger.of(self.stagger))
        if self.env_name is None:
            raise ConfigError("EnvConfig.env_name is missing; name an environment, e.g. 'CartPole-v1'.")
        if isinstance(self.env_name, EnvSpec):
            if self.type != "gymnasium":
                raise ConfigError(f"EnvConfig.env_name is an EnvSpec but type is {self.type!r}; use type='gymnasium'.")
        elif not isinstance(self.env_name, str) and not callable(self.env_name):
            raise ConfigError(f"EnvConfig.env_name is {self.env_name!r}; expected a name such as 'CartPole-v1'.")
        if callable(self.env_name) and self.type not in ("factory", "vector"):
            raise ConfigError(
                f"EnvConfig.env_name is a callable but type is {self.type!r}; use type='factory' "
                "(it returns one environment) or type='vector' (it returns a VectorEnv)."
            )
        if self.type == "factory" and isinstance(self.env_name, str) and not is_dotted_path(self.env_name):
            raise ConfigError(
                f"EnvConfig.env_name is {self.env_name!r} with type='factory'; expected a callable or its dotted path "
                "('package.module:function'). For a registered id use type='gymnasium'."
            )
        self._check_wrappers()
        if self.wrappers and self.type == "envpool":
            raise ConfigError(
                "EnvConfig.wrappers do not reach EnvPool's environments, which are not Python objects; give EnvPool's "
                "own options in env_kwargs (e.g. frame_skip), or use type='gymnasium'."
            )
        if self.stagger is not None and self.type in ("vector", "envpool"):
            self._check_vector_stagger(self.stagger)
        if self.seed is not None:
            object.__setattr__(self, "seed", check_seed(self.seed))
        if self.kl_threshold is not None:
            self._check_threshold(self.kl_threshold)
        if self.sync is not None:
            check_rule("EnvConfig.sync", self.sync)
        if not isinstance(self.seed_episodes, bool):
            raise ConfigError(f"EnvConfig.seed_episodes is {self.seed_episodes!r}; expected True or False.")

    def _check_vector_stagger(self, stagger: Stagger) -> None:
        if stagger.init != "clock" or stagger.early != "partial":
            raise ConfigError(
                f"EnvConfig.stagger has init={stagger.init!r} and early={stagger.early!r} with type={self.type!r}; an "
                "environment that is one of a vector cannot be stepped, or left standing, alone. Use init='clock' and "
                "early='partial', or type='gymnasium' or 'factory'."
            )

    def _check_threshold(self, threshold: float) -> None:
        if not is_number(threshold) or threshold < 0:
            raise ConfigError(
                f"EnvConfig.kl_threshold is {reprlib.repr(threshold)}; expected a divergence of at least 0 in "
                "nats, e.g. 0.05."
            )
        if self.sync is not None:
            raise ConfigError(
                f"EnvConfig has both kl_threshold={threshold!r} and sync={self.sync!r}; give one rule that says both, "
                f"e.g. sync=farstep.sync.AAPS({threshold}) | farstep.sync.MaxLag(10)."
            )

    def _check_wrappers(self) -> None:
        if isinstance(self.wrappers, str) or not isinstance(self.wrappers, Sequence):
            raise ConfigError(f"EnvConfig.wrappers is {self.wrappers!r}; expected a list, e.g. [TimeLimit].")
        for wrapper in self.wrappers:
            match wrapper:
                case (function, Mapping()):
                    pass
                case function:
                    pass
            if not callable(function) and not (isinstance(function, str) and is_dotted_path(function)):
                raise ConfigError(
                    f"EnvConfig.wrappers has {wrapper!r}; expected a callable, a dotted path "
                    "('gymnasium.wrappers:TimeLimit'), or a pair of one of these and its keyword arguments."
                )

    def check_reset(self, seed: int | None, masked: bool) -> int | None:
        """The seed of a reset of all environments, or only of masked ones."""
        if seed is not None and masked and self.type == "envpool":
            raise ConfigError(
                "reset got a seed and a reset_mask, but EnvPool seeds all of its environments together; "
                "leave out one of the two."
            )
        return None if seed is None else check_seed(seed)


def is_dotted_path(name: str) -> bool:
    """Whether `name` can be the path of something to import: `package.module:function` or `package.module.function`."""
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    return attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))


def check_seed(value: object) -> int:
    """A root of seeds, if it is one that can be sent to workers."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or not 0 <= int(value) < 2**63:
        raise ConfigError(f"the seed is {value!r}; it must be a non-negative integer below 2**63, to fit a message.")
    return int(value)


def check_count(name: str, value: object, minimum: int = 1) -> int:
    """A number of something, if it is one."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or int(value) < minimum:
        raise ConfigError(f"{name} is {value!r}; it must be an integer of at least {minimum}.")
    return int(value)


def is_number(value: object) -> bool:
    """Whether it is a real number that a float can hold, and no NaN."""
    try:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and not math.isnan(value)
    except OverflowError:  # 10**400
        return False


def check_rule(what: str, rule: object) -> None:
    """Refuse what is no sync rule, or one that does not say how much it wants to be measured."""
    if isinstance(rule, type):
        raise ConfigError(f"{what} is the class {rule.__name__}; give an instance, e.g. {rule.__name__}().")
    if not isinstance(rule, SyncRule):
        raise ConfigError(
            f"{what} is {rule!r}, which has no should_pull(state); use a rule such as farstep.sync.EveryK(4)."
        )
    for name, minimum in (("probes", 0), ("rows", 1)):
        check_count(f"{type(rule).__name__}.{name}", getattr(rule, name, minimum), minimum)
