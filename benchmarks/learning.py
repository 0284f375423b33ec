"""Seconds and environment steps until a task is learned: farstep's learners compared with CleanRL's and RLlib's PPO.

    python benchmarks/setup_peers.py cleanrl rllib
    git clone https://github.com/vwxyzjn/cleanrl /tmp/cleanrl && git -C /tmp/cleanrl checkout fe8d8a0
    python benchmarks/learning.py --cleanrl /tmp/cleanrl/cleanrl/ppo.py --markdown benchmarks/README.md
    python benchmarks/learning.py --minutes 60 --only 'farstep-*'            # repeat to continue
    python benchmarks/learning.py --cores 2        # several runs at a time, each on two cores that no other run uses
    python benchmarks/learning.py --show benchmarks/results/learning.json    # only tables and plots

A task is learned when the mean return of the last 100 training episodes reaches its threshold. The contenders
alternate, seed by seed, each in its own process and virtual environment. Seconds are those of training, which starts
when processes and environments exist; a separate column has the time of the whole process. farstep runs with CleanRL's
hyper-parameters, with tuned ones, and with the defaults of `ppo`, `async-ppo` and `impala` for 16, 64 and 128
environments. Each peer runs with several numbers of environments; tables show its best. defaults.py measures the same
defaults in steps; here seconds count, so no two runs share a core.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import json
import math
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from children import run_script
from document import check_machine, continued, write_document, write_markdown
from learning_tables import PPO, Layout, draw, summary
from roster import BENCHMARKS, OWN, Contender, add_contender_options, parse_contenders
from runner import Run, execute, runs_in, turns

IMAGES = BENCHMARKS.parent / "docs" / "images"


@dataclass(frozen=True, kw_only=True)
class Task:
    """An environment, and the return at which it counts as learned."""

    env: str
    threshold: float | None
    """None: runs end after `max_steps`, and their returns are compared."""
    max_steps: int
    """Steps after which a run ends without reaching the threshold; annealed learning rates reach zero there."""
    package: str | None = None
    """A package that the environment needs and farstep's extras do not install; without it, the task is skipped."""

    @property
    def is_installed(self) -> bool:
        return self.package is None or importlib.util.find_spec(self.package) is not None


@dataclass(frozen=True, kw_only=True)
class Learner(Contender):
    """A contender, and the tasks that it learns."""

    by_task: Mapping[str, tuple[str, ...]] | None = None
    """Further options for each task that it learns; None: it learns all tasks, without further options."""

    def learns(self, task: Task) -> bool:
        return self.by_task is None or task.env in self.by_task

    def prepared(self, task: Task, cleanrl: Path) -> Contender:
        """The contender, with all options for a task; `cleanrl` is a script in CleanRL's repository."""
        further = self.by_task[task.env] if self.by_task is not None else ()
        scripts = ("--scripts", str(cleanrl.parent)) if self.venv == "cleanrl" else ()
        return replace(self, options=(*self.options, *further, *scripts, "--contender", self.name))


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Tasks, contenders, and the form of their results."""

    script: str
    """Name of the script; its results are in the file of the same name under results/."""
    description: str
    tasks: Mapping[str, Task]
    learners: tuple[Learner, ...]
    cleanrl: Path
    """Default path of a script in CleanRL's repository."""
    layout: Layout
    summary: Callable[[dict[str, Any]], str]
    timeout_s: float = 1800.0

    @property
    def name(self) -> str:
        return self.script.removesuffix(".py")

    @property
    def marks(self) -> tuple[str, str]:
        """The marks of its section in the README."""
        return f"<!-- {self.name}: begin -->", f"<!-- {self.name}: end -->"


TASKS = {
    "CartPole-v1": Task(env="CartPole-v1", threshold=475.0, max_steps=500_000),
    "LunarLander-v3": Task(env="LunarLander-v3", threshold=200.0, max_steps=1_000_000),
}

