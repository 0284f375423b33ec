"""Renders episodes of an agent to a video, with an environment in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from farstep.agents.policy import Policy
from farstep.core import Array
from farstep.errors import ConfigError
from farstep.learners.networks.agent import NetworkAgent
from farstep.learners.networks.nets import Space
from farstep.learners.options.run_config import RunConfig
from farstep.observe.video import require_encoder, write_video
from farstep.rollout.sources import Source, explain_missing
from farstep.schema import leaves, map_leaves, nest, space_schema

Env = gymnasium.Env[Any, Any]


def spaces_of(run: RunConfig) -> tuple[Space, Space]:
    """Return the observation space and the action space of a run's environment."""
    env = _environment(run)
    try:
        return env.observation_space, env.action_space
    finally:
        env.close()


def record(
    agent: NetworkAgent,
    run: RunConfig,
    path: Path,
    *,
    seed: int = 0,
    episodes: int = 1,
    max_steps: int = 2000,
    fps: float | None = None,
) -> list[float]:
    """Render episodes to a video file.

    Args:
        agent: The policy.
        run: Options of the run; they name the environment.
        path: The file to write.
        seed: Seed of the first episode; each later episode adds 1.
        episodes: Number of episodes.
        max_steps: Maximum number of steps of an episode; a longer episode is cut off.
        fps: Frames per second; None: the environment's `render_fps`, or 30.

    Returns:
        The return of each episode.

    Raises:
        ConfigError: The environment cannot be rendered, or imageio-ffmpeg is not installed.
        RunError: The video cannot be written.
    """
    env = _environment(run)
    try:
        rate = fps or float(env.metadata.get("render_fps") or 30)
        returns: list[float] = []
        write_video(path, _frames(agent, env, seed, episodes, max_steps, returns), rate)
    finally:
        env.close()
    return returns


def check_recording(run: RunConfig) -> None:
    """Raise `ConfigError` if the environment of a run cannot be rendered. Call this before anything starts."""
    if run.env_type in ("envpool", "vector"):
        raise ConfigError(
            f"environments of type {run.env_type} cannot be rendered individually; use --env-type gymnasium or factory."
        )
    require_encoder()
    env = _environment(run)
    try:
        env.reset(seed=run.seed)
        _frame(env)
    finally:
        env.close()


def _environment(run: RunConfig) -> Env:
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # frames need no screen, but SDL would fail without one
    config = run.env_config(envs_per_node=1, stagger=None, inference=None)
    kwargs = {**config.env_kwargs, "render_mode": "rgb_array"}
    try:
        return Source.of(run.env_config(envs_per_node=1, stagger=None, inference=None, env_kwargs=kwargs)).build()
    except (ConfigError, TypeError) as error:  # a TypeError of the user's own code
        if "unexpected keyword argument 'render_mode'" not in str(error):
            raise
        raise ConfigError(
            f"a video needs an environment that accepts render_mode='rgb_array'; {run.env!r} has no argument "
            "render_mode. Add it, and return the image from render() as an array (height, width, 3) of uint8."
        ) from error


def _frames(
    agent: NetworkAgent, env: Env, seed: int, episodes: int, max_steps: int, returns: list[float]
) -> Iterator[Array]:
    policy = Policy(agent)
    structure, _ = space_schema(env.observation_space, "obs")
    for episode in range(episodes):
        obs, _ = env.reset(seed=seed + episode)
        state, start, total = policy.initial_state(1), np.ones(1, bool), 0.0
        for _ in range(max_steps):
            yield _frame(env)
            row = nest(structure, {name: np.asarray(leaf)[None] for name, leaf in leaves(structure, obs)})
            out = policy(row, state, start, None)
            state, start = out.get("state"), np.zeros(1, bool)
            obs, reward, terminated, truncated, _ = env.step(map_leaves(lambda leaf: leaf[0], out["action"]))
            total += float(reward)
            if terminated or truncated:
                yield _frame(env)
                break
        returns.append(total)


def _frame(env: Env) -> Array:
    try:
        frame = env.render()
    except gymnasium.error.DependencyNotInstalled as error:
        name = env.spec.id if env.spec is not None else type(env.unwrapped).__name__
        raise ConfigError(f"to be rendered, {explain_missing(name, error)}") from error
    if not isinstance(frame, np.ndarray):
        raise ConfigError(
            f"the environment's render() returned {type(frame).__name__}; a video needs arrays: the environment "
            "must support render_mode='rgb_array'."
        )
    return frame
