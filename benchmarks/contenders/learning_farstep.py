"""farstep's learners, by `farstep train` with the options that the benchmark chose."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

import _setup  # noqa: F401

# isort: split
from _learning import LAST_EPISODES, Curve, parse_arguments, report

from farstep.cli import train

RUN = Path("runs", "benchmark")
"""Inside the folder that the benchmark creates for each run."""
REPLAY_LEARNERS = ("dqn", "apex", "sac")
"""Learners whose `update` counts optimizer steps; an update of the others has many."""
LEARNER_METRICS = ("time/sample", "time/actor_training")
"""Seconds of the learner, without publishing, checkpoints and waiting for rows."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--contender", required=True)
    parser.add_argument("--learner", default="ppo")
    parser.add_argument("--options", default="", help="of `farstep train`")
    task, options = parse_arguments(parser)
    task = replace(task, max_seconds=math.inf)  # which ends only runs of peers
    arguments = [
        options.learner,
        *("--env", task.env),
        *("--seed", str(task.seed)),
        *("--total-steps", str(task.max_steps)),
        *options.options.split(),
    ]
    if math.isfinite(task.threshold):
        arguments += ["--target-return", str(task.threshold)]
    train.main([*arguments, "--folder", str(RUN.parent), "--name", RUN.name])
    curve = Curve(task)
    updates, learner_s = 0, 0.0
    for line in (RUN / "metrics.jsonl").read_text().splitlines():
        found = json.loads(line)
        updates = found["update"]
        learner_s += sum(found.get(name, 0.0) for name in LEARNER_METRICS)
        if "env/return_mean" in found:
            episodes = min(found["env/episodes"], LAST_EPISODES)
            curve.mean(found["step"], found["env/return_mean"], episodes, found["seconds"])
    report(
        options.contender,
        task,
        curve,
        f"farstep train {' '.join(arguments)}",
        ("farstep", "torch", "numpy", "gymnasium"),
        **({"updates": updates, "learner_s": learner_s} if options.learner in REPLAY_LEARNERS else {}),
    )


if __name__ == "__main__":
    main()
