"""Ending the processes of engines that do not end by themselves."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from farstep.doctor.programs import Program
from farstep.launch.engines.engine import SETUP_FAILED, setup_lines
from farstep.launch.engines.engine_processes import EngineProcess, end_processes

pytestmark = pytest.mark.slow  # real processes

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); time.sleep(60)"
)


def test_sessions_of_programs_that_ignore_signals_end() -> None:
    sessions = [EngineProcess([sys.executable, "-c", STUBBORN], f"host{i}", b"") for i in range(3)]
    sessions.append(EngineProcess(["true"], "host3", b""))
    deadline = time.monotonic() + 30
    while not all("here" in session.tail() for session in sessions[:3]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    end_processes(sessions, patience_s=0.0)
    assert all(session.ended for session in sessions)
    assert sessions[0].tail() == "here"  # their output is still available


def test_processes_that_hold_the_output_of_a_program_end_with_it(tmp_path: Path) -> None:
    program = Program(["sh", "-c", f"sleep 60 & echo $! > {tmp_path}/pid; wait"])
    deadline = time.monotonic() + 30
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert program.end(time.monotonic()) == (None, "")
    holder = Path("/proc", (tmp_path / "pid").read_text().strip(), "stat")
    while is_alive(holder):  # SIGKILL was sent; the kernel takes a moment
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(("setup", "failed"), [("false", "false"), ("source {}/activate", ""), ("true", "")])
def test_a_setup_line_that_fails_is_named(setup: str, failed: str, tmp_path: Path) -> None:
    (tmp_path / "activate").write_text("false\ntrue\n")  # what others wrote has reasons of its own
    lines = [*setup_lines([setup.format(tmp_path), "true"]), f'echo "${{{SETUP_FAILED}-}}"']
    for command in (["bash", "-c", "\n".join(lines)], ["bash", str(tmp_path / "script")]):
        (tmp_path / "script").write_text("\n".join(lines))
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{failed}\n"
