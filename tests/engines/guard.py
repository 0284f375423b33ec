"""Runs one program, none of whose processes outlives it: `python guard.py CONTROL NAMESPACES COMMAND...`.

CONTROL is the reading end of a pipe. A byte in it is a signal for the program (SIGKILL, SIGSTOP and SIGCONT: for all
that it started, daemons too); its end, when the process with the other end dies, is SIGKILL. NAMESPACES is "-", or
descriptors joined by commas: of a network and a host name for the first program of a host, which gets mounts and
process numbers of its own and with which all others end; of network, host name, mounts and process numbers for the
others. The guard ends as the program did. It needs nothing but Python, so that `python -I -S` starts it fast.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x4000000, 0x20000000, 0x40000000
KINDS = (CLONE_NEWNET, CLONE_NEWUTS, CLONE_NEWNS, CLONE_NEWPID)
MS_REC, MS_PRIVATE = 0x4000, 0x40000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
FOR_ALL = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT}

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> None:
    """A call of the C library that Python has no name for."""
    if getattr(_libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}{arguments}: {os.strerror(ctypes.get_errno())}")


def main(control: int, namespaces: str, command: list[str]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the program gets signals through the pipe
        signal.signal(number, signal.SIG_IGN)
    os.set_inheritable(control, False)
    if namespaces == "-":
        end_like(guard(control, command))
    here = Path.cwd()
    descriptors = [int(word) for word in namespaces.split(",")]
    for descriptor, kind in zip(descriptors, KINDS, strict=False):
        call("setns", descriptor, kind)
        os.close(descriptor)
    os.chdir(here)  # new mounts begin at /
    is_first = len(descriptors) < len(KINDS)
    if is_first:
        call("unshare", CLONE_NEWPID | CLONE_NEWNS)
    reading, writing = os.pipe()
    try:
        child = os.fork()  # process numbers are new for children only
    except OSError:
        end_like(signal.SIGKILL)  # the host crashed meanwhile
    if child:
        os.close(writing)
        os.close(control)
        os.waitpid(child, 0)
        end_like(int(os.read(reading, 16) or signal.SIGKILL))
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.close(reading)
    if is_first:
        call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
        call("mount", b"proc", b"/proc", b"proc", 0, None)
    os.write(writing, str(guard(control, command)).encode())
    os._exit(0)


def guard(control: int, command: list[str]) -> int:
    """Runs `command`, ends all processes that it left behind, and returns its status as `waitpid` does."""
    call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    begun, runs = os.pipe()  # closed when the program has begun: until then a signal would be lost
    program = os.fork()
    if not program:
        run(command)
    os.close(runs)
    os.read(begun, 1)
    os.close(begun)
    poller = select.poll()
    poller.register(control, select.POLLIN)
    poller.register(woken, select.POLLIN)
    while True:
        for descriptor, _ in poller.poll():
            if descriptor == woken:
                os.read(woken, 4096)
            else:
                number = (os.read(control, 1) or bytes([signal.SIGKILL]))[0]
                if number == signal.SIGKILL:
                    end_descendants()
                    return int(signal.SIGKILL)
                for pid in descendants() if number in FOR_ALL else [program]:
                    send(pid, number)
        for pid, status in ended():
            if pid == program:
                end_descendants()
                return status


def run(command: list[str]) -> None:
    """Replaces this process by the program."""
    try:
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]} cannot be run: {error}\n".encode())
    os._exit(127)


def descendants() -> list[int]:
    """All living processes that descend from this one."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - importing less is the point here
        if name.isdigit():
            try:
                state, parent = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue  # it ended meanwhile
            if state != "Z":
                children.setdefault(int(parent), []).append(int(name))
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def end_descendants() -> None:
    """Kills all descendants until not even a zombie is left: orphans of a dying process become our children."""
    try:
        while True:
            for pid in descendants():
                send(pid, signal.SIGKILL)
            os.waitpid(-1, 0)
    except ChildProcessError:
        pass


def ended() -> list[tuple[int, int]]:
    """Those that have ended since the last call, with their status."""
    found: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if not pid:
            return found
        found.append((pid, status))


def send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def end_like(status: int) -> None:
    """Ends this process with the status of another one."""
    if os.WIFSIGNALED(status):
        call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)  # one core file is enough
        if os.WTERMSIG(status) != signal.SIGKILL:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
