"""The errors that farstep raises. `except farstep.FarstepError` catches them all.

FarstepError
├── ConfigError          invalid or contradictory options, found before anything is started (also a ValueError)
│   └── SpaceError       a space without a fixed array layout, or an observation that does not fit its space
├── AgentError           the agent lacks something that workers need (also a TypeError)
├── LaunchError          the workers could not be started
│   └── HandshakeError   head and worker have different versions or array schemas
├── WorkerError          a failure on a worker; names the worker, host and phase
│   ├── RemoteEnvError   the environment or the agent raised; has the remote traceback
│   ├── WorkerDied       the process ended (signal or exit status); has the tail of its output
│   └── WorkerStuck      no progress within the timeout of the phase; has the stacks of its threads
├── BufferTimeout        a buffer's limiter blocked an insert or a sample for too long (also a TimeoutError)
├── PublishTimeout       a consumer's update blocked publishing for too long (also a TimeoutError)
├── WireError            a message that is malformed, too large, or from an unauthenticated peer
├── DeliveryError        a trigger's message that its consumer did not accept or did not finish processing
├── CheckpointError      a checkpoint cannot be written, or no intact one can be read (also an OSError)
├── ResourceError        file descriptors, processes, memory or disk are exhausted (also an OSError)
├── RewardError          a reward that is not a finite number (also a ValueError)
├── RunError             the folder of a run is missing, in use, or not readable or writable (also an OSError)
├── PendingStepError     a call that an unfinished step_async() or send() does not allow, or that needs one
├── EndedError           step() of an ended environment without autoreset (also an AssertionError)
└── ClosedError          the call needs a cluster that is open and has not failed
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import resource
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple


class FarstepError(Exception):
    """Base class of all farstep errors."""


class ConfigError(FarstepError, ValueError):
    """An option is invalid or contradicts another; raised before anything is started."""


class SpaceError(ConfigError):
    """A space has no fixed array layout, or an observation does not fit its space."""


class AgentError(FarstepError, TypeError):
    """The agent lacks something that workers need; the message names it."""


class LaunchError(FarstepError):
    """The workers could not be started."""


class HandshakeError(LaunchError):
    """Head and worker have different versions or array schemas; the message has both."""


UNKNOWN_HOST = "?"
"""Host of a worker that has no node yet."""


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where on the cluster an error happened.

    Attributes:
        worker: Index of the worker.
        incarnation: How often the worker had been restarted.
        host: Name of its host.
        pid: Its process id.
        phase: What it was doing, e.g. `step` or `reset`.
        slot: Slot of the environment, if the error concerns one.
        seed: Seed of the episode, if known.
        episode_step: Step of the episode, if known.
        version: Version of the policy, if known.
        role: What the process is: `worker` or `acting server`.
    """

    worker: int
    incarnation: int = 0
    host: str = UNKNOWN_HOST
    pid: int = 0
    phase: str = "?"
    slot: int | None = None
    seed: int | None = None
    episode_step: int | None = None
    version: int | None = None
    role: str = "worker"

    def __str__(self) -> str:
        parts = [f"{self.role} {self.worker}"]
        if self.incarnation:
            parts[0] += f" (restart {self.incarnation})"
        process = [f"pid {self.pid}"] if self.pid else []
        parts += [f"host {self.host}", *process, f"phase {self.phase}"]
        if self.slot is not None:
            parts.append(f"environment slot {self.slot}")
        if self.seed is not None:
            parts.append(f"seed {self.seed}")
        if self.episode_step is not None:
            parts.append(f"episode step {self.episode_step}")
        if self.version is not None:
            parts.append(f"policy version {self.version}")
        return ", ".join(parts)


class WorkerError(FarstepError):
    """A failure on a worker.

    Attributes:
        message: What happened.
        where: Worker, host, process, phase and environment.
        remote_traceback: Traceback on the worker; empty if there is none.
        output: Tail of the worker's output; empty if it is not known.
    """

    def __init__(self, message: str, where: Where, remote_traceback: str = "", output: str = "") -> None:
        self.message, self.where = message, where
        self.remote_traceback = remote_traceback
        self.output = output
        text = f"{message} [{where}]"
        if remote_traceback:
            text += f"\n\nOn the worker:\n{remote_traceback.rstrip()}"
        if output:
            text += f"\n\nLast output of the worker:\n{output.rstrip()}"
        super().__init__(text)

    def preface(self, text: str) -> None:
        """Put a text in front of the message.

        Args:
            text: One or more sentences; a space is added after them.
        """
        WorkerError.__init__(self, f"{text} {self.message}", self.where, self.remote_traceback, self.output)

    @property
    def evidence(self) -> str:
        """The traceback on the worker, or else the tail of its output; empty if neither is known."""
        return self.remote_traceback or self.output

    def __str__(self) -> str:
        return str(self.args[0])  # `remote_error` may mix in KeyError, whose __str__ returns a repr

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.where, self.remote_traceback, self.output)


