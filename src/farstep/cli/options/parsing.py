"""Parses options into a dataclass, with tyro. For a mistake, prints one sentence with the nearest valid options."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, DecimalException
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from farstep.errors import ConfigError

T = TypeVar("T")
_JSON = {Mapping[str, object]: Mapping, Mapping[str, float]: Mapping, Sequence[Mapping[str, object]]: Sequence}
"""Types of options that users pass as JSON, with the required type of the JSON value."""


def _whole_number(word: str) -> int:
    """Convert an integer, which may have an exponent, such as 1e5. Raise `ValueError` for anything else."""
    if "e" not in word.lower():
        return int(word)
    try:
        value = Decimal(word)
    except DecimalException:
        raise ValueError(word) from None
    if not -_LARGEST <= value <= _LARGEST or value % 1:  # check the size first: 1e999999999 would fill the memory
        raise ValueError(word)
    return int(value)


_LARGEST = 10**18
"""Largest integer that an option accepts with an exponent."""
_NUMBERS: dict[Any, tuple[type, Callable[[str], int | float], str]] = {
    shape: (kind, convert, expected)
    for kind, convert, expected in (
        (int, _whole_number, "a whole number, such as 100000 or 1e5"),
        (float, float, "a number"),
    )
    for shape in (kind, kind | None, (kind, ...))
}
"""Types of options that are numbers or tuples of numbers: the number's type, its parser, and what errors call it."""


def parse(
    kind: type[T],
    arguments: Sequence[str],
    command: str,
    default: T | None = None,
) -> T:
    """Parse command-line arguments.

    Args:
        kind: The dataclass that has the options.
        arguments: The arguments after the command, e.g. `["--env", "CartPole-v1"]`.
        command: The command as typed, for messages.
        default: Values of options that are not given; None: the defaults of the dataclass.

    Returns:
        An instance of `kind`.

    Raises:
        ConfigError: An option is unknown, missing or malformed.
        SystemExit: With status 0, after printing the help text of `--help`.
    """
    known = ["--help", *option_names(kind)]
    for name in map(_name, arguments):
        if name.startswith("--") and name not in known:
            near = [f"--{option}" for option in difflib.get_close_matches(name[2:], [option[2:] for option in known])]
            hint = f"did you mean {' or '.join(near)}?" if near else "--help lists them all."
            raise ConfigError(f"'{command}' has no option {name}; {hint}")
        if f"-{name}" in known:
            raise ConfigError(f"'{command}' has no option {name}; did you mean -{name}?")
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            found: Any = tyro.cli(kind, args=list(arguments), prog=command, default=default, registry=_registry())
    except SystemExit as end:
        if not end.code:
            raise
        from_file = default is not None  # then other names in the message are those of the file
        names = [name for name in option_names(kind) if not from_file or name in map(_name, arguments)]
        text = _as_options(_sentence(printed.getvalue()), names)
        raise ConfigError(f"{text} '{command} --help' explains every option.") from None
    return found  # type: ignore[no-any-return]


def check_belonging(kind: Any, arguments: Sequence[str], command: str, others: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if an option does not belong to `kind` but to one of `others`; name the owner."""
    mine = option_names(kind)
    for name in map(_name, arguments):
        owners = [other for other, config in others.items() if name in option_names(config)]
        if owners and name not in mine:
            raise ConfigError(f"{command} has no option {name}; it belongs to {' or '.join(owners)}.")


def typed(name: str, value: object) -> str:
    """Return an option and its value as a user would type them."""
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    return shlex.join([f"--{option}", *map(str, value if isinstance(value, tuple) else [value])])


def option_names(kind: Any) -> list[str]:
    """Return all options of a dataclass, including nested dataclasses, with tyro's names (without prefixes)."""
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


def _as_options(text: str, options: Sequence[str]) -> str:
    """Replace names of fields in an error message by the options that set them."""
    for option in options:
        field = option[2:].replace("-", "_")
        # A name of one word may also be an ordinary word of the sentence.
        pattern = rf"(?<![\w.-]){field}(?![\w-])" if "_" in field else rf"^{field}(?= is )|(?<![\w.-]){field}(?==)"
        text = re.sub(pattern, option, text)
    return text


def _name(argument: str) -> str:
    return argument.split("=")[0].replace("_", "-")


def _sentence(text: str) -> str:
    """Return the error message in tyro's box as one line. Without box characters, tyro underlines the title."""
    words: list[str] = []
    has_title = "╭" not in text
    for line in (line.strip("│ ") for line in text.splitlines() if not line.startswith(("╭", "╰", "usage"))):
        if line and not line.strip("─-"):
            if not has_title:
                break  # the rest repeats the help text
            words, has_title = [], False
        elif line.startswith(("Argument helptext", "For full helptext")):
            break
        else:
            words.append(line)
    whole = re.sub(r"Error parsing ((?!-)[\w.]+: )?", "", " ".join(words))
    whole = re.sub(r"Missing from (.+?): (\S+) .*", r"'\1' needs \2", whole)
    whole = whole.replace(
        "Failed to parse key-value pairs!", "expected alternating names and values, e.g. cpu 4 memory 8Gi"
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
        kind, convert, expected = _NUMBERS[shape]

        def value(word: str) -> Any:
            try:
                return None if is_optional and word == "None" else convert(word)
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
