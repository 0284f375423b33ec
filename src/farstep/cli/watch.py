"""`farstep watch`: render episodes of a trained policy to a video."""

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
from farstep.config.field_docs import show_fields
from farstep.errors import ConfigError
from farstep.learners.loop.saving import check_agent, join_state
from farstep.learners.loop.training import Progress
from farstep.learners.networks.nets import ActorCritic
from farstep.observe.run_folder import RunFolder
from farstep.observe.video import check_fps


@show_fields
@dataclass(frozen=True, kw_only=True)
class Options:
    """Render episodes of a run's newest checkpoint to a video."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of the run."""
    episodes: int = 1
    """Number of episodes."""
    out: Path | None = None
    """Video file to write. None: videos/step-NUMBER.mp4 in the run's folder."""
    seed: int = 0
    """Seed of the first episode and of sampling; each later episode adds 1."""
    sample: bool = False
    """Sample actions as in training, instead of taking the most likely ones."""
    max_steps: int = 2000
    """Steps after which an episode is cut off."""
    fps: float | None = None
    """Frames per second. None: the environment's render_fps, or 30."""
    trust: bool = False
    """Execute the code that the run's config.json names, even if its tag does not show that you wrote the
    file."""


def main(arguments: Sequence[str]) -> int:
    """Load the newest checkpoint and render episodes; return the exit status."""
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
    listed = ", ".join(f"{value:.1f}" for value in returns)
    sys.stdout.write(
        f"{out}: {len(returns)} episode{'s' * (len(returns) > 1)} after {steps:,} steps, return {listed}\n"
    )
    return 0


def _restore(agent: ActorCritic, loaded: checkpoint.Loaded) -> int:
    """Load the agent's parameters; return the number of steps that it was trained for."""
    state = join_state(loaded)
    check_agent(agent, state.get("agent"))
    steps = Progress.of(state.get("progress")).steps
    agent.load_state_dict(state["agent"])
    return steps
