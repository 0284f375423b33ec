"""A worker that is parked on disk where criu fails. A script takes the place of criu; tests/cluster/test_criu.py has
the real one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import farstep
from farstep.errors import ConfigError, LaunchError
from farstep.launch.daemon.child import RestoredProcess, SpawnedProcess, is_readable
from farstep.launch.daemon.criu import PROGRAM, Criu, working_criu
from farstep.launch.daemon.dumpable_worker import DumpableWorker
from farstep.launch.daemon.process import ProcessStarter, WorkerProcess
from farstep.rollout.progress import COUNT, ProgressBoard
from farstep.wire.channels.local import local_pair
from tests.cluster.parking import state_of

pytestmark = pytest.mark.slow  # real processes

ECHO = """
import socket, sys
from farstep.rollout.progress import COUNT
from farstep.wire.channels.memory import SharedMemory
from farstep.worker.connection.connect import RelayedLink
from farstep.worker.connection.death_pipe import die_with_starter
link_fd, board_fd, board_bytes, death_fd = map(int, sys.argv[1:])
die_with_starter(death_fd)
board = SharedMemory(board_fd, board_bytes)
words = board.map.cast("q")
link = RelayedLink(socket.socket(fileno=link_fd), words, board, death_fd)
while True:
    if (received := link.receive()) is not None:
        words[COUNT] += 1
        link.send(received.frames)
