"""Prevents launches inside a worker.

Otherwise, a module that launches on import would start workers that import it and launch again, without end.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from types import FrameType

from farstep.errors import LaunchError

_LOOP = "farstep.worker.loop"
_VARIABLE = "FARSTEP_WORKER"
"""Set in worker processes and inherited by the processes that their environments start."""


def mark_worker_process() -> None:
    """Reject every launch in this process and in the processes that it starts."""
    os.environ[_VARIABLE] = str(os.getpid())


def refuse_nested_launch() -> None:
    """Refuse to launch inside a worker, or inside a process that a worker started.

    Raises:
        LaunchError: A worker is launching; the message names the module whose import does so, if any, and the remedy.
    """
    frames = list(_frames())
    in_process = any(frame.f_globals.get("__name__") == _LOOP for frame in frames)
    if not in_process and _VARIABLE not in os.environ:
        return
    if (module := _imported_module(frames)) is not None:
        raise LaunchError(
            f"importing the module {module} launches farstep, and a worker imports it, so workers would start workers "
            "endlessly: put the launch under if __name__ == '__main__':, or into a function that only the "
            "learner's program calls."
        )
    raise LaunchError(
        "the code of an environment or an agent launches farstep inside a worker, where that is not allowed: launch in "
        "the learner's program. A process that an environment starts, or a job that it submits, may launch if it is "
        f"started without the environment variable {_VARIABLE}."
    )


def _frames() -> Iterator[FrameType]:
    """The caller's stack, innermost first; it reveals a worker inside the head's process.

    Ctrl-C could leave a global flag in the wrong state.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _imported_module(frames: Iterable[FrameType]) -> str | None:
    """The innermost module on the stack that the worker is importing, with file and line; None if there is none."""
    for frame in frames:
        name = frame.f_globals.get("__name__")
        if name == _LOOP:
            return None
        if frame.f_code.co_name == "<module>" and name not in (None, "__main__"):
            return f"{name!r} ({frame.f_code.co_filename}, line {frame.f_lineno})"
    return None
