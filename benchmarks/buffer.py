"""Rows per second into and out of farstep's buffer, its peers, and plain arrays, which are the upper limit.

All contenders run in turn, several rounds, each in its own process and virtual environment:

    python benchmarks/buffer.py                                              # all: about half an hour
    python benchmarks/buffer.py --quick                                      # a few minutes, to test the benchmark
    python benchmarks/buffer.py --only 'numpy-*' farstep --observations vector --sampler prioritized
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from children import run_script
from document import header, write_document, write_markdown
from replay import INSERTS, KEYS, OBSERVATIONS
from rich import box
from rich.console import Console
from rich.table import Table
from roster import BENCHMARKS, BUFFER_LIMITS, BUFFERS, BufferContender, add_contender_options, parse_contenders
from runner import Run, execute, turns
from tables import Rates, load, rates_of, why_missing

SAMPLERS = ("uniform", "prioritized")
README_MARKS = ("<!-- buffer: begin -->", "<!-- buffer: end -->")
QUICK = {"rounds": 1, "seconds": 0.2, "shrink": 10}


@dataclass(frozen=True)
class Case:
    """Kind of observation, and sampler."""

    observations: str
    sampler: str

    def __str__(self) -> str:
        return f"{self.observations}, {self.sampler}"

    @property
    def actions(self) -> list[str]:
        """Measurements, as named in the contenders' reports."""
        batches = OBSERVATIONS[self.observations].batches
        updates = [f"update {size}" for size in batches] if self.sampler == "prioritized" else []
        return [*(f"insert {rows}" for rows in INSERTS), *(f"sample {size}" for size in batches), *updates]


Results = dict[Case, dict[str, list[Run]]]
"""The runs of every case, by contender."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Contenders, cases, rounds and durations."""

    cases: list[Case]
    contenders: list[BufferContender]
    rounds: int
    seconds: float
    shrink: int
    timeout_s: float

    def taking_part(self, case: Case) -> list[BufferContender]:
        return [contender for contender in self.contenders if case.sampler in contender.samplers]

    @property
    def num_runs(self) -> int:
        return self.rounds * sum(len(self.taking_part(case)) for case in self.cases)

    def __iter__(self) -> Iterator[tuple[Case, int, BufferContender]]:
        """Ordered by case, so that runs that are compared are close in time."""
        for case in self.cases:
            for number, contender in turns(self.taking_part(case), self.rounds):
                yield case, number, contender

    def arguments(self, case: Case) -> list[str]:
        return [
            *("--observations", case.observations),
            *("--sampler", case.sampler),
            *("--seconds", str(self.seconds)),
            *("--shrink", str(self.shrink)),
        ]


def main() -> int:
    options = parse_options()
    plan = Plan(
        cases=[Case(kind, sampler) for kind in options.observations for sampler in options.sampler],
        contenders=options.contenders,
        rounds=options.rounds,
        seconds=options.seconds,
        shrink=options.shrink,
        timeout_s=options.timeout,
    )
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 140)
    console.print(f"{plan.num_runs} runs of {len(plan.contenders)} contenders, {len(plan.cases)} cases")
    results: Results = {case: {contender.name: [] for contender in plan.taking_part(case)} for case in plan.cases}
    try:
        execute(plan, results, outcome)
    except KeyboardInterrupt:
        console.print("\ninterrupted; results so far:")
    show(results, console)
    write_document(options.out, document(plan, results))
    console.print(f"\nwritten: {options.out}")
    if options.markdown:
        write_markdown(options.markdown, markdown(results), README_MARKS)
        console.print(f"written: {options.markdown}")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = tuple(OBSERVATIONS)
    parser.add_argument("--observations", nargs="+", choices=kinds, default=list(kinds))
    parser.add_argument("--sampler", nargs="+", choices=SAMPLERS, default=list(SAMPLERS))
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contender in each case")
    parser.add_argument("--seconds", type=float, default=1.0, help="measured time of each number")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which a run is killed")
    add_contender_options(parser)
    parser.add_argument("--quick", action="store_true", help="one short round with a tenth of the capacities")
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results" / "buffer.json")
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="FILE",
        help="write the tables to this file: between their marks if it has them, otherwise as the whole file",
    )
    parser.set_defaults(shrink=1)
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(**QUICK)
    return parse_contenders(parser, BUFFERS)


def outcome(case: Case, done: Run) -> str:
    if done.report is None:
        return f"{done.status}: {done.reason}"
    found = [f"{action} {speed_of(done, action):,.0f}" for action in case.actions[2:4]]
    return f"{', '.join(found)} rows/s, others took {done.others_cores:.2f} cores"


def speed_of(done: Run, action: str) -> float | None:
    """Rows per second of the median call, which other processes disturb less than the mean."""
    if done.report is None:
        return None
    return int(action.split()[1]) / float(done.report["speeds"][action]["median_us"]) * 1e6


