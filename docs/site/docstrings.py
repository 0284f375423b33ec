"""An extension of griffe, which reads docstrings: examples are code, and options of a dataclass are its arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from textwrap import indent
from typing import Any

import griffe

EXAMPLE = re.compile(r"^(Example:\n)((?:(?: +.*)?\n?)+)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites docstrings of the package."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Rewrite the docstrings of all classes and functions, and the defaults of fields."""
        for each in objects(pkg):
            if isinstance(each, griffe.Attribute) and str(each.value).startswith("or_mapping("):
                each.value = each.value.arguments[0]  # the default; a mapping is accepted too, as the text says
            if docstring := each.docstring:
                docstring.value = EXAMPLE.sub(fenced, docstring.value)
                if isinstance(each, griffe.Class) and (options := "".join(described_options(each))):
                    docstring.value += f"\n\nArgs:\n{options}"


def objects(parent: griffe.Object) -> Iterator[griffe.Object]:
    """Yield an object and all that it contains."""
    yield parent
    for member in parent.members.values():
        if isinstance(member, griffe.Object):
            yield from objects(member)


def fenced(found: re.Match[str]) -> str:
    """Return the section with its code in a fenced block."""
    code = found[2].rstrip()
    language = "pycon" if ">>>" in code else "python"
    return f"{found[1]}    ```{language}\n{code}\n    ```\n"


def described_options(each: griffe.Class) -> Iterator[str]:
    """Yield the public fields of a dataclass and of its bases, each with its docstring."""
    owners = [owner for owner in [*reversed(each.mro()), each] if is_dataclass(owner)] if is_dataclass(each) else []
    fields = {name: field for owner in owners for name, field in owner.members.items()}  # attributes has inherited ones
    for name, field in fields.items():
        is_field = isinstance(field, griffe.Attribute) and field.annotation and "property" not in field.labels
        if is_field and "ClassVar" not in str(field.annotation) and field.docstring and not name.startswith("_"):
            yield indent(f"{name}: {indent(field.docstring.value, '    ').lstrip()}\n", "    ")


def is_dataclass(each: griffe.Object) -> bool:
    """Return whether a class has the decorator; labels are set later."""
    return isinstance(each, griffe.Class) and any("dataclass" in str(found.value) for found in each.decorators)
