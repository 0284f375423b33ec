"""Time that asynchronous PPO saves compared with synchronous PPO if environment steps vary in duration.

    python benchmarks/async.py --markdown benchmarks/README.md
    python benchmarks/async.py --show benchmarks/results/async.json      # only tables and plots
    python benchmarks/async.py --task lunarlander --minutes 9            # at equal return: see async_return.py
    python benchmarks/async.py --task lunarlander --show benchmarks/results/async-lunarlander.json

Eight workers have one environment each, which sleeps in every step for a time drawn from a log-normal distribution
(sigma 1.5), so that processors are not the bottleneck. Learning and collecting are also measured alone, in the same
processes: a synchronous update takes the sum of both, an ideal asynchronous one the longer of the two. Runs that are in
the results file are not repeated.
"""

from __future__ import annotations

import concurrent.futures
import json
import logging
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import async_return
import numpy as np
import torch
import tyro
from async_tables import draw, summary
from children import run_script
from cpu_meter import CpuMeter
from document import continued, write_document, write_markdown
from runner import turns
from trainings import RUNS, Sitting
from versions import versions_of

import farstep
from farstep.learners.async_ppo import AsyncPPO, AsyncPPOConfig
from farstep.learners.loop.timing import Timer
from farstep.learners.loop.training import Learner, Limits, Training
from farstep.learners.networks.nets import NetConfig, make_agent
from farstep.learners.ppo import PPO, PPOConfig

HERE = Path(__file__).resolve().parent
WARM_UP = 3
"""First updates, which times do not include."""
README_MARKS = ("<!-- async: begin -->", "<!-- async: end -->")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings of one learner."""

    name: str
    staleness_threshold: int | None = None
    """None: synchronous PPO."""
    num_chunks: int | None = None


SETTINGS = (
    Setting(name="sync"),
    Setting(name="async-0", staleness_threshold=0),
    Setting(name="async-1", staleness_threshold=1),
    Setting(name="async-2", staleness_threshold=2),
    Setting(name="async-1-first-4", staleness_threshold=1, num_chunks=4),
    Setting(name="async-3-first-4", staleness_threshold=3, num_chunks=4),
)


@dataclass(frozen=True, kw_only=True)
class Args:
    """Train with several settings and seeds; compare times, returns and staleness."""

    task: Literal["sleepy", "lunarlander"] = "sleepy"
    """sleepy: environments that sleep; lunarlander: seconds to a return of 200"""
    minutes: float | None = None
    """start no run after this time; a run in progress is stopped (lunarlander) or finishes (sleepy)"""
    runs: Path = RUNS
    """folder for run folders (lunarlander)"""
    num_envs: int = 112
    """total number of environments (lunarlander)"""
    only: tuple[str, ...] = tuple(setting.name for setting in SETTINGS)
    """settings to run"""
    seeds: int = 3
    """runs of each setting"""
    total_steps: int | None = None
    """environment steps of a run: 100,000; at most 3,000,000 for lunarlander, whose runs end at the threshold"""
    threshold: float = 450.0
    """mean return of the last 100 episodes at which the time to the threshold is measured"""
    mean_ms: float = 3.0
    """mean time of an environment step; with 3, learning is about 30 % of a synchronous update on two cores"""
    sigma: float = 1.5
    """standard deviation of the logarithm of that time"""
    workers: int | None = None
    """worker processes: 8; 14 for lunarlander"""
    num_steps: int = 128
    """steps of each environment per rollout"""
    hidden: tuple[int, ...] = (128, 128)
    """widths of the hidden layers of actor and critic"""
    learning_rate: float = 1e-3
    update_epochs: int = 8
    minibatch: int = 256
    """rows per optimizer step"""
    threads: int = 1
    """threads of the learner, in all settings; `farstep train` gives a synchronous learner all cores"""
    alone: int = 30
    """updates over which collecting and learning are each measured alone"""
    out: Path | None = None
    """results file: results/async.json, or results/async-lunarlander.json"""
    images: Path = HERE.parent / "docs" / "images"
    """folder for plots"""
    markdown: Path | None = None
    """write tables to this file, between its marks"""
    show: tuple[Path, ...] = ()
    """only print tables and draw plots of these results"""

    @property
    def rows(self) -> int:
        """Rows of a rollout of all workers."""
        return self.workers * self.num_steps


def learner_of(setting: Setting, args: Args, agent: Any, seed: int) -> Learner:
    """Configurations of both learners with the same hyper-parameters."""
    net = NetConfig(hidden=args.hidden, normalize_obs=False, normalize_reward=False)
    common: dict[str, Any] = {
        "learning_rate": args.learning_rate,
        "anneal_lr": False,
        "num_steps": args.num_steps,
        "gamma": 0.98,
        "gae_lambda": 0.8,
        "update_epochs": args.update_epochs,
        "value_clip": None,
        "net": net,
    }
    if setting.staleness_threshold is None:
        return PPO(agent, PPOConfig(**common, minibatch_size=args.minibatch, ent_coef=0.0), seed)
    config = AsyncPPOConfig(
        **common,
        staleness_threshold=setting.staleness_threshold,
        num_chunks=setting.num_chunks,
        global_batch_size=args.minibatch,
        entropy_bonus=0.0,
    )
    return AsyncPPO(agent, config, seed)


@contextmanager
def world(setting: Setting, args: Args, seed: int) -> Iterator[tuple[farstep.ClusterEnv, Learner]]:
    """Workers and a learner, started."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(seed)
    env_config = farstep.EnvConfig(
        type="factory",
        env_name="sleepy:cartpole",
        env_kwargs={"mean_ms": args.mean_ms, "sigma": args.sigma},
        envs_per_node=args.workers,
        seed=seed,
    )
    with farstep.ClusterEnv(env_config, farstep.LocalConfig(workers_per_node=args.workers)) as env:
        agent = make_agent(
            *env.launch(), NetConfig(hidden=args.hidden, normalize_obs=False, normalize_reward=False), 0.98
        )
        yield env, learner_of(setting, args, agent, seed)


