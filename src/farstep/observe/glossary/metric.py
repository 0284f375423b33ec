"""What the glossary says about one number that farstep measures."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "info"]
"""A counter never decreases while the process runs, a gauge may; an info is text."""
Source = Literal["training loop", "learner", "evaluation", "workers", "head", "launcher", "workflow"]
"""What measures it."""


@dataclass(frozen=True)
class Metric:
    """One number that farstep measures, or one text that it reports."""

    name: str
    """Its name in all loggers, or its keys in `ClusterEnv.stats` joined by slashes. A part in angle brackets stands for
    any key: `divergence/<worker>`."""
    meaning: str
    source: Source
    kind: Kind = "gauge"
    unit: str = ""
    """Empty for numbers without a unit, and for text."""
    when: str = ""
    """Learners, options or events with which it exists; empty: always."""
    healthy: str = ""
    """Values to expect in a run that learns."""
    label: str = ""
    """Short name in the terminal and in plots; empty: the last part of `name`."""
    logged_as: str = ""
    """The metric of `farstep train` that measures the same as this entry of `ClusterEnv.stats`, but per update or per
    worker, or across resumes; empty: none, or the one with the same name."""

    @property
    def title(self) -> str:
        """The label with its unit, as the heading of a plot."""
        unit = f" in {self.unit}" if self.unit else ""
        return f"{self.short_name[0].upper()}{self.short_name[1:]}{unit}"

    @property
    def short_name(self) -> str:
        """The label, or else the last part of the name."""
        return self.label or self.name.rpartition("/")[2]

    def labels(self, name: str) -> dict[str, str] | None:
        """Return what the parts in angle brackets stand for in a name, such as `{"worker": "3"}`; None: no match."""
        found = _pattern(self.name).fullmatch(name)
        return found.groupdict() if found else None


@functools.cache
def _pattern(name: str) -> re.Pattern[str]:
    """The pattern of the names that a name with parts in angle brackets stands for."""
    parts = (f"(?P<{part[1:-1]}>[^/]+)" if part[:1] == "<" else re.escape(part) for part in name.split("/"))
    return re.compile("/".join(parts))


@dataclass(frozen=True)
class Namespace:
    """Metrics with the same prefix."""

    prefix: str
    """Ends in a slash; empty for names without one."""
    text: str
    """What all of them have in common."""
    metrics: tuple[Metric, ...]
