"""Steps until `farstep train` has learned a task with default options, except `--env` and `--num-envs`.

    python benchmarks/defaults.py --jobs 8 --minutes 9       # repeat until all runs are complete
    python benchmarks/defaults.py --tasks other
    python benchmarks/defaults.py --show benchmarks/results/defaults.json      # only tables and plots

A task is learned when the mean return of the last 100 training episodes reaches its threshold; the run ends there.
Evaluations (20 episodes with the most likely actions, in separate environments) are stored, too. Ape-X on CartPole-v1
is judged by them: some of its environments take many random actions for ever. It has learned the task from the first
evaluation on after which none is below the threshold, and the run has a fixed number of steps. A run that is in the
results file is not repeated. A run that was stopped is stored as far as it came, and continued next time.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from children import run_script
from curve_plots import band, panels, save
from document import continued, machines, write_document
from roster import BENCHMARKS
from tables import table
from trainings import Metrics, Sitting, Training, curve, evaluations, metrics_of

IMAGES = BENCHMARKS.parent / "docs" / "images"
ON_POLICY = ("ppo", "async-ppo", "impala")
REPLAY = ("dqn", "apex", "sac", "aride")
LEARNERS = ON_POLICY + REPLAY
POINTS = 40
"""Points of the stored curve of training returns."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """An environment, and the return at which it counts as learned."""

    threshold: float
    sac_threshold: float | None = None
    """Threshold for SAC; None: the same."""
    learners: tuple[str, ...] = ON_POLICY
    total_steps: int = 1_000_000
    eval_every: int = 25_000
    eval_episodes: int = 20
    evaluated: tuple[str, ...] = ()
    """Learners that are judged by their evaluations instead of their training returns."""
    evaluated_steps: int = 200_000
    """Steps of such a run."""
    options: tuple[str, ...] = ()
    """Options of `farstep train` instead of `--env NAME`."""
    needs: str | None = None
    """An optional module that the task needs."""

    def threshold_of(self, learner: str) -> float:
        """The return at which the task counts as learned by this learner."""
        return self.sac_threshold if learner == "sac" and self.sac_threshold is not None else self.threshold


MAIN = {
    "CartPole-v1": Task(threshold=475.0, eval_every=10_000, learners=LEARNERS, evaluated=("apex",)),
    "LunarLander-v3": Task(threshold=200.0, learners=(*ON_POLICY, "dqn", "apex", "sac")),
}
OTHER = {
    "Acrobot-v1": Task(threshold=-100.0),
    "Pendulum-v1": Task(threshold=-250.0, sac_threshold=-200.0, learners=(*ON_POLICY, "sac")),
    "HalfCheetah-v5": Task(threshold=4000.0, learners=("sac",), eval_episodes=5, needs="mujoco"),
    "MountainCarContinuous-v0": Task(threshold=90.0),
    "ALE/Pong-v5": Task(
        threshold=18.0,
        total_steps=10_000_000,
        eval_every=500_000,
        eval_episodes=5,
        options=("--env-type", "factory", "--env", "workload:make_env", "--env-kwargs", '{"env_id":"ALE/Pong-v5"}'),
        needs="ale_py",
    ),
}
TASKS = MAIN | OTHER
GROUPS = {"main": MAIN, "other": OTHER}


def main() -> int:
    options = parse_options()
    if options.show:
        document = json.loads(options.show.read_text())
    else:
        document = continued(options.out, "defaults.py")
        complete = measure(document, options)
        print("all runs are complete" if complete else "some runs are missing; run the same command again to continue")
    for env in TASKS:
        if text := summary(document, env):
            print(f"\n{text}")
    for path in draw(document, options.images):
        print(f"written: {path}")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=[*GROUPS, *TASKS], default=["main"], help="tasks, or groups")
    parser.add_argument("--learners", nargs="+", choices=LEARNERS, default=list(LEARNERS))
    parser.add_argument(
        "--num-envs",
        nargs="+",
        type=int,
        help="numbers of environments (default: 16; also 64 and 128 for on-policy learners on the main tasks)",
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each case, with seeds 1, 2, ...")
    parser.add_argument("--workers", type=int, default=2, help="worker processes of each run")
    parser.add_argument("--device", default="cpu", help="device of the learner")
    parser.add_argument("--inference", default="local", help="where actions are computed, as in `farstep train`")
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results" / "defaults.json")
    parser.add_argument("--images", type=Path, default=IMAGES, help="folder for plots")
    parser.add_argument("--show", type=Path, metavar="FILE", help="only print tables and draw plots of these results")
    Sitting.add_options(parser)
    return parser.parse_args()


def measure(document: dict[str, Any], options: argparse.Namespace) -> bool:
    """Run the missing runs; returns whether all are complete."""
    done = {key_of(run) for run in document["runs"] if not run.get("stopped")}
    cases = [case for case in cases_of(options) if key_of(case) not in done]
    print(f"{len(cases)} runs, {options.jobs} at a time; {len(done)} are in {options.out.name} already", flush=True)

    def store(index: int, metrics: list[Metrics], **more: Any) -> str:
        run = outcome(cases[index], metrics) | {"command": trainings[index].command, "jobs": options.jobs} | more
        others = [other for other in document["runs"] if key_of(other) != key_of(run)]
        document["runs"] = sorted([*others, run], key=lambda run: (list(TASKS).index(run["env"]), *key_of(run)))
        write_document(options.out, document)
        return in_words(run)

    trainings = [training_of(case, options) for case in cases]
    sitting = Sitting.of(options)
    complete = sitting.train(trainings, store)
    ended = {key_of(run) for run in document["runs"] if not run.get("stopped")}
    for index, case in enumerate(cases):
        metrics = metrics_of(sitting.folder / trainings[index].name)
        if key_of(case) not in ended and any("env/return_mean" in line for line in metrics):
            print(store(index, metrics, stopped=True))
    return complete


def cases_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All runs, ordered by seed, so that every case soon has one run."""
    chosen = list(dict.fromkeys(env for name in options.tasks for env in GROUPS.get(name, (name,))))
    cases = []
    for seed, env in itertools.product(range(1, options.seeds + 1), chosen):
        needed = TASKS[env].needs
        if needed is not None and importlib.util.find_spec(needed) is None:
            print(f"{env} is skipped: {needed} is not installed")
            continue
        for learner in options.learners:
            if learner in TASKS[env].learners:
                numbers = options.num_envs or ([16, 64, 128] if env in MAIN and learner in ON_POLICY else [16])
                cases += [{"env": env, "learner": learner, "num_envs": number, "seed": seed} for number in numbers]
    return cases


