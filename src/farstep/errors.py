"""Every error that farstep raises.

FarstepError
├── ConfigError          options that cannot work together, found at construction (also a ValueError)
│   └── SpaceError       a space farstep cannot lay out as arrays, or observations that do not fit theirs
├── AgentError           the agent lacks something a worker needs (also a TypeError)
├── LaunchError          the cluster did not come up
│   └── HandshakeError   head and worker differ in version or array schema
├── WorkerError          something went wrong on a worker; says which, where and in which phase
│   ├── RemoteEnvError   the environment or the agent raised; carries the remote traceback
│   ├── WorkerDied       the process ended (signal or exit status), with the tail of its output
│   └── WorkerStuck      no progress within the phase's limit, with the stacks it was stuck in
├── BufferTimeout        a buffer had nothing to give, or no room, for too long (also a TimeoutError)
├── PublishTimeout       a consumer was in the middle of its update for too long (also a TimeoutError)
├── WireError            a message that is malformed, oversized or not from an admitted peer
├── DeliveryError        a trigger's message that its consumer did not take, or did not finish
├── CheckpointError      a checkpoint that cannot be written, or none that can be read (also an OSError)
├── ResourceError        the machine or a limit has no more descriptors, processes, memory or disk (also an OSError)
├── RewardError          rewards that nothing can be learned from (also a ValueError)
├── RunError             a run's folder that is not there, in use, or cannot be read or written (also an OSError)
├── EndedError           step() of an ended environment without autoreset (also an AssertionError)
└── ClosedError          the cluster is closed, or failed earlier and cannot go on
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import resource
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


class FarstepError(Exception):
    """Root of farstep's errors."""


class ConfigError(FarstepError, ValueError):
    """Options that cannot work; raised before anything is started."""


class SpaceError(ConfigError):
    """An observation or action space that has no fixed array layout, or observations that do not fit theirs."""


class AgentError(FarstepError, TypeError):
    """The agent cannot be used as it is; the message says what to add."""


class LaunchError(FarstepError):
    """The cluster could not be started."""


class HandshakeError(LaunchError):
    """Head and worker do not fit together; the message names both sides."""


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where on the cluster something happened."""

    worker: int
    incarnation: int = 0
    host: str = "?"
    pid: int = 0
    phase: str = "?"
    slot: int | None = None
    seed: int | None = None
    episode_step: int | None = None
    version: int | None = None

    def __str__(self) -> str:
        parts = [f"worker {self.worker}"]
        if self.incarnation:
            parts[0] += f" (restart {self.incarnation})"
        parts += [f"host {self.host}", f"pid {self.pid}", f"phase {self.phase}"]
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
    """Something went wrong on a worker."""

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
        """Say something before the message."""
        WorkerError.__init__(self, f"{text} {self.message}", self.where, self.remote_traceback, self.output)

    def __str__(self) -> str:
        return str(self.args[0])  # also where it doubles as a KeyError, whose own form is a repr

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.where, self.remote_traceback, self.output)


class RemoteEnvError(WorkerError):
    """The environment or the agent raised on a worker."""

    kind = ""
    """The class that was raised there, where this can be caught as such."""

    def __reduce__(self) -> tuple[Any, ...]:
        return remote_error, (self.kind, self.message, self.where, self.remote_traceback)


class WorkerDied(WorkerError):
    """A worker process ended by itself or was killed."""


class WorkerStuck(WorkerError):
    """A worker made no progress within its phase's limit."""


class BufferTimeout(FarstepError, TimeoutError):
    """A buffer's limiter did not let somebody insert or sample in time; says what it waited for."""


class PublishTimeout(FarstepError, TimeoutError):
    """Publishing waited too long for a consumer that may be changing the agent; the message names the consumer."""


class WireError(FarstepError):
    """A message that cannot be accepted."""


class DeliveryError(FarstepError):
    """A trigger's message did not reach its consumer, or the consumer ended or failed before it was done."""


class CheckpointError(FarstepError, OSError):
    """A checkpoint could not be saved, or none is there that is intact; the message names each and why."""


