"""Runs programs with a deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence


class Program:
    """A running program. Its output goes to a file, because a child that keeps a pipe open would block the reader."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._output = tempfile.TemporaryFile(prefix="farstep-doctor-")  # noqa: SIM115 - closed by `end`
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except BaseException:
            self._output.close()
            raise

    def end(self, deadline: float) -> tuple[int | None, str]:
        """Wait until the deadline, then kill the program and all its children.

        Returns:
            The exit status (None if the program was killed), and the output.
        """
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(max(0.1, deadline - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with self._output as output:
            output.seek(0)
            return status, output.read().decode(errors="replace").strip()
