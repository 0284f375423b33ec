"""Checks of a replay run's options before workers are launched, and before its folder is created."""

from __future__ import annotations

from collections.abc import Collection

from farstep.cluster_env import ClusterEnv
from farstep.errors import ConfigError
from farstep.learners.replay.config import EpisodeReplayConfig, LoopConfig
from farstep.learners.replay.frame_stacks import frame_stack_of
from farstep.learners.replay.loop import is_concurrent
from farstep.learners.replay.recorded_episodes import RecordedEpisodes
from farstep.resources import available_memory
from farstep.schema import space_schema


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
    path = config.warmup if isinstance(config, EpisodeReplayConfig) and not resumed else None
    if path is None:
        return None
    recorded = RecordedEpisodes.load(path)
    recorded.check_room(path, rows)
    return recorded


def check_launched(
    config: LoopConfig, env: ClusterEnv, names: Collection[str], recorded: RecordedEpisodes | None
) -> None:
    """Check what depends on the environments' spaces: frame stacks, memory and recorded episodes.

    Args:
        config: Options of the buffer and the loop.
        env: The launched environments.
        names: The arrays of a batch that the learner needs.
        recorded: What `check_before_launch` returned.

    Raises:
        ConfigError: An option does not fit the environments or this machine.
    """
    spaces = env.launch()
    schema = space_schema(spaces[0], "obs")[1]
    stack = frame_stack_of(config, env)
    stored = schema if stack is None else stack.stored(schema)
    row_bytes = sum(spec.nbytes for spec in (*stored.values(), *space_schema(spaces[1], "action")[1].values()))
    needed, available = config.buffer_size * row_bytes, available_memory()
    if needed > available:
        raise ConfigError(
            f"--buffer-size {config.buffer_size:,} needs at least {needed / 2**30:,.1f} GiB ({row_bytes:,} bytes per "
            f"row), but this machine has {available / 2**30:,.1f} GiB available. Lower --buffer-size."
        )
    if recorded is not None and isinstance(config, EpisodeReplayConfig) and config.warmup is not None:
        recorded.check(config.warmup, schema, names, spaces)
