"""The results of elastic.py as tables and plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from curve_plots import panels, save
from document import machines
from tables import table

Document = dict[str, Any]
Run = dict[str, Any]
PARTS, PREWARM, GPU = ("held", "backends", "batch", "shared"), "prewarm", "gpu"
"""All parts of a run without `--parts`, and two others."""
ALONE = ("batch", PREWARM, GPU)
"""Parts that have results files of their own, because they were measured on other machines."""
PREWARMED = ", prewarmed"
SLOTS_IMAGE, BATCH_IMAGE = "elastic-slots.png", "elastic-batch.png"
RELEASED, HELD, RAY = "farstep, released", "farstep, held", "Ray actors, held"
IN_TURN = "released and held in turn"
LONGER = ", longer updates"
SAC_RELEASED, SAC_HELD, SAC_RAY = "SAC, farstep, released", "SAC, farstep, held", "SAC, Ray actors, held"
SOON_S = 0.05


def page(document: Document, part: str) -> str:
    """The section of a page about one part: table and plot."""
    found = runs_of(document, part)
    if not found:
        return f"Not measured yet. To measure it, run `python benchmarks/elastic.py --parts {part}`."
    return _PAGES[part](document, found)


def claims(document: Document, batch: Document | None = None) -> str:
    """The section of benchmarks/README.md: what was measured beside what the ARTOS paper reports.

    Args:
        document: The results of all parts.
        batch: Results that replace those of the part batch in `document`; None: there are none.
    """
    where, runs = f"On {machines(document)} (`results/elastic.json`)", document["runs"]
    if batch is not None:
        runs = [*(run for run in runs if run["part"] != "batch"), *batch["runs"]]
        where += f"; adaptive batches on {machines(batch)} (`results/elastic-batch.json`)"
    document = {**document, "runs": runs}
    rows = [[name, paper, found] for name, paper, measure in _CLAIMS if (found := measure(document))]
    where += ". Medians of the rounds; the row about adaptive batches has means of the seeds:"
    return f"{where}\n\n{table(['', 'ARTOS (paper)', 'farstep'], rows)}"


def runs_of(document: Document, part: str) -> dict[str, list[Run]]:
    """The runs of a part, by the name of the case."""
    found: dict[str, list[Run]] = {}
    for run in document["runs"]:
        if run["part"] == part:
            found.setdefault(run["name"], []).append(run)
    return found


def load(runs: Sequence[Run]) -> str:
    """A sentence about the load of the machine by other processes."""
    others = [run["others_cpu_s"] / run["wall_s"] for run in runs]
    return f"Other processes used {median(others):.2f} cores (median of the runs; at most {max(others):.2f})."


def _load(found: dict[str, list[Run]]) -> str:
    return load([run for runs in found.values() for run in runs])


def _median(runs: Sequence[Run], value: Callable[[Run], float]) -> float:
    return float(median(value(run) for run in runs))


# ---- held ----


def _slot_s(run: Run) -> float:
    return float(run["slot_seconds"] / run["updates"])


def _mean_update_s(run: Run) -> float:
    return mean(run["update_s"])


def _held_page(document: Document, found: dict[str, list[Run]]) -> str:
    return "\n\n".join([*_ppo(document, found), *_in_turn(found), *_sac(found), _load(found)])


def _ppo(document: Document, found: dict[str, list[Run]]) -> list[str]:
    ppo = {name: runs for name, runs in found.items() if "update_s" in runs[0]}
    if not ppo:
        return []
    any_run = next(iter(ppo.values()))[0]
    base_name, against = (RAY, "Ray") if RAY in ppo else (HELD, "held")
    base, rows = ppo.get(base_name), []
    for name, runs in ppo.items():
        slot_s = _median(runs, _slot_s)
        share = f"{slot_s / _median(base, _slot_s):.2f}" if base else "-"
        times = [f"{1e3 * _median(runs, value):.0f}" for value in (_mean_update_s, _p95)]
        parts = [f"{1e3 * _median(runs, lambda run, key=key: run[key]):.0f}" for key in ("collect_s", "learn_s")]
        cpu = f"{_median(runs, lambda run: run['cpu_seconds'] / run['updates']):.2f}"
        rows.append([name, f"{slot_s:.2f}", share, *times, *parts, cpu])
    header = ["", "slot-seconds per update", f"/ {against}", "update", "update, 95 %", "collecting", "learning"]
    parts = [
        f"**PPO** with {_workers(any_run)}, {any_run['rows_per_update']:,} rows per update, and environments that "
        f"compute for {any_run['workload']['step_ms']:.2f} ms per step. The machine has {machines(document)}. The "
        f"table has medians of {len(next(iter(ppo.values())))} rounds of {any_run['updates']} updates:",
        "\n".join((f"- */ {against}*: slot-seconds relative to the row *{base_name}*", *_PPO_COLUMNS)),
        table([*header, "CPU-seconds per update"], rows),
        _RAY_IS_COMPUTED if RAY in ppo else "Ray actors were not measured.",
        "The plot shows how many worker slots are held during six updates:",
    ]
    return [*parts, f"![slots over time, held and released](images/{SLOTS_IMAGE})"]


_PPO_COLUMNS = (
    "- *update*: mean time of an update with its rollout, in ms; *update, 95 %*: the 95th percentile",
    "- *collecting*, *learning*: the two parts of an update, in ms",
    "- *CPU-seconds*: of all processes, learner and daemons included",
)
_RAY_IS_COMPUTED = (
    "The slot-seconds of Ray actors are computed, not recorded. Ray reserves the CPU of an actor until the actor ends, "
    "so the slot-seconds are the number of actors times the seconds of the run."
)


def _p95(run: Run) -> float:
    return float(np.percentile(run["update_s"], 95))


def _in_turn(found: dict[str, list[Run]]) -> list[str]:
    runs = found.get(IN_TURN)
    if not runs:
        return []
    ratios = ", ".join(f"{_released_over_held(run):.3f}" for run in runs)
    return [
        "**PPO in one process.** One process has both kinds of workers, and its updates use released and held workers "
        f"in turn. With released workers, the median update takes {_median(runs, _released_over_held):.2f} times as "
        f"long as with held workers ({ratios} in {len(runs)} such processes)."
    ]


def _released_over_held(run: Run) -> float:
    return float(median(run["released_s"]) / median(run["held_s"]))


def _sac(found: dict[str, list[Run]]) -> list[str]:
    sac = {name: found[name] for name in (SAC_RELEASED, SAC_HELD, SAC_RAY) if name in found}
    if not sac:
        return []
    base = sac.get(SAC_RAY) or sac.get(SAC_HELD)
    rows = []
    for name, runs in sac.items():
        slot_s = _median(runs, _slot_s)
        share = f"{slot_s / _median(base, _slot_s):.2f}" if base else "-"
        idle = _median(runs, lambda run: 1 - run["used_seconds"] / run["slot_seconds"])
        times = [
            1e3 * _median(runs, _seconds_per_update),
            1e3 * _median(runs, lambda run: run["cpu_seconds"] / run["updates"]),
        ]
        rows.append([name, f"{1e3 * slot_s:.1f}", share, f"{idle:.0%}", *(f"{value:.1f}" for value in times)])
    any_run = next(iter(sac.values()))[0]
    against = "Ray" if SAC_RAY in sac else "held"
    header = ["", "slot-milliseconds per update", f"/ {against}", "idle", "update, ms", "CPU-milliseconds per update"]
    return [
        f"**SAC** with {_workers(any_run)}, {any_run['total_steps']:,} steps, and "
        f"{any_run['updates_per_step']:g} updates per step. SAC learns while workers collect. Workers that are too far "
        "ahead of the learner wait; with `release_idle`, they are released. Ray's actors are allowed to be as many "
        "steps ahead of the learner as farstep's workers. *Idle* is the share of the slot-seconds in which workers "
        f"waited. The table has medians of {len(next(iter(sac.values())))} rounds:",
        table(header, rows),
    ]


def _seconds_per_update(run: Run) -> float:
    return float(run["seconds"] / run["updates"])


# ---- backends ----


def _backends_page(document: Document, found: dict[str, list[Run]]) -> str:
    rows = []
    for name, runs in found.items():
        waits = [wait for run in runs for wait in run["waits_s"]]
        soon = f"{np.mean([wait < SOON_S for wait in waits]):.0%}"
        numbers = [f"{1e3 * value:.0f}" for value in (median(waits), max(waits))]
        rows.append([name, *numbers, soon, str(len(waits))])
    workers = next(iter(found.values()))[0]["workers"]
    return "\n\n".join(
        [
            f"The run has {workers} workers on {machines(document)}. The first rows are about new workers:",
            "\n".join(_STARTS),
            "In the other rows, the learner sleeps for 0.05 s or 0.5 s in place of an update, and then requests a "
            "rollout. The times are from this request until the first step of the slowest worker. Workers send rows "
            "over shared memory (*shm*) or TCP (*tcp*). The name of a row says what happens during the sleep:",
            "\n".join(_BACKENDS[name] for name in _BACKENDS if any(case.startswith(name) for case in found)),
            table(["", "median, ms", "longest", f"below {1e3 * SOON_S:.0f} ms", "samples"], rows),
            _load(found),
        ]
    )


_STARTS = (
    "- *first batch*: the time from the start of a run until its first batch",
    "- *restart*: the time until the first step of a worker that replaces a killed one",
)
_BACKENDS = {
    "held": "- *held*: all workers keep running",
    "released": "- *released*: all workers are suspended",
    "prewarmed": "- *prewarmed*: all workers are suspended, but continue before the predicted end of the sleep",
    "parked": "- *parked*: all workers but one are parked, and unparked with the request",
    "parked, criu": "- *parked, criu*: the same, but the workers are parked on disk",
}
"""What happens to workers in the rows with these names."""


# ---- prewarm ----


def _prewarm_page(document: Document, found: dict[str, list[Run]]) -> str:
    rows = []
    for name, runs in found.items():
        waits = [wait for run in runs for wait in run["waits_s"]]
        without = found.get(name.removesuffix(PREWARMED)) if name.endswith(PREWARMED) else None
        gained = f"{1 - _update_and_wait_s(runs) / _update_and_wait_s(without):.0%}" if without else ""
        numbers = [f"{1e3 * value:.0f}" for value in (median(waits), max(waits))]
        rows.append([name, f"{runs[0]['update_s']:g}", *numbers, gained, str(len(waits))])
    workers = next(iter(found.values()))[0]["workers"]
    return "\n\n".join(
        [
            f"The run has {workers} workers on {machines(document)} (`results/elastic-prewarm.json`). Times are from "
            "the end of an update until the first step of the slowest worker. The name of a row says what happens to "
            "workers:",
            "\n".join(_PREWARM),
            "*Gained* is the time that prewarming saves, divided by the duration of the update and of the wait after "
            "it:",
            table(["", "update, s", "median, ms", "longest", "gained", "samples"], rows),
            _load(found),
        ]
    )


_PREWARM = (
    "- *cold*, *zygote*: during the update, all workers but one are killed; then new ones start, with this "
    "`start_method`",
    "- *criu*: during the update, all workers but one are written to disk; then they are restored",
    "- *reconnect*: during the update, all workers are released; then they continue, and may have to reconnect",
    "- *prewarmed*: workers are requested before the predicted end of the update; in the other rows, at its end",
)
"""What happens in the rows with these names."""


def _update_and_wait_s(runs: Sequence[Run]) -> float:
    return float(runs[0]["update_s"] + median(wait for run in runs for wait in run["waits_s"]))


# ---- batch ----


def _batch_page(document: Document, found: dict[str, list[Run]]) -> str:
    parts, names = [], ["workers", "reached", "seconds", "slot-seconds", "updates", "steps"]
    for task in dict.fromkeys(run["task"] for runs in found.values() for run in runs):
        mine = {name: [run for run in runs if run["task"] == task] for name, runs in found.items()}
        mine = {name: runs for name, runs in mine.items() if runs}
        first, end_s = next(iter(mine.values()))[0], _common_s(mine)
        parts += [
            f"PPO learns {task}, with one environment per worker. Each step sleeps for "
            f"{first['workload']['step_ms']:g} ms, so that all workers can step at the same time. A run ends when the "
            f"mean return of 100 episodes reaches {first['target']:g}, or after {first['seconds_limit']:g} s. "
            "`schedule` starts with the smallest of the fixed numbers of workers, and adds workers until it has the "
            "largest. `noise` chooses from 1 to the largest. The table has means over the seeds, with the lowest and "
            "the highest value in brackets:",
            "\n".join(
                (
                    f"- *reached*: the number of runs that reached a return of {first['target']:g}",
                    "- *seconds*, *slot-seconds*, *updates*, *steps*: from the start to the end of a run",
                    f"- *return, 0 - {end_s} s*: the return, averaged over the first {end_s} s of a run",
                    "- *last return*, *last workers*: the return and the number of workers in the last update",
                )
            ),
            table(
                [*names, f"return, 0 - {end_s} s", "last return", "last workers"],
                [_batch_row(name, runs, end_s) for name, runs in mine.items()],
            ),
        ]
    parts += [f"On {machines(document)}. {_load(found)}", f"![return and workers over time](images/{BATCH_IMAGE})"]
    return "\n\n".join(parts)


def _batch_row(name: str, runs: list[Run], end_s: float) -> list[str]:
    keys = (("seconds", "{:.1f}"), ("slot_seconds", "{:.0f}"), ("updates", "{:.0f}"), ("steps", "{:,.0f}"))
    found = [_spread([run[key] for run in runs], form) for key, form in keys]
    found += [_spread([_mean_return(run, end_s) for run in runs], "{:.0f}")]
    found += [_spread([run[key] for run in runs], "{:.0f}") for key in ("return", "workers")]
    return [name, _reached(runs), *found]


def _common_s(found: dict[str, list[Run]]) -> int:
    """Whole seconds that every run lasted."""
    return int(min(run["seconds"] for runs in found.values() for run in runs))


def _mean_return(run: Run, end_s: float) -> float:
    """The mean over time of the return, from the start of the run."""
    seconds, *_, returns = zip(*run["curve"], strict=True)
    return float(np.interp(np.linspace(0.0, end_s, 1000), seconds, returns).mean())


def _spread(values: Sequence[float], form: str) -> str:
    return f"{form.format(mean(values))} ({form.format(min(values))} - {form.format(max(values))})"


# ---- shared ----


def _shared_page(document: Document, found: dict[str, list[Run]]) -> str:
    first = next(iter(found.values()))[0]
    rows = []
    for name, runs in found.items():
        updates = [_workload_s(run) for run in runs]
        rows.append(
            [
                name,
                f"{1e3 * median(updates):.0f} ({1e3 * min(updates):.0f} - {1e3 * max(updates):.0f})",
                _over_alone(found, runs, _workload_s),
                f"{median(_rows(run) for run in runs):,.0f}",
                _over_alone(found, runs, lambda run: _workload_s(run) / _rows(run)),
            ]
        )
    return "\n\n".join(
        [
            f"Each workload is a run of PPO with {_workers(first)} and `release_idle`. The workloads use "
            f"{first['cores']} cores of a machine with {machines(document)}. Collecting takes about as long as "
            "learning, which uses one thread. The name of a row says how many slots the coordinator has:",
            "\n".join(_SHARED),
            "The table has medians of the rounds, with the lowest and the highest value in brackets. In each round, "
            "the second workload starts with another delay after the first one, up to the duration of an update. */ "
            "alone* is relative to one workload alone. *Longer updates* have more rows:",
            table(["", "update, ms", "/ alone", "rows per update", "time per row / alone"], rows),
            _load(found),
        ]
    )


_SHARED = (
    "- *slots for both*: a slot for each worker of both workloads, so that the workloads need not take turns",
    "- *slots for one*: only as many slots as one workload has workers, so that the workloads take turns",
)


def _workers(run: Run) -> str:
    number = run["workload"]["workers"]
    return f"{number} worker{'s' * (number > 1)}"


def _workload_s(run: Run) -> float:
    """The mean time of an update, over both workloads."""
    return mean(mean(workload["update_s"]) for workload in run["workloads"])


def _rows(run: Run) -> float:
    return mean(mean(workload["rows"]) for workload in run["workloads"])


def _over_alone(found: dict[str, list[Run]], runs: list[Run], value: Callable[[Run], float]) -> str:
    alone = found.get("alone" + LONGER * (runs[0]["name"].endswith(LONGER)))
    return f"{_median(runs, value) / _median(alone, value):.2f}" if alone else "-"


# ---- gpu ----


def _gpu_page(document: Document, found: dict[str, list[Run]]) -> str:
    rows = []
    for name, runs in found.items():
        base = found.get(name.replace(RELEASED, HELD), runs)
        rows.append(
            [
                name.split(", ")[1],
                f"{runs[0]['parameters'] / 1e6:.2f} M",
                f"{_median(runs, lambda run: run['gpu_seconds'] / run['seconds']):.2f}",
                f"{_median(runs, _gpu_s) / _median(base, _gpu_s):.2f}",
                f"{1e3 * _median(runs, _seconds_per_update):.0f}",
                f"{1e3 * _median(runs, lambda run: run['move_s'] / run['updates']):.1f}",
                f"{_median(runs, lambda run: run['memory_mib']):,.0f}",
            ]
        )
    any_run = next(iter(found.values()))[0]
    names = ["GPU", "parameters", "share of time", "GPU-seconds", "update, ms", "moves, ms", "MiB between"]
    return "\n\n".join(
        [
            f"PPO with {_workers(any_run)} on {machines(document)} and {any_run['device']} "
            "(`results/elastic-gpu.json`). *Share of time* is the share of the run's time in which the run holds "
            "the GPU. *GPU-seconds* are those per update, relative to the row *held* with the same number of "
            "parameters. *Update* is the time from one update to the next, with its rollout. *Moves* is the time per "
            "update to move parameters and optimizer state to the GPU and back. "
            "*MiB between* is the GPU memory of PyTorch between updates, without CUDA's context. Medians of "
            f"{len(next(iter(found.values())))} rounds:",
            table(names, rows),
            _load(found),
        ]
    )


def _gpu_s(run: Run) -> float:
    return float(run["gpu_seconds"] / run["updates"])


# ---- claims ----


def _ratio(part: str, name: str, other: str, value: Callable[[Run], float]) -> Callable[[Document], str]:
    def measured(document: Document) -> str:
        found = runs_of(document, part)
        return (
            f"{_median(found[name], value) / _median(found[other], value):.2f}" if {name, other} <= set(found) else ""
        )

    return measured


def _released_latency(document: Document) -> str:
    runs = runs_of(document, "held").get(IN_TURN)
    return f"{_median(runs, _released_over_held):.2f}" if runs else ""


def _soon(document: Document) -> str:
    found = runs_of(document, "backends")
    waits = [
        wait
        for name, runs in found.items()
        if name.startswith("released, shm")
        for run in runs
        for wait in run["waits_s"]
    ]
    return f"{np.mean([wait < SOON_S for wait in waits]):.0%}" if waits else ""


def _reached(runs: Sequence[Run]) -> str:
    return f"{sum(run['reached'] for run in runs)} of {len(runs)}"


def _adaptive(quantity: str, document: Document) -> str:
    """The sum of a quantity over a run by a rule, as a share of that with the most workers."""
    found = runs_of(document, "batch")
    fixed = [name for name in found if name[0].isdigit()]
    if not fixed or "noise" not in found or "schedule" not in found:
        return ""
    most = max(fixed, key=lambda name: int(name.split()[0]))
    of = mean(run[quantity] for run in found[most])
    ratios = {rule: mean(run[quantity] for run in found[rule]) / of for rule in ("schedule", "noise")}
    found_ratios = [f"{ratio:.2f} ({rule}, {_reached(found[rule])})" for rule, ratio in ratios.items()]
    return f"{' and '.join(found_ratios)}; {most}: {_reached(found[most])}"


_CLAIMS: tuple[tuple[str, str, Callable[[Document], str]], ...] = (
    ("PPO: slot-seconds released / Ray actors held", "0.55", _ratio("held", RELEASED, RAY, _slot_s)),
    ("PPO: slot-seconds released / farstep held", "-", _ratio("held", RELEASED, HELD, _slot_s)),
    ("PPO: time of an update, released / farstep held", "-", _released_latency),
    ("SAC: slot-seconds released / Ray actors held", "0.54", _ratio("held", SAC_RELEASED, SAC_RAY, _slot_s)),
    ("SAC: slot-seconds released / farstep held", "-", _ratio("held", SAC_RELEASED, SAC_HELD, _slot_s)),
    (
        "SAC: time of an update, released / farstep held",
        "-",
        _ratio("held", SAC_RELEASED, SAC_HELD, _seconds_per_update),
    ),
    ("released local workers, updates of 0.05 and 0.5 s: rollouts that wait less than 50 ms", "92.75 %", _soon),
    (
        "adaptive batch: slot-seconds / most workers (runs that reached the target)",
        "0.45 to 0.53",
        partial(_adaptive, "slot_seconds"),
    ),
    ("adaptive batch: seconds / most workers, likewise", "0.85 to 0.96", partial(_adaptive, "seconds")),
    (
        "two workloads on the same cores: time of an update / alone",
        "1.03",
        _ratio("shared", "two, slots for one", "alone", _workload_s),
    ),
    (
        "the same, updates four times as long",
        "1.03",
        _ratio("shared", f"two, slots for one{LONGER}", f"alone{LONGER}", _workload_s),
    ),
)


# ---- plots ----


def draw(document: Document, folder: Path) -> list[Path]:
    """Draw slots over time, and returns and workers over time, as far as they were measured."""
    written = []
    held = {name: runs for name, runs in runs_of(document, "held").items() if "update_s" in runs[0]}
    if held:
        written.append(_draw_slots(held, folder / SLOTS_IMAGE))
    if batch := runs_of(document, "batch"):
        written.append(_draw_batch(batch, folder / BATCH_IMAGE))
    return written


def _draw_slots(found: dict[str, list[Run]], path: Path) -> Path:
    """Draw a panel per contender; Ray actors have no trace, because they hold their slots all the time."""
    figure, axes = panels(len(found), "PPO: slots that are held during six updates", "seconds")
    traces = {name: runs[0].get("trace") for name, runs in found.items()}
    end = max(trace[-1][0] for trace in traces.values() if trace)
    for index, (axis, (name, runs)) in enumerate(zip(axes, found.items(), strict=True)):
        workers = runs[0]["workload"]["workers"]
        times, slots = zip(*(traces[name] or [[0.0, workers], [end, workers]]), strict=True)
        axis.fill_between([0.0, *times], [slots[0], *slots], step="post", color=f"C{index}", alpha=0.6)
        axis.set(
            title=name if traces[name] else f"{name} (not recorded)",
            ylabel="slots",
            xlim=(0, end),
            ylim=(0, 1.1 * workers),
        )
    return save(figure, path)


def _draw_batch(found: dict[str, list[Run]], path: Path) -> Path:
    task = next(iter(found.values()))[0]["task"]
    figure, axes = panels(3, f"PPO on {task} by number of workers; one line per seed", "seconds")
    axes[1].set_xlabel("slot-seconds")
    for index, (name, runs) in enumerate(found.items()):
        for run in runs:
            seconds, _, _, slot_seconds, workers, returns = zip(*run["curve"], strict=True)
            for axis, x, y in zip(axes, (seconds, slot_seconds, seconds), (returns, returns, workers), strict=True):
                axis.plot(x, y, color=f"C{index}", label=name, alpha=0.7, linewidth=1)
    for axis, label in zip(axes, ("return", "return", "workers"), strict=True):
        axis.set_ylabel(f"{label}, mean of the last 100 episodes" if label == "return" else label)
    return save(figure, path)


_PAGES = {
    "held": _held_page,
    "backends": _backends_page,
    PREWARM: _prewarm_page,
    "batch": _batch_page,
    "shared": _shared_page,
    GPU: _gpu_page,
}
