"""`farstep train` with an engine; a shell stands in for ssh, as in tests/contract/test_nodes.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from farstep.cli import main

pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("torch_in_workers")]
SHELL = """#!/bin/sh
[ "$1" = missing ] && exit 1
shift
exec sh -c "$*"
"""
TRAIN = ["train", "ppo", "--num-envs", "4", "--num-steps", "64"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shell").write_text(SHELL)
    (tmp_path / "shell").chmod(0o755)
    return tmp_path


def nodes(*hosts: str) -> list[str]:
    return ["--launcher", "ssh", "--ssh", str(Path("shell").absolute()), "--hosts", *hosts, "--workers-per-node", "1"]


def saved() -> Any:
    return json.loads(Path("runs/far/config.json").read_text())


def steps() -> list[int]:
    return sorted({json.loads(line)["step"] for line in Path("runs/far/metrics.jsonl").read_text().splitlines()})


def test_a_run_on_a_node_and_its_continuation() -> None:
    begin = ["--env", "CartPole-v1", "--name", "far", "--total-steps", "512", "--eval-every", "256"]
    assert main([*TRAIN, *begin, *nodes("one")]) == 0
    assert saved()["run"]["launcher"] == "ssh" and saved()["nodes"]["hosts"] == ["one"]
    # It is resumed on the same node, then on this machine, then on two nodes.
    resume = ["train", "ppo", "--resume", "runs/far", "--total-steps"]
    assert main([*resume, "768"]) == 0
    assert main([*resume, "1024", "--launcher", "local"]) == 0
    assert steps() == [256, 512, 768, 1024]
    assert "nodes" not in saved()
    assert main([*resume, "1280", *nodes("one", "two")]) == 0
    assert steps()[-1] == 1280 and saved()["nodes"]["hosts"] == ["one", "two"]


def test_a_run_without_a_node_that_never_comes() -> None:
    begin = ["--env", "CartPole-v1", "--name", "far", "--total-steps", "512", "--min-nodes", "1"]
    assert main([*TRAIN, *begin, *nodes("one", "missing")]) == 0
    assert steps() == [128, 256, 384, 512]
