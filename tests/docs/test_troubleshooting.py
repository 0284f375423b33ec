"""The page of troubleshooting has every class of error, with messages that farstep has."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from farstep import errors

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "docs/troubleshooting.md").read_text().partition("## By error class\n")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| `(\w+)` \| (.+?) \| .+? \| .+? \|$", SECTION, re.M)
"""Class and cell of messages of each row."""


def test_every_class_has_a_row() -> None:
    classes = {
        name
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, errors.FarstepError) and kind.__module__ == errors.__name__
    }
    assert {name for name, _ in ROWS} == classes
    assert len(ROWS) == SECTION.count("\n| `")


def texts(tree: ast.AST) -> Iterator[str]:
    """The texts in a module; what an f-string inserts is left out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "\0".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_messages_are_those_of_the_source() -> None:
    files = sorted((ROOT / "src/farstep").rglob("*.py"))
    known = "\n\n".join(text.replace("\n", " ") for file in files for text in texts(ast.parse(file.read_text())))
    messages = [message for _, cell in ROWS for message in re.findall(r"`([^`]+)`", cell)]
    assert len(messages) >= len(ROWS)
    for message in messages:
        parts = [re.escape(part.strip()) for part in message.split("...") if part.strip()]
        assert parts and re.search("[^\n]*".join(parts), known), message
