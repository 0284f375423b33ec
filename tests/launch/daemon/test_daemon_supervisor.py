"""The supervisor of a node daemon, in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys

KILLED_ONCE = """
import os
import signal

from farstep.launch.daemon import supervisor

wait = os.waitpid


def reclaimed(pid, options):
    ended = wait(pid, options)
    os.kill(os.getpid(), signal.SIGTERM)
    return ended


os.waitpid = reclaimed
shared = supervisor.keep_alive(3, 1)
if not shared[0]:
    shared[0] = 1
    os.kill(os.getpid(), signal.SIGKILL)
signal.pause()
"""


def test_a_node_that_is_reclaimed_just_when_its_daemon_was_killed_ends() -> None:
    """The signal reaches the daemon that was started meanwhile, or none is started."""
    ended = subprocess.run([sys.executable, "-c", KILLED_ONCE], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in ended.stderr
    assert ended.returncode in (128 + signal.SIGKILL, 128 + signal.SIGTERM)
