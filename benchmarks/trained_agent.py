"""The animation of the README: trains LunarLander with `farstep train`, records an episode and writes a GIF.

    python benchmarks/trained_agent.py                # trains first; minutes
    python benchmarks/trained_agent.py --run runs/NAME

Needs the extras torch, envs and video.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import imageio_ffmpeg
import tyro
from children import run_script
from PIL import Image

FARSTEP = (sys.executable, "-m", "farstep")
TRAIN = "train ppo --env LunarLander-v3 --num-envs 64 --target-return 220 --total-steps 1500000 --name readme"


@dataclass(kw_only=True)
class Args:
    """Make the animation of a trained agent."""

    run: Path | None = None
    """folder of a run to show; None: train one in runs/readme"""
    seed: int = 1
    """seed of the recorded episode"""
    width: int = 420
    """pixels"""
    every: int = 2
    """show every second, third, ... frame"""
    colors: int = 48
    """colors of the palette"""
    out: Path = Path(__file__).parents[1] / "docs" / "images" / "lunarlander.gif"
    """file to write"""


def frames(video: Path, width: int) -> list[Image.Image]:
    """Return the frames of a video, resized."""
    reader = imageio_ffmpeg.read_frames(video)
    size = next(reader)["size"]
    height = width * size[1] // size[0]
    return [Image.frombytes("RGB", size, data).resize((width, height), Image.Resampling.LANCZOS) for data in reader]


def main() -> None:
    """Train, record and convert."""
    args = tyro.cli(Args)
    if args.run is None:
        subprocess.run([*FARSTEP, *TRAIN.split()], check=True)
    with tempfile.TemporaryDirectory() as folder:
        video = Path(folder) / "episode.mp4"
        run = args.run or Path("runs/readme")
        subprocess.run([*FARSTEP, "watch", run, "--seed", str(args.seed), "--out", video], check=True)
        shown = frames(video, args.width)[:: args.every]
    palette = shown[len(shown) // 2].quantize(args.colors, dither=Image.Dither.NONE)
    first, *others = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in shown]
    first.save(args.out, save_all=True, append_images=others, duration=20 * args.every, loop=0, optimize=True)
    print(f"{args.out}: {len(shown)} frames, {args.out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    run_script(main)
