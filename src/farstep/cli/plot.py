"""`farstep plot`: runs as a picture."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from farstep.cli.options import parse
from farstep.errors import ConfigError
from farstep.observe.files import as_run_error
from farstep.observe.plots import plot
from farstep.observe.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class Options:
    """Draw return, throughput and staleness of runs; those that differ by their seed alone become one line."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """folders of runs"""
    out: Path | None = None
    """file to write; default: plots/run.png in the folder of one run, plots/comparison.png in that of the first of
    several runs"""


def main(arguments: Sequence[str]) -> int:
    """Read, draw."""
    options = parse(Options, arguments, "farstep plot")
    if not options.runs:
        raise ConfigError("'farstep plot' needs at least one run, e.g. farstep plot runs/NAME.")
    name = "run.png" if len(options.runs) == 1 else "comparison.png"
    out = options.out or RunFolder.open(options.runs[0]).plots / name
    with as_run_error(out):
        plot(options.runs, out)
    sys.stdout.write(f"{out}\n")
    return 0
