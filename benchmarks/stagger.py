"""Staggered resets compared with environments that all start together, with short rollouts of long episodes.

    python benchmarks/stagger.py                                  # the chain and Pendulum: about ten minutes on a core
    python benchmarks/stagger.py --quick                          # a minute: one seed, few updates; nothing is written
    python benchmarks/stagger.py --only 'N_B=*' naive --seeds 5
    python benchmarks/stagger.py --show benchmarks/results/stagger.json    # only the table and the plots

PPO with `ClusterEnv.collect` learns the chain (`chain.py`) from rollouts of K=5 steps of episodes of H=200, so that
without staggering, an update sees a fortieth of the episode, and the same part comes again 40 updates later. Measured
after each update: F[u, b], the mean probability of the right action in block b; and the mean squared error of V against
the exact value of the policy at all positions. Pendulum-v1, with episodes of 1,000 steps and rollouts of 10, is
evaluated on episodes of 200 steps, never staggered.
"""

from __future__ import annotations

import concurrent.futures
import fnmatch
import json
import multiprocessing
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from chain import ACTIONS, BLOCKS, HORIZON, TARGETS, Chain, features
from children import run_script
from document import header, write_document
from rich.console import Console
from rich.table import Table
from small_ppo import PPO, ActorCritic
from tables import table as markdown_table
from versions import versions_of

import farstep

RESULTS = Path(__file__).parent / "results"
IMAGES = Path(__file__).parent.parent / "docs" / "images"