class RewardError(FarstepError, ValueError):
    """An environment returned a reward that is no finite number; the message names its slot."""


class RunError(FarstepError, OSError):
    """The folder of a run is missing, in use by another process, or cannot be read or written."""


class ResourceError(FarstepError, OSError):
    """File descriptors, processes, memory or disk have run out; the message names the limit and says what to do."""

    def __init__(self, message: str, number: int = 0) -> None:
        super().__init__(message)
        self.errno = number

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.errno)


_DISK = "Make room there (df -h)."
_MEMORY = "Use fewer environments or shorter rollouts, or a machine with more memory (free -h; df -h /dev/shm)."
_ADVICE = {
    errno.EMFILE: "This process may open {files} files: raise the limit (ulimit -n) or use fewer workers.",
    errno.ENFILE: "The machine has no more file descriptors: close other programs or raise fs.file-max (sysctl).",
    errno.EAGAIN: "This user may run {processes} processes and threads: raise it (ulimit -u) or use fewer workers.",
    errno.ENOMEM: _MEMORY,
    errno.ENOBUFS: _MEMORY,
    errno.ENOSPC: _DISK,
    errno.EFBIG: "A file of this process may have {bytes} bytes: raise the limit (ulimit -f).",
    errno.EDQUOT: "Your quota is used up: make room (quota -s).",
}


_LIMITS = {"files": resource.RLIMIT_NOFILE, "processes": resource.RLIMIT_NPROC, "bytes": resource.RLIMIT_FSIZE}


@contextlib.contextmanager
def typed_shortage(what: str) -> Iterator[None]:
    """Turn an exception that means that descriptors, processes, memory or disk have run out into `ResourceError`.

    Args:
        what: What could not be done, as the beginning of a sentence.

    Raises:
        ResourceError: The block raised such an exception; any other one passes unchanged.
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
    """A call on a cluster that is closed or has failed."""


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
    """What raised on a worker; one of Python's own exceptions, or of farstep's, can be caught as such here, too."""
    for double in _DOUBLES:
        if double.__name__ == kind:
            both = type(f"Remote{kind}", (RemoteEnvError, double), {"__module__": __name__, "kind": kind})
            return both(message, where, remote_traceback)  # type: ignore[no-any-return]
    return RemoteEnvError(message, where, remote_traceback)


def is_own(kind: str) -> bool:
    """Whether a class that was raised on a worker is one of farstep's, whose message says who did what."""
    return any(double.__name__ == kind and issubclass(double, FarstepError) for double in _DOUBLES)


class EndedError(FarstepError, AssertionError):
    """An environment was stepped after its episode had ended, without autoreset."""


_LONGEST_TEXT = 1 << 18


def described(error: BaseException) -> str:
    """`Class: text` of an exception, also where its `__str__` raises."""
    try:
        text = str(error)
    except Exception as another:
        text = f"<its __str__ raised {type(another).__name__}>"
    return printable(f"{type(error).__name__}: {text}".removesuffix(": "))


def printable(text: str) -> str:
    """A text that can be encoded and sent: lone surrogates are escaped, the middle of an overlong text is left out."""
    if len(text) > _LONGEST_TEXT:
        half = _LONGEST_TEXT // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
    return text.encode(errors="backslashreplace").decode()


def unknown_name(what: str, got: str, known: Iterable[str]) -> str:
    """One sentence for a name that does not exist: the nearest ones, then all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(got, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {got!r}.{hint} Known: {', '.join(names)}."


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1 node`, `2 nodes`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


EXTRAS = {
    "Box2D": "envs",
    "ale_py": "envs",
    "cv2": "envs",
    "pygame": "envs",
    "envpool": "envpool",
    "imageio_ffmpeg": "video",
    "matplotlib": "plot",
    "tensorboard": "tensorboard",
    "torch": "torch",
    "wandb": "wandb",
}
"""By module, the extra of farstep that installs it."""


def install_extra(module: str) -> str:
    """The command that installs a module with farstep's extra; empty if no extra has it."""
    extra = EXTRAS.get(module.partition(".")[0])
    return "" if extra is None else f"pip install 'farstep[{extra}]'"
