"""`farstep train` on a terminal: the address of its status page, the file with it, and `--no-status-page`."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from farstep.cli import main

pytestmark = pytest.mark.slow  # real processes

DEADLINE_S = 120.0
ENDLESS = (
    "train ppo --env CartPole-v1 --launcher in-process --num-envs 4 --num-steps 16 --total-steps 100000000 --name run"
)


class Terminal:
    """What a program prints on a terminal."""

    def __init__(self, descriptor: int) -> None:
        self.text = ""
        self._descriptor = descriptor

    def read_until(self, pattern: str) -> str:
        """Read until the text has this pattern; return the match."""
        deadline = time.monotonic() + DEADLINE_S
        while (found := re.search(pattern, self.text)) is None:
            assert self._read(deadline), self.text
        return found[0]

    def read_all(self) -> None:
        """Read until the program has closed the terminal."""
        deadline = time.monotonic() + DEADLINE_S
        while self._read(deadline):
            pass

    def _read(self, deadline: float) -> bool:
        """Read once; return False at the end."""
        readable, _, _ = select.select([self._descriptor], [], [], max(0.0, deadline - time.monotonic()))
        assert readable, f"nothing more was printed after: {self.text}"
        try:
            part = os.read(self._descriptor, 65536)
        except OSError:  # how Linux reports that the other side was closed
            return False
        self.text += part.decode(errors="replace")
        return bool(part)


@contextmanager
def training(folder: Path, *options: str) -> Iterator[Terminal]:
    """Context manager: train on a terminal; at the end, stop the run with Ctrl-C."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "farstep", *ENDLESS.split(), "--folder", str(folder), *options]
    try:
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs) as process:
            os.close(theirs)
            terminal = Terminal(ours)
            try:
                yield terminal
                process.send_signal(signal.SIGINT)
                terminal.read_all()
                assert process.wait(DEADLINE_S) == 130, terminal.text
            finally:
                process.kill()
    finally:
        os.close(ours)


def test_address_is_printed_and_stored_for_this_user_until_the_run_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run" / "status"
    with training(tmp_path) as terminal:
        address = terminal.read_until(r"(?<=status: )http://127\.0\.0\.1:\d+/\?token=[\w-]+(?=\r?\n)")
        terminal.read_until(r"run: ")  # the workers have started
        assert file.read_text() == address
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert main(["status", str(tmp_path / "run")]) == 0
        assert capsys.readouterr().out.splitlines()[0] == address
    assert not file.exists()


def test_run_without_a_page_prints_and_stores_no_address(tmp_path: Path) -> None:
    with training(tmp_path, "--no-status-page") as terminal:
        terminal.read_until(r"run: ")
        assert (tmp_path / "run" / "config.json").exists() and not (tmp_path / "run" / "status").exists()
    assert "status: " not in terminal.text and "token" not in terminal.text
