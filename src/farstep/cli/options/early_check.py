"""Checks the options of `farstep train` before torch is imported, which takes seconds."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar

import tyro

from farstep.cli.options.env_check import check_env
from farstep.cli.options.launchers import ENGINES, LAUNCHERS, SharingOptions, chosen_launcher
from farstep.cli.options.parsing import check_names, name_of, option_names, parse
from farstep.config.field_docs import show_fields
from farstep.config.launch import EngineConfig
from farstep.learners.options.run_config import RunConfig

CONFIGS = {
    "ppo": ("ppo", "PPOConfig"),
    "async-ppo": ("async_ppo", "AsyncPPOConfig"),
    "impala": ("impala", "ImpalaConfig"),
    "dqn": ("dqn", "DQNConfig"),
    "apex": ("dqn", "ApexConfig"),
    "sac": ("sac", "SACConfig"),
    "aride": ("aride", "ArideConfig"),
}
"""Module and name of each learner's configuration. The modules import torch."""
_FILES = ("--config", "--resume")
E = TypeVar("E", bound=EngineConfig | SharingOptions)


@show_fields
@dataclass(frozen=True, kw_only=True)
class _Shared(Generic[E]):
    """The options that do not depend on the learner."""

    run: tyro.conf.OmitArgPrefixes[RunConfig]
    nodes: tyro.conf.OmitArgPrefixes[E]


def check_early(name: str, arguments: Sequence[str]) -> None:
    """Check names of options, and the values of those that all learners share.

    Args:
        name: The learner.
        arguments: The arguments after its name. Nothing is checked if they ask for help; values are not checked if a
            file has further options, or if options belong to another learner or launcher.

    Raises:
        ConfigError: As `parse_options` and `check_env`.
    """
    options = [each for each in arguments if re.match("--?[a-z]", each)]  # without negative numbers
    command, given = f"farstep train {name}", set(map(name_of, options))
    if {"--help", "-h"} & given or not arguments or not arguments[0].startswith("--"):
        return
    nodes: Any = ENGINES.get(chosen_launcher(arguments), SharingOptions)
    shared = [*option_names(RunConfig), *option_names(nodes)]
    known = [*shared, *_FILES, "--trust", "--no-trust", *sorted(options_of(name))]
    if foreign := given - set(known):
        others = {option for config in LAUNCHERS.values() for option in option_names(config)}
        check_names(known, sorted(foreign - others.union(*map(options_of, CONFIGS))), command)
    elif given.isdisjoint(_FILES):
        check_env(parse(_Shared[nodes], _only(shared, arguments), command).run)


def _only(options: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Return these options, with their values."""
    found: list[str] = []
    is_wanted = False
    for argument in arguments:
        if argument.startswith("--"):
            is_wanted = name_of(argument) in options
        if is_wanted:
            found.append(argument)
    return found


def options_of(learner: str) -> frozenset[str]:
    """Return what `option_names` returns for the configuration of a learner, without importing it."""
    module, name = CONFIGS[learner]
    return frozenset(_options_in(f"farstep.learners.{module}", name))


@cache
def _options_in(module: str, name: str) -> set[str]:
    """Read the options of a dataclass, including nested configurations and bases, from its source."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: node.module for node in imports for alias in node.names}
    found: set[str] = set()
    (definition,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    nested = [base.id for base in definition.bases if isinstance(base, ast.Name)]
    for node in definition.body:
        match node:
            case ast.AnnAssign(annotation=ast.Name(id=kind)) if kind.endswith("Config"):
                nested.append(kind)
            case ast.AnnAssign(target=ast.Name(id=field), annotation=annotation):
                option = field.replace("_", "-")
                found |= {f"--{option}", *([f"--no-{option}"] if ast.unparse(annotation) == "bool" else [])}
    return found.union(*(_options_in(homes.get(each) or module, each) for each in nested))