class RemoteEnvError(WorkerError):
    """The environment or the agent raised on a worker.

    If the remote exception has a common built-in class such as ValueError, `except ValueError` also catches this error.

    Attributes:
        kind: Name of that built-in class; empty if there is none.
    """

    kind = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return remote_error, (self.kind, self.message, self.where, self.remote_traceback)


class WorkerDied(WorkerError):
    """A worker process exited or was killed."""


class WorkerStuck(WorkerError):
    """A worker made no progress within the timeout of its phase (see `Timeouts`)."""


class BufferTimeout(FarstepError, TimeoutError):
    """A buffer's limiter blocked an insert or a sample for too long; the message says what was missing."""


class PublishTimeout(FarstepError, TimeoutError):
    """Publishing waited too long for a consumer that may be updating the agent; the message names the consumer."""


class WireError(FarstepError):
    """A message is malformed, too large, or from an unauthenticated peer."""


class DeliveryError(FarstepError):
    """A consumer did not accept a trigger's message, or ended before it had processed the message."""


class CheckpointError(FarstepError, OSError):
    """A checkpoint could not be written, or no intact one was found; the message lists the files and reasons."""


class RewardError(FarstepError, ValueError):
    """An environment returned a reward that is not a finite number; the message names its slot."""


class RunError(FarstepError, OSError):
    """The folder of a run is missing, in use by another process, or not readable or writable."""


class ResourceError(FarstepError, OSError):
    """File descriptors, processes, memory or disk are exhausted; the message names the limit and the remedy.

    Attributes:
        errno: Number of the operating system's error, as in `OSError`.
    """

    def __init__(self, message: str, number: int = 0) -> None:
        super().__init__(message)
        self.errno = number

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.errno)


_DISK = "Free some disk space there (df -h)."
_MEMORY = "Use fewer environments or shorter rollouts, or a machine with more memory (free -h; df -h /dev/shm)."
_ADVICE = {
    errno.EMFILE: "This process may open {files} files: raise the limit (ulimit -n) or use fewer workers.",
    errno.ENFILE: "The machine has no more file descriptors: close other programs or raise fs.file-max (sysctl).",
    errno.EAGAIN: "This user may run {processes} processes and threads: raise the limit (ulimit -u) or use fewer "
    "workers.",
    errno.ENOMEM: _MEMORY,
    errno.ENOBUFS: _MEMORY,
    errno.ENOSPC: _DISK,
    errno.EFBIG: "A file of this process may have {bytes} bytes: raise the limit (ulimit -f).",
    errno.EDQUOT: "Your disk quota is used up: delete files (quota -s).",
}


_LIMITS = {"files": resource.RLIMIT_NOFILE, "processes": resource.RLIMIT_NPROC, "bytes": resource.RLIMIT_FSIZE}


@contextlib.contextmanager
def typed_shortage(what: str) -> Iterator[None]:
    """Context manager: convert exceptions about exhausted resources into `ResourceError`.

    Args:
        what: What failed, as the start of a sentence.

    Raises:
        ResourceError: File descriptors, processes, memory or disk space ran out. Other exceptions pass unchanged.
    """
    try:
        yield
    except FarstepError:
        raise
    except Exception as error:
        number = getattr(error, "errno", None)
        if isinstance(error, RuntimeError) and "can't start new thread" in described(error):
            number = errno.EAGAIN
        if number not in _ADVICE:
            raise
        limits = {
            name: "any number of" if (limit := resource.getrlimit(kind)[0]) == resource.RLIM_INFINITY else limit
            for name, kind in _LIMITS.items()
        }
        advice = _ADVICE[number].format(**limits)
        raise ResourceError(f"{what}: {described(error)}. {advice}", number) from error


class ClosedError(FarstepError):
    """The call needs a cluster that is open and has not failed."""