_RAW = "--no-normalize-obs --no-normalize-reward"
CLEANRLS = (
    "--num-envs 4 --num-steps 128 --learning-rate 2.5e-4 --anneal-lr --minibatch-size 128 --update-epochs 4 "
    f"--value-clip 0.2 {_RAW}"
)
"""CleanRL's hyper-parameters."""

OWN_CHOICE = {
    "CartPole-v1": (
        "--num-envs 16 --num-steps 64 --learning-rate 2e-3 --minibatch-size 128 --update-epochs 8 --gamma 0.98 "
        f"--gae-lambda 0.8 --ent-coef 0 {_RAW}"
    ),
    "LunarLander-v3": (
        "--num-envs 32 --num-steps 256 --learning-rate 1e-3 --minibatch-size 512 --update-epochs 8 --gamma 0.999 "
        "--gae-lambda 0.98 --ent-coef 0"
    ),
}
"""Hyper-parameters tuned for farstep on two cores."""


CLEANRL, RLLIB, FARSTEP = "learning_cleanrl.py", "learning_rllib.py", "learning_farstep.py"
LEARNERS = (
    Learner(name="cleanrl", script=CLEANRL, venv="cleanrl"),
    *(Learner(name=f"cleanrl-{n}", script=CLEANRL, venv="cleanrl", options=("--num-envs", str(n))) for n in (8, 16)),
    Learner(name="rllib", script=RLLIB, venv="rllib"),
    Learner(name="rllib-32", script=RLLIB, venv="rllib", options=("--num-envs", "32")),
    Learner(name="farstep-cleanrls", script=FARSTEP, venv=OWN, options=(f"--options={CLEANRLS}",)),
    Learner(
        name="farstep",
        script=FARSTEP,
        venv=OWN,
        by_task={env: (f"--options={chosen}",) for env, chosen in OWN_CHOICE.items()},
    ),
    *(
        Learner(
            name=f"farstep-{learner}-{n}",
            script=FARSTEP,
            venv=OWN,
            options=("--learner", learner, f"--options=--num-envs {n}"),
        )
        for learner in ("ppo", "async-ppo", "impala")
        for n in (16, 64, 128)
    ),
)
"""A name that ends in a number has that many environments; `rllib` and `cleanrl` use those of their own examples."""
LEARNING = Benchmark(
    script="learning.py",
    description=__doc__,
    tasks=TASKS,
    learners=LEARNERS,
    cleanrl=BENCHMARKS / ".venvs" / "cleanrl" / "ppo.py",
    layout=PPO,
    summary=summary,
)


@dataclass(frozen=True)
class Case:
    """A task and a seed."""

    env: str
    seed: int

    def __str__(self) -> str:
        return f"{self.env} seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Contenders, tasks and seeds."""

    script: str
    tasks: list[Task]
    seeds: range
    contenders: list[Learner]
    cleanrl: Path
    timeout_s: float
    max_seconds: float = math.inf
    """Seconds of training after which a peer's run ends without reaching the threshold."""
    done: frozenset[tuple[Case, str]] = frozenset()
    """Completed runs, which are not repeated."""
    deadline: float = math.inf
    """Time on the monotonic clock after which no run is started."""

    @property
    def num_runs(self) -> int:
        return len(self._missing())

    def __iter__(self) -> Iterator[tuple[Case, int, Contender]]:
        for case, task, contender in self._missing():
            if time.monotonic() > self.deadline:
                print("some runs are missing; run the same command again to continue")
                return
            yield case, 1, contender.prepared(task, self.cleanrl)

    def _missing(self) -> list[tuple[Case, Task, Learner]]:
        everything = [
            (Case(task.env, self.seeds[number - 1]), task, contender)
            for task in self.tasks
            for number, contender in turns([found for found in self.contenders if found.learns(task)], len(self.seeds))
        ]
        return [(case, task, found) for case, task, found in everything if (case, found.name) not in self.done]

    def arguments(self, case: Case) -> list[str]:
        task = next(task for task in self.tasks if task.env == case.env)
        return [
            *("--env", task.env),
            *("--seed", str(case.seed)),
            *(() if task.threshold is None else ("--threshold", str(task.threshold))),
            *("--max-steps", str(task.max_steps)),
            *("--max-seconds", str(self.max_seconds)),
        ]


