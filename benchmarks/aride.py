"""What the parts of A-RIDE contribute: DPER, Retrace, asynchronous workers, and a warm-up from recorded episodes.

    python benchmarks/aride.py --jobs 8 --seeds 5 --minutes 30      # repeat until all runs are complete
    python benchmarks/aride.py --show benchmarks/results/aride.json  # only tables and plots

DistRL reports 8 points of success lost without DPER and 6 without Retrace, on phones. The task here is a small game in
the manner of a phone (phone.py): an instruction and a screen as tokens, reward only for success. Each worker has one
environment whose steps sleep for a time of its own, so workers are uneven. A-RIDE is compared with itself:

    no-dper     --priority-alpha 0: all episodes are sampled equally often
    no-retrace  --retrace-lambda 0: one-step TD errors instead of Retrace; importance ratios stay
    sync        --no-concurrent: every worker rolls a chunk, then all wait for the slowest and for the learner

each without and with a warm-up from 128 episodes of a noisy demonstrator. All runs have the same number of environment
steps. Success is the share of evaluation episodes that succeed, with the most likely actions, in environments that do
not sleep. Runs in the results file are not repeated; a run that was stopped starts over, since seconds are compared.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import logging
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aride_tables import VARIANTS, draw, key_of, summary
from children import run_script
from document import check_machine, continued, write_document
from phone import Demonstrator, Phone
from roster import BENCHMARKS
from versions import versions_of

import farstep
from farstep.learners.aride import Aride, ArideConfig
from farstep.learners.loop.evaluation import Evaluator, run_episodes
from farstep.learners.loop.training import Limits, Training
from farstep.learners.networks.nets import NetConfig, make_agent
from farstep.learners.replay.config import EpisodeReplayConfig
from farstep.learners.replay.recorded_episodes import record_episodes

IMAGES = BENCHMARKS.parent / "docs" / "images"
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "no-dper": {"priority_alpha": 0.0},
    "no-retrace": {"retrace_lambda": 0.0},
    "sync": {"replay": {"concurrent": False}},
}
"""Options of each variant, besides those that all have."""
NET = NetConfig(hidden=(64,), activation="relu")
REPLAY = {
    "batch_size": 32,
    "samples_per_step": 8.0,
    "buffer_size": 3_000,
    "learning_starts": 300,
    "num_steps": 8,
    "report_every": 250,
}
COMMON = {"learning_rate": 3e-3, "gamma": 0.95, "entropy_bonus": 0.02, "invalid_penalty": 0.1}
EPISODES = 128
"""Recorded episodes of a warm-up, as in DistRL."""
NOISE = 0.75
"""Noise of the demonstrator, whose success is then about that of DistRL's policy before training, 40 %."""
EVAL_SEED = 10_000


def main() -> int:
    options = parse_options()
    document = json.loads(options.show.read_text()) if options.show else measured(options)
    if document["runs"]:
        print(f"\n{summary(document)}")
        for path in draw(document, options.images):
            print(f"written: {path}")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--warmups", nargs="+", choices=("none", "recorded"), default=["none", "recorded"])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each variant, with seeds 1, 2, ...")
    parser.add_argument("--total-steps", type=int, default=20_000, help="environment steps of a run")
    parser.add_argument("--workers", type=int, default=4, help="workers of a run, with one environment each")
    parser.add_argument("--step-ms", nargs=2, type=float, default=[4.0, 40.0], help="shortest and longest step")
    parser.add_argument("--eval-every", type=int, default=2_000, help="environment steps between evaluations")
    parser.add_argument("--eval-episodes", type=int, default=200, help="episodes of an evaluation")
    parser.add_argument("--final-episodes", type=int, default=1_000, help="episodes of the last evaluation")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--minutes", type=float, help="start no run after this time; runs in progress finish")
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results" / "aride.json")
    parser.add_argument("--images", type=Path, default=IMAGES, help="folder for plots")
    parser.add_argument("--show", type=Path, metavar="FILE", help="only print tables and draw plots of these results")
    return parser.parse_args()


# ---- all runs ----


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Run the missing runs; returns the document with all runs."""
    document = continued(options.out, "aride.py")
    check_machine(document, options.out)
    names = ("total_steps", "workers", "step_ms", "eval_every", "eval_episodes", "final_episodes")
    settings = {name: getattr(options, name) for name in names}
    settings |= {"options": {**COMMON, **REPLAY}, "episodes": EPISODES, "noise": NOISE}
    if document.setdefault("settings", settings) != settings:
        raise SystemExit(f"{options.out} was measured with {document['settings']}, not {settings}; use another --out")
    document["versions"] = versions_of("farstep", "torch", "numpy", "gymnasium")
    done = {key_of(run) for run in document["runs"]}
    cases = [case for case in cases_of(options) if key_of(case) not in done]
    print(f"{len(cases)} runs, {options.jobs} at a time; {len(done)} are in {options.out.name} already", flush=True)
    # Workers and the processes of runs import phone.py.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(BENCHMARKS), os.environ.get("PYTHONPATH"))))
    for run in outcomes(cases, settings, options):
        document["runs"] = sorted(
            [*document["runs"], run], key=lambda run: (list(VARIANTS).index(run["variant"]), *key_of(run)[1:])
        )
        write_document(options.out, document)
        print(
            f"{run['variant']}, warm-up {run['warmup']}, seed {run['seed']}: success {run['success']:.3f} after "
            f"{run['steps']:,} steps, {run['seconds']:.0f} s; load {run['load'][0]:.1f} to {run['load'][1]:.1f}",
            flush=True,
        )
    complete = len(document["runs"]) == len(done) + len(cases)
    print("all runs are complete" if complete else "some runs are missing; run the same command again to continue")
    return document


def in_order(run: dict[str, Any]) -> tuple[Any, ...]:
    variant, warmup, seed = key_of(run)
    return warmup, list(VARIANTS).index(variant), seed


def cases_of(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All runs. Variants that are compared follow each other, so that they share the load of the machine."""
    for seed in range(1, options.seeds + 1):
        for warmup in options.warmups:
            for variant in options.variants if seed % 2 else options.variants[::-1]:
                yield {"variant": variant, "warmup": warmup, "seed": seed}


