"""Every `farstep ...` line in the bash blocks of all pages is accepted by the command's own parser."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from farstep.cli import coordinator, doctor
from farstep.cli.options.parsing import parse
from farstep.cli.options.train_options import parse_options, stored_config, write_yaml
from farstep.observe.run_folder import RunFolder
from tests.docs.test_snippets import PAGES, name_of

COORDINATOR = {"start": coordinator.StartOptions, "status": coordinator.StatusOptions}
VARIABLE = re.compile(r"\w+=")


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