_DOUBLES = (
    AgentError,
    AssertionError,
    AttributeError,
    ConfigError,
    IndexError,
    KeyError,
    LaunchError,
    NotImplementedError,
    RuntimeError,
    SpaceError,
    TypeError,
    ValueError,
    ZeroDivisionError,
)


def remote_error(kind: str, message: str, where: Where, remote_traceback: str) -> RemoteEnvError:
    """Return the error for an exception on a worker. If `_DOUBLES` has its class, the error is also of this class."""
    for double in _DOUBLES:
        if double.__name__ == kind:
            both = type(f"Remote{kind}", (RemoteEnvError, double), {"__module__": __name__, "kind": kind})
            return both(message, where, remote_traceback)  # type: ignore[no-any-return]
    return RemoteEnvError(message, where, remote_traceback)


def is_own(kind: str) -> bool:
    """Return whether `kind` names a farstep error. The message of such an error needs no class name in front."""
    return any(double.__name__ == kind and issubclass(double, FarstepError) for double in _DOUBLES)


class PendingStepError(FarstepError, RuntimeError):
    """A step that was begun has not been finished, or none was begun."""


class EndedError(FarstepError, AssertionError):
    """An environment was stepped after its episode had ended, without autoreset."""


_LONGEST_TEXT = 1 << 18
_SHARED_MODULES = ("builtins", "farstep.errors")
"""Modules whose exception classes exist in every process."""


def described(error: BaseException) -> str:
    """Return `Class: text` of an exception, even if its `__str__` raises."""
    try:
        text = str(error)
    except Exception as another:
        text = f"<its __str__ raised {type(another).__name__}>"
    return printable(f"{type(error).__name__}: {text}".removesuffix(": "))


def memory_error_of(error: BaseException | None) -> BaseException | None:
    """Return the exception which says that main memory or the memory of a GPU ran out: `error` or one of its causes.
    None if there is none."""
    # torch has no class for these; the second one is that of torch 2.13 on ARM
    texts = ("can't allocate memory", "DefaultCPUAllocator: not enough memory", "CUDA error: out of memory")
    while error is not None:
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            return error
        if isinstance(error, RuntimeError) and any(text in described(error) for text in texts):
            return error
        error = error.__cause__
    return None


class ErrorReport(NamedTuple):
    """What one process tells another about an exception."""

    message: str
    traceback: str
    kind: str
    """Name of the exception's class if it exists in every process; otherwise empty."""


def report_of(error: BaseException) -> ErrorReport:
    """Return the report of an exception; its texts can be sent."""
    kind = type(error).__name__ if type(error).__module__ in _SHARED_MODULES else ""
    return ErrorReport(described(error), printable("".join(traceback.format_exception(error))), kind)


def printable(text: str) -> str:
    """Return a text that can be sent: lone surrogates are escaped, and the middle of a very long text is cut out."""
    if len(text) > _LONGEST_TEXT:
        half = _LONGEST_TEXT // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
    return text.encode(errors="backslashreplace").decode()


def unknown_name(what: str, got: str, known: Iterable[str]) -> str:
    """Return an error message for an unknown name, with the nearest known name and a list of all."""
    names = sorted(known)
    by_lower_case = {name.lower(): name for name in names}
    near = difflib.get_close_matches(got.lower(), by_lower_case, n=1)
    hint = f" Did you mean {by_lower_case[near[0]]!r}?" if near else ""
    return f"unknown {what} {got!r}.{hint} Known: {', '.join(names)}."


def warn_caller(text: str) -> None:
    """Warn, and name as the origin the line of the user's code that called farstep."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 node`, `2 nodes`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


EXTRAS = {
    "Box2D": "envs",
    "ale_py": "envs",
    "cv2": "envs",
    "pygame": "envs",
    "envpool": "envpool",
    "imageio_ffmpeg": "video",
    "matplotlib": "plot",
    "peft": "lora",
    "prometheus_client": "prometheus",
    "tensorboard": "tensorboard",
    "torch": "torch",
    "wandb": "wandb",
    "yaml": "yaml",
}
"""The extra of farstep that installs a module."""


def install_extra(module: str) -> str:
    """Return the pip command for the extra of farstep that installs a module; empty if no extra does."""
    extra = EXTRAS.get(module.partition(".")[0])
    return "" if extra is None else f"pip install 'farstep[{extra}]'"