def against_numpy(done: Run, keys: tuple[str, ...], number: str) -> float | None:
    for found in done.report["against_numpy"] if done.report else ():
        if tuple(found["keys"]) == keys:
            return float(found[number])
    return None


def rates_in(runs: dict[str, list[Run]], action: str) -> dict[str, Rates]:
    """Median and best rows per second of every contender that reports them."""
    return {name: found for name, done in runs.items() if (found := rates_of(done, lambda run: speed_of(run, action)))}


def rate_table(case: Case, runs: dict[str, list[Run]]) -> Table:
    """The table of one case: thousand rows per second and, in parentheses, the fraction of the limit."""
    rates = {action: rates_in(runs, action) for action in case.actions}
    shown = Table(
        "contender",
        title=f"{case}: thousand rows per second in the median call (in brackets: as a fraction of the fastest "
        "plain arrays)",
    )
    for action in case.actions:
        shown.add_column(action, justify="right")
    for name, done in runs.items():
        if any(run.report for run in done):
            shown.add_row(name, *(cell(name, rates[action]) for action in case.actions))
    return shown


def cell(name: str, rates: dict[str, Rates]) -> str:
    if name not in rates:
        return "-"
    limits = [rates[limit].median for limit in BUFFER_LIMITS if limit in rates]
    part = f" ({rates[name].median / max(limits):.2f})" if limits else ""
    thousands = rates[name].median / 1000
    return f"{thousands:,.0f}{part}" if thousands >= 100 else f"{thousands:,.1f}{part}"


def acceptance_table(runs: dict[str, list[Run]], keys: tuple[str, ...]) -> Table | None:
    """Time of a prioritized batch of these keys compared with plain indexing, alternately in one process."""
    numbers = ("sample_us", "fancy_us", "take_us", "times_fancy", "times_take")
    batch = f"a prioritized batch of 1,024 rows of {', '.join(keys)}"
    shown = Table("contender", title=f"median time of {batch}, compared with plain arrays")
    for heading in ("batch, µs", "fancy indexing, µs", "take, µs", "times fancy indexing", "times take"):
        shown.add_column(heading, justify="right")
    for name, done in runs.items():
        values_of = {number: [against_numpy(run, keys, number) for run in done] for number in numbers}
        found = [[value for value in values if value is not None] for values in values_of.values()]
        if name not in BUFFER_LIMITS and all(found):
            middle = [median(values) for values in found]
            shown.add_row(name, *(f"{value:,.0f}" for value in middle[:3]), *(f"{value:.2f}" for value in middle[3:]))
    return shown if shown.row_count else None


def tables_of(results: Results) -> Iterator[Table]:
    for case, runs in results.items():
        if any(run.report for done in runs.values() for run in done):
            yield rate_table(case, runs)
            for keys in (KEYS, ("obs",)):
                if found := acceptance_table(runs, keys):
                    yield found


def remarks(results: Results) -> list[str]:
    """Missing contenders, how each stores next_obs, package versions, and load of the machine."""
    everyone = [(name, run) for runs in results.values() for name, done in runs.items() for run in done]
    reports = {name: run.report for name, run in everyone if run.report}
    keeping: dict[str, list[str]] = {}
    for name, report in reports.items():
        keeping.setdefault(report["next_obs"], []).append(name)
    kept = [f"{how} by {', '.join(names)}" for how, names in keeping.items()]
    versions = {package: found for report in reports.values() for package, found in report["versions"].items()}
    missing = {name: why_missing([run]) for name, run in everyone if run.report is None}
    others = [run.others_cores for _, run in everyone if run.report]
    return [
        *(f"Not measured: {name} ({reason})." for name, reason in missing.items()),
        f"next_obs is {'; '.join(kept)}.",
        f"Versions: {', '.join(f'{package} {found}' for package, found in versions.items())}.",
        load(others),
    ]


def show(results: Results, console: Console) -> None:
    for table in tables_of(results):
        console.print()
        console.print(table, soft_wrap=False)
    for remark in remarks(results):
        console.print(remark, markup=False, highlight=False)


def markdown(results: Results) -> str:
    """The same tables in Markdown."""
    console = Console(width=400, color_system=None)
    parts = []
    for table in tables_of(results):
        title, table.title, table.box = str(table.title), None, box.MARKDOWN
        with console.capture() as capture:
            console.print(table)
        lines = (line.strip() for line in capture.get().splitlines())
        parts += [f"{title[0].upper()}{title[1:]}:", "\n".join(line for line in lines if line)]
    return "\n\n".join([*parts, *remarks(results)])


def document(plan: Plan, results: Results) -> dict[str, object]:
    """The results document: machine, command and every run."""
    return {
        **header("buffer.py"),
        "rounds": plan.rounds,
        "seconds": plan.seconds,
        "shrink": plan.shrink,
        "runs": [
            {**asdict(case), "round": number, **asdict(done)}
            for case, runs in results.items()
            for done_runs in runs.values()
            for number, done in enumerate(done_runs, start=1)
        ],
    }


if __name__ == "__main__":
    run_script(main)