@dataclass(kw_only=True)
class Args:
    """Train on the chain and on Pendulum with several schedules; compare accuracy, forgetting and speed."""

    seeds: int = 3
    jobs: int = 1
    """runs in parallel"""
    only: tuple[str, ...] = ("*",)
    """names of cases, as shell patterns"""
    quick: bool = False
    """one seed and an eighth of the updates, to test the benchmark itself"""
    out: Path = RESULTS / "stagger.json"
    show: Path | None = None
    """only print the table and draw the plots of these results"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    name: str
    task: str = "chain"
    num_envs: int = 64
    steps: int = 5
    updates: int = 400
    stagger: dict[str, Any] | None = None


def _stagger(groups: int, **more: Any) -> dict[str, Any]:
    return {"horizon": HORIZON, "groups": groups, **more}


PENDULUM = {"task": "pendulum", "steps": 10, "updates": 800}
CASES = [
    Case(name="naive"),
    *(Case(name=f"N_B={groups}", stagger=_stagger(groups)) for groups in (2, 5, 10, 20, 40)),
    Case(name="N_B=40, clock", stagger=_stagger(40, init="clock")),
    Case(name="N_B=40, policy", stagger=_stagger(40, init="policy")),
    Case(name="random offsets", stagger={"horizon": HORIZON, "offsets": "random"}),
    Case(name="gated chain, naive", task="gated"),
    Case(name="gated chain, N_B=40", task="gated", stagger=_stagger(40)),
    Case(name="N=16, naive", num_envs=16),
    Case(name="N=16, N_B=16", num_envs=16, stagger=_stagger(16)),
    Case(name="N=256, naive", num_envs=256, updates=250),
    Case(name="N=256, N_B=40", num_envs=256, updates=250, stagger=_stagger(40)),
    Case(name="K=H, naive", steps=HORIZON, updates=20),
    Case(name="K=H, N_B=40", steps=HORIZON, updates=20, stagger=_stagger(40)),
    Case(name="Pendulum, naive", **PENDULUM),
    Case(name="Pendulum, N_B=64", stagger={"horizon": 1000}, **PENDULUM),
]
DRAWN = ("naive", "N_B=40")
"""Cases whose forgetting matrices are drawn side by side."""


# ---- the tasks ----


def train_chain(case: Case, seed: int) -> dict[str, Any]:
    model, ppo = ActorCritic(12, ACTIONS, seed), PPO(seed=seed)
    positions, right = features(np.arange(HORIZON)), np.repeat(TARGETS, HORIZON // BLOCKS)
    matrix, errors = np.zeros((case.updates, BLOCKS)), np.zeros(case.updates)
    config = {
        "type": "factory",
        "env_name": Chain,
        "env_kwargs": {"gated": case.task == "gated"},
        "envs_per_node": case.num_envs,
        "seed": seed,
        "stagger": case.stagger,
    }
    with farstep.ClusterEnv(config, farstep.InProcessConfig(workers_per_node=1)) as env:
        for update in range(case.updates):
            ppo.update(model, env.collect(model, steps=case.steps))
            chance = np.exp(model.log_probs(model.actor(positions)))[np.arange(HORIZON), right].astype(np.float64)
            values = model.critic(positions)[:, 0]
            matrix[update] = chance.reshape(BLOCKS, -1).mean(1)
            errors[update] = np.square(values - exact_values(chance, ppo.gamma)).mean()
        stats = env.stats()
    found = {**measures(case, matrix, errors), **counted(stats), "curve": matrix.mean(1).round(3).tolist()}
    return {**found, "matrix": matrix.round(2).tolist()} if case.name in DRAWN and seed == 1 else found


def exact_values(chance: Any, gamma: float) -> Any:
    """Exact values of the policy in the ungated chain, which is walked to its end from each position."""
    values, value = np.zeros(len(chance)), 0.0
    for p in reversed(range(len(chance))):
        values[p] = value = chance[p] + gamma * value
    return values


def measures(case: Case, matrix: Any, errors: Any) -> dict[str, Any]:
    accuracy, cycle = matrix.mean(1), max(1, min(HORIZON // case.steps, case.updates))
    lost = np.maximum.accumulate(matrix) - matrix
    return {
        "accuracy": float(accuracy[-cycle:].mean()),
        "updates_to_0.7": int(np.argmax(accuracy >= 0.7)) + 1 if (accuracy >= 0.7).any() else None,
        "forgetting": float(lost[len(lost) // 2 :].mean()),
        "value_mse": None if case.task == "gated" else float(errors[-cycle:].mean()),
    }


def counted(stats: dict[str, Any]) -> dict[str, int]:
    return {"steps": stats["steps"], "stagger_steps": stats["stagger_steps"]}


EVALUATE_EVERY = 20
_EVALUATED_STEPS = 200


def train_pendulum(case: Case, seed: int) -> dict[str, Any]:
    model = ActorCritic(3, None, seed)
    ppo = PPO(gamma=0.95, gae_lambda=0.95, reward_scale=0.1, seed=seed)
    one = farstep.InProcessConfig(workers_per_node=1)
    limits = {"max_episode_steps": 1000}
    config = {"env_name": "Pendulum-v1", "env_kwargs": limits, "envs_per_node": case.num_envs, "seed": seed}
    evaluation = {"env_name": "Pendulum-v1", "envs_per_node": 20, "seed": 100}
    curve = []
    with (
        farstep.ClusterEnv({**config, "stagger": case.stagger}, one) as env,
        farstep.ClusterEnv(evaluation, one) as test,
    ):
        greedy = ActorCritic(3, None, seed)
        greedy.greedy = True
        for update in range(case.updates):
            ppo.update(model, env.collect(model, steps=case.steps))
            if (update + 1) % EVALUATE_EVERY == 0:
                greedy.flat[:] = model.flat
                test.reset(seed=100)  # the same 20 initial states each time
                curve.append(float(test.collect(greedy, steps=_EVALUATED_STEPS).episodes["return"].mean()))
        stats = env.stats()
    reached = np.flatnonzero(np.array(curve) >= -400)
    last = curve[-len(curve) // 4 :]
    return {
        "return": float(np.mean(last)),
        "return_min": float(np.min(last)),
        "updates_to_-400": int(reached[0] + 1) * EVALUATE_EVERY if len(reached) else None,
        **counted(stats),
        "curve": [round(value, 1) for value in curve],
    }


# ---- running, and showing ----


def train(case: Case, seed: int) -> tuple[dict[str, Any], Any]:
    """The result of a run, and its curves."""
    began = time.process_time()
    result = (train_pendulum if case.task == "pendulum" else train_chain)(case, seed)
    curves = {key: result.pop(key) for key in ("curve", "matrix") if key in result}
    cpu_s = round(time.process_time() - began, 1)
    return {"case": case.name, "seed": seed, **result, "cpu_s": cpu_s}, curves


def main(args: Args) -> None:
    console = Console(width=120)
    if args.show is not None:
        document = json.loads(args.show.read_text())
        show(document, json.loads(curves_of(args.show).read_text())["curves"], console)
        return
    chosen = [case for case in CASES if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in args.only)]
    if args.quick:
        chosen = [replace(case, updates=max(EVALUATE_EVERY, case.updates // 8)) for case in chosen]
    seeds = range(1, (1 if args.quick else args.seeds) + 1)
    began, runs, curves = time.monotonic(), [], []
    os.environ["OMP_NUM_THREADS"] = "1"  # threads of the child processes; the matrices are small
    with concurrent.futures.ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(train, case, seed) for case in chosen for seed in seeds]
        for done in waiting:
            run, course = done.result()
            runs.append(run)
            curves.append({"case": run["case"], "seed": run["seed"], **course})
            console.print(run)
    document = {
        **header("stagger.py"),
        "versions": versions_of("farstep", "gymnasium", "numpy"),
        "seconds": round(time.monotonic() - began),
        "cases": [case.__dict__ for case in chosen],
        "runs": runs,
    }
    if not args.quick:
        write_document(args.out, document)
        found = {key: document[key] for key in ("date", "command", "machine")} | {"curves": curves}
        curves_of(args.out).write_text(json.dumps(found, separators=(",", ":")) + "\n")
    show(document, curves, console, draw=not args.quick)


def curves_of(path: Path) -> Path:
    return path.with_name(path.stem + "-curves.json")


def mean(document: dict[str, Any], case: str, key: str) -> float | None:
    """Mean over seeds; None if at least half of them are None."""
    found = [run[key] for run in document["runs"] if run["case"] == case]
    known = [value for value in found if value is not None]
    return float(np.mean(known)) if 2 * len(known) > len(found) else None


def show(document: dict[str, Any], curves: list[dict[str, Any]], console: Console, draw: bool = True) -> None:
    columns = {
        "chain": ("accuracy", "updates_to_0.7", "forgetting", "value_mse"),
        "pendulum": ("return", "return_min", "updates_to_-400"),
    }
    for task, keys in columns.items():
        cases = [case for case in document["cases"] if (case["task"] == "pendulum") == (task == "pendulum")]
        if not cases:
            continue
        table = Table(title=f"{task}: means of the seeds", box=None)
        for title in ("case", *keys, "steps", "discarded"):
            table.add_column(title, justify="left" if title == "case" else "right")
        for case in cases:
            cells = {key: mean(document, case["name"], key) for key in (*keys, "steps", "stagger_steps")}
            table.add_row(case["name"], *(_cell(key, value) for key, value in cells.items()))
        console.print(table)
    if draw:
        draw_matrices(curves)
        draw_accuracy(curves)
        draw_returns(curves)


def chain_summary(document: dict[str, Any]) -> str:
    """A Markdown table of means over seeds."""
    titles = {"accuracy": "accuracy", "updates_to_0.7": "updates to 0.7", "forgetting": "forgetting"}
    titles |= {"value_mse": "value error", "stagger_steps": "discarded"}
    names = [case["name"] for case in document["cases"] if case["task"] != "pendulum"]
    rows = [[name, *(_cell(key, mean(document, name, key)) for key in titles)] for name in names]
    return markdown_table(["", *titles.values()], rows)


def pendulum_summary(document: dict[str, Any]) -> str:
    """A Markdown table of means over seeds, with the return of each seed."""
    rows = []
    for name in (case["name"] for case in document["cases"] if case["task"] == "pendulum"):
        by_seed = ", ".join(f"{run['return']:.0f}" for run in document["runs"] if run["case"] == name)
        keys = ("return_min", "updates_to_-400", "stagger_steps")
        cells = [_cell(key, mean(document, name, key)) for key in ("return", *keys)]
        rows.append([name, cells[0], by_seed, *cells[1:]])
    titles = ["return, last quarter", "by seed", "worst in last quarter", "updates to -400", "discarded"]
    return markdown_table(["", *titles], rows)


def _cell(key: str, value: float | None) -> str:
    if value is None:
        return "never" if key.startswith("updates") else "-"
    return f"{value:.3f}" if key in ("accuracy", "forgetting", "value_mse") else f"{value:,.0f}"


def _of(curves: list[dict[str, Any]], name: str, key: str = "curve") -> list[Any]:
    return [np.array(entry[key]) for entry in curves if entry["case"] == name and key in entry]


def _figure(columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    IMAGES.mkdir(parents=True, exist_ok=True)
    return plt.subplots(1, columns, figsize=size, layout="constrained", **options)


def draw_matrices(curves: list[dict[str, Any]]) -> None:
    pair = [(name, _of(curves, name, "matrix")) for name in DRAWN]
    if not all(found for _, found in pair):
        return
    figure, axes = _figure(2, (9, 3.6), sharey=True)
    for axis, (name, found) in zip(axes, pair, strict=True):
        image = axis.imshow(found[0].T, aspect="auto", origin="lower", vmin=0, vmax=1, interpolation="nearest")
        axis.set(title="all begin together" if name == "naive" else "staggered, 40 groups", xlabel="update")
    axes[0].set_ylabel("block of the episode")
    axes[0].set_yticks([0, 5, 10, 15, 19])
    figure.colorbar(image, ax=axes, label="probability of the right action")
    figure.savefig(IMAGES / "stagger-forgetting.png", dpi=90)


def draw_accuracy(curves: list[dict[str, Any]]) -> None:
    names = ["naive", "N_B=2", "N_B=5", "N_B=10", "N_B=20", "N_B=40", "N_B=40, clock"]
    if not all(_of(curves, name) for name in names):
        return
    figure, axis = _figure(1, (7, 3.8))
    for k, name in enumerate(names):
        clock = "clock" in name
        color = "black" if name == "naive" else "tab:red" if clock else _shade(k / 6)
        accuracy = np.mean(_of(curves, name), axis=0)
        axis.plot(np.arange(1, len(accuracy) + 1), accuracy, color=color, ls="--" if clock else "-", lw=1.2, label=name)
    axis.axhline(0.7, color="gray", lw=0.6, ls=":")
    axis.set(xlabel="update (each of K=5 steps of 64 environments)", ylabel="probability of the right action")
    axis.legend(fontsize=8)
    figure.savefig(IMAGES / "stagger-accuracy.png", dpi=90)


def _shade(x: float) -> Any:
    import matplotlib as mpl

    return mpl.colormaps["viridis"](0.95 - 0.95 * x)


def draw_returns(curves: list[dict[str, Any]]) -> None:
    names = ("Pendulum, naive", "Pendulum, N_B=64")
    if not all(_of(curves, name) for name in names):
        return
    figure, axis = _figure(1, (7, 3.4))
    for name, color in zip(names, ("black", "tab:green"), strict=True):
        found = np.array(_of(curves, name))
        updates = np.arange(1, found.shape[1] + 1) * EVALUATE_EVERY
        for curve in found:
            axis.plot(updates, curve, color=color, lw=0.6, alpha=0.5)
        axis.plot(updates, found.mean(0), color=color, lw=1.6, label=name)
    axis.set(xlabel="update (each of 10 steps of 64 environments)", ylabel="return of 200 steps")
    axis.legend(fontsize=8)
    figure.savefig(IMAGES / "stagger-pendulum.png", dpi=90)


if __name__ == "__main__":
    run_script(lambda: main(tyro.cli(Args, description=__doc__)))
