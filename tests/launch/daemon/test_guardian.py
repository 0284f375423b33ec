"""The guardian runs registered commands when the head has ended, and only then."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from farstep.launch.daemon.guardian import Guardian, guard

pytestmark = pytest.mark.slow  # real processes

HEAD = """
import signal, sys
from farstep.launch.daemon.guardian import Guardian
guardian = Guardian()
guardian.register("kept", ["touch", sys.argv[1] + "/kept"])
guardian.register("released", ["touch", sys.argv[1] + "/released"])
guardian.unregister("released")
print(guardian.pid, flush=True)
signal.pause()
"""


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, f"the guardian {pid} does not end"
        time.sleep(0.01)


def test_guardian_runs_the_registered_commands_of_a_killed_head(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HEAD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as head:
        assert head.stdout is not None
        guardian = int(head.stdout.readline())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(guardian, number)
        assert not list(tmp_path.iterdir())
        head.kill()
    wait_until_gone(guardian)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_guardian_without_commands_ends_at_once(tmp_path: Path) -> None:
    guardian = Guardian()
    guardian.close()
    guardian = Guardian()
    guardian.register("a", ["touch", str(tmp_path / "a")])
    guardian.unregister("a")
    guardian.unregister("b")
    guardian.close()
    guardian.close()
    assert not list(tmp_path.iterdir())


def test_fork_of_the_head_does_not_delay_the_guardian(tmp_path: Path) -> None:
    guardian = Guardian()
    guardian.register("a", ["true"])
    pid = guardian.pid
    assert pid is not None
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        guardian.close()
        wait_until_gone(pid)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_failing_command_is_retried_until_the_deadline(tmp_path: Path) -> None:
    script = tmp_path / "second_time"
    script.write_text('#!/bin/sh\n[ -e "$0.once" ] && touch "$0.twice" || { touch "$0.once"; exit 1; }\n')
    script.chmod(0o755)
    guard([b'{"register": "a", "command": ["%s"]}\n' % str(script).encode()], 60.0)
    assert (tmp_path / "second_time.twice").exists()


def test_guardian_gives_up_commands_that_cannot_succeed() -> None:
    lines = b'{"register": "a", "command": ["/nowhere"]}\n{"register": "b", "command": ["sleep", "60"]}\n{"promi'
    guard(io.BytesIO(lines), 0.3)
