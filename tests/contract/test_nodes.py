"""Launchers with nodes keep the contract, too. Here nodes are processes of this machine, through the engine of ssh with
a shell in its place; real engines have files of their own in tests/cluster."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from farstep.launch_config import SSHConfig
from farstep.testing import check_launcher

SHELL = """#!/bin/sh
shift
exec sh -c "$*"
"""


def kill_agent(node: dict[str, Any]) -> None:
    os.kill(node["pid"], signal.SIGKILL)


def config(folder: Path, nodes: int = 1, max_nodes: int | None = None, **options: Any) -> SSHConfig:
    shell = folder / "shell"
    shell.write_text(SHELL)
    shell.chmod(0o755)
    hosts = [f"host{i}" for i in range(max_nodes or nodes)]
    return SSHConfig(hosts=hosts, ssh=(str(shell),), nodes=nodes, max_nodes=max_nodes, **options)


@pytest.mark.timeout(300)
def test_agents_in_place_of_nodes(tmp_path: Path) -> None:
    check_launcher(functools.partial(config, tmp_path), kill_node=kill_agent)
