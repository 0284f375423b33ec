"""Every `farstep ...` line in the bash blocks of all pages is accepted by the command's own parser.

Every option of `farstep` that a page names in its text exists. `test_benchmark_pages.py` checks those of benchmarks.
"""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from farstep.cli import coordinator, doctor
from farstep.cli.options.algorithms import ALGORITHMS
from farstep.cli.options.launchers import ENGINES, LAUNCHERS, SharingOptions
from farstep.cli.options.parsing import option_names, parse
from farstep.cli.options.train_options import Options, parse_options, stored_config, write_yaml
from farstep.observe.run_folder import RunFolder
from tests.docs.test_snippets import PAGES, name_of

COORDINATOR = {"start": coordinator.StartOptions, "status": coordinator.StatusOptions}
VARIABLE = re.compile(r"\w+=")
OF_SLURM = {"docs/slurm.md": {"--constraint", "--exclude", "--gres", "--qos"}}
"""Options of sbatch that a page names, by page."""


def command_lines(page: Path) -> list[str]:
    """The lines of bash blocks that run `farstep`, possibly after variables such as `RAY_ADDRESS=...`."""
    tokens = MarkdownIt("commonmark").parse(page.read_text())
    lines = [line for token in tokens if token.info == "bash" for line in token.content.splitlines()]
    return [line for line in lines if re.match(rf"(?:{VARIABLE.pattern}\S* )*farstep ", line)]


def parsed(command: str, *words: str) -> object:
    """Parse as the command does, but do not run it."""
    if command == "train":
        return parse_options(words[0], words[1:])
    if command == "doctor":
        return doctor.parsed(words)
    if command == "coordinator":
        return parse(COORDINATOR[words[0]], words[1:], "farstep coordinator")
    return parse(importlib.import_module(f"farstep.cli.{command}").Options, words, f"farstep {command}")


def make_run(learner: str, path: Path) -> None:
    """Make the folder of a run that a line resumes or repeats."""
    options = parse_options(learner, ["--env", "CartPole-v1", "--name", path.name])
    folder = RunFolder.create(path.parent, path.name, stored_config(learner, options))
    write_yaml(learner, options, folder)


LINES = [pytest.param(line, id=f"{name_of(page)}: {line}") for page in PAGES for line in command_lines(page)]


def test_lines_are_found() -> None:
    lines = [str(each.values[0]) for each in LINES]
    assert sum("farstep train " in line for line in lines) >= 35 and len(lines) >= 51


@pytest.mark.parametrize("line", LINES)
def test_line_is_accepted(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line, comments=True)
    while VARIABLE.match(words[0]):
        del words[0]
    if named := re.search(r"--(?:resume|config) (runs/\w+)", line):
        make_run(words[2], Path(named[1]))
    assert parsed(*words[1:]) is not None


def known_options() -> dict[str, set[str]]:
    """All options of each command, with any learner and any launcher."""
    simple = ("eval", "watch", "plot", "status", "metrics", "slurm", "kubernetes")
    kinds = {name: [importlib.import_module(f"farstep.cli.{name}").Options] for name in simple}
    kinds["coordinator"] = [*COORDINATOR.values()]
    kinds["doctor"] = [doctor.Options[launcher] for launcher in LAUNCHERS.values()]  # type: ignore[valid-type]
    learners = [algorithm.config for algorithm in ALGORITHMS.values()]
    kinds["train"] = [Options[pair] for pair in product(learners, [SharingOptions, *ENGINES.values()])]  # type: ignore[misc, valid-type]
    return {name: {"--help"}.union(*(option_names(kind) for kind in found)) for name, found in kinds.items()}


def named_options(page: Path) -> Iterator[tuple[str | None, str]]:
    """Yield the options of `farstep` in the text of a page, each with its command; None: the text names no command."""
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text()):
        for code in (child.content for child in token.children or () if child.type == "code_inline"):
            if code.startswith(("--", "farstep ")):
                command = code.split()[1] if code.startswith("farstep ") else None
                code = re.sub(r"=.*", "", code)  # a value may have options of another program
                yield from ((command, option) for option in re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", code))


def test_options_in_texts_exist() -> None:
    known, count = known_options(), 0
    every = {"--version"}.union(*known.values())
    for page in PAGES:
        if name_of(page) != "benchmarks/README.md":
            for command, option in named_options(page):
                count += 1
                found = known.get(command or "", every) | OF_SLURM.get(name_of(page), set())
                assert option in found, f"{name_of(page)}: no {option} of {command or 'any command'}"
    assert count > 300
