"""Shows the docstring of every field of a configuration in `help()`.

Python ignores a string below a dataclass field. `show_fields` reads these strings from the source and adds them to the
docstring of the class, where `help()` and the command line's `--help` find them. Each text is written only once.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
from typing import Any, TypeVar, cast

T = TypeVar("T")
_WIDTH = 100
_NO_BREAK = "\0"
"""Replaces a space at which a line must not be broken."""


def show_fields(kind: type[T]) -> type[T]:
    """Class decorator, above `@dataclass`: add the docstrings of the fields to the docstring of the class.

    The source is read when `__doc__` is first used, not at import. Fields without a docstring are left out. If the
    source is missing, all fields are listed without their docstrings.
    """
    cast(Any, kind).__doc__ = _LazyDoc(kind, kind.__doc__ or "")
    return kind


def field_docs(kind: type) -> dict[str, str]:
    """Return the docstrings of a dataclass's fields, including inherited fields; skip fields without a docstring."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            found |= _docs_in_source(base)
    return found


class _LazyDoc:
    """Descriptor for the `__doc__` of a class."""

    def __init__(self, kind: type, summary: str) -> None:
        self._kind, self._summary = kind, summary
        self._text: str | None = None

    def __get__(self, instance: object, owner: type) -> str:
        if self._text is None:
            docs = field_docs(self._kind)
            fields = [each for each in dataclasses.fields(cast(Any, self._kind)) if each.name in docs or not docs]
            entries = [_entry(each, docs.get(each.name, "")) for each in fields]
            self._text = "\n".join([inspect.cleandoc(self._summary), "", "Attributes:", *entries])
        return self._text


def _docs_in_source(kind: type) -> dict[str, str]:
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError, SyntaxError):  # no source: bytecode only, or a class made at run time
        return {}
    found: dict[str, str] = {}
    for pair in itertools.pairwise(definition.body if isinstance(definition, ast.ClassDef) else ()):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


def _entry(field: dataclasses.Field[Any], text: str) -> str:
    default: Any = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if default is dataclasses.MISSING:
        shown = ""
    elif dataclasses.is_dataclass(default) and default == cast(Any, type(default))():
        shown = f", default {type(default).__name__}()"  # without the values of its fields
    else:
        shown = f", default {default!r}"
    kind = re.sub(r"^OrMapping\[(.*)\]$", r"\1 | Mapping", str(field.type))
    line = f"{field.name} ({kind}{shown}): {text}"
    # tyro joins only lines that start with a letter, so break lines before letters only.
    wrapped = textwrap.fill(
        re.sub(r" (?![^\W\d_])", _NO_BREAK, line),
        _WIDTH,
        initial_indent=" " * 4,
        subsequent_indent=" " * 8,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return wrapped.replace(_NO_BREAK, " ")
