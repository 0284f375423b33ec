"""A helper process that cleans up what the head left on a cluster, if the head cannot: it was killed.

It reads from a pipe whose other end only the head holds: what to run, and what need not be run any more. When the pipe
ends it runs what is left, and ends. It is started as a file, with nothing of farstep imported.
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
_PAUSE_S = 2.0
_UNHEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Whoever stops the head may signal all that it started; the helper ends by itself."""


class Guardian:
    """The head's side."""

    def __init__(self, deadline_s: float = _DEADLINE_S, environment: Mapping[str, str] | None = None) -> None:
        self._deadline_s, self._environment = deadline_s, environment
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._telling = threading.Lock()
        self._kept: set[str] = set()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def promise(self, key: str, command: Sequence[str]) -> None:
        """When this process is gone, `command` is run, again and again until it succeeds or the deadline passes."""
        if self._process is None:
            self._start()
        self._kept.add(key)
        self._tell({"promise": key, "command": list(command)})

    def release(self, key: str) -> None:
        """The command need not be run any more."""
        if key in self._kept:
            self._kept.discard(key)
            self._tell({"release": key})

    def close(self) -> None:
        """Promises that were not released are kept, by a process that nobody waits for."""
        if self._process is None:
            return
        self.forget()
        if not self._kept:
            self._process.wait()
        self._process = None

    def forget(self) -> None:
        """Let go of the pipe; in a fork of the head, because the helper must not wait for the head's child."""
        _guardians.discard(self)
        with self._telling:
            if self._pipe >= 0:
                os.close(self._pipe)
                self._pipe = -1

    def _start(self) -> None:
        read, self._pipe = os.pipe()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _UNHEARD)  # inherited: it hears none before it can ignore it
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
            self.forget()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(read)
        _guardians.add(self)

    def _tell(self, message: Mapping[str, object]) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._telling, contextlib.suppress(BrokenPipeError):  # it was killed: there is no net, and the run goes on
            while line and self._pipe >= 0:
                line = line[os.write(self._pipe, line) :]


_guardians: weakref.WeakSet[Guardian] = weakref.WeakSet()


def _forget_all() -> None:
    for guardian in list(_guardians):
        guardian._telling = threading.Lock()  # a thread that is not in this process may have held it
        guardian.forget()


os.register_at_fork(after_in_child=_forget_all)


# ---- the helper process ----


def guard(lines: Iterable[bytes], deadline_s: float) -> None:
    """Read promises until the head is gone, then keep them."""
    promised: dict[str, list[str]] = {}
    for line in lines:
        try:
            message = json.loads(line)
        except ValueError:
            continue  # cut off in the middle: the head was killed there
        if "promise" in message:
            promised[message["promise"]] = message["command"]
        else:
            promised.pop(message["release"], None)
    end = time.monotonic() + deadline_s
    while promised and time.monotonic() < end:
        promised = {key: command for key, command in promised.items() if not _succeeds(command, end)}
        if promised:
            time.sleep(min(_PAUSE_S, max(0.0, end - time.monotonic())))


def _succeeds(command: Sequence[str], end: float) -> bool:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=max(0.0, end - time.monotonic()))
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def main() -> None:
    for number in _UNHEARD:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _UNHEARD)
    guard(sys.stdin.buffer, float(sys.argv[1]))


if __name__ == "__main__":
    main()
