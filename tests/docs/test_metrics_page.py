"""docs/metrics.md is what the glossary generates, and pages name only metrics that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from farstep.observe.glossary import METRICS, NAMESPACES, STATS
from farstep.observe.glossary.page import page

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = "python -m farstep.observe.glossary > docs/metrics.md"


def test_the_page_is_generated_from_the_glossary() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == page(), f"run `{COMMAND}`"


def test_the_command_on_the_page_prints_it() -> None:
    assert COMMAND in page().splitlines()[0] and COMMAND in (ROOT / "CONTRIBUTING.md").read_text()
    command = [sys.executable, "-m", "farstep.observe.glossary"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout == page()


def test_the_page_has_each_entry_with_its_unit_and_meaning() -> None:
    lines = page().splitlines()
    for metric in (*METRICS.values(), *STATS.values()):
        rows = [
            line for line in lines if line.startswith(f"| `{metric.name}` | {metric.kind} | {metric.unit}".rstrip())
        ]
        assert rows and all(metric.meaning in row and metric.source in row for row in rows), metric.name


def test_pages_name_only_metrics_of_the_glossary() -> None:
    prefixes = "|".join(re.escape(group.prefix) for group in NAMESPACES if group.prefix)
    name = re.compile(rf"`((?:{prefixes})[a-z][a-z0-9_/]*[a-z0-9])`")
    found = {(file.name, each) for file in PAGES for each in name.findall(file.read_text())}
    assert len(found) > 100
    paths = {path for entry in STATS for path in (entry, entry.rpartition("/")[0])}
    assert sorted((file, each) for file, each in found if each not in METRICS and each not in paths) == []


def test_only_the_generated_page_has_a_table_of_metrics() -> None:
    """A list of metrics elsewhere would become wrong; a table of symptoms may name one in each row."""
    for file in PAGES:
        if file.name != "metrics.md":
            rows = re.findall(r"^\| `([\w/]+)`", file.read_text(), re.M)
            assert len({name for name in rows if name in METRICS and "/" in name}) < 4, file.name
