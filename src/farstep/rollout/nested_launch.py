"""Prevents launches inside a worker, and while the head imports a module that workers import.

Otherwise, a module that launches on import would start workers endlessly: each worker imports the module again.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Iterator
from types import FrameType

from farstep.errors import LaunchError

_LOOP = "farstep.worker.loop"
_VARIABLE = "FARSTEP_WORKER"
"""Environment variable of worker processes; processes that environments start inherit it."""


def mark_worker_process() -> None:
    """Reject every launch in this process and in the processes that it starts."""
    os.environ[_VARIABLE] = str(os.getpid())


def import_as_worker(module: str) -> None:
    """Import a module in the head as workers do. Ignore its errors, because workers report them with their traceback.

    Raises:
        LaunchError: Importing the module launches.
    """
    try:
        importlib.import_module(module)
    except LaunchError:
        raise
    except (Exception, SystemExit):
        return


def refuse_nested_launch() -> None:
    """Refuse to launch inside a worker, or inside a process that a worker started.

    Raises:
        LaunchError: A worker is launching. The message has the remedy and, if an import launches, the name of the
            module.
    """
    frames = list(_frames())
    in_process = any(
        frame.f_globals.get("__name__") == _LOOP or frame.f_code is import_as_worker.__code__ for frame in frames
    )
    if not in_process and _VARIABLE not in os.environ:
        return
    if (module := _imported_module(frames)) is not None:
        raise LaunchError(
            f"importing the module {module} launches farstep. A worker imports this module, so workers would start "
            "workers endlessly. Put the launch under if __name__ == '__main__':, or into a function that only the "
            "learner's program calls."
        )
    raise LaunchError(
        "the code of an environment or an agent launches farstep inside a worker, which is not allowed. Launch in the "
        "learner's program. If an environment starts a process or submits a job that must launch, start it without "
        f"the environment variable {_VARIABLE}."
    )


def _frames() -> Iterator[FrameType]:
    """The caller's stack, innermost frame first. It shows whether the caller is a worker inside the head's process. A
    global flag would be simpler, but Ctrl-C could leave it in the wrong state.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _imported_module(frames: Iterable[FrameType]) -> str | None:
    """The innermost module that is being imported on this stack, with file and line; None if there is none."""
    for frame in frames:
        name = frame.f_globals.get("__name__")
        if name == _LOOP:
            return None
        if frame.f_code.co_name == "<module>" and name not in (None, "__main__"):
            return f"{name!r} ({frame.f_code.co_filename}, line {frame.f_lineno})"
    return None
