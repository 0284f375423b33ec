"""Configurations of environments (what to run), and checks that other modules use.

`launch.py` configures where workers run. Configurations are frozen, keyword-only and checked at construction. Wherever
farstep expects a configuration, it also accepts a mapping with the same keys.
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
from farstep.config.base import OrMapping, or_mapping
from farstep.config.field_docs import show_fields
from farstep.config.inference import ServedInference
from farstep.config.transfer import ALL_AT_ONCE, TransferTrigger
from farstep.core import SyncRule
from farstep.errors import AgentError, ConfigError, described

EnvType = Literal["gymnasium", "factory", "vector", "envpool"]
Inference = Literal["local", "served", "auto", "eager"]
Compression = Literal["auto", "none", "lz4", "zstd"]
StaggerInit = Literal["advance", "clock", "policy"]
StaggerOffsets = Literal["even", "random"]
StaggerEarly = Literal["partial", "gate"]


@show_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsConfig(_Config):
    """Which parameters are sent to workers, and in what form."""

    only: str | Sequence[str] | Callable[[str], bool] | None = None
    """Which parameters to send: a shell pattern for names such as `actor.*`, several patterns, or a function that takes
    a name and returns a bool. For all other parameters, workers keep the values of the agent that they first received.
    None: send all."""
    half: bool | Literal["bfloat16"] = False
    """Send float32 and float64 parameters rounded to 16 bits: to float16 (True), or to "bfloat16", which has the range
    of float32 and fewer digits."""
    delta: bool = False
    """Send only the difference to the version that the worker already has, compressed without loss. No effect on
    workers that share memory with the head: they all read one copy."""

    def __post_init__(self) -> None:
        if not isinstance(self.half, bool) and self.half != "bfloat16":
            raise ConfigError(f"WeightsConfig.half is {self.half!r}; expected True (float16), 'bfloat16' or False.")
        if not isinstance(self.delta, bool):
            raise ConfigError(f"WeightsConfig.delta is {self.delta!r}; expected True or False.")
        patterns = [self.only] if isinstance(self.only, str) else self.only
        if isinstance(patterns, Sequence) and patterns and all(isinstance(p, str) and p for p in patterns):
            object.__setattr__(self, "only", tuple(patterns))
        elif self.only is not None and not callable(self.only):
            raise ConfigError(
                f"WeightsConfig.only is {self.only!r}; expected a pattern such as 'actor.*', a list of "
                "patterns, or a function of a parameter's name."
            )

    def travels(self, name: str) -> bool:
        """Return whether a parameter is sent to workers.

        Args:
            name: Name of the parameter.

        Returns:
            True if `only` selects it.

        Raises:
            AgentError: The predicate `only` raised.
        """
        if self.only is None:
            return True
        if callable(self.only):
            try:
                return bool(self.only(name))
            except Exception as error:
                raise AgentError(
                    f"the predicate weights.only raised {described(error)}, for the parameter {name!r}. "
                    "It must return True or False for every name of get_parameters()."
                ) from error
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.only)

    def idle_patterns(self, names: Sequence[str]) -> list[str]:
        """Return the patterns in `only` that match no parameter.

        Args:
            names: Names of all parameters of the agent.

        Returns:
            The patterns; empty if `only` is None or a function.
        """
        patterns = () if self.only is None or callable(self.only) else self.only
        return [p for p in patterns if not any(fnmatch.fnmatchcase(name, p) for name in names)]


ALL_WEIGHTS = WeightsConfig()
"""All parameters are sent, unchanged."""


@show_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class Stagger(_Config):
    """Spread environments over the horizon, so that even a short rollout has rows from every part of an episode.

    This is Staggered Environment Resets (arXiv 2511.21011). Pass it as `EnvConfig.stagger`.
    """

    horizon: int | None = None
    """Required: largest number of steps of an episode; a longer episode is truncated."""
    groups: int | Literal["auto"] = "auto"
    """Number of groups of environments, each with its own start offset; at most one per environment. `auto`: horizon
    divided by the steps of the first rollout, rounded down."""
    init: StaggerInit = "advance"
    """How an environment reaches its start offset. `advance`: by random actions; `policy`: by the agent's actions;
    `clock`: its first episode is truncated early. Steps of `advance` and `policy` are not part of a rollout."""
    offsets: StaggerOffsets = "even"
    """Start offsets: `even` spaces the groups evenly over the horizon; `random` draws one per environment from the
    seed."""
    early: StaggerEarly = "partial"
    """When an environment starts its next episode if an episode ends before the horizon. `partial`: at once; `gate`:
    when its group starts next."""

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
                f"Stagger.groups is {self.groups} with horizon={self.horizon}; groups start at different steps of the "
                "horizon, so there can be at most one group per step."
            )
        if self.offsets == "random":
            raise ConfigError(
                f"Stagger has both groups={self.groups} and offsets='random', which draws an offset for every "
                "environment instead of every group; leave out one of the two."
            )


@show_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvConfig(_Config):
    """Which environments to run, and how workers act in them.

    Example:
        farstep.EnvConfig(env_name="CartPole-v1", envs_per_node=64, seed=0)
    """

    type: EnvType = "gymnasium"
    """Source of the environments: `gymnasium` (a registered id), `factory` (a function that returns an environment),
    `vector` (a function that returns a VectorEnv) or `envpool`."""
    env_name: str | EnvSpec | Callable[..., Any] | None = None
    """Required: a Gymnasium or EnvPool id; `module:Id` imports the module first. Type `gymnasium` also takes an
    `EnvSpec`; `factory` and `vector` take a callable or its dotted path (`package.module:function`)."""
    env_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keyword arguments for the constructor of every environment."""
    wrappers: Sequence[Any] = ()
    """Wrappers, applied in order: callables, dotted paths, or pairs of a callable or path and its keyword arguments."""
    envs_per_node: int = 1
    """Number of environments on each node."""
    seed: int | None = None
    """Root seed; the seeds of all environments derive from it. None: draw a root seed at random, shown by
    `env.seed`."""
    seed_episodes: bool = True
    """True: seed every episode, so that a replacement worker continues with the same episodes. False: seed only the
    first episode, as Gymnasium's vector environments do; faster if seeding is slow (180 ms for Atari)."""
    kl_threshold: float | None = None
    """Pull weights only when the running KL divergence exceeds this many nats (AAPS). None: pull every published
    version."""
    sync: SyncRule | None = None
    """When a worker pulls weights: `farstep.sync.Always()` (default), `EveryK`, `EverySeconds`, `MaxLag`, `AAPS`, or
    several joined by `|`."""
    weights: OrMapping[WeightsConfig] = or_mapping(ALL_WEIGHTS)
    """Which parameters are sent, and in what form; a mapping is accepted: `{"only": "actor.*", "half": True}`."""
    transfer: OrMapping[TransferTrigger] = or_mapping(ALL_AT_ONCE)
    """When workers without shared memory send the arrays of a chunk; a mapping is accepted: `{"size": 64}`."""
    compression: Compression = "auto"
    """Compression of chunks from workers without shared memory: `lz4`, `zstd` (both need `farstep[compression]`),
    `none`, or `auto`, which measures the connection and chooses for each array."""
    inference: OrMapping[Inference | ServedInference] = or_mapping("local")
    """Where and how actions are computed. `local`: each worker has a copy of the agent, and replaces its `act` by a
    faster version if both return the same values. `eager`: the same, but always call `act`.
    `served`: one acting server per node acts for its workers; a mapping has its options: `{"device": "cuda"}`, or
    `{"where": "head"}` for one server on the machine of the head. `auto`: measure `local` and `served` with the first
    agent, and use the faster one; if workers have GPUs, also measure `local` on the CPU."""
    stagger: OrMapping[Stagger | None] = or_mapping(None)
    """Spread environments over the horizon; a mapping is accepted: `{"horizon": 1000}`. None: all start together."""
    info_keys: Sequence[str] = ()
    """Entries of the environments' infos to record in every row, as arrays `info.<key>` (float32). An entry must be a
    number or a bool; where it is missing, the array has 0."""
    release_idle: bool = False
    """Suspend all workers while no rollout is in progress, so that the learner and other programs get their cores. They
    keep their memory and continue with the next call that needs them. Batches are the same. In a workflow, suspend each
    worker while it may roll no chunk, because the learner is behind."""
    prewarm: bool = False
    """With `release_idle`: while updates take about the same time, let workers continue, and request slots of the
    coordinator, shortly before the next rollout is expected."""

    @property
    def label(self) -> str:
        """Name of the environment for people."""
        name = self.env_name
        return name if isinstance(name, str) else str(getattr(name, "__qualname__", getattr(name, "id", repr(name))))

    def __post_init__(self) -> None:
        self._one_of("type", EnvType)
        self._check_info_keys()
        if isinstance(self.inference, Mapping) or self.inference == "served":
            options = self.inference if isinstance(self.inference, Mapping) else None
            object.__setattr__(self, "inference", ServedInference.of(options))
        if not isinstance(self.inference, ServedInference):
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
            if callable(getattr(self.env_name, "reset", None)):
                raise ConfigError(
                    f"EnvConfig.env_name is an environment, {self.env_name!r}; every worker needs environments of its "
                    "own. With type='factory' (a VectorEnv: type='vector'), pass the class, or a function that returns "
                    "one."
                )
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
        for name in ("seed_episodes", "release_idle", "prewarm"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"EnvConfig.{name} is {getattr(self, name)!r}; expected True or False.")
        if self.prewarm and not self.release_idle:
            raise ConfigError(
                "EnvConfig has prewarm=True, which has no effect on workers that are never released; also give "
                "release_idle=True."
            )

    @property
    def serving(self) -> ServedInference | None:
        """The options of acting servers; None if workers act themselves."""
        return self.inference if isinstance(self.inference, ServedInference) else None

    def _check_vector_stagger(self, stagger: Stagger) -> None:
        if stagger.init != "clock" or stagger.early != "partial":
            raise ConfigError(
                f"EnvConfig.stagger has init={stagger.init!r} and early={stagger.early!r} with type={self.type!r}; a "
                "single environment of a vector can be neither stepped nor paused. Use init='clock' and "
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
                f"EnvConfig has both kl_threshold={threshold!r} and sync={self.sync!r}; give one rule for both, "
                f"e.g. sync=farstep.sync.AAPS({threshold}) | farstep.sync.MaxLag(10)."
            )

    def _check_info_keys(self) -> None:
        keys = self.info_keys
        if isinstance(keys, str) or not isinstance(keys, Sequence) or not all(isinstance(k, str) and k for k in keys):
            raise ConfigError(f"EnvConfig.info_keys is {keys!r}; expected a list of names, e.g. ['invalid_action'].")
        if len(set(keys)) < len(keys):
            raise ConfigError(f"EnvConfig.info_keys is {keys!r}; each name may occur only once.")
        object.__setattr__(self, "info_keys", tuple(keys))

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
        """Check the arguments of a reset.

        Args:
            seed: The root seed, or None.
            masked: Whether only some environments are reset.

        Returns:
            The seed as an int, or None.

        Raises:
            ConfigError: The seed is out of range, or cannot be combined with a mask.
        """
        if seed is not None and masked and self.type == "envpool":
            raise ConfigError(
                "reset got a seed and a reset_mask, but EnvPool seeds all of its environments together; "
                "leave out one of the two."
            )
        return None if seed is None else check_seed(seed)