Results = dict[Case, dict[str, list[Run]]]


def main(benchmark: Benchmark = LEARNING) -> int:
    options = parse_options(benchmark)
    if options.show:
        documents = [json.loads(path.read_text()) for path in options.show]
        merged = {**documents[0], "runs": [run for document in documents for run in document["runs"]]}
        finish(benchmark, merged, options)
        return 0
    document = continued(options.out, benchmark.script)
    check_machine(document, options.out)
    document["runs"] = [run for run in document["runs"] if run["report"]]  # failed runs are retried
    results: Results = runs_in(document, lambda run: Case(run["env"], run["seed"]))
    tasks = [benchmark.tasks[env] for env in options.env]
    for task in tasks:
        if not task.is_installed:
            print(f"{task.env} is skipped: {task.package} is not installed")
    plan = Plan(
        script=benchmark.script,
        tasks=[replace(task, max_steps=options.max_steps or task.max_steps) for task in tasks if task.is_installed],
        seeds=range(options.first_seed, options.first_seed + options.seeds),
        contenders=options.contenders,
        cleanrl=options.cleanrl.resolve(),
        timeout_s=options.timeout,
        max_seconds=options.max_seconds,
        done=frozenset((case, name) for case, found in results.items() for name in found),
        deadline=math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes,
    )
    print(f"{plan.num_runs} runs of {', '.join(contender.name for contender in plan.contenders)}")
    for case in (Case(task.env, seed) for task in plan.tasks for seed in plan.seeds):
        results.setdefault(case, {})
        for contender in plan.contenders:
            results[case].setdefault(contender.name, [])

    def outcome(case: Case, done: Run) -> str:
        write_document(
            options.out, document_of(document, plan, results)
        )  # after every run, because all runs together take hours
        return in_words(done)

    try:
        if options.cores:
            document["cores_per_run"] = options.cores
            execute_pinned(plan, results, outcome, options.cores)
        else:
            execute(plan, results, outcome)
    except KeyboardInterrupt:
        print("\ninterrupted; results so far:")
    finish(benchmark, document_of(document, plan, results), options)
    print(f"written: {options.out}")
    return 0


