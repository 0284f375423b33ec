"""Options from a dataclass, with tyro; a wrong one ends in a sentence and the nearest right ones."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from farstep.errors import ConfigError

T = TypeVar("T")
_JSON = {Mapping[str, object]: Mapping, Mapping[str, float]: Mapping, Sequence[Mapping[str, object]]: Sequence}
"""Options that are given as JSON, with what it must describe."""
_NUMBERS: dict[Any, tuple[type, str]] = {
    shape: (kind, expected)
    for kind, expected in ((int, "a whole number"), (float, "a number"))
    for shape in (kind, kind | None, (kind, ...))
}
"""Options that are numbers, or tuples of them, with what is expected."""


def parse(
    kind: type[T],
    arguments: Sequence[str],
    command: str,
    default: T | None = None,
) -> T:
    """The dataclass that the arguments describe; `--help` prints and exits."""
    known = ["--help", *option_names(kind)]
    for name in map(_name, arguments):
        if name.startswith("--") and name not in known:
            near = [f"--{option}" for option in difflib.get_close_matches(name[2:], [option[2:] for option in known])]
            hint = f"did you mean {' or '.join(near)}?" if near else "--help lists them all."
            raise ConfigError(f"'{command}' has no option {name}; {hint}")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            found: Any = tyro.cli(kind, args=list(arguments), prog=command, default=default, registry=_registry())
    except SystemExit as end:
        if not end.code:
            raise
        raise ConfigError(f"{_sentence(said.getvalue())} '{command} --help' explains every option.") from None
    return found  # type: ignore[no-any-return]


def check_belonging(kind: Any, arguments: Sequence[str], command: str, others: Mapping[str, Any]) -> None:
    """Refuse options that `kind` has not and others have, and say which."""
    mine = option_names(kind)
    for name in map(_name, arguments):
        owners = [other for other, config in others.items() if name in option_names(config)]
        if owners and name not in mine:
            raise ConfigError(f"{command} has no option {name}; it belongs to {' or '.join(owners)}.")


def typed(name: str, value: object) -> str:
    """An option as one types it."""
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    return shlex.join([f"--{option}", *map(str, value if isinstance(value, tuple) else [value])])


def option_names(kind: Any) -> list[str]:
    """All options of a dataclass and those inside it, as tyro names them without prefixes."""
    found: list[str] = []
    base = get_origin(kind) or kind
    chosen = dict(zip(getattr(base, "__parameters__", ()), get_args(kind), strict=True))
    for name, hint in get_type_hints(base).items():
        hint = chosen.get(hint, hint)
        if dataclasses.is_dataclass(hint):
            found += option_names(hint)
        else:
            option = name.replace("_", "-")
            found += [f"--{option}", *([f"--no-{option}"] if hint is bool else [])]
    return found


def _name(argument: str) -> str:
    return argument.split("=")[0].replace("_", "-")


def _sentence(text: str) -> str:
    """What tyro says in its box, as one line; where it cannot draw, its title is underlined instead."""
    said: list[str] = []
    has_title = "╭" not in text
    for line in (line.strip("│ ") for line in text.splitlines() if not line.startswith(("╭", "╰", "usage"))):
        if line and not line.strip("─-"):
            if not has_title:
                break  # below, it only repeats the help
            said, has_title = [], False
        elif line.startswith(("Argument helptext", "For full helptext")):
            break
        else:
            said.append(line)
    whole = re.sub(r"Error parsing ((?!-)[\w.]+: )?", "", " ".join(said))
    whole = re.sub(r"Missing from (.+?): (\S+) .*", r"'\1' needs \2", whole)
    whole = whole.replace(
        "Failed to parse key-value pairs!", "expected names and values in turn, e.g. cpu 4 memory 8Gi"
    )
    return re.sub(r"\s+", " ", whole).strip().rstrip(".") + "."


def _registry() -> ConstructorRegistry:
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def from_json(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        if info.type not in _JSON:
            return None
        expected = _JSON[info.type]
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="JSON",
            instance_from_str=lambda words: json.loads(words[0]),
            is_instance=lambda value: isinstance(value, expected),
            str_from_instance=lambda value: [json.dumps(value)],
        )

    @registry.primitive_rule
    def from_numbers(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        is_tuple, is_optional = get_origin(info.type) is tuple, type(None) in get_args(info.type)
        shape = get_args(info.type) if is_tuple else info.type
        if shape not in _NUMBERS:
            return None
        kind, expected = _NUMBERS[shape]

        def value(word: str) -> Any:
            try:
                return None if is_optional and word == "None" else kind(word)
            except ValueError:
                raise ValueError(f"expected {expected}, got {word!r}") from None

        metavar = kind.__name__.upper()
        return PrimitiveConstructorSpec(
            nargs="*" if is_tuple else 1,
            metavar=f"[{metavar} [{metavar} ...]]" if is_tuple else f"{'{None}|' * is_optional}{metavar}",
            instance_from_str=lambda words: tuple(map(value, words)) if is_tuple else value(words[0]),
            is_instance=lambda _: True,
            str_from_instance=lambda default: list(map(str, default if is_tuple else [default])),
        )

    return registry
