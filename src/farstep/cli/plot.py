"""`farstep plot`: draw the curves of runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from farstep.cli.options import parse
from farstep.config.field_docs import show_fields
from farstep.errors import ConfigError
from farstep.observe.files import as_run_error
from farstep.observe.plots import plot
from farstep.observe.run_folder import RunFolder


@show_fields
@dataclass(frozen=True, kw_only=True)
class Options:
    """Plot return, throughput and staleness of runs; runs that differ only in their seed share a line."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of the runs."""
    out: Path | None = None
    """PNG file to write. None: plots/run.png in the folder of a single run, plots/comparison.png in the folder of the
    first of several."""


def main(arguments: Sequence[str]) -> int:
    """Parse the options and draw; return the exit status."""
    options = parse(Options, arguments, "farstep plot")
    if not options.runs:
        raise ConfigError("'farstep plot' needs at least one run, e.g. farstep plot runs/NAME.")
    name = "run.png" if len(options.runs) == 1 else "comparison.png"
    out = options.out or RunFolder.open(options.runs[0]).plots / name
    with as_run_error(out):
        plot(options.runs, out)
    sys.stdout.write(f"{out}\n")
    return 0
