"""Runs criu (https://criu.org), which writes the process of a parked worker to disk and restores it."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from farstep.errors import LaunchError
from farstep.launch.daemon.child import is_readable
from farstep.launch.daemon.guardian import Guardian
from farstep.resources import usable_cpus

PROGRAM = "FARSTEP_CRIU"
"""Environment variable with the path of criu, if it is not in PATH."""
_FOLDERS = "/usr/local/sbin:/usr/sbin:/sbin"
"""Where criu may be although PATH does not list it, as for users other than root."""
_PREFIX = "farstep-criu-"
_RUN_S, _BYTES_PER_S = 30.0, 10e6
"""Seconds after which criu is killed, and bytes that it must write or read in each further second."""
_TRIAL_S = 20.0
_STALE_S = 60.0
_POLL_S = 0.1
_WAIT = os.WEXITED | os.WNOHANG | os.WNOWAIT
_REASON_CHARS = 300
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Outcome:
    """How criu ended."""

    reason: str = ""
    """Why it failed; empty if it succeeded."""
    was_killed: bool = False
    """Whether a signal ended criu, so that the process that it worked on may be damaged."""


class CriuRun:
    """A running criu.

    Args:
        command: The command line.
        log: The file that criu writes its messages to.
        nbytes: The size of the process.
        fds: Descriptors that criu inherits.
        restored: The process that criu restores as a child of this one; 0 if it dumps a process.
    """

    def __init__(
        self, command: Sequence[str], log: Path, nbytes: int, fds: Sequence[int] = (), restored: int = 0
    ) -> None:
        self._log, self._restored = log, restored
        self._limit_s = _RUN_S + nbytes / _BYTES_PER_S
        self._ends_at = time.monotonic() + self._limit_s
        self._process = subprocess.Popen(
            command,
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self.exit_fd = os.pidfd_open(self._process.pid)
        except OSError:
            self._process.kill()
            self._process.wait()
            raise
        self._outcome: Outcome | None = None

    def poll(self) -> Outcome | None:
        """Return how criu ended; None while it runs."""
        if self._outcome is not None:
            return self._outcome
        if time.monotonic() > self._ends_at or self._has_lost_process():
            self._kill()
        if (ended := _ended_child(self._process.pid)) is not None:
            if ended.si_status:  # also end helpers that criu could not end; before its process id can be reused
                os.killpg(self._process.pid, signal.SIGKILL)
            os.close(self.exit_fd)
            self._outcome = self._described(self._process.wait())
        return self._outcome

    def _has_lost_process(self) -> bool:
        """Whether the process ended while criu restored it. Criu is not its parent, and would wait for it."""
        return bool(self._restored) and _ended_child(self._restored) is not None

    def _described(self, status: int) -> Outcome:
        if status == 0:
            return Outcome()
        if status > 0 or self._has_lost_process():
            return Outcome(last_error(self._log) or f"criu exited with status {status}")
        if time.monotonic() > self._ends_at:
            return Outcome(f"criu took longer than {self._limit_s:.0f} s", was_killed=True)
        return Outcome(f"criu was killed by {signal.Signals(-status).name}", was_killed=True)

    def kill(self) -> Outcome:
        """End criu at once."""
        if self._outcome is None:
            self._kill()
        return self.wait()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.exit_fd, signal.SIGKILL)  # `Popen.kill` may reap it: see `poll`

    def wait(self) -> Outcome:
        while (outcome := self.poll()) is None:
            is_readable(self.exit_fd, _POLL_S)
        return outcome


class Criu:
    """Dumps and restores the processes of a node. Their images are in a folder that `close` removes.

    Args:
        program: The path of criu.
        parent: The folder for the folder of images. None: that of temporary files.
    """

    def __init__(self, program: str, parent: Path | None = None) -> None:
        self.program = program
        parent = parent or Path(tempfile.gettempdir())
        _remove_stale(parent)
        self.folder = Path(tempfile.mkdtemp(prefix=_prefix(), dir=parent))  # mode 0700: images contain all memory
        self._lock = os.open(self.folder, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # until this process ends: see `_remove_stale`
        self._guardian = Guardian()
        self._guardian.register("images", ["rm", "-rf", str(self.folder)])
        self._runs: list[CriuRun] = []
        self._orphans: dict[int, Sequence[int]] = {}
        """For each process that is being dumped, or was dumped, its descendants that may not be reaped yet."""

    @property
    def is_busy(self) -> bool:
        """Whether as many processes are being dumped or restored as this node has cores."""
        self._runs = [run for run in self._runs if run.poll() is None]
        return len(self._runs) >= usable_cpus()

    def dump(self, pid: int, images: Path) -> CriuRun:
        """Write a process and its descendants to the new folder `images`, and end them. If this fails, they run on."""
        images.mkdir()
        command = [self.program, "dump", "--tree", str(pid), *self._options(images, "dump.log")]
        orphans = descendants(pid)
        self._adopt_orphans(pid, orphans)
        nbytes = sum(_resident_bytes(each) for each in (pid, *orphans))
        return self._run(CriuRun(command, images / "dump.log", nbytes))

    def reap(self, pid: int) -> bool:
        """Reap the descendants of a process that was dumped. Return whether their process ids are free."""
        orphans = [each for each in self._orphans.get(pid, ()) if not _reap(each)]
        self._adopt_orphans(pid, orphans)
        return not orphans

    def remove(self, pid: int, images: Path) -> None:
        """Remove the images of a process that was restored, has ended, or could not be dumped."""
        self._adopt_orphans(pid, ())
        shutil.rmtree(images, ignore_errors=True)

    def _adopt_orphans(self, pid: int, orphans: Sequence[int]) -> None:
        """Let this process adopt the descendants of a process that ends: process 1 of a container may not reap them.

        It adopts orphans only while it expects some, because nothing would reap the others.
        """
        self._orphans.pop(pid, None)
        if orphans:
            self._orphans[pid] = orphans
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(bool(self._orphans)))

    def restore(self, pid: int, images: Path, pipes: Mapping[str, int]) -> CriuRun:
        """Restore a process and its descendants, with the same process ids. It becomes a child of this process.

        Args:
            pid: The id of the process.
            images: The folder that `dump` has filled.
            pipes: For each pipe between the process and others, its name (`pipe:[INODE]`) and an open end.
        """
        command = [self.program, "restore", "--restore-detached", "--restore-sibling"]
        for name, fd in pipes.items():
            command += ["--inherit-fd", f"fd[{fd}]:{name}"]
        command += self._options(images, "restore.log")
        return self._run(CriuRun(command, images / "restore.log", size_of(images), list(pipes.values()), pid))

    def _options(self, images: Path, log: str) -> list[str]:
        return ["--images-dir", str(images), "--log-file", log, "-v2", "--manage-cgroups=ignore", *_rights()]

    def _run(self, run: CriuRun) -> CriuRun:
        self._runs.append(run)
        return run

    def close(self) -> None:
        """Remove all images."""
        for run in self._runs:
            run.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)
        self._guardian.unregister("images")
        self._guardian.close()


def working_criu(parent: Path | None = None) -> Criu:
    """Return criu for this machine.

    This dumps and restores a small process, because much decides whether that is permitted: the kernel, the rights of
    this user, the container.

    Args:
        parent: The folder for the folder of images. None: that of temporary files.

    Raises:
        LaunchError: Processes cannot be written to disk here; the message says why.
    """
    try:
        return _working_criu(parent)
    except OSError as error:  # such as a full disk
        raise LaunchError(f"criu cannot be used here: {error}.") from error


def _working_criu(parent: Path | None) -> Criu:
    path = f"{os.environ.get('PATH', os.defpath)}:{_FOLDERS}"
    if (program := shutil.which(os.environ.get(PROGRAM) or "criu", path=path)) is None:
        raise LaunchError(f"criu is not installed (its path may be in the environment variable {PROGRAM}).")
    parent = parent or Path(tempfile.gettempdir())
    if _is_in_memory(parent):
        raise LaunchError(f"{parent}, the folder for images, is in memory; set TMPDIR to a folder on a disk.")
    command = [program, "check", *_rights()]
    try:
        check = subprocess.run(command, capture_output=True, text=True, timeout=_TRIAL_S, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{program} does not work: {error}.") from error
    if check.returncode:
        raise LaunchError(f"'{program} check' failed: {_first_error((check.stdout + check.stderr).splitlines())}.")
    with contextlib.ExitStack() as failed:
        criu = Criu(program, parent)
        failed.callback(criu.close)
        _try(criu)
        failed.pop_all()
    return criu


def _rights() -> list[str]:
    """The option of users other than root, who need the capability CAP_CHECKPOINT_RESTORE."""
    return [] if os.geteuid() == 0 else ["--unprivileged"]


def _try(criu: Criu) -> None:
    null, command = subprocess.DEVNULL, [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"]
    process = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)
    try:
        images = criu.folder / "trial"
        if reason := criu.dump(process.pid, images).wait().reason:
            raise LaunchError(f"criu cannot write a process to disk here: {reason}.")
    finally:
        process.kill()
        process.wait()
    reason = criu.restore(process.pid, images, {}).wait().reason
    end_restored(process.pid)
    if reason:
        raise LaunchError(f"criu cannot restore a process here: {reason}.")
    shutil.rmtree(images)


def end_restored(pid: int) -> None:
    """Kill a process that criu has restored, perhaps in part, with its descendants. Ignore processes of others."""
    try:
        os.waitid(os.P_PID, pid, _WAIT)
    except ChildProcessError:
        return  # it does not exist, or is not a child of this process
    for each in (pid, *descendants(pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    os.waitpid(pid, 0)


def _ended_child(pid: int) -> os.waitid_result | None:
    """How a child of this process ended; None if it runs, or is not a child."""
    try:
        return os.waitid(os.P_PID, pid, _WAIT)
    except ChildProcessError:
        return None


def _reap(pid: int) -> bool:
    """Reap a process if it is an ended child of this one. Return whether its process id is free."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    return not Path(f"/proc/{pid}").exists()


