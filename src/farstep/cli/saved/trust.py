"""Refuses to execute code that a run's options name, unless this user wrote the options or passed --trust."""

from __future__ import annotations

from farstep.cli.options.launchers import ENGINES
from farstep.errors import RunError
from farstep.learners.options.run_config import RunConfig
from farstep.observe.run_folder import RunFolder


def check_trusted(folder: RunFolder, run: RunConfig, why_not: str, trust: bool, command: str) -> None:
    """Raise `RunError` if `why_not` (from `RunFolder.read_signed_config`) is not empty and `trust` is False."""
    if not why_not or trust:
        return
    named = [f"the {run.env_type} environment {run.env!r}", *(f"the wrapper {wrapper!r}" for wrapper in run.wrappers)]
    if run.launcher in ENGINES:
        named.append(f"commands on nodes of --launcher {run.launcher}")
    raise RunError(
        f"{folder.config_file} may not be yours: {why_not}. '{command}' would execute the code that the file names: "
        f"{', '.join(named)}. Read the file; if you trust its author, add --trust (docs/security.md explains this)."
    )
