"""What all configurations share."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping
from typing import Any, Self, cast, get_args

from farstep.errors import ConfigError, unknown_name


class Options:
    """What the configurations share: construction from a mapping, names of options, checks of literals."""

    def __new__(cls, *values: object, **options: object) -> Self:
        """Unknown options are refused by name, with the nearest."""
        known = [field.name for field in dataclasses.fields(cast(Any, cls)) if field.init]
        for name in options:
            if name not in known:
                raise ConfigError(unknown_name(f"option of {cls.__name__}", name, known))
        return super().__new__(cls)

    @classmethod
    def of(cls, value: Self | Mapping[str, object] | None) -> Self:
        """`value` itself, or a configuration made from a mapping."""
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"expected a {cls.__name__} or a mapping of its fields, got {value!r}.")
        return cls(**{str(key): option for key, option in value.items()})

    def _one_of(self, field: str, literal: object) -> None:
        got = getattr(self, field)
        if got not in get_args(literal):
            raise ConfigError(unknown_name(f"{field} of {type(self).__name__}", str(got), get_args(literal)))

    def _at_least(self, field: str, minimum: float) -> None:
        got: Any = getattr(self, field)
        kind = numbers.Integral if isinstance(minimum, int) else numbers.Real  # NumPy's numbers are both
        if not isinstance(got, kind) or isinstance(got, bool) or not float(got) >= minimum:
            what = "an integer" if isinstance(minimum, int) else "a number"
            raise ConfigError(f"{type(self).__name__}.{field} is {got!r}; it must be {what} of at least {minimum}.")
        if isinstance(got, numbers.Integral):
            object.__setattr__(self, field, int(got))  # NumPy's integers do not travel
