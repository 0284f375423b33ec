"""farstep's learners, by `farstep train` with the options that learning.py chose."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import _setup  # noqa: F401

# isort: split
from _learning import LAST_EPISODES, Curve, parse_arguments, report

from farstep.cli import train

RUN = Path("runs", "benchmark")
"""Inside the folder that learning.py makes for each run."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--contender", required=True)
    parser.add_argument("--learner", default="ppo")
    parser.add_argument("--options", default="", help="of `farstep train`")
    task, options = parse_arguments(parser)
    arguments = [
        options.learner,
        *("--env", task.env),
        *("--seed", str(task.seed)),
        *("--total-steps", str(task.max_steps)),
        *("--target-return", str(task.threshold)),
        *options.options.split(),
    ]
    train.main([*arguments, "--folder", str(RUN.parent), "--name", RUN.name])
    curve = Curve(task.threshold)
    for line in (RUN / "metrics.jsonl").read_text().splitlines():
        found = json.loads(line)
        if "env/return_mean" in found:
            episodes = min(found["env/episodes"], LAST_EPISODES)
            curve.mean(found["step"], found["env/return_mean"], episodes, found["seconds"])
    report(
        options.contender,
        task,
        curve,
        f"farstep train {' '.join(arguments)}",
        ("farstep", "torch", "numpy", "gymnasium"),
    )


if __name__ == "__main__":
    main()