def is_dotted_path(name: str) -> bool:
    """Return whether `name` is an import path: `package.module:function` or `package.module.function`."""
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    return attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))


def check_seed(value: object) -> int:
    """Return a root seed as an int; raise `ConfigError` if it does not fit a message to workers."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or not 0 <= int(value) < 2**63:
        raise ConfigError(f"the seed is {value!r}; it must be a non-negative integer below 2**63, to fit a message.")
    return int(value)


def check_count(name: str, value: object, minimum: int = 1) -> int:
    """Return a count as an int; raise `ConfigError` if it is not an integer of at least `minimum`."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or int(value) < minimum:
        raise ConfigError(f"{name} is {value!r}; it must be an integer of at least {minimum}.")
    return int(value)


def is_number(value: object) -> bool:
    """Return whether `value` is a real number that fits a float and is not NaN."""
    try:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and not math.isnan(value)
    except OverflowError:  # 10**400
        return False


def check_rule(what: str, rule: object) -> None:
    """Raise `ConfigError` unless `rule` is a sync rule with valid `probes` and `rows`."""
    if isinstance(rule, type):
        raise ConfigError(f"{what} is the class {rule.__name__}; give an instance, e.g. {rule.__name__}().")
    if not isinstance(rule, SyncRule):
        raise ConfigError(
            f"{what} is {rule!r}, which has no should_pull(state); use a rule such as farstep.sync.EveryK(4)."
        )
    for name, minimum in (("probes", 0), ("rows", 1)):
        check_count(f"{type(rule).__name__}.{name}", getattr(rule, name, minimum), minimum)