def execute_pinned(plan: Plan, results: Results, outcome: Callable[[Case, Run], str], cores: int) -> None:
    """Carry out the plan with as many runs at a time as the machine has groups of `cores` cores."""
    usable = sorted(os.sched_getaffinity(0))
    groups: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    for first in range(0, len(usable) - cores + 1, cores):
        groups.put(usable[first : first + cores])
    if groups.empty():
        raise SystemExit(f"--cores {cores}: this machine has {len(usable)} cores")
    started, num_done = time.monotonic(), 0

    def run_one(case: Case, contender: Contender, group: list[int]) -> None:
        nonlocal num_done
        try:
            done = run_pinned(case, contender.name, plan, group)
        finally:
            groups.put(group)
        with lock:
            results[case][contender.name].append(done)
            num_done += 1
            place = f"[{num_done}/{plan.num_runs}, {(time.monotonic() - started) / 60:.1f} min]"
            print(f"{place} {case}: {contender.name}: {outcome(case, done)}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(groups.qsize()) as pool:
        lock = threading.Lock()
        futures = []
        for case, _, contender in plan:
            futures.append(pool.submit(run_one, case, contender, groups.get()))
        for future in futures:
            future.result()


def run_pinned(case: Case, contender: str, plan: Plan, group: list[int]) -> Run:
    """Run one contender on the cores of `group`, by calling the script of the benchmark for it alone."""
    task = next(task for task in plan.tasks if task.env == case.env)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        command = [
            *("taskset", "--cpu-list", ",".join(map(str, group)), sys.executable, str(BENCHMARKS / plan.script)),
            *("--env", case.env, "--only", contender, "--first-seed", str(case.seed), "--seeds", "1"),
            *("--max-steps", str(task.max_steps), "--cleanrl", str(plan.cleanrl), "--timeout", str(plan.timeout_s)),
            *("--max-seconds", str(plan.max_seconds)),
            *("--out", str(out), "--images", folder),
        ]
        ended = subprocess.run(command, capture_output=True, text=True)
        if not out.exists():
            return Run(contender=contender, status="failed", reason=ended.stderr.strip()[-200:])
        (runs,) = runs_in(json.loads(out.read_text()), lambda run: Case(run["env"], run["seed"])).values()
    return runs[contender][0]


def parse_options(benchmark: Benchmark) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=benchmark.description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tasks = list(benchmark.tasks)
    parser.add_argument("--env", nargs="+", choices=tasks, default=tasks)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each contender in each task")
    parser.add_argument(
        "--first-seed",
        type=int,
        default=11,
        help="first of the consecutive seeds; 1 to 10 are reserved for tuning hyper-parameters",
    )
    parser.add_argument("--max-steps", type=int, help="limit of steps, instead of each task's, to test the benchmark")
    parser.add_argument(
        "--cleanrl",
        type=Path,
        default=benchmark.cleanrl,
        help=f"CleanRL's {benchmark.cleanrl.name}, in a checkout of its repository",
    )
    parser.add_argument(
        "--max-seconds", type=float, default=math.inf, help="end a peer's run after this time of training"
    )
    parser.add_argument("--timeout", type=float, default=benchmark.timeout_s, help="seconds before a run is killed")
    parser.add_argument(
        "--minutes", type=float, help="start no run after this time; run the same command again to continue"
    )
    parser.add_argument(
        "--cores", type=int, metavar="N", help="run several at a time, each on N cores (default: one, on all cores)"
    )
    add_contender_options(parser)
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results" / f"{benchmark.name}.json")
    parser.add_argument("--images", type=Path, default=IMAGES, help="folder for plots")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write tables to this file, between its marks")
    parser.add_argument(
        "--show", nargs="+", type=Path, metavar="FILE", help="only print tables and draw plots of these results"
    )
    options = parse_contenders(parser, benchmark.learners)
    if not options.show and any(c.venv == "cleanrl" for c in options.contenders) and not options.cleanrl.exists():
        parser.error(
            f"CleanRL's script is not at {options.cleanrl}; set --cleanrl to its path. The docstring of this script "
            "shows how to get it."
        )
    return options


def in_words(done: Run) -> str:
    report = done.report
    if report is None:
        return f"{done.status}: {done.reason}"
    came = "reached" if report["reached"] else f"ended at {report['last_mean']:.0f}"
    return (
        f"{came} after {report['seconds']:.1f} s, {report['steps']:,} steps; others took {done.others_cores:.2f} cores"
    )


def document_of(head: dict[str, Any], plan: Plan, results: Results) -> dict[str, Any]:
    """The results document: machine, command and every run."""
    runs = [
        {"env": case.env, "seed": case.seed, **asdict(done)}
        for case, found in results.items()
        for done_runs in found.values()
        for done in done_runs
    ]
    tasks = {task["env"]: task for task in (*head.get("tasks", ()), *map(asdict, plan.tasks))}
    return {**head, "tasks": list(tasks.values()), "runs": runs}


def finish(benchmark: Benchmark, document: dict[str, Any], options: argparse.Namespace) -> None:
    """Print tables and draw plots."""
    text = benchmark.summary(document)
    print(f"\n{text}")
    for path in draw(document, options.images, benchmark.layout):
        print(f"written: {path}")
    if options.markdown:
        write_markdown(options.markdown, text, benchmark.marks)
        print(f"written: {options.markdown}")


if __name__ == "__main__":
    run_script(main)