def size_of(images: Path) -> int:
    """Return the bytes that a folder of images takes on disk."""
    return sum(image.stat().st_blocks * 512 for image in images.iterdir())


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def descendants(pid: int) -> list[int]:
    """Return the processes that a process and its children have started."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found


def affinities(pid: int) -> dict[int, set[int]]:
    """Return the cores of each thread of a process and its descendants."""
    found = {}
    for each in (pid, *descendants(pid)):
        for task in Path(f"/proc/{each}/task").glob("*"):
            with contextlib.suppress(OSError):
                found[int(task.name)] = os.sched_getaffinity(int(task.name))
    return found


def last_error(log: Path) -> str:
    """Return the cause of a failure in a log of criu; empty if there is none."""
    with contextlib.suppress(OSError):
        return _first_error(log.read_text(errors="replace").splitlines())
    return ""


def _first_error(lines: Sequence[str]) -> str:
    """The first error, which later ones follow from. The one about the limit of open files is harmless."""
    errors = [line for line in lines if "Error (" in line and "RLIMIT_NOFILE" not in line]
    text = (errors or list(lines[-1:]) or [""])[0].rpartition("Error ")[2]
    return "".join(letter for letter in text if letter.isprintable())[:_REASON_CHARS]


def _is_in_memory(folder: Path) -> bool:
    device = folder.stat().st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == name:
            return fields[fields.index("-") + 1] in ("tmpfs", "ramfs")
    return False


def _prefix() -> str:
    """How the names of the folders of this machine start. Others may share the parent, but not see its locks (NFS)."""
    return f"{_PREFIX}{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}-"


def _remove_stale(parent: Path) -> None:
    """Remove the images of processes that have ended together with their guardians, as in a cgroup that was killed."""
    for folder in parent.glob(f"{_prefix()}*"):
        with contextlib.suppress(OSError):  # removed meanwhile, not a folder, of another user, or in use
            # Without O_NONBLOCK, a FIFO of another user would block this process.
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                status = os.fstat(lock)
                if status.st_uid != os.geteuid() or time.time() - status.st_mtime < _STALE_S:
                    continue  # of another user, or its process may not have locked it yet
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
