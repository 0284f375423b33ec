"""`farstep watch`: episodes of a trained policy as a video."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import tyro

from farstep.checkpoint import folder as checkpoint
from farstep.cli.options import parse
from farstep.cli.recording import agent_of, check_recording, record
from farstep.cli.train import load_config
from farstep.cli.trust import check_trusted
from farstep.config.env import check_count, check_seed
from farstep.errors import ConfigError
from farstep.learners.loop.saving import check_agent, join_state
from farstep.learners.loop.training import Progress
from farstep.learners.networks.nets import ActorCritic
from farstep.observe.run_folder import RunFolder
from farstep.observe.video import check_fps


@dataclass(frozen=True, kw_only=True)
class Options:
    """Render episodes of a run's newest checkpoint."""

    run: Annotated[Path, tyro.conf.Positional]
    """folder of the run"""
    episodes: int = 1
    """how many"""
    out: Path | None = None
    """the video; none given: videos/ in the run's folder"""
    seed: int = 0
    """of the first episode, and of sampling"""
    sample: bool = False
    """sample actions, as in training, instead of the most likely ones"""
    max_steps: int = 2000
    """of an episode"""
    fps: float | None = None
    """pictures per second; none given: as the environment says"""
    trust: bool = False
    """execute code that the run's config.json names even if its tag does not show that you wrote it"""


def main(arguments: Sequence[str]) -> int:
    """Load, act, render."""
    if not arguments:
        raise ConfigError("'farstep watch' needs the folder of a run, e.g. farstep watch runs/NAME.")
    options = parse(Options, arguments, "farstep watch")
    check_count("episodes", options.episodes)
    check_count("max_steps", options.max_steps)
    check_seed(options.seed)
    if options.fps is not None:
        check_fps(options.fps)
    folder = RunFolder.open(options.run)
    saved, why_not = folder.read_signed_config()
    run, config = load_config(saved)
    check_trusted(folder, run, why_not, options.trust, "farstep watch")
    check_recording(run)
    agent = agent_of(run, config)
    steps = checkpoint.load_with(folder.checkpoints, partial(_restore, agent))
    agent.greedy = not options.sample
    torch.manual_seed(options.seed)
    out = options.out or folder.videos / f"step-{steps:09d}.mp4"
    returns = record(
        agent, run, out, seed=options.seed, episodes=options.episodes, max_steps=options.max_steps, fps=options.fps
    )
    said = ", ".join(f"{value:.1f}" for value in returns)
    sys.stdout.write(f"{out}: {len(returns)} episode{'s' * (len(returns) > 1)} after {steps:,} steps, return {said}\n")
    return 0


def _restore(agent: ActorCritic, loaded: checkpoint.Loaded) -> int:
    """Load the agent's parameters; returns the number of steps that it was trained for."""
    state = join_state(loaded)
    check_agent(agent, state.get("agent"))
    steps = Progress.of(state.get("progress")).steps
    agent.load_state_dict(state["agent"])
    return steps
