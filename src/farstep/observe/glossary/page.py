"""Renders the glossary as docs/metrics.md."""

from __future__ import annotations

from collections.abc import Sequence

from farstep.observe.glossary.exposed import EXPOSED_GROUPS
from farstep.observe.glossary.metric import Metric, Namespace
from farstep.observe.glossary.stats import STATS_GROUPS
from farstep.observe.glossary.training import NAMESPACES

_INTRODUCTION = """\
<!-- Generated: edit src/farstep/observe/glossary/, then run `python -m farstep.observe.glossary > docs/metrics.md`. -->
# Metrics

This page lists every number that farstep logs or counts, with its unit and meaning. The names are the same in
`metrics.jsonl`, TensorBoard, Weights & Biases and the terminal. A *counter* never decreases while the process runs; a
*gauge* may rise and fall; an *info* is text. The *head* is the process of your program. The
[glossary](glossary.md) explains words such as chunk, ticket, version and probe.

- [Metrics of `farstep train`](#metrics-of-farstep-train)
- [Counters of `env.stats()`](#counters-of-envstats), for any program
- [Only for Prometheus](#only-for-prometheus)
- [Names of your own](#names-of-your-own)
"""
_TRAINING = """
## Metrics of `farstep train`

PPO, asynchronous PPO and IMPALA log one line per update. DQN, Ape-X, SAC and A-RIDE log one line per `--report-every`
steps. [Training](training.md#metrics-of-a-run) says where to look first if a run is slow or does not learn. The column
*healthy* gives rules of thumb, not measurements. If a number is not healthy, look for a remedy on the learner's page:
[PPO](ppo.md), [asynchronous PPO](async_ppo.md), [IMPALA](impala.md), [DQN and Ape-X](dqn.md), [SAC](sac.md),
[A-RIDE](aride.md). The columns *when* (when, or by which learners, a metric is logged) and *healthy* name learners as
`farstep train` does: `ppo`, `async-ppo` and so on.
"""
_STATS = """
## Counters of `env.stats()`

`env.stats()` returns a plain dictionary. Its counters count from `launch()` on. The name `bytes/weights_sent` stands
for `env.stats()["bytes"]["weights_sent"]`. A part in angle brackets stands for any key, or for a position in a list.
[Counters](progress.md#counters) shows how to log these numbers from your own program.

If a counter and a metric of `farstep train` have the same name, they are the same number. The column *logged as* names
a related metric of `farstep train`, whose value differs: it covers only the time since the previous line, is a mean
over workers, or continues from the earlier parts of a resumed run.
"""
_EXPOSED = """
## Only for Prometheus

[Prometheus](status.md#prometheus) gets all numbers above, and those in the following tables. An info has the value 1,
and its text is in the label `value`.
"""
_OWN = """
## Names of your own

Loggers accept any name. Your learner's [`run(env, loop)`](training.md#from-python) passes its metrics to
`loop.report(Iteration(metrics=...))`, and farstep adds the prefix `train/`. A phase that `run` measures with
`loop.timer("NAME")` is logged as `time/NAME`, and the terminal shows it like farstep's own phases.

Later releases of farstep may add metrics under the prefixes above. Therefore give your names a prefix of your own:
`Iteration(metrics={"mine/loss": 0.5})` is logged as `train/mine/loss`.
"""


def page() -> str:
    """Return the whole page in Markdown."""
    training = (_section(f"`{group.prefix}`" if group.prefix else "Progress", group) for group in NAMESPACES)
    stats = (_section(f'`stats()["{group.prefix.rstrip("/")}"]`', group) for group in STATS_GROUPS[1:])
    rows = _section("Steps and chunks", STATS_GROUPS[0])
    exposed = (_section(f"`{group.prefix}`", group) for group in EXPOSED_GROUPS)
    return "".join([_INTRODUCTION, _TRAINING, *training, _STATS, rows, *stats, _EXPOSED, *exposed, _OWN])


def _section(heading: str, group: Namespace) -> str:
    return f"\n### {heading}\n\n{group.text}\n\n{_table(group.metrics)}"


def _table(metrics: Sequence[Metric]) -> str:
    """Return a table without the columns that would be empty."""
    columns: dict[str, list[str]] = {
        "name": [f"`{metric.name}`" for metric in metrics],
        "kind": [metric.kind for metric in metrics],
        "unit": [metric.unit for metric in metrics],
        "measured by": [metric.source for metric in metrics],
        "when": [metric.when for metric in metrics],
        "meaning": [metric.meaning for metric in metrics],
        "healthy": [metric.healthy for metric in metrics],
        "logged as": [f"`{metric.logged_as}`" if metric.logged_as else "" for metric in metrics],
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    lines = [tuple(shown), ("---",) * len(shown), *zip(*shown.values(), strict=True)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
