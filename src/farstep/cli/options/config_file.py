"""Options of a run in a YAML file: a flat mapping. Its keys are the names of the options, without dashes.

Every run writes such a file into its folder, and `farstep train LEARNER --config FILE` reads such a file. Names are
unique, as on the command line, so a file needs no nesting.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec
import tyro

from farstep.cli.options.launchers import ENGINES, SharingOptions, chosen_launcher
from farstep.config.launch import EngineConfig
from farstep.errors import ConfigError
from farstep.learners.options.run_config import RunConfig
from farstep.observe.extras import require
from farstep.version import VERSION

T = TypeVar("T")
_ALGORITHM = "algorithm"
_JSON = ("env_kwargs", "stagger")
"""Options that are JSON on the command line but mappings in a file."""
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
"""Pattern of numbers with an exponent, such as 3e-4."""
_PLAIN = re.compile(r"[A-Za-z][\w./-]*", re.ASCII)
"""Pattern of text that needs no quotes, except for `_WORDS`."""
_WORDS = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")


# ---- reading ----


def read_options(
    path: Path, algorithm: str, learners: Mapping[str, type[Any]], arguments: Sequence[str]
) -> tuple[RunConfig, Any, EngineConfig | SharingOptions]:
    """Read the options of a run from a YAML file, as defaults for the command line.

    Required options that the file lacks are marked as missing. Options are not checked against each other yet, because
    the command line may add and change options.

    Args:
        path: The file.
        algorithm: The learner that the command names.
        learners: Configuration classes of all learners, by name.
        arguments: The command's arguments; a --launcher among them replaces the launcher of the file.

    Returns:
        Options of the run, of the learner and of the cluster's nodes.

    Raises:
        ConfigError: The file cannot be read, is for another learner, or has a key or value that is not valid.
    """
    given = _read(path)
    if given.pop(_ALGORITHM, algorithm) != algorithm:
        other = _read(path)[_ALGORITHM]
        raise ConfigError(f"{path} is for {other}, not for {algorithm}; use 'farstep train {other} --config {path}'.")
    in_file = chosen_launcher(["--launcher", str(given.get("launcher", "local"))])
    parts: list[type[Any]] = [RunConfig, learners[algorithm], ENGINES.get(in_file, SharingOptions)]
    types = {name: hint for part in parts for name, hint in _options(part)}
    owners = {f"'farstep train {name}'": kind for name, kind in learners.items()}
    owners |= {f"launcher: {name}": kind for name, kind in ENGINES.items()}
    values = {name: _converted(path, name, value, types, owners) for name, value in given.items()}
    nodes: type[EngineConfig | SharingOptions] = ENGINES.get(chosen_launcher(arguments, in_file), SharingOptions)
    return _unchecked(RunConfig, values), _unchecked(learners[algorithm], values), _unchecked(nodes, values)


def learner_in(path: Path) -> str | None:
    """Return the learner that a YAML file names; None if it names none. Raise `ConfigError` if it cannot be read."""
    name = _read(path).get(_ALGORITHM)
    return None if name is None else str(name)


def _read(path: Path) -> dict[str, Any]:
    yaml = require("yaml", "pyyaml", "--config", "safe_load")

    class Loader(yaml.SafeLoader):  # type: ignore[misc, name-defined]
        """Reads 3e-4 as a number, too; YAML 1.1 requires a decimal point."""

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("+-.0123456789"))
    try:
        text = path.read_text(encoding="utf-8")
        document = yaml.compose(text, Loader)
        found = yaml.load(text, Loader)  # a SafeLoader: it constructs no objects
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}. Pass a YAML file with options.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {_mistake(error)}.") from error
    except (ValueError, RecursionError) as error:  # a date or number that does not exist; lists nested too deeply
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{path} contains a {type(found).__name__}; expected options, such as 'env: CartPole-v1'.")
    _check_unique(path, ((key, str(key.value).replace("-", "_")) for key, _ in document.value))
    for _, value in document.value:
        if isinstance(value, yaml.MappingNode):
            _check_unique(path, ((key, str(key.value)) for key, _ in value.value))
    return {str(key).replace("-", "_"): value for key, value in found.items()}


def _check_unique(path: Path, keys: Iterable[tuple[Any, str]]) -> None:
    """Raise `ConfigError` if two keys of a mapping have the same name."""
    names: set[str] = set()
    for key, name in keys:
        if name in names:
            raise ConfigError(
                f"{path}, line {key.start_mark.line + 1}: {name} occurs twice; remove one of the entries."
            )
        names.add(name)


def _mistake(error: Any) -> str:
    """Return what a `YAMLError` says, with the numbers of the lines."""
    if (mark := getattr(error, "problem_mark", None)) is None:
        return " ".join(str(error).split())
    start = getattr(error, "context_mark", None)
    context = f" {error.context} that starts in line {start.line + 1}" if error.context and start is not None else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}{context}"


def _converted(path: Path, name: str, value: Any, types: Mapping[str, Any], owners: Mapping[str, type[Any]]) -> Any:
    """Convert a value to the type of its option."""
    if name not in types:
        having = [owner for owner, kind in owners.items() if name in dict(_options(kind))]
        near = difflib.get_close_matches(name, types, n=1)
        hint = f"did you mean {near[0]}?" if near else "'farstep train LEARNER -h' lists the options."
        if isinstance(value, dict):
            hint = "options are not grouped: write each one on a line of its own, without indentation."
        hint = f"it belongs to {' or '.join(having)}." if having else hint
        raise ConfigError(f"{path} has the unknown option {name!r}; {hint}")
    if name in _JSON and isinstance(value, dict):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise ConfigError(f"{path}: {name} has the key {odd[0]!r}, which is not text; put it in quotes.")
        try:
            return json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: {name} must have only numbers, text, lists and mappings: {error}.") from None
    try:
        # Not strict, because YAML reads 3e-4, which has no decimal point, as text.
        return msgspec.convert(value, types[name], strict=False, dec_hook=_as_kind)
    except (msgspec.ValidationError, TypeError) as error:
        raise ConfigError(f"{path}: {name} is {value!r}, which is not valid: {error}.") from None


def _as_kind(kind: type, value: Any) -> Any:
    return value if isinstance(value, kind) else kind(value)


def _options(kind: type[Any]) -> Iterator[tuple[str, Any]]:
    """Yield name and type of each option of a configuration, including nested configurations."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        if is_dataclass(hint := hints[field.name]):
            assert isinstance(hint, type)
            yield from _options(hint)
        else:
            yield field.name, hint


