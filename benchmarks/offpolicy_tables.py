"""The results of offpolicy.py and equal_updates.py as tables and plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import learning_tables
from learning_tables import Layout, Row, calm_runs, family
from tables import table

REPLAY = Layout(
    labels={
        "cleanrl": "CleanRL",
        "sb3": "Stable-Baselines3",
        "rllib": "RLlib",
        "farstep-sac-alternating": "farstep `sac --no-concurrent`",
        "farstep-sac": "farstep `sac`",
        "farstep-dqn": "farstep `dqn`",
        "farstep-apex": "farstep `apex`",
    },
    peers=("cleanrl", "sb3", "rllib"),
    baseline="cleanrl",
    image="offpolicy",
)
VARIANTS = CONCURRENT, ALTERNATING = "farstep-sac", "farstep-sac-alternating"
PAPER_SECONDS, PAPER_UPDATE = "ARTOS's paper reports 42 to 49 % less time than Ray", "38 % less in ARTOS's paper"


def summary(document: dict[str, Any], file: str = "offpolicy.json") -> str:
    """Concurrent and alternating SAC, time per update, tables of all contenders, and comparisons with each peer."""
    parts = []
    for task in document["tasks"]:
        calm = calm_runs([run for run in document["runs"] if run["env"] == task["env"]], REPLAY)
        if any(calm.values()):
            parts += [*_concurrency(task, calm), *_updates(task, calm), *_against_peers(task, calm)]
    return "\n\n".join([*parts, learning_tables.summary(document, REPLAY), f"`results/{file}` has every run."])


def equal_updates(document: dict[str, Any], file: str = "equal_updates.json") -> str:
    """Concurrent and alternating SAC with the same number of steps: a row per seed that both have."""
    variants = [[run for run in document["runs"] if run["report"] and run["contender"] == name] for name in VARIANTS]
    pairs = sorted(_same_seeds(*variants), key=lambda pair: pair[0]["seed"])
    if not pairs:
        return "No seed has both variants yet."
    rows, ratios = [], []
    for pair in pairs:
        updates = dict.fromkeys(f"{run['report']['updates']:,}" for run in pair)  # one number if both are equal
        seconds, per_update = ([key(run) for run in pair] for key in (_seconds, _learner_ms))
        ratios.append((seconds[0] / seconds[1], per_update[0] / per_update[1]))
        cells = [f"{value:.1f}" for value in seconds] + [f"{ratios[-1][0]:.2f}"]
        cells += [f"{value:.2f}" for value in per_update] + [f"{ratios[-1][1]:.2f}"]
        rows.append([str(pair[0]["seed"]), " and ".join(updates), *cells])
    time, update = (_less(median(found), 1.0) for found in zip(*ratios, strict=True))
    (task,) = document["tasks"]
    others = max(run["others_cpu_s"] / run["wall_s"] for pair in pairs for run in pair)
    header = ["seed", "updates", "s, concurrent", "s, alternating", "ratio"]
    header += ["learner, ms per update, concurrent", "alternating", "ratio"]
    return "\n\n".join(
        [
            f"{task['env'].rpartition(':')[2]}, {task['max_steps']:,} steps, {_seeds(len(pairs))}: SAC that learns "
            f"while workers roll takes {time} time than SAC that alternates (median; {PAPER_SECONDS}). The learner "
            f"needs {update} time per update ({PAPER_UPDATE}). "
            f"Other processes used at most {others:.2f} cores.",
            table(header, rows),
            f"`results/{file}` has every run.",
        ]
    )


def draw(document: dict[str, Any], folder: Path) -> list[Path]:
    """Draw the plot of each task: return over seconds and steps."""
    return learning_tables.draw(document, folder, REPLAY)


def _concurrency(task: Row, calm: dict[str, list[Row]]) -> list[str]:
    """How much time SAC saves by learning while workers roll, with the seeds that both variants have."""
    pairs = _same_seeds(calm.get(CONCURRENT, []), calm.get(ALTERNATING, []))
    if not pairs:
        return []
    first, second = zip(*pairs, strict=True)
    own, other = (median(map(_learner_ms, runs)) for runs in (first, second))
    return [
        f"{task['env']}, SAC that learns while workers roll, {_seeds(len(pairs))}: to the threshold, "
        f"{_comparison(task, first, second, 'SAC that alternates')} ({PAPER_SECONDS}). The learner needs {own:.2f} ms "
        f"instead of {other:.2f} ms per update, {_less(own, other)} time ({PAPER_UPDATE})."
    ]


def _updates(task: Row, calm: dict[str, list[Row]]) -> list[str]:
    """A table with the updates of each contender and the time of one."""
    rows = []
    for name, runs in calm.items():
        counted = [run for run in runs if run["report"].get("updates")]
        if counted:
            reports = [run["report"] for run in counted]
            timed = [_learner_ms(run) for run in counted if "learner_s" in run["report"]]
            rows.append(
                [
                    REPLAY.label(name),
                    f"{median(report['updates'] for report in reports):,.0f}",
                    f"{median(report['updates'] / report['steps'] for report in reports):.2f}",
                    f"{median(1000 * _seconds(run) / run['report']['updates'] for run in counted):.2f}",
                    f"{median(timed):.2f}" if timed else "-",
                ]
            )
    header = ["", "updates", "updates/step", "ms per update, overall", "ms in the learner"]
    text = f"{task['env']}, time per update; overall: seconds of training divided by updates; medians:"
    return [text, table(header, rows)] if rows else []


def _against_peers(task: Row, calm: dict[str, list[Row]]) -> list[str]:
    """Each of farstep's learners compared with each peer."""
    said = []
    for name in (name for name in calm if name.startswith("farstep") and name != ALTERNATING and calm[name]):
        against = [
            _comparison(task, calm[name], calm[peer], REPLAY.labels[family(peer)])
            for peer in calm
            if family(peer) in REPLAY.peers and calm[peer]
        ]
        if against:
            said.append(f"{REPLAY.label(name)}: {'; '.join(dict.fromkeys(against))}.")
    return [f"{task['env']}, median time of training. {' '.join(said)}"] if said else []