KEPT = {
    "seconds": "seconds",
    "return": "env/return_mean",
    "lag": "lag/versions_mean",
    "lag_max": "lag/versions_max",
    "behave_k3": "train/actor/behave_k3",
    "filtered": "train/actor/behav_clip_fraction",
    "collect_s": "time/collect",
    "train_s": "time/actor_training",
}
"""Values that are stored for each update, and the metric of each."""


class Record:
    """Stores these metrics of every update."""

    def __init__(self) -> None:
        self.columns: dict[str, list[float]] = {"step": [], **{name: [] for name in KEPT}}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.columns["step"].append(step)
        for name, key in KEPT.items():
            self.columns[name].append(round(float(metrics.get(key, 0.0)), 5))


def run(setting: Setting, seed: int, args: Args) -> dict[str, Any]:
    """Measure collecting and learning alone, then train one run."""
    logging.getLogger("farstep").setLevel(logging.WARNING)
    with world(setting, args, seed) as (env, learner):
        collect_s, rows, learn_s = alone(env, learner, args.alone)
    with world(setting, args, seed) as (env, learner):
        record = Record()
        training = Training(learner, env, Limits(total_steps=args.total_steps), sink=record)
        progress = training.run()
    columns = record.columns
    seconds, reached = np.array(columns["seconds"]), np.array(columns["return"]) >= args.threshold
    first = int(np.argmax(reached)) if reached.any() else None
    return {
        "setting": setting.name,
        "seed": seed,
        "overlaps": bool(setting.staleness_threshold),
        "collect_only_s": collect_s,
        "learn_only_s": learn_s,
        "rows_per_update": rows,
        "seconds_per_update": float(np.diff(seconds[WARM_UP:]).mean()),
        "seconds_to_threshold": None if first is None else float(seconds[first]),
        "steps_to_threshold": None if first is None else int(columns["step"][first]),
        "final_return": float(np.mean(progress.returns)),
        "curve": columns,
    }


