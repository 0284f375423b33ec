"""Checks of a replay run's options before workers are launched, and before its folder is created."""

from __future__ import annotations

import copy

import numpy as np

from farstep.agents.parameters import as_array, leaves_of
from farstep.agents.policy import Policy, same_randomness
from farstep.batch import PRIORITY, is_final
from farstep.cluster_env import ClusterEnv
from farstep.elastic.scaling import Fill, Rule
from farstep.errors import ConfigError
from farstep.head.chunks.rollouts import base_rows
from farstep.learners.loop.worker_scaling import chosen_rule
from farstep.learners.networks.agent import NetworkAgent
from farstep.learners.replay.config import UNUSABLE_RULES, EpisodeReplayConfig, LoopConfig
from farstep.learners.replay.loop import ReplayAlgorithm, is_concurrent, make_buffer
from farstep.learners.replay.recorded_episodes import RecordedEpisodes
from farstep.resources import available_memory
from farstep.schema import ArraySpec, Schema, leaves, nest, space_schema


def check_before_launch(config: LoopConfig, env: ClusterEnv, resumed: bool) -> RecordedEpisodes | None:
    """Check everything that does not depend on the environments' spaces.

    Args:
        config: Options of the buffer and the loop.
        env: The environments, which need not be launched.
        resumed: Whether the run continues; then recorded episodes are not inserted again.

    Returns:
        The episodes of --warmup; None without this option.

    Raises:
        ConfigError: The buffer is too small, or the recorded episodes cannot be used.
    """
    num_envs, steps = env.num_envs, config.chunk_steps(env.num_envs)
    if config.buffer_size < steps * num_envs:
        raise ConfigError(
            f"--buffer-size is {config.buffer_size:,}, less than one chunk of {steps} steps of {num_envs} environments."
            f" Raise it to at least {steps * num_envs:,}, or lower --num-steps or --num-envs."
        )
    # Concurrent runs pool the capacity; otherwise each environment has an equal share.
    rows = config.buffer_size if is_concurrent(config, env) else config.buffer_size // num_envs * num_envs
    if config.learning_starts > rows:
        raise ConfigError(
            f"--learning-starts is {config.learning_starts:,}, but {num_envs} environments share only {rows:,} rows of "
            f"--buffer-size {config.buffer_size:,}. Lower --learning-starts, or raise --buffer-size."
        )
    rule = chosen_rule(config.scaling, None, UNUSABLE_RULES)
    if rule is not None and not is_concurrent(config, env):
        _check_alternating(config, rule, env)
    path = config.warmup if isinstance(config, EpisodeReplayConfig) and not resumed else None
    if path is None:
        return None
    recorded = RecordedEpisodes.load(path)
    recorded.check_room(path, rows)
    return recorded


def _check_alternating(config: LoopConfig, rule: Rule, env: ClusterEnv) -> None:
    """Raise `ConfigError` if a run whose learner and workers take turns cannot follow the scaling rule."""
    if isinstance(rule, Fill):
        raise ConfigError(
            f"--scaling is {config.scaling!r}, but with --no-concurrent or --launcher in-process the learner makes "
            "all its updates before workers continue, so they are never ahead of it. Use "
            "schedule:FIRST:LAST:ADD:EVERY, or learn concurrently."
        )
    if config.learning_starts > (rows := config.buffer_size // env.num_workers):
        raise ConfigError(
            f"--learning-starts is {config.learning_starts:,}, but with --scaling only one worker may run, which has "
            f"{rows:,} rows of --buffer-size {config.buffer_size:,} unless learning is concurrent. Lower "
            "--learning-starts, or raise --buffer-size."
        )


def check_launched(
    config: LoopConfig, env: ClusterEnv, algorithm: ReplayAlgorithm, recorded: RecordedEpisodes | None
) -> None:
    """Check what depends on the environments' spaces: frame stacks, memory and recorded episodes.

    Args:
        config: Options of the buffer and the loop.
        env: The launched environments.
        algorithm: The learner.
        recorded: What `check_before_launch` returned.

    Raises:
        ConfigError: An option does not fit the environments or this machine.
    """
    schema = row_schema(env, algorithm.agent)
    with make_buffer(config, algorithm.sampler, env, seed=0) as buffer:
        row_bytes = buffer.options.row_bytes(schema)
    needed, available = config.buffer_size * row_bytes, available_memory()
    if needed > available:
        raise ConfigError(
            f"--buffer-size {config.buffer_size:,} needs {needed / 2**30:,.1f} GiB ({row_bytes:,} bytes per row), but "
            f"this machine has {available / 2**30:,.1f} GiB available. Lower --buffer-size."
        )
    if recorded is not None and isinstance(config, EpisodeReplayConfig) and config.warmup is not None:
        recorded.check(config.warmup, schema, algorithm.names, env.launch())


def row_schema(env: ClusterEnv, agent: NetworkAgent) -> Schema:
    """Return the arrays of a row as workers record them: those of the environments, and those that `act` returns.

    Args:
        env: The launched environments.
        agent: The agent; a copy of it acts once, on the CPU.
    """
    space = copy.deepcopy(env.launch()[0])
    space.seed(0)
    structure, obs = space_schema(space, "obs")
    example = {name: np.asarray(array)[None] for name, array in leaves(structure, space.sample())}
    policy = Policy(copy.deepcopy(agent).to("cpu"))
    with same_randomness():
        out = policy(nest(structure, example), policy.initial_state(1), np.ones(1, bool), None)
    out.pop("state", None)  # recorded once per chunk
    outputs = {name: ArraySpec.of(as_array(leaf)) for key, part in out.items() for name, leaf in leaves_of(part, key)}
    if callable(getattr(agent, "priorities", None)):
        outputs[PRIORITY] = ArraySpec((), np.dtype(np.float32).str)
    rows = {**base_rows(obs, info_keys=env.env_config.info_keys), **outputs}
    return {name: spec for name, spec in rows.items() if not is_final(name)}