def outcomes(
    cases: list[dict[str, Any]], settings: dict[str, Any], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Carry out the cases, several at a time, until time is up."""
    deadline = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    left, running = list(cases), set()
    with concurrent.futures.ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        while left or running:
            while left and len(running) < options.jobs and (deadline is None or time.monotonic() < deadline):
                running.add(pool.submit(trained, left.pop(0), settings, options.jobs))
            if not running:
                return
            ended, running = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in ended:
                try:
                    yield future.result()
                except farstep.FarstepError as error:  # e.g. workers that a busy machine did not start in time
                    print(f"a run FAILED: {error}", flush=True)


# ---- one run ----


class Curve:
    """Training success over steps and seconds, from the rows of metrics."""

    def __init__(self) -> None:
        self.points: list[list[float]] = []
        self.evaluations: list[list[float]] = []
        self.last: dict[str, float] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.last |= metrics
        if "env/return_mean" in metrics:
            self.points.append([step, round(metrics["seconds"], 2), round(metrics["env/return_mean"], 3)])
        if "eval/step" in metrics:
            seconds = next((point[1] for point in self.points if point[0] >= metrics["eval/step"]), 0.0)
            self.evaluations.append([int(metrics["eval/step"]), seconds, round(metrics["eval/return_mean"], 3)])


def trained(case: dict[str, Any], settings: dict[str, Any], jobs: int) -> dict[str, Any]:
    """Train once, and evaluate the final agent; in a process of its own."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    seed, curve = case["seed"], Curve()
    low_ms, high_ms = settings["step_ms"]
    load = os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory() as folder,
        phones(settings["workers"], seed, {"low_s": low_ms / 1e3, "high_s": high_ms / 1e3}) as env,
        phones(16, EVAL_SEED) as final,
    ):
        warmup = recording(Path(folder, "warmup.npz"), seed) if case["warmup"] == "recorded" else None
        config = config_of(case["variant"], warmup)
        torch.manual_seed(seed)
        agent = make_agent(*env.launch(), config.net, config.gamma)
        evaluator = Evaluator(
            phones(16, EVAL_SEED).env_config, settings["eval_episodes"], EVAL_SEED, launch=farstep.InProcessConfig()
        )
        limits = Limits(total_steps=settings["total_steps"], eval_every=settings["eval_every"])
        try:
            progress = Training(Aride(agent, config, seed), env, limits, sink=curve, evaluator=evaluator).run()
        finally:
            evaluator.close()
        actor = deepcopy(agent)
        actor.greedy = True
        returns, _ = run_episodes(
            final, actor, settings["final_episodes"], EVAL_SEED + seed, max_steps=50_000, emit=final.emit_event
        )
    return {
        **case,
        "success": round(float(np.mean(returns)), 4),
        "episodes": len(returns),
        "steps": progress.steps,
        "seconds": round(curve.points[-1][1], 2),
        "updates": progress.updates,
        "staleness": round(curve.last.get("lag/versions_mean", 0.0), 2),
        "ess": round(curve.last.get("train/actor/ess", 0.0), 3),
        "curve": curve.points,
        "evaluations": curve.evaluations,
        "load": [round(load, 2), round(os.getloadavg()[0], 2)],
        "jobs": jobs,
    }


def config_of(variant: str, warmup: Path | None) -> ArideConfig:
    chosen = dict(OPTIONS[variant])
    replay = EpisodeReplayConfig(**{**REPLAY, **chosen.pop("replay", {})}, warmup=warmup)
    return ArideConfig(net=NET, replay=replay, **COMMON, **chosen)


def phones(number: int, seed: int, kwargs: dict[str, float] | None = None) -> farstep.ClusterEnv:
    """Environments in worker processes if their steps take time, otherwise in this process."""
    source: dict[str, Any] = {"type": "factory", "env_name": Phone, "envs_per_node": number, "seed": seed}
    source |= {"env_kwargs": kwargs or {}}
    source["info_keys"] = ("invalid_action",)
    if not kwargs:
        return farstep.ClusterEnv(source, farstep.InProcessConfig(workers_per_node=1))
    limits = {"connect_s": 600.0, "construct_s": 600.0, "load_s": 600.0, "idle_s": 600.0}  # for a busy machine
    return farstep.ClusterEnv(source, farstep.LocalConfig(workers_per_node=number, timeouts=limits))


def recording(path: Path, seed: int) -> Path:
    """Record the episodes of a warm-up; returns their file."""
    with phones(8, seed) as env:
        env.launch()
        record_episodes(env, Demonstrator(NOISE, seed), EPISODES, seed=seed).save(path)
    return path


if __name__ == "__main__":
    run_script(main)