def alone(env: farstep.ClusterEnv, learner: Learner, updates: int) -> tuple[float, int, float]:
    """Seconds to collect a batch without learning, its rows, and seconds to learn from it without collecting."""
    batches = learner.batches(env)
    for _ in range(WARM_UP):
        batch = next(batches)
        env.publish(learner.agent)
    began = time.monotonic()
    for _ in range(updates):
        batch = next(batches)
        env.publish(learner.agent)
    collect_s = (time.monotonic() - began) / updates
    batch = next(batches)  # workers soon stop at the staleness bound, and are idle
    timer, times = Timer(), []
    for _ in range(WARM_UP + updates):
        began = time.monotonic()
        learner.update(batch, env.version, 0.0, timer)
        times.append(time.monotonic() - began)
    return collect_s, int(batch["valid"].sum()), float(np.median(times[WARM_UP:]))


def main(args: Args) -> None:
    if args.task == "lunarlander":
        lunarlander(args)
        return
    args = replace(
        args,
        workers=args.workers or 8,
        total_steps=args.total_steps or 100_000,
        out=args.out or HERE / "results" / "async.json",
    )
    assert args.out is not None
    if args.show:
        documents = [json.loads(path.read_text()) for path in args.show]
        finish({**documents[0], "runs": [run for document in documents for run in document["runs"]]}, args)
        return
    known = {setting.name: setting for setting in SETTINGS}
    chosen = [known[name] for name in args.only]
    # Workers import the module sleepy.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    document = continued(args.out, "async.py") | {
        "versions": versions_of("farstep", "torch", "numpy", "gymnasium"),
        "settings": {name: value for name, value in asdict(args).items() if not isinstance(value, Path)},
    }
    document["settings"].pop("show")
    spawn = multiprocessing.get_context("spawn")
    known_runs = {(run["seed"], run["setting"]) for run in document["runs"]}
    order = [(seed, setting) for seed, setting in turns(chosen, args.seeds) if (seed, setting.name) not in known_runs]
    started = time.monotonic()
    for index, (seed, setting) in enumerate(order, start=1):
        began = time.monotonic()
        if args.minutes is not None and began - started > 60 * args.minutes:
            print("some runs are missing; run the same command again to continue")
            break
        with CpuMeter() as meter, concurrent.futures.ProcessPoolExecutor(1, spawn) as pool:
            done = pool.submit(run, setting, seed, args).result()
        done |= {"wall_s": round(time.monotonic() - began, 2), "others_cpu_s": round(meter.others_s, 2)}
        document["runs"].append(done)
        write_document(args.out, document)
        print(
            f"[{index}/{len(order)}] {setting.name}, seed {seed}: {done['seconds_per_update']:.3f} s an update "
            f"(collect alone {done['collect_only_s']:.3f}, learn alone {done['learn_only_s']:.3f}), return "
            f"{done['final_return']:.0f}, {done['seconds_to_threshold']} s to {args.threshold:g}; others took "
            f"{done['others_cpu_s'] / done['wall_s']:.2f} cores",
            flush=True,
        )
    finish(document, args)
    print(f"written: {args.out}")


def lunarlander(args: Args) -> None:
    """Measure seconds to a return of 200, synchronous and asynchronous."""
    if args.show:
        document = json.loads(args.show[0].read_text())
    else:
        sitting = Sitting(jobs=1, minutes=args.minutes, folder=args.runs)
        out = args.out or HERE / "results" / "async-lunarlander.json"
        settings = {"workers": args.workers or 14, "num_envs": args.num_envs}
        document = async_return.measure(sitting, out, args.seeds, settings, args.total_steps or 3_000_000)
    if document["runs"]:
        print(f"\n{async_return.summary(document)}")
        for path in async_return.draw(document, args.images):
            print(f"written: {path}")


def finish(document: dict[str, Any], args: Args) -> None:
    """Print tables and draw plots."""
    text = summary(document)
    print(f"\n{text}")
    for path in draw(document, args.images):
        print(f"written: {path}")
    if args.markdown:
        write_markdown(args.markdown, text, README_MARKS)
        print(f"written: {args.markdown}")


if __name__ == "__main__":
    run_script(lambda: main(tyro.cli(Args)))
