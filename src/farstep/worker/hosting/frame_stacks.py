"""Finds out whether the observations of an environment are stacked frames."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium


def stacked_frames(env: Any) -> int:
    """Return the number of frames per observation.

    Args:
        env: A single environment, or a vector environment: a `SyncVectorEnv` or an EnvPool.

    Returns:
        The `stack_size` of the outermost `FrameStackObservation`, or the `stack_num` of an EnvPool; 0 if neither says
        that observations are stacked. Other wrappers may have moved the axis of the stack.
    """
    config = getattr(env, "config", None)
    if isinstance(config, Mapping) and isinstance(config.get("stack_num"), int):
        return max(0, int(config["stack_num"]))
    if isinstance(env, gymnasium.vector.SyncVectorEnv):
        env = env.envs[0]
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, gymnasium.wrappers.FrameStackObservation):
            return int(env.stack_size)
        env = env.env
    return 0