def key_of(run: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(run[name] for name in ("env", "learner", "num_envs", "seed"))


def training_of(case: dict[str, Any], options: argparse.Namespace) -> Training:
    task = TASKS[case["env"]]
    chosen = [*(task.options or ("--env", case["env"])), "--num-envs", str(case["num_envs"])]
    chosen += ["--seed", str(case["seed"])]
    is_evaluated = case["learner"] in task.evaluated
    if not is_evaluated:
        chosen += ["--target-return", f"{task.threshold_of(case['learner']):g}"]
    chosen += ["--eval-every", str(task.eval_every), "--eval-episodes", str(task.eval_episodes)]
    chosen += ["--workers", str(options.workers), "--threads", "1"]
    if options.device != "cpu":
        chosen += ["--device", options.device]
    if options.inference != "local":
        chosen += ["--inference", options.inference]
    name = "-".join(str(part).replace("/", "-").lower() for part in ("defaults", *key_of(case)))
    total_steps = task.evaluated_steps if is_evaluated else task.total_steps
    return Training(name=name, learner=case["learner"], options=tuple(chosen), total_steps=total_steps)


def outcome(case: dict[str, Any], metrics: list[Metrics]) -> dict[str, Any]:
    """The stored result of a run; `reached` is whether it reached its threshold."""
    points = curve(metrics, {"env/return_mean": 1, "seconds": 1}, POINTS)
    steps, final, seconds = points[-1]
    task, found = TASKS[case["env"]], evaluations(metrics)
    threshold = task.threshold_of(case["learner"])
    reached = final >= threshold
    if case["learner"] in task.evaluated:
        good = list(itertools.takewhile(lambda evaluation: evaluation[1] >= threshold, reversed(found)))
        reached = bool(good)
        if reached:
            steps = good[-1][0]
            seconds = next(line["seconds"] for line in metrics if line["step"] >= steps)
    return {
        **case,
        "reached": reached,
        "steps": steps,
        "seconds": seconds,
        "curve": points,
        "evaluations": found,
    }


def in_words(run: dict[str, Any]) -> str:
    ended = "was stopped" if run.get("stopped") else "ended"
    came = "reached its threshold" if run["reached"] else f"{ended} at {run['curve'][-1][1]}"
    where = f"{run['learner']} on {run['env']}, {run['num_envs']} environments, seed {run['seed']}"
    last = f"evaluation {run['evaluations'][-1][1]:.0f}" if run["evaluations"] else "no evaluation"
    return f"{where}: {came} after {run['steps']:,} steps, {run['seconds']:.0f} s; {last}"


def summary(document: dict[str, Any], env: str) -> str:
    """Steps of every seed on one task, by learner and number of environments."""
    runs = [run for run in document["runs"] if run["env"] == env]
    if not runs:
        return ""
    goals = {TASKS[env].threshold_of(run["learner"]) for run in runs}
    numbers = sorted({run["num_envs"] for run in runs})
    rows = []
    for learner in LEARNERS:
        mine = [run for run in runs if run["learner"] == learner]
        if mine:
            cells = [_steps([run for run in mine if run["num_envs"] == number]) for number in numbers]
            bound = "" if all(run["reached"] for run in mine) else "> "
            rows.append([f"`{learner}`", *cells, f"{bound}{mean(run['steps'] for run in mine) / 1000:.0f}k"])
    goal = " (on-policy learners) or ".join(f"{goal:g}" for goal in sorted(goals)) + " (SAC)" * (len(goals) > 1)
    evaluated = [f"`{learner}`" for learner in TASKS[env].evaluated if any(run["learner"] == learner for run in runs)]
    by = f"; {', '.join(evaluated)}: to the first evaluation from which on the return stays there" if evaluated else ""
    brackets = "" if all(run["reached"] for run in runs) else " (in brackets: not reached)"
    if any(run.get("stopped") for run in runs):
        brackets = " (in brackets: not reached; runs that were stopped early also have their last mean return)"
    title = f"{env}, thousand steps to a mean training return of {goal}{by}, one number per seed{brackets}:"
    return f"{title}\n\n{table(['', *(f'{number} environments' for number in numbers), 'mean'], rows)}"


def page(document: dict[str, Any]) -> str:
    """The section of benchmarks/README.md: machines, and a table for every task."""
    return "\n\n".join(
        [
            f"On {machines(document)} (`results/defaults.json` has the machine of each command). Runs that did not "
            "reach the threshold count with all of their steps; the mean is then a lower bound (>):",
            *(text for env in TASKS if (text := summary(document, env))),
        ]
    )


def learner_page(document: dict[str, Any], learner: str) -> str:
    """The section of a learner's page: table and curves."""
    if not any(run["learner"] == learner and run["env"] in drawn_tasks(learner) for run in document["runs"]):
        return f"Not measured yet. To measure it, run `python benchmarks/defaults.py --learners {learner}`."
    image = f"![evaluation returns over steps of {learner}, by task and number of environments]"
    return f"{learner_summary(document, learner)}\n\n{image}(images/defaults-{learner}.png)"


def learner_summary(document: dict[str, Any], learner: str) -> str:
    """The table of one learner: steps to the threshold and the last evaluation of every case."""
    rows = []
    for env, number in itertools.product(TASKS, sorted({run["num_envs"] for run in document["runs"]})):
        of_case = [run for run in document["runs"] if run["env"] == env and run["num_envs"] == number]
        runs = [run for run in of_case if run["learner"] == learner]
        if not runs:
            continue
        ended = [run for run in runs if not run.get("stopped")]
        last = [run["evaluations"][-1][1] for run in ended if run["evaluations"]]
        spread = f" ({min(last):.0f} to {max(last):.0f})" if len(last) > 1 else ""
        reached = sum(run["reached"] for run in runs)
        row = [f"{env} ({TASKS[env].threshold_of(learner):g})", str(number), f"{reached} of {len(runs)}"]
        row += [_steps(runs), f"{mean(last):.0f}{spread}" if last else "-"]
        if learner in REPLAY:
            row.append(f"{median(run['seconds'] for run in ended) / 60:.1f}" if ended else "-")
        elif learner != "ppo":
            row.append(_of_sync(runs, [run for run in of_case if run["learner"] == "ppo"]))
        rows.append(row)
    header = ["task (threshold)", "environments", "reached", "thousand steps, by seed", "final evaluation (range)"]
    last_column = ["minutes (median)"] if learner in REPLAY else [] if learner == "ppo" else ["steps / PPO's steps"]
    return table([*header, *last_column], rows)


def _of_sync(runs: list[dict[str, Any]], sync: list[dict[str, Any]]) -> str:
    """Mean steps divided by PPO's, over the seeds that both have; no number if PPO did not reach the threshold."""
    if not all(run["reached"] for run in sync):
        return "-"
    bound = "" if all(run["reached"] for run in runs) else "> "
    seeds = {run["seed"] for run in runs} & {run["seed"] for run in sync}
    steps = [[run["steps"] for run in found if run["seed"] in seeds] for found in (runs, sync)]
    return f"{bound}{mean(steps[0]) / mean(steps[1]):.2f}" if seeds else "-"


def _steps(runs: list[dict[str, Any]]) -> str:
    found = sorted(runs, key=lambda run: run["seed"])
    return ", ".join(map(_in_brackets, found)) or "-"


def _in_brackets(run: dict[str, Any]) -> str:
    """The steps of a run, in brackets if it did not reach its threshold."""
    steps = f"{run['steps'] / 1000:.0f}"
    if run.get("stopped"):
        return f"({steps}, last return {run['curve'][-1][1]:g})"
    return steps if run["reached"] else f"({steps})"


def drawn_tasks(learner: str) -> Mapping[str, Task]:
    """The tasks of a learner's plot: the main ones, and all for replay learners."""
    return TASKS if learner in REPLAY else MAIN


def draw(document: dict[str, Any], folder: Path) -> list[Path]:
    """Draw a plot per learner: evaluation returns by task, with a line per number of environments."""
    written = []
    for learner in LEARNERS:
        runs = [run for run in document["runs"] if run["learner"] == learner]
        tasks = [env for env in drawn_tasks(learner) if any(run["env"] == env for run in runs)]
        if not tasks:
            continue
        fixed = [env for env in tasks if learner in TASKS[env].evaluated]
        end = "runs end at the threshold"
        end += "".join(f", on {env} after {TASKS[env].evaluated_steps:,} steps" for env in fixed)
        title = f"farstep train {learner}: evaluation returns\nmean and range of the seeds; {end}"
        figure, axes = panels(len(tasks), title)
        for axis, env in zip(axes, tasks, strict=True):
            axis.set(title=env, ylabel="return of an evaluation")
            axis.axhline(TASKS[env].threshold_of(learner), color="grey", linestyle=":", linewidth=1)
            for index, number in enumerate(sorted({run["num_envs"] for run in runs})):
                mine = [run["evaluations"] for run in runs if run["env"] == env and run["num_envs"] == number]
                band(axis, mine, 1, f"{number} environments", f"C{index}")
        written.append(save(figure, folder / f"defaults-{learner}.png"))
    return written


if __name__ == "__main__":
    run_script(main)
