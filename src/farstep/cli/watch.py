"""`farstep watch`: renders episodes of a trained policy to a video."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from farstep.cli.options.algorithms import agent_for
from farstep.cli.options.parsing import parse
from farstep.cli.saved.recording import check_recording, record, spaces_of
from farstep.cli.saved.saved_run import SavedRun
from farstep.config.env import check_count, check_seed
from farstep.config.field_docs import show_fields
from farstep.errors import ConfigError
from farstep.observe.run_status import number
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
    """Sample actions as in training, instead of taking the most likely actions."""
    max_steps: int = 2000
    """Maximum number of steps of an episode; a longer episode is cut off."""
    fps: float | None = None
    """Frames per second. None: the environment's render_fps, or 30."""
    trust: bool = False
    """Execute the code that the run's config.json names, even if the file's signature is missing or wrong."""


def main(arguments: Sequence[str]) -> int:
    """Load the newest checkpoint and render episodes. Return the exit status."""
    if not arguments:
        raise ConfigError("'farstep watch' needs the folder of a run, e.g. farstep watch runs/NAME.")
    options = parse(Options, arguments, "farstep watch")
    check_count("episodes", options.episodes)
    check_count("max_steps", options.max_steps)
    check_seed(options.seed)
    if options.fps is not None:
        check_fps(options.fps)
    saved = SavedRun.open(options.run, options.trust, "farstep watch")
    run = saved.run
    check_recording(run)
    agent = agent_for(saved.learner, *spaces_of(run))
    steps = saved.restore(agent).steps
    agent.greedy = not options.sample
    torch.manual_seed(options.seed)
    out = options.out or saved.folder.videos / f"step-{steps:09d}.mp4"
    returns = record(
        agent, run, out, seed=options.seed, episodes=options.episodes, max_steps=options.max_steps, fps=options.fps
    )
    listed = ", ".join(number(value) for value in returns)
    sys.stdout.write(
        f"{out}: {len(returns)} episode{'s' * (len(returns) > 1)} after {steps:,} steps, return {listed}\n"
    )
    return 0
