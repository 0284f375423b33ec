"""The launchers that a command line can name, and the options of each launcher."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from farstep.cli.options.parsing import check_belonging
from farstep.config.field_docs import show_fields
from farstep.config.kubernetes import KubernetesConfig
from farstep.config.launch import (
    EngineConfig,
    InProcessConfig,
    LaunchConfig,
    LocalConfig,
    RayConfig,
    SlurmConfig,
    SSHConfig,
)
from farstep.errors import ConfigError, unknown_name

ENGINES: dict[str, type[EngineConfig]] = {
    "slurm": SlurmConfig,
    "ssh": SSHConfig,
    "ray": RayConfig,
    "kubernetes": KubernetesConfig,
}
"""Launchers that start a node daemon on each of several nodes."""
LAUNCHERS: dict[str, type[LaunchConfig]] = {"local": LocalConfig, "in-process": InProcessConfig, **ENGINES}


def chosen_launcher(arguments: Sequence[str], default: str = "local") -> str:
    """Return the launcher that `--launcher` names. Find it before parsing, because it decides which other options
    exist."""
    name = default
    for i, argument in enumerate(arguments):
        flag, _, value = argument.partition("=")
        if flag == "--launcher":
            name = value or "".join(arguments[i + 1 : i + 2])
    if name not in LAUNCHERS:
        raise ConfigError(unknown_name("launcher", name, LAUNCHERS))
    return name


def check_options(kind: Any, arguments: Sequence[str], command: str, launcher: str) -> None:
    """Raise `ConfigError` for an option that only other launchers have."""
    here = LAUNCHERS.keys() - ENGINES.keys()
    others = {
        f"--launcher {name}": config
        for name, config in LAUNCHERS.items()
        if not {name, launcher} <= here  # do not suggest an option of one local launcher for the other
    }
    check_belonging(kind, arguments, f"'{command}' with --launcher {launcher}", others)


@show_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class SharingOptions:
    """Options of a launcher on this machine, in addition to the options of the run."""

    coordinator: str | None = None
    """Name or path of the coordinator whose slots this run shares with others (farstep coordinator start)."""
    priority: int = 1
    """Share of the coordinator's slots relative to other runs, from 1 to 100."""
    min_workers: int = 1
    """Number of workers without which the run waits for slots of the coordinator."""
