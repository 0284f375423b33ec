"""Pages about benchmarks: every file, command and option that they name exists, and every table matches its results."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.benchmark_modules import benchmark_modules

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
PAGES = [BENCHMARKS / "README.md", ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = sorted((BENCHMARKS / "results").glob("*.json"))


def named(pattern: str) -> Iterator[tuple[str, Any]]:
    """Pages, and what matches on them."""
    for page in PAGES:
        for found in re.findall(pattern, page.read_text()):
            yield page.name, found


def has_option(script: Path, option: str) -> bool:
    """Whether a script takes an option, as an argument of argparse or as a field of tyro's."""
    text = script.read_text()
    if "Sitting.add_options(" in text:  # the options of every script that trains in several sittings
        text += (BENCHMARKS / "trainings.py").read_text()
    if "learning.main(" in text:  # benchmarks that learning.py runs
        text += (BENCHMARKS / "learning.py").read_text()
    if "add_contender_options(" in text:  # scripts whose contenders can be chosen
        text += (BENCHMARKS / "roster.py").read_text()
    field = option.removeprefix("--").replace("-", "_")
    return f'"{option}"' in text or re.search(rf"^    {field}: ", text, re.MULTILINE) is not None


def test_tables_are_those_of_the_committed_results() -> None:
    command = [sys.executable, str(BENCHMARKS / "pages.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, f"python benchmarks/pages.py writes them again:\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_results_name_their_date_machine_and_command(path: Path) -> None:
    document = json.loads(path.read_text())
    assert document["date"] and document["machine"]["cpu"] and document["machine"]["python"]
    python, script, *words = shlex.split(document["command"])
    assert python == "python" and (ROOT / script).exists()
    unknown = [word for word in words if word.startswith("--") and not has_option(ROOT / script, word)]
    assert not unknown, f"{script} does not take {unknown}"


def test_every_plot_is_drawn_from_results_that_are_committed() -> None:
    (pages,) = benchmark_modules("pages")
    drawn = {image: plots.results for plots in pages.PLOTS for image in plots.images}
    shown = {Path(name).name for _, name in named(r"!\[[^\]]*\]\(([^)]+\.png)\)")}
    pictures = {path.name for path in (ROOT / "docs" / "images").glob("status*.png")}
    assert shown - drawn.keys() == {"impala-cartpole.png", *pictures}  # what `farstep` shows
    assert {"learning-cartpole-v1.png", "async-returns.png"} <= shown
    for image in shown:
        assert (ROOT / "docs" / "images" / image).exists(), image
        assert image not in drawn or (BENCHMARKS / "results" / drawn[image]).exists(), image


def test_files_that_pages_name_exist() -> None:
    # A command that measures something may name the file that it will write.
    pattern = r"(?<!--out benchmarks/)\bresults/[\w.-]+\.(?:json|png)\b"
    results = [(page, BENCHMARKS / name) for page, name in named(pattern)]
    scripts = [(page, BENCHMARKS / name) for page, name in named(r"\bbenchmarks/([\w/]+\.py)\b")]
    text = (BENCHMARKS / "README.md").read_text()
    beside = [("README.md", BENCHMARKS / name) for name in re.findall(r"`((?:contenders/)?\w+\.py)`", text)]
    assert len(results) > 15 and len(scripts) > 15 and beside
    assert [(page, path.name) for page, path in (*results, *scripts, *beside) if not path.exists()] == []


def test_results_are_named_on_a_page() -> None:
    told = {Path(name).name for _, name in named(r"\bresults/[\w.-]+\.json\b")}
    assert {path.name for path in RESULTS} - told == {"stagger-curves.json"}  # beside stagger.json, for its plots


def test_targets_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    spans = [*named(r"`make ([a-z -]+)`"), *named(r"(?m)^make ([a-z-]+(?: [a-z-]+)*)")]
    words = [(page, word) for page, span in spans for word in span.split()]
    assert len(words) > 10
    assert [(page, word) for page, word in words if word not in targets] == []


def test_options_that_pages_name_exist() -> None:
    commands = [(page, script, text) for page, (script, text) in named(r"python benchmarks/(\w+\.py)([^`\n#]*)")]
    assert len(commands) > 15
    for page, script, text in commands:
        for option in re.findall(r"--[a-z-]+", text):
            assert has_option(BENCHMARKS / script, option), f"{page}: {script} does not take {option}"
    scripts = list(BENCHMARKS.glob("*.py"))
    alone = re.findall(r"`(--[a-z-]+[^`]*)`", (BENCHMARKS / "README.md").read_text())
    options = [option for span in alone for option in re.findall(r"--[a-z-]+", span)]
    assert len(options) > 10
    assert [option for option in options if not any(has_option(script, option) for script in scripts)] == []
