"""A helper process that cleans up after a killed head, e.g. cancels its jobs on a cluster.

The head registers and unregisters commands through a pipe; only the head holds the write end. When the pipe closes, the
helper runs the commands that are still registered, and exits. The helper runs this file directly and imports nothing
else of farstep.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence

_DEADLINE_S = 120.0
"""Seconds during which failing commands are retried."""
_PAUSE_S = 2.0
"""Seconds between two attempts."""
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that a user or an engine may send to the head and all its children; the helper must survive them."""


class Guardian:
    """Starts the helper process and sends it commands; used in the head."""

    def __init__(self, deadline_s: float = _DEADLINE_S, environment: Mapping[str, str] | None = None) -> None:
        self._deadline_s, self._environment = deadline_s, environment
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._pipe_lock = threading.Lock()
        self._registered: set[str] = set()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def register(self, key: str, command: Sequence[str]) -> None:
        """Run `command` after this process has ended. Retry until it succeeds or the deadline passes."""
        if self._process is None:
            self._start()
        self._registered.add(key)
        self._send({"register": key, "command": list(command)})

    def unregister(self, key: str) -> None:
        """Cancel a registered command."""
        if key in self._registered:
            self._registered.discard(key)
            self._send({"unregister": key})

    def close(self) -> None:
        """Close the pipe. Do not wait for the helper if it still has commands to run."""
        if self._process is None:
            return
        self.close_pipe()
        if not self._registered:
            self._process.wait()
        self._process = None

    def close_pipe(self) -> None:
        """Close the write end. Forks of the head also call this; otherwise they would keep the pipe open."""
        _guardians.discard(self)
        with self._pipe_lock:
            if self._pipe >= 0:
                os.close(self._pipe)
                self._pipe = -1

    def _start(self) -> None:
        read, self._pipe = os.pipe()
        before = signal.pthread_sigmask(
            signal.SIG_BLOCK, _IGNORED
        )  # the helper inherits the mask, until it ignores these signals
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(self._deadline_s)],
                stdin=read,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **(self._environment or {})},
            )
        except BaseException:
            self.close_pipe()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(read)
        _guardians.add(self)

    def _send(self, message: Mapping[str, object]) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._pipe_lock, contextlib.suppress(BrokenPipeError):  # the helper may have been killed
            while line and self._pipe >= 0:
                line = line[os.write(self._pipe, line) :]


_guardians: weakref.WeakSet[Guardian] = weakref.WeakSet()


def _close_all() -> None:
    for guardian in list(_guardians):
        guardian._pipe_lock = threading.Lock()  # a thread that does not exist in the fork may have held the lock
        guardian.close_pipe()


os.register_at_fork(after_in_child=_close_all)


# ---- the helper process ----


def guard(lines: Iterable[bytes], deadline_s: float) -> None:
    """Read registrations until the head closes the pipe, then run the registered commands."""
    registered: dict[str, list[str]] = {}
    for line in lines:
        try:
            message = json.loads(line)
        except ValueError:
            continue  # the head was killed while writing this line
        if "register" in message:
            registered[message["register"]] = message["command"]
        else:
            registered.pop(message["unregister"], None)
    end = time.monotonic() + deadline_s
    while registered and time.monotonic() < end:
        registered = {key: command for key, command in registered.items() if not _succeeds(command, end)}
        if registered:
            time.sleep(min(_PAUSE_S, max(0.0, end - time.monotonic())))


def _succeeds(command: Sequence[str], end: float) -> bool:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=max(0.0, end - time.monotonic()))
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def main() -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    guard(sys.stdin.buffer, float(sys.argv[1]))


if __name__ == "__main__":
    main()
