"""Benchmarks that need no peers run, and write down what they found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    "command", ["scale.py --workers 4 --seconds 0.5 --steps 8", "bulk.py --rounds 1 --seconds 0.2"]
)
def test_a_benchmark_runs(command: str, tmp_path: Path) -> None:
    script, *words = command.split()
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *words, "--out", str(tmp_path / "found.json")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["command"].startswith(f"python benchmarks/{command}")
    assert found.get("rows") or found["megabytes_per_second"]["farstep, encrypted"]
