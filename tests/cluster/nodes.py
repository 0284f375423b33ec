"""Node daemons on this machine: a shell starts them in place of ssh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from farstep.config.launch import SSHConfig

SHELL = """#!/bin/sh
shift
exec sh -c "$*"
"""


def shell_in(folder: Path) -> str:
    """Write a program that takes the arguments of ssh, and runs the command on this machine."""
    shell = folder / "shell"
    shell.write_text(SHELL)
    shell.chmod(0o755)
    return str(shell)


def node_config(folder: Path, nodes: int, max_nodes: int | None = None, **options: Any) -> SSHConfig:
    hosts = [f"host{i}" for i in range(max_nodes or nodes)]
    return SSHConfig(hosts=hosts, ssh=(shell_in(folder),), nodes=nodes, max_nodes=max_nodes, **options)
