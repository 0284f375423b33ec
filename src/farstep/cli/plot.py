"""`farstep plot`: draws the curves of runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from farstep.cli.options.parsing import parse
from farstep.config.field_docs import show_fields
from farstep.errors import ConfigError
from farstep.observe.files import as_run_error
from farstep.observe.plots import plot
from farstep.observe.run_folder import RunFolder


@show_fields
@dataclass(frozen=True, kw_only=True)
class Options:
    """Plot return and throughput of runs and, if there were any, staleness, dropped chunks and restarts. Runs that
    differ only in their seed share a line.

    Examples: farstep plot runs/NAME; farstep plot runs/NAME runs/OTHER --out comparison.svg
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of the runs."""
    out: Path | None = None
    """File to write, ending in .png, .svg or .pdf. None: NAME.png in the current folder for one run, comparison.png for
    several."""


def main(arguments: Sequence[str]) -> int:
    """Parse the options and draw. Return the exit status."""
    options = parse(Options, arguments, "farstep plot")
    if not options.runs:
        raise ConfigError("'farstep plot' needs at least one run, e.g. farstep plot runs/NAME.")
    name = RunFolder.open(options.runs[0]).path.resolve().name if len(options.runs) == 1 else "comparison"
    out = options.out or Path(f"{name}.png")
    with as_run_error(out):
        plot(options.runs, out)
    sys.stdout.write(f"{out}\n")
    return 0
