"""Steps per second of farstep, of its peers, and of the limit for Python environments on this machine.

All contenders run in turn, several rounds, each in its own process and virtual environment:

    python benchmarks/throughput.py                                            # all: about two hours
    python benchmarks/throughput.py --env CartPole-v1 --num-envs 64 --rounds 1
    python benchmarks/throughput.py --only 'limit-*' 'farstep-*' 'envpool-*' --sampler lean
    python benchmarks/throughput.py --rounds 6 --continue                      # adds rounds to earlier results
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from children import run_script
from document import check_machine, continued, header, write_document, write_markdown
from roster import BENCHMARKS, CONTENDERS, Contender, add_contender_options, parse_contenders
from runner import Run, execute, runs_in, turns
from tables import Case, Results, case_table, summary

ENVS = ("CartPole-v1", "LunarLander-v3", "ALE/Pong-v5")
README_MARKS = ("<!-- throughput: begin -->", "<!-- throughput: end -->")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Contenders, cases, rounds and durations."""

    cases: list[Case]
    contenders: list[Contender]
    rounds: int
    steps: int
    seconds: float
    workers: int
    timeout_s: float

    @property
    def sizes(self) -> dict[str, Any]:
        """What all rounds of a results file have in common."""
        return {"steps": self.steps, "seconds": self.seconds, "workers": self.workers}

    @property
    def num_runs(self) -> int:
        return sum(len(self.contenders_of(case)) for case in self.cases) * self.rounds

    def contenders_of(self, case: Case) -> list[Contender]:
        """The contenders that support the environment of a case."""
        return [contender for contender in self.contenders if not contender.envs or case.env in contender.envs]

    def __iter__(self) -> Iterator[tuple[Case, int, Contender]]:
        """Ordered by case, so that runs that are compared are close in time."""
        for case in self.cases:
            for number, contender in turns(self.contenders_of(case), self.rounds):
                yield case, number, contender

    def arguments(self, case: Case) -> list[str]:
        return [
            *("--env", case.env),
            *("--num-envs", str(case.num_envs)),
            *("--sampler", case.sampler),
            *("--steps", str(self.steps)),
            *("--seconds", str(self.seconds)),
            *("--workers", str(self.workers)),
        ]


def main() -> int:
    options = parse_options()
    plan = Plan(
        cases=[Case(env, n, sampler) for sampler in options.sampler for env in options.env for n in options.num_envs],
        contenders=options.contenders,
        rounds=options.rounds,
        steps=options.steps,
        seconds=options.seconds,
        workers=options.workers,
        timeout_s=options.timeout,
    )
    missing = [contender for contender in plan.contenders if contender.interpreter is None]
    print(f"{plan.num_runs} runs of {len(plan.contenders)} contenders, {len(plan.cases)} cases")
    for contender in missing:
        print(f"  {contender.name} is not installed: {contender.how_to_install}")
    results: Results = {case: {contender.name: [] for contender in plan.contenders_of(case)} for case in plan.cases}
    document = {**header("throughput.py"), **plan.sizes}
    if options.is_continued and options.out.exists():
        document = earlier(options.out, plan, results)

    def stored(case: Case, done: Run) -> str:
        write_json(options.out, document, plan, results)
        return outcome(case, done)

    try:
        execute(plan, results, stored)
    except KeyboardInterrupt:
        print("\ninterrupted; results so far:")
    for case, runs in results.items():
        if any(runs.values()):
            print(f"\n{case_table(case, runs)}")
    print(f"\nwritten: {options.out}")
    if options.markdown:
        write_markdown(options.markdown, summary(results), README_MARKS)
        print(f"written: {options.markdown}")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", nargs="+", default=list(ENVS), metavar="ID")
    parser.add_argument("--num-envs", nargs="+", type=int, default=[16, 64], metavar="N")
    parser.add_argument("--sampler", nargs="+", choices=("eager", "lean"), default=["eager"])
    parser.add_argument("--steps", type=int, default=128, help="length T of a rollout")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contender in each case")
    parser.add_argument("--seconds", type=float, default=4.0, help="measured time of one run")
    parser.add_argument("--workers", type=int, default=2, help="worker processes of a contender, one per core")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds after which a run is killed")
    parser.add_argument(
        "--continue", dest="is_continued", action="store_true", help="measure only rounds that --out does not have yet"
    )
    add_contender_options(parser)
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results" / "throughput.json")
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="FILE",
        help="write the summary to this file: between its marks if it has them, otherwise as the whole file",
    )
    return parse_contenders(parser, CONTENDERS)


def outcome(case: Case, done: Run) -> str:
    if done.steps_per_second is None:
        return f"{done.status}: {done.reason}"
    return f"{done.steps_per_second:,.0f} steps/s, others took {done.others_cores:.2f} cores"


def earlier(path: Path, plan: Plan, results: Results) -> dict[str, Any]:
    """Open the results of earlier sittings, and add their runs to ``results``."""
    document = continued(path, "throughput.py")
    check_machine(document, path)
    for name, size in plan.sizes.items():
        if document[name] != size:
            raise SystemExit(f"{path} was measured with --{name} {document[name]}: use the same, or another --out")
    for case, runs in runs_in(document, Case.of).items():
        results.setdefault(case, {}).update(runs)
    return document


def write_json(path: Path, document: dict[str, Any], plan: Plan, results: Results) -> None:
    """The results document: machine, command and every run."""
    runs = [
        {"env": case.env, "num_envs": case.num_envs, "sampler": case.sampler, "round": number, **asdict(done)}
        for case, by_contender in results.items()
        for done_runs in by_contender.values()
        for number, done in enumerate(done_runs, start=1)
    ]
    write_document(path, {**document, "rounds": plan.rounds, "runs": runs})


if __name__ == "__main__":
    run_script(main)
