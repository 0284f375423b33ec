"""Renders the status of a run for the live display, as a panel of the package rich."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from farstep.event import RUN_STOPPING, Event
from farstep.observe.diagnosis import Diagnosis
from farstep.observe.glossary import METRICS
from farstep.observe.run_status import (
    EVALUATION,
    RESTARTS,
    RETURN,
    SPEED,
    STALENESS,
    RunStatus,
    data_size,
    duration,
    label,
    number,
    percent,
    target_text,
)

_BARS = "▁▂▃▄▅▆▇█"
_SHADES = "█▓▒░"
_COLORS = {
    "collect": "cyan",
    "recompute": "magenta",
    "advantages": "yellow",
    "train": "green",
    "publish": "blue",
    "checkpoint": "bright_black",
    "evaluate": "red",
    "other": "white",
}
_MAX_WIDTH = 100
_SPARKLINE_WIDTH = 32
_MIN_BAR_WIDTH = 3
SHOWN_EVENTS = 3


def panel(
    status: RunStatus,
    title: str,
    elapsed_s: float,
    now_s: float,
    width: int,
    *,
    diagnosis: Diagnosis | None = None,
    events: Sequence[Event] = (),
) -> Panel:
    """Render the status.

    Args:
        status: The status to show.
        title: Heading of the panel.
        elapsed_s: Seconds since the start of the run.
        now_s: Current time, from the same clock as `RunStatus.update`.
        width: Columns of the terminal.
        diagnosis: What the run is waiting for; None, or too little data: no row for it.
        events: What happened, oldest first; the latest three are shown.

    Returns:
        The panel, at most 100 columns wide.
    """
    width = min(width, _MAX_WIDTH)
    latest = status.latest
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    grid.add_row("steps", Progress(status, now_s))
    if diagnosis is not None and diagnosis.cause != "unknown":  # near the top: a low terminal cuts off the end
        style = "yellow" if diagnosis.is_problem else ""
        grid.add_row("diagnosis", Text(diagnosis.text, style=style, no_wrap=False, overflow="fold"))
    if not status.updates:
        grid.add_row("", Text("waiting for the first update", style="dim"))
    if RETURN in latest:
        text = Text(f"{number(latest[RETURN])}  ", style="bold").append(_sparkline(status.returns), style="green")
        _add(text, f"   {label('env/length_mean')}", latest.get("env/length_mean"), number)
        grid.add_row(label(RETURN), text)
    if EVALUATION in latest:
        text = Text(number(latest[EVALUATION]), style="bold")
        _add(text, " ±", latest.get("eval/return_std"), number)
        _add(text, "   version", latest.get("eval/version"), "{:,.0f}".format)
        grid.add_row(label(EVALUATION), text)
    if SPEED in latest:
        text = Text(f"{latest[SPEED]:,.0f} {METRICS[SPEED].unit}")
        grid.add_row(label(SPEED), text.append(f"   {duration(elapsed_s)} so far", style="dim"))
    if STALENESS in latest:
        text = Text(f"{latest[STALENESS]:.2f} {METRICS[STALENESS].unit}")
        _add(text, "   at most", latest.get("lag/versions_max"), "{:,.0f}".format)
        grid.add_row(label(STALENESS), text)
    if weights := _weights(status):
        grid.add_row("weights", weights)
    if "workers/alive" in latest or status.dropped():
        grid.add_row("workers", _workers(status))
    if shares := status.shares():
        grid.add_row("time", Shares(shares))
    for position, event in enumerate(events[-SHOWN_EVENTS:]):
        grid.add_row("" if position else "events", _event(event))
    heading = Text(title, style="bold")
    return Panel(grid, title=heading, title_align="left", box=box.ROUNDED, border_style="dim", width=width)


def _event(event: Event) -> Text:
    clock = time.strftime("%H:%M:%S", time.localtime(event.time))
    text = Text.assemble((f"{clock} ", "dim"), (event.kind, "bold"), f"  {' '.join(event.text.split())}")
    if RUN_STOPPING in event.text:  # wrap it, because it answers the user's Ctrl-C
        text.no_wrap, text.overflow = False, "fold"
    return text


def _add(text: Text, label: str, value: float | None, form: Callable[[float], str]) -> None:
    if value is not None:
        text.append(f"{label} {form(value)}", style="dim")


def _sparkline(values: Sequence[float], width: int = _SPARKLINE_WIDTH) -> str:
    """Return the values as a row of bars, scaled from the lowest to the highest value."""
    if not values:
        return ""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(values), max(values)
    if high <= low:
        return _BARS[0] * len(values)
    return "".join(_BARS[min(int((value - low) / (high - low) * len(_BARS)), len(_BARS) - 1)] for value in values)


def _weights(status: RunStatus) -> str:
    latest = status.latest
    parts = []
    if (version := "train/actor/current_version") in latest:
        parts.append(f"{label(version)} {latest[version]:,.0f}")
    if (pulls := "sync/pulls_per_worker") in latest:
        parts.append(f"{latest[pulls]:,.0f} {label(pulls)}")
    if "bytes/weights_sent" in latest:
        parts.append(data_size(latest["bytes/weights_sent"]))
    return "   ".join(parts)


def _workers(status: RunStatus) -> Text:
    latest = status.latest
    text = Text()
    if "workers/alive" in latest:
        text.append(f"{latest['workers/alive']:,.0f} {label('workers/alive')}")
    if (restarts := latest.get(RESTARTS)) is not None:
        text.append(f"   {restarts:,.0f} restart{'' if restarts == 1 else 's'}", style="yellow" if restarts else "dim")
    if dropped := status.dropped():
        causes = ", ".join(f"{cause} {count:,}" for cause, count in dropped.items())
        text.append(f"   dropped: {causes}", style="yellow")
    else:
        text.append("   nothing dropped", style="dim")
    return text


class Progress:
    """Steps, a bar and the time that is left; if there is no room for the bar, in two lines without it."""

    def __init__(self, status: RunStatus, now_s: float) -> None:
        left_s = None if status.reached_target else status.seconds_left(now_s)
        done = target_text(status) if status.reached_target else percent(status.fraction)
        self._fraction = status.fraction
        self._steps = Text(f"{status.step:,} of {status.total_steps:,}", no_wrap=False, overflow="fold")
        self._left = Text(done, no_wrap=False, overflow="fold")
        self._left.append("" if left_s is None else f"  {duration(left_s)} left", style="dim")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width < len(self._steps) + len(self._left) + _MIN_BAR_WIDTH + 2:
            yield from (self._steps, self._left)
            return
        bar = ProgressBar(total=1.0, completed=self._fraction, complete_style="cyan", finished_style="green")
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        row.add_row(self._steps, bar, self._left)
        yield row

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(10, options.max_width)


class Shares:
    """A bar whose segments are proportional to the shares, with a legend. Without colors, segments are shaded."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        self._shares = shares

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shades = _SHADES if console.color_system is None or console.no_color else _SHADES[:1]
        bar, legend, lines = Text(no_wrap=True), Text(no_wrap=True), []
        at = 0.0
        for position, (name, share) in enumerate(self._shares.items()):
            mark, color = shades[position % len(shades)], _COLORS.get(name, "bright_white")
            at += share
            bar.append(mark * (round(at * options.max_width) - len(bar)), style=color)
            entry = Text.assemble((mark, color), (f" {name.replace('_', ' ')} ", "dim"), percent(share))
            if legend and len(legend) + len(entry) + 3 > options.max_width:
                lines.append(legend)
                legend = Text(no_wrap=True)
            legend.append("   " if legend else "").append_text(entry)
        yield from (bar, *lines, legend)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(10, options.max_width)
