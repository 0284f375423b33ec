"""Checks the environment of a run before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from farstep.learners.options.run_config import RunConfig
from farstep.rollout.sources import Source

_SINGLE = {"--env": "env", "--env-type": "env_type", "--launcher": "launcher"}
"""Options with one value that decide which environment is built and where."""


def check_env(run: RunConfig) -> None:
    """Raise `ConfigError` if workers on this machine could certainly not build the environment of a run."""
    if run.launcher in ("local", "in-process"):  # nodes may have other packages
        Source.of(run.env_config(stagger=None, inference=None)).check(load=True)


def check_named_env(arguments: Sequence[str]) -> None:
    """Check the environment that the options of `farstep train` name. This needs no learner, and so no torch, which
    takes seconds to import.

    Args:
        arguments: The arguments after `farstep train`. Nothing is checked if they name a file with further options,
            ask for help, or lack a value.

    Raises:
        ConfigError: As `check_env`.
    """
    given = _values(arguments)
    single = {field: given[option] for option, field in _SINGLE.items() if option in given}
    if "env" not in single or {"--config", "--resume", "--help", "-h"} & given.keys():
        return
    if all(len(values) == 1 for values in single.values()):
        options: dict[str, Any] = {field: value for field, (value,) in single.items()}
        check_env(RunConfig(**options, wrappers=tuple(given.get("--wrappers", ()))))


def _values(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each option."""
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for argument in arguments:
        if argument.startswith("-"):
            name, equals, value = argument.partition("=")
            values = found[name.replace("_", "-")] = [value] if equals else []
        else:
            values.append(argument)
    return found
