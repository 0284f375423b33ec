"""Chooses how the replay buffer of a run stores stacked images."""

from __future__ import annotations

from farstep.buffer.storage.frames import FrameStack
from farstep.cluster_env import ClusterEnv
from farstep.errors import ConfigError
from farstep.learners.replay.config import LoopConfig
from farstep.schema import ArraySpec, space_schema

_IMAGE_AXES = 3
"""A stacked image has at least this many axes."""


def frame_stack_of(config: LoopConfig, env: ClusterEnv) -> FrameStack | None:
    """Return the frame stack of a run's observations.

    Args:
        config: Options of the loop; `frame_stack` says how many frames are stacked.
        env: The launched environments, which may know it.

    Returns:
        The stacked arrays and their axis: the first or the last one, whichever has a length that is a multiple of the
        number of frames; if both have, the shorter one. None if observations are not stacked images.

    Raises:
        ConfigError: The options have a number of frames that fits no observation.
    """
    _, schema = space_schema(env.launch()[0], "obs")
    count = env.frame_stack if config.frame_stack is None else config.frame_stack
    if count < 2:
        return None
    axes = {name: axis for name, spec in schema.items() if (axis := _axis(spec, count)) is not None}
    if axes:
        axis = next(iter(axes.values()))
        return FrameStack(count, axis, tuple(name for name, found in axes.items() if found == axis))
    if config.frame_stack is None:
        return None
    shown = ", ".join(f"{name} {spec}" for name, spec in schema.items())
    raise ConfigError(
        f"--frame-stack is {count}, but no observation is an image with a multiple of {count} entries on its first or "
        f"last axis: {shown}. Leave out --frame-stack, or choose 0."
    )


def _axis(spec: ArraySpec, count: int) -> int | None:
    axes = [axis for axis in (0, -1) if len(spec.shape) >= _IMAGE_AXES and spec.shape[axis] % count == 0]
    return min(axes, key=lambda axis: spec.shape[axis], default=None)
