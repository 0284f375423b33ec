"""The base class of all configurations."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Generic, Self, TypeVar, cast, get_args

from farstep.errors import ConfigError, unknown_name

T = TypeVar("T")

if TYPE_CHECKING:

    class OrMapping(Generic[T]):
        """Type of a field that holds a `T`. Its constructor argument may also be a mapping of the options of `T`."""

        def __get__(self, instance: object, owner: type) -> T: ...

        def __set__(self, instance: object, value: T | Mapping[str, object]) -> None: ...

    def or_mapping(default: T) -> OrMapping[T]:
        """Return the default of a field of type `OrMapping`."""
else:
    OrMapping = Annotated[T, "or a mapping of its options"]

    def or_mapping(default):
        return default


class Options:
    """Base class of the configurations: construction from a mapping, and checks of values."""

    def __new__(cls, *values: object, **options: object) -> Self:
        """Reject unknown options, and name the nearest known one."""
        known = [field.name for field in dataclasses.fields(cast(Any, cls)) if field.init]
        for name in options:
            if name not in known:
                raise ConfigError(unknown_name(f"option of {cls.__name__}", name, known))
        return super().__new__(cls)

    @classmethod
    def of(cls, value: Self | Mapping[str, object] | None) -> Self:
        """Return `value` as this kind of configuration.

        Args:
            value: A configuration (returned unchanged), a mapping of options, or None for the defaults.

        Returns:
            The configuration.

        Raises:
            ConfigError: `value` is something else, or its options are invalid.
        """
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
        kind = numbers.Integral if isinstance(minimum, int) else numbers.Real  # these include NumPy's types
        if not isinstance(got, kind) or isinstance(got, bool) or not float(got) >= minimum:
            what = "an integer" if isinstance(minimum, int) else "a number"
            raise ConfigError(f"{type(self).__name__}.{field} is {got!r}; it must be {what} of at least {minimum}.")
        if isinstance(got, numbers.Integral):
            object.__setattr__(self, field, int(got))  # NumPy's integers cannot be encoded
