"""`farstep metrics`: print the unit and meaning of metrics."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from farstep.cli.options.parsing import parse
from farstep.config.field_docs import show_fields
from farstep.errors import ConfigError
from farstep.observe.glossary import EXPOSED, METRICS, STATS, Metric


@show_fields
@dataclass(frozen=True, kw_only=True)
class Options:
    """Print the unit and meaning of metrics: those that farstep train logs, the entries of env.stats(), and
    those that only Prometheus gets.

    Examples: farstep metrics; farstep metrics time/ train/actor/ess
    """

    names: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Names, or parts of names; none: all."""


def main(arguments: Sequence[str]) -> int:
    """Parse the options and print; return the exit status."""
    options = parse(Options, arguments, "farstep metrics")
    known = (METRICS | STATS | EXPOSED).values()
    for name in options.names:
        if not any(_is_meant(metric, name) for metric in known):
            raise ConfigError(f"no metric has {name!r} in its name; 'farstep metrics' without a name lists all.")
    for metric in known:
        if not options.names or any(_is_meant(metric, name) for name in options.names):
            sys.stdout.write(f"{metric.name} ({', '.join(filter(None, (metric.kind, metric.unit)))})\n")
            sys.stdout.write(f"    {'; '.join(filter(None, (metric.meaning, metric.when)))}\n")
    return 0


def _is_meant(metric: Metric, name: str) -> bool:
    return name in metric.name or metric.labels(name) is not None