def _comparison(task: Row, first: Sequence[Row], second: Sequence[Row], name: str) -> str:
    """Seconds of the first compared with those of the second, whose incomplete runs are lower bounds."""
    own, other = (median(map(_seconds, runs)) for runs in (first, second))
    bound = f"at least {_less(own, other)} time than" if own < other else "no comparison with"
    if task["threshold"] is not None and not _all_reached(first):
        return "not every seed reaches the threshold, so times are not compared"
    if any(run["report"].get("stopped") for run in second):
        return f"{bound} {name}, whose runs were stopped before the end"
    if task["threshold"] is not None and not _all_reached(second):
        return f"{bound} {name}, which does not reach the threshold with every seed"
    return f"{_less(own, other)} time than {name}"


def _less(own: float, other: float) -> str:
    share = own / other
    return f"{100 * (1 - share):.0f} % less" if share <= 1 else f"{100 * (share - 1):.0f} % more"


def _all_reached(runs: Sequence[Row]) -> bool:
    return all(run["report"]["reached"] for run in runs)


def _same_seeds(first: Sequence[Row], second: Sequence[Row]) -> list[tuple[Row, Row]]:
    others = {run["seed"]: run for run in second}
    return [(run, others[run["seed"]]) for run in first if run["seed"] in others]


def _seeds(number: int) -> str:
    return "one seed" if number == 1 else f"{number} seeds"


def _seconds(run: Row) -> float:
    """Seconds of training."""
    return float(run["report"]["seconds"])


def _learner_ms(run: Row) -> float:
    """Milliseconds per update of the learner's own work: sampling a batch and the optimizer step."""
    return 1000 * float(run["report"]["learner_s"]) / max(run["report"]["updates"], 1)
