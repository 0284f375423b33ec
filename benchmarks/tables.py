"""The measurements as tables: Markdown that is also readable in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from roster import CONTENDERS, FARSTEP, LIMITS
from runner import DISTURBED_CORES, Run


@dataclass(frozen=True)
class Case:
    """The workload of a case."""

    env: str
    num_envs: int
    sampler: str

    @classmethod
    def of(cls, run: Mapping[str, Any]) -> Case:
        """The case of a stored run."""
        return cls(run["env"], run["num_envs"], run["sampler"])

    def __str__(self) -> str:
        return f"{self.env.removeprefix('ALE/')} N={self.num_envs} {self.sampler}"


@dataclass(frozen=True)
class Rates:
    """Steps per second of one contender over the rounds."""

    median: float
    best: float

    def over(self, other: Rates) -> Rates:
        return Rates(self.median / other.median, self.best / other.best)


Results = dict[Case, dict[str, list[Run]]]
"""The runs of every case, by contender."""


def rates_of(
    runs: Sequence[Run], rate: Callable[[Run], float | None] = lambda run: run.steps_per_second
) -> Rates | None:
    """Rates of the runs that other processes did not disturb; of all runs if every one was disturbed."""
    calm = [run for run in runs if not run.disturbed]
    for chosen in (calm, runs):
        found = [number for run in chosen if (number := rate(run)) is not None]
        if found:
            return Rates(median(found), max(found))
    return None


def ratio_to_limit(name: str, rates: dict[str, Rates]) -> Rates | None:
    """Rate of ``name`` divided by that of the limit with the same kind of inference."""
    inference = next(contender.inference for contender in CONTENDERS if contender.name == name)
    limit = rates.get(LIMITS[inference])
    return rates[name].over(limit) if limit and name in rates else None


def ratio_of_farstep(name: str, rates: dict[str, Rates]) -> Rates | None:
    """Rate of the faster of farstep's two ways of collecting divided by that of ``name``."""
    own = [rates[candidate] for candidate in FARSTEP if candidate in rates]
    return max(own, key=lambda found: found.median).over(rates[name]) if own and name in rates else None


def case_table(case: Case, runs: dict[str, list[Run]]) -> str:
    """The table of one case, with a row per contender."""
    rates = {name: found for name, done in runs.items() if (found := rates_of(done))}
    rows = [
        [
            name,
            f"{found.median:,.0f}",
            f"{found.best:,.0f}",
            pair(ratio_to_limit(name, rates)),
            pair(ratio_of_farstep(name, rates)),
            f"{median(run.others_cores for run in runs[name] if run.report):.2f}",
            f"{sum(not run.disturbed for run in runs[name] if run.report)}/{len(runs[name])}",
        ]
        for name, found in rates.items()
    ]
    header = ["contender", "median", "best", "to the limit", "farstep to it", "others' cores", "calm runs"]
    absent = [f"- {name}: {why_missing(done)}" for name, done in runs.items() if name not in rates]
    title = f"{case}, steps per second; ratios of medians (of best):"
    return "\n\n".join(filter(None, (title, table(header, rows), "\n".join(absent))))


def summary(results: Results) -> str:
    """All cases side by side: a table of rates and a table of ratios to the limit."""
    cases = list(results)
    names = list(dict.fromkeys(name for runs in results.values() for name in runs))
    rates = {
        case: {name: found for name, done in runs.items() if (found := rates_of(done))}
        for case, runs in results.items()
    }
    speeds = [[name, *(cell(rates[case].get(name), results[case].get(name, [])) for case in cases)] for name in names]
    ratios = [
        [name, *(pair(ratio_to_limit(name, rates[case])) for case in cases)]
        for name in names
        if any(name in rates[case] for case in cases)
    ]
    header = ["contender", *map(str, cases)]
    others = [run.others_cores for runs in results.values() for done in runs.values() for run in done if run.report]
    return "\n\n".join(
        part
        for part in (
            "Steps per second, median (best):",
            table(header, speeds),
            "Steps per second divided by those of the limit with the same kind of inference; medians (in brackets: "
            "best runs):",
            table(header, ratios),
            load(others),
        )
        if part
    )


def stepping_summary(results: Results) -> str:
    """Stepping alone: steps per second divided by those of `SyncVectorEnv`."""
    rates = {
        case: {name: found for name, done in runs.items() if (found := rates_of(done))}
        for case, runs in results.items()
    }
    names = list(dict.fromkeys(name for found in rates.values() for name in found))
    rows = [
        [name, *(pair(found[name].over(found["steps-sync"])) if name in found else "-" for found in rates.values())]
        for name in names
    ]
    return table(["contender", *(f"{case.env} N={case.num_envs}" for case in rates)], rows)


def many_workers_summary(results: Results) -> str:
    """Every contender in every case, compared with the limit and with `AsyncVectorEnv`."""
    rows = []
    for case, runs in results.items():
        rates = {name: found for name, done in runs.items() if (found := rates_of(done))}
        for name, found in rates.items():
            baseline = rates.get("steps-async" if name.startswith("steps-") else "gymnasium-async")
            to_async = found.over(baseline) if baseline else None
            speed = f"{found.median:,.0f} ({found.best:,.0f})"
            label = f"{case.env} N={case.num_envs}"
            rows.append([label, name, speed, pair(ratio_to_limit(name, rates)), pair(to_async)])
    return table(["environments", "contender", "steps per second", "/ limit", "/ `AsyncVectorEnv`"], rows)


def load(others_cores: Sequence[float]) -> str:
    """A sentence about the load of the machine by other processes; empty without runs."""
    if not others_cores:
        return ""
    return (
        f"Other processes used {median(others_cores):.2f} cores (median; at most {max(others_cores):.2f}). Runs in "
        f"which they used more than {DISTURBED_CORES} cores are left out if the contender has other runs."
    )


def cell(rates: Rates | None, runs: list[Run]) -> str:
    if rates is None:
        return runs[-1].status if runs else "-"
    return f"{rates.median:,.0f} ({rates.best:,.0f})"


def pair(ratio: Rates | None) -> str:
    return f"{ratio.median:.2f} ({ratio.best:.2f})" if ratio else "-"


def why_missing(runs: list[Run]) -> str:
    if not runs:
        return "not run yet"
    return f"{runs[-1].status}: {runs[-1].reason}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, padded so that its columns line up as plain text; numbers to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = [text.rjust(width) for text, width in zip(row, widths, strict=True)]
        padded[0] = row[0].ljust(widths[0])
        return f"| {' | '.join(padded)} |"

    rule = [f":{'-' * (widths[0] - 1)}", *(f"{'-' * (width - 1)}:" for width in widths[1:])]
    return "\n".join([line(header), f"| {' | '.join(rule)} |", *map(line, rows)])
