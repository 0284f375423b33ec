"""Node daemons on this machine: a shell starts them in place of ssh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import farstep
from farstep.config.launch import SSHConfig
from farstep.testing import CountingEnv
from tests.cluster.checks import cluster
from tests.cluster.tables import ENDLESS

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


def on_nodes(
    folder: Path,
    nodes: int,
    most: int,
    workers: int = 2,
    env: Any = CountingEnv,
    lease_s: float = 4.0,
    relay: bool = False,
    **options: Any,
) -> farstep.ClusterEnv:
    """A cluster of nodes with one environment per worker; the episodes of `CountingEnv` never end."""
    config = node_config(folder, nodes, most, min_nodes=1, workers_per_node=workers, lease_s=lease_s, relay=relay)
    return cluster(env, envs=workers, config=config, env_kwargs=ENDLESS, **options)
