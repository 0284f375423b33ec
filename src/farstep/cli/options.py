"""Options from a dataclass, with tyro; a wrong one ends in a sentence and the nearest right ones."""

from __future__ import annotations

import contextlib
import difflib
import io
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import tyro

from farstep.errors import ConfigError

T = TypeVar("T")


def parse(kind: type[T], arguments: Sequence[str], command: str, default: T | None = None) -> T:
    """The dataclass that the arguments describe; `--help` prints and exits."""
    known = _known(kind, command, default)
    for argument in arguments:
        name = argument.split("=")[0].replace("_", "-")
        if name.startswith("--") and name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else "--help lists them all."
            raise ConfigError(f"'{command}' has no option {name}; {hint}")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            found: Any = tyro.cli(kind, args=list(arguments), prog=command, default=default)
    except SystemExit as end:
        if not end.code:
            raise
        raise ConfigError(f"{_sentence(said.getvalue())} '{command} --help' explains every option.") from None
    return found  # type: ignore[no-any-return]


def _known(kind: type[T], command: str, default: T | None) -> list[str]:
    """All options, as tyro itself names them."""
    parser = tyro.extras.get_parser(kind, prog=command, default=default)
    return [option for action in parser._actions for option in action.option_strings if option.startswith("--")]


def _sentence(text: str) -> str:
    """What tyro says in its box, as one line."""
    lines = [re.sub(r"[│╭╮╰╯─]+", " ", line).strip() for line in text.splitlines()]
    kept = [line for line in lines if line and not line.startswith(("usage", "For full helptext", "Parsing error"))]
    said = re.sub(r"\s+", " ", " ".join(kept)).strip().rstrip(".")
    return f"{said}."