def _unchecked(kind: type[T], values: Mapping[str, Any], base: object = None) -> T:
    """Return a configuration with these values, without the checks of its constructor."""
    made: Any = object.__new__(kind)
    hints = get_type_hints(kind)
    for field in fields(kind):  # type: ignore[arg-type]
        default = _default(field) if base is None else getattr(base, field.name)
        nested = is_dataclass(hint := hints[field.name])
        value = _unchecked(hint, values, default) if nested else values.get(field.name, default)
        object.__setattr__(made, field.name, value)
    return made  # type: ignore[no-any-return]


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return tyro.MISSING_NONPROP if field.default is MISSING else field.default


# ---- writing ----


def as_yaml(algorithm: str, parts: Mapping[str, object]) -> str:
    """Return the options of a run as YAML: first the options that differ from their defaults, then the others.

    Args:
        algorithm: The learner.
        parts: Configurations by heading.

    Returns:
        The text of a file that `read_options` reads.
    """
    changed: list[str] = []
    rest: list[str] = []
    for heading, part in parts.items():
        defaults = dict(_values(_unchecked(type(part), {})))
        same: list[str] = []
        for name, value in _values(part):
            (same if value == defaults[name] else changed).append(f"{name}: {_scalar(_readable(name, value))}")
        rest += ["", f"# {heading}, as by default", *same] if same else []
    lines = [
        f"# Options of this run, written by farstep {VERSION}. To repeat the run:",
        f"#   farstep train {algorithm} --config FILE",
        "# Options on the command line take precedence. --resume reads config.json, not this file.",
        f"{_ALGORITHM}: {algorithm}",
        "",
        "# changed from their defaults",
        *changed,
        *rest,
    ]
    return "\n".join(lines) + "\n"


def _values(part: object) -> Iterator[tuple[str, Any]]:
    """Yield name and plain value of each option of a configuration, including nested configurations."""
    for field in fields(part):  # type: ignore[arg-type]
        value = getattr(part, field.name)
        if is_dataclass(value):
            yield from _values(value)
        else:
            yield field.name, msgspec.to_builtins(value, enc_hook=str)


def _readable(name: str, value: Any) -> Any:
    """Return JSON as a mapping if reading the mapping restores the same text."""
    if name in _JSON and value is not None and json.dumps(found := json.loads(value)) == value:
        return found
    return value


def _scalar(value: Any) -> str:
    """Return a value in YAML, on one line."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case float() if not math.isfinite(value):
            return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
        case float():
            mantissa, exponent, power = repr(value).partition("e")  # YAML needs a decimal point before an exponent
            return f"{mantissa}{'' if '.' in mantissa else '.0'}{exponent}{power}"
        case str() if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
            return value
        case str():
            return json.dumps(value, ensure_ascii=False)
        case Mapping():
            return f"{{{', '.join(f'{_scalar(key)}: {_scalar(entry)}' for key, entry in value.items())}}}"
        case list() | tuple():
            return f"[{', '.join(map(_scalar, value))}]"
        case _:
            return str(value)