"""
"""A worker that sends every message back, and counts them in its progress words."""
FAILS = 'echo "(00.01) Error (criu/files.c:7): no space left" > "$IMAGES/$1.log"; exit 1'
KILLED = "kill -9 $$"
DUMPED = 'kill -9 "$3"'
"""A dump that ends the process, as criu does at the end."""
HANGS = "sleep 60"


class Parked:
    """A worker with a script in place of criu: `dump` and `restore` are what it does."""

    def __init__(self, folder: Path, dump: str = "exit 1", restore: str = "exit 1") -> None:
        script = folder / "criu"
        images = 'while [ "$1" != --images-dir ]; do shift; done; IMAGES=$2'
        shift = f'IMAGES=$( {images}; echo "$IMAGES" )'
        script.write_text(f"#!/bin/sh\n{shift}\ncase $1 in\ndump) {dump};;\nrestore) {restore};;\nesac\n")
        script.chmod(0o755)
        self.criu = Criu(str(script), folder)
        self.starter: ProcessStarter | None = ProcessStarter(1, "cold")
        self.board = ProgressBoard(1, 1)
        link, theirs = local_pair()
        output, output_write = os.pipe()
        with theirs, self.starter.death_fd() as death:
            fds = [theirs.fileno(), self.board.memory.fd, death]
            arguments = (fds[0], fds[1], self.board.memory.nbytes, death)
            command = [sys.executable, "-c", ECHO, *map(str, arguments)]
            popen = subprocess.Popen(
                command, pass_fds=fds, stdout=output_write, stderr=output_write, start_new_session=True
            )
        os.close(output_write)
        process = WorkerProcess(SpawnedProcess(popen), output)
        self.worker = DumpableWorker(
            0, process, self.board, link=link, criu=self.criu, open_death_pipe=self.starter.death_fd
        )
        self.pid, self.received = popen.pid, list[bytes]()

    def wait(self, condition: Callable[[], Any]) -> None:
        """Do what the node daemon does, until the condition holds."""
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline
            self.worker.advance()
            self._read()
            self.worker.pass_on()
            time.sleep(0.002)

    def _read(self) -> None:
        try:
            while self.worker.link is not None and (received := self.worker.link.receive()) is not None:
                self.received.append(bytes(received.frames[0]))
        except EOFError:
            self.worker.link_ended()

    def park(self) -> None:
        self.worker.set_suspended(True, parked=True)

    def unpark(self) -> None:
        self.worker.set_suspended(False)

    def problem(self) -> str:
        self.wait(lambda: self.worker.problem)
        text, self.worker.problem = self.worker.problem, ""
        return text

    def next_message(self) -> bytes:
        count = len(self.received)
        self.wait(lambda: len(self.received) > count)
        return self.received[count]

    def end(self) -> Any:
        self.wait(self.worker.poll)
        return self.worker.poll()

    def close(self) -> None:
        self.worker.kill()
        self.wait(self.worker.poll)
        self.worker.close()
        self.close_starter()
        self.criu.close()

    def close_starter(self) -> None:
        """Close the pipe that ends the worker, as the end of the node daemon does."""
        if self.starter is not None:
            self.starter.close()
            self.starter = None


Park = Callable[..., Parked]


@pytest.fixture
def parked(tmp_path: Path) -> Iterator[Park]:
    opened: list[Parked] = []

    def make(**actions: str) -> Parked:
        opened.append(Parked(tmp_path, **actions))
        return opened[-1]

    yield make
    for each in opened:
        each.close()
        assert not list(tmp_path.glob("farstep-criu-*")), "images must be removed"


def test_worker_that_cannot_be_dumped_is_suspended_and_loses_no_message(parked: Park) -> None:
    """Messages that arrive while it is parked wait for the new link."""
    world = parked(dump=FAILS)
    for number in range(3):
        world.worker.pass_on([b"%d" % number])
        world.park()
        assert world.problem() == "(criu/files.c:7): no space left"
        world.worker.pass_on([b"%d while parked" % number])
        world.wait(lambda: state_of(world.pid) == "T")
        assert world.received[-1] == b"%d" % number and not world.worker.disk_bytes
        world.unpark()
        assert world.next_message() == b"%d while parked" % number
    assert world.board.read(0)[COUNT] == 6, "the daemon must see the words of a worker that has attached again"


def test_worker_is_ended_if_criu_was_killed_while_it_dumped_it(parked: Park) -> None:
    world = parked(dump=KILLED)
    world.park()
    assert world.end().note == "criu was killed by SIGKILL while it wrote the worker to disk"


def test_worker_that_cannot_be_restored_has_ended_with_the_reason(parked: Park) -> None:
    world = parked(dump=DUMPED, restore=FAILS)
    world.park()
    world.wait(lambda: not Path(f"/proc/{world.pid}").exists())
    for _ in range(3):
        world.worker.advance()
        assert world.worker.poll() is None, "a worker on disk has not ended"
    world.unpark()
    ended = world.end()
    assert (ended.status, ended.note) == (1, "it could not be restored from disk: (criu/files.c:7): no space left")
    assert not list(world.criu.folder.iterdir())


def test_worker_is_unparked_while_criu_dumps_it(parked: Park) -> None:
    world = parked(dump=f"sleep 0.2; {FAILS}")
    world.park()
    world.wait(lambda: list(world.criu.folder.glob("images-*")))
    world.unpark()
    world.worker.pass_on([b"after"])
    world.wait(lambda: world.received == [b"after"])


@pytest.mark.parametrize("actions", [{"dump": HANGS}, {"dump": DUMPED}, {"dump": DUMPED, "restore": HANGS}])
def test_worker_is_killed_wherever_it_is(parked: Park, actions: dict[str, str]) -> None:
    world = parked(**actions)
    world.park()
    world.wait(lambda: list(world.criu.folder.glob("images-*")))
    if actions["dump"] == DUMPED:
        world.wait(lambda: not Path(f"/proc/{world.pid}").exists() and world.worker.poll() is None)
    if "restore" in actions:
        world.unpark()
        world.worker.advance()
    world.worker.kill()
    assert world.end().status == -signal.SIGKILL


def test_worker_that_dies_while_it_is_detached_has_ended(parked: Park) -> None:
    world = parked(dump=FAILS)
    world.park()
    world.problem()
    os.kill(world.pid, signal.SIGKILL)
    assert world.end().status == -signal.SIGKILL


def test_worker_stays_in_memory_if_the_folder_for_its_images_cannot_be_created(parked: Park) -> None:
    world = parked()
    obstacle = world.criu.folder / "images-0"
    obstacle.touch()
    world.park()
    assert "File exists" in world.problem()
    world.wait(lambda: state_of(world.pid) == "T")
    obstacle.unlink()
    world.unpark()
    world.worker.pass_on([b"after"])
    assert world.next_message() == b"after"


def test_worker_that_cannot_be_connected_again_has_ended_with_the_reason(parked: Park) -> None:
    world = parked(dump=FAILS)
    world.park()
    world.problem()
    (world.criu.folder / "new-0").touch()
    world.unpark()
    ended = world.end()
    assert ended.status == -signal.SIGKILL and "could not be connected again" in ended.note
    assert world.worker.blameless


def test_worker_is_returning_until_it_is_connected(parked: Park) -> None:
    world = parked(dump=FAILS)
    assert not world.worker.is_returning
    world.park()
    world.problem()
    assert not world.worker.is_returning
    world.unpark()
    assert world.worker.is_returning
    world.worker.pass_on([b"after"])
    assert world.next_message() == b"after"
    assert not world.worker.is_returning


def test_worker_that_dies_while_it_connects_has_ended(parked: Park, monkeypatch: pytest.MonkeyPatch) -> None:
    world = parked(dump=FAILS)
    world.park()
    world.problem()
    world.unpark()
    with monkeypatch.context() as patch:  # otherwise it may connect during this call of advance
        patch.setattr(world.worker.process, "resume", lambda: None)
        world.worker.advance()
    *_, listener = world.worker.fds()
    world.worker.process.resume()
    assert is_readable(listener, 30)
    os.kill(world.pid, signal.SIGKILL)
    assert is_readable(world.worker.process.exit_fd, 30)
    world.worker.advance()
    assert world.end().status == -signal.SIGKILL and not world.worker.blameless


def test_worker_has_ended_if_criu_cannot_be_started_to_restore_it(parked: Park) -> None:
    world = parked(dump=DUMPED)
    world.park()
    world.wait(lambda: not Path(f"/proc/{world.pid}").exists())
    Path(world.criu.program).unlink()
    world.unpark()
    assert "could not be restored from disk: [Errno 2]" in world.end().note
    assert world.worker.blameless


def test_process_that_has_the_process_id_of_a_worker_on_disk_is_not_killed(
    parked: Park, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        world = parked(dump=DUMPED, restore=FAILS)
        world.park()
        world.wait(lambda: not Path(f"/proc/{world.pid}").exists())
        monkeypatch.setattr(world.worker, "dumped_pid", other.pid)
        world.unpark()
        assert "another process has its process id" in world.end().note
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_restored_process_that_was_reaped_elsewhere_has_ended() -> None:
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    restored = RestoredProcess(process.pid)
    process.kill()
    process.wait()
    assert restored.poll() == -signal.SIGKILL
    restored.close()


def test_error_of_the_folder_for_images_is_a_launch_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROGRAM, "/bin/true")
    with pytest.raises(LaunchError, match="No such file or directory"):
        working_criu(tmp_path / "missing")
    with pytest.raises(LaunchError, match="No such file or directory"):
        working_criu(Path("/proc"))  # in which no folder can be created


def folder_of_images(parent: Path) -> Path:
    """The name of a folder of images in `parent`."""
    criu = Criu("/bin/true", parent)
    criu.close()
    return criu.folder


def age(path: Path) -> None:
    os.utime(path, (time.time() - 3600, time.time() - 3600))


def test_images_of_killed_processes_are_removed_but_not_those_of_other_users(tmp_path: Path) -> None:
    stale, fifo, others = (folder_of_images(tmp_path) for _ in range(3))
    stale.mkdir()
    os.mkfifo(fifo)
    others.mkdir()
    if os.geteuid() == 0:
        os.chown(others, 12345, 12345)
    for path in (stale, fifo, others):
        age(path)
    Criu("/bin/true", tmp_path).close()
    assert not stale.exists() and fifo.exists()
    assert others.exists() == (os.geteuid() == 0)


def test_images_of_another_machine_are_kept(tmp_path: Path) -> None:
    """On NFS, its lock may be invisible here."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    own = folder_of_images(tmp_path)
    other = own.with_name(own.name.replace(boot_id, "01234567-89ab-cdef-0123-456789abcdef"))
    assert other != own
    other.mkdir()
    age(other)
    Criu("/bin/true", tmp_path).close()
    assert other.exists()


def test_acting_servers_exclude_workers_on_disk() -> None:
    config = farstep.SSHConfig(hosts="a", relay=True, park_method="criu")
    env = farstep.ClusterEnv({"env_name": "CartPole-v1", "inference": "served"}, config)
    with pytest.raises(ConfigError, match=r"inference is 'served' and park_method is 'criu'"):
        env.launch()


def test_worker_that_waits_for_its_link_ends_with_the_daemon(parked: Park) -> None:
    world = parked(dump=HANGS)
    world.park()
    world.wait(lambda: list(world.criu.folder.glob("images-*")))
    world.close_starter()
    deadline = time.monotonic() + 30
    while state_of(world.pid) != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)
