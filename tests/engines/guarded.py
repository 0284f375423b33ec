"""Base of all engines of the tests: processes that do not outlive the test, deadlines, a folder, free ports."""

from __future__ import annotations

import os
import random
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

_GUARD = Path(__file__).with_name("guard.py")
_TAIL_LINES = 30


class EngineError(RuntimeError):
    """An engine failed to do what a test requires."""


class EngineMissing(EngineError):
    """This machine cannot run an engine, as it is."""


class Guarded(subprocess.Popen[Any]):
    """A program that dies with this process and takes all that it started with it, daemons too.

    `send_signal`, `terminate` and `kill` mean the program, not the guard around it (and `kill`, SIGSTOP and SIGCONT
    all that the program started). A program that cannot be run ends with 127 and says why on its stderr.
    """

    def __init__(self, command: Sequence[str | Path], namespaces: Sequence[int] = (), **options: Any) -> None:
        control, self._control = os.pipe()
        self._open = True
        joined = ",".join(map(str, namespaces)) or "-"
        guard = [sys.executable, "-I", "-S", str(_GUARD), str(control), joined, *map(str, command)]
        passed = (control, *namespaces, *options.pop("pass_fds", ()))
        try:
            super().__init__(guard, pass_fds=passed, start_new_session=True, **options)
        except BaseException:
            self._close()
            raise
        finally:
            os.close(control)

    def send_signal(self, sig: int) -> None:
        if self.poll() is None and self._open:
            try:
                os.write(self._control, bytes([sig]))
            except BrokenPipeError:
                pass  # it is ending

    def end(self, timeout_s: float = 20.0) -> None:
        """Kills what is left and waits until it is gone; may be called again."""
        self._close()
        try:
            self.wait(timeout_s)
        finally:
            for stream in (self.stdin, self.stdout, self.stderr):
                if stream is not None:
                    stream.close()

    def _close(self) -> None:
        if self._open:
            self._open = False
            os.close(self._control)


class Engine:
    """A context manager with a temporary folder; `_start` starts the rest, and what it has put on `_stack` is ended."""

    parent = "/tmp"
    """Where the folder is. Independent of TMPDIR, because the path of a Unix socket has at most 107 bytes."""

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="farstep-", dir=self.parent))
            self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        raise NotImplementedError

    def _guarded(self, process: Guarded) -> Guarded:
        self._stack.callback(process.end)
        return process


def require(package: str, *programs: str) -> list[str]:
    """Paths of programs; raises if one is not there, and says which Debian package has it."""
    paths = [shutil.which(program, path=system_path()["PATH"]) for program in programs]
    for program, path in zip(programs, paths, strict=True):
        if path is None:
            raise EngineMissing(f"{program} is missing: apt-get install --no-install-recommends {package}")
    return [path for path in paths if path is not None]


def require_root(what: str) -> None:
    if os.geteuid() != 0:
        raise EngineMissing(f"{what} need root")


def system_path() -> dict[str, str]:
    """The environment, with the folders in which Debian has its daemons."""
    return {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"}


def wait_until(
    done: Callable[[], bool],
    what: str,
    timeout_s: float = 30.0,
    logs: Iterable[Path] = (),
    alive: Iterable[subprocess.Popen[Any]] = (),
    pause_s: float = 0.05,
) -> None:
    """Returns when `done()`; raises with the end of `logs` if that takes too long, or if one of `alive` has ended."""
    deadline = time.monotonic() + timeout_s
    while not done():
        ended = [process.returncode for process in alive if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            why = f"a process ended with {ended[0]}" if ended else f"not after {timeout_s:g} s"
            raise EngineError(f"waited for {what}: {why}{''.join(map(tail, logs))}")
        time.sleep(pause_s)


def expect_line(process: subprocess.Popen[str], wanted: str, what: str, timeout_s: float = 20.0) -> None:
    """Waits for a process to write a line; raises if it is another one, or takes too long."""
    assert process.stdout is not None and process.stderr is not None
    ready, _, _ = select.select([process.stdout], [], [], timeout_s)
    line = process.stdout.readline().strip() if ready else ""
    if line != wanted:
        process.kill()
        raise EngineError(f"{what} said {line!r} instead of {wanted!r}: {process.stderr.read()}")


def tail(log: Path) -> str:
    """The last lines of a log, with its name."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError as error:
        lines = [str(error)]
    return "\n".join([f"\n--- {log.name}", *lines])


def free_ports(number: int) -> list[int]:
    """Free ports below the ephemeral range and above the ports that Ray assigns."""
    found: list[int] = []
    while len(found) < number:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found
