"""No process, shared memory or temporary file outlives a head, however it ends."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import uuid
import weakref
from pathlib import Path

import pytest

import farstep
from farstep.config.launch import LaunchConfig
from farstep.testing import TableAgent
from tests.cluster.checks import assert_sound, cluster, eventually, in_process, within

ROOT = Path(__file__).parents[2]
TAG = "FARSTEP_TEST_TAG"
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
ENDS = [*SIGNALS, "exception", "os._exit"]
"""In every phase. `sys.exit` raises, as an exception does, so that one phase is enough for it."""
LEASE_S = 20.0  # ten, and as much again for a busy machine


class Head:
    """A head in a process of its own; all it starts, and all they start, carries its tag."""

    def __init__(self, folder: Path, *command: str) -> None:
        folder.mkdir()
        self._folder, self._tag = folder, uuid.uuid4().hex
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        environment = {**os.environ, TAG: self._tag, "TMPDIR": str(self._temporary)}
        self.process = subprocess.Popen(
            [sys.executable, *command],
            env=environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def processes(self) -> dict[int, str]:
        """Living processes with this head's tag: itself, workers, and what environments started."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if f"{TAG}={self._tag}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                except OSError:
                    continue  # it ended meanwhile
        return found

    def until_there(self) -> None:
        """Until the head is in its phase, with a worker and a process that the environment started."""
        # Six heads start at once, each with a worker.
        eventually(lambda: (self._folder / "here").exists() or self.process.poll() is not None, 120)
        assert self.process.poll() is None, self.process.communicate()
        names = " ".join(self.processes().values())
        assert "farstep.worker" in names
        assert "sleep 1000" in names

    def end(self, how: str) -> None:
        if how == "SIGINT":  # an impatient user
            while self.process.poll() is None:
                self.process.send_signal(signal.SIGINT)
                try:
                    self.process.wait(0.1)
                except subprocess.TimeoutExpired:
                    continue
        else:
            self.process.send_signal(SIGNALS.get(how, signal.SIGUSR1))

    def assert_nothing_left(self) -> None:
        self.process.communicate(timeout=LEASE_S)
        try:
            eventually(lambda: not self.processes(), LEASE_S)
        except AssertionError as error:
            raise AssertionError(f"{self._folder.name}: left {self.processes()}") from error
        assert list(self._temporary.iterdir()) == []


@pytest.mark.parametrize("phase", ["launch", "collect", "stream", "idle", "gil"])
def test_nothing_outlives_a_head_that_ends(phase: str, tmp_path: Path) -> None:
    shared = set(Path("/dev/shm").iterdir())
    ends = {"gil": ["SIGKILL", "SIGTERM"], "collect": [*ENDS, "sys.exit"]}.get(phase, ENDS)
    heads = {end: Head(tmp_path / end, "-m", "tests.cluster.head", phase, end, str(tmp_path / end)) for end in ends}
    try:
        for head in heads.values():
            head.until_there()
        for end, head in heads.items():
            head.end(end)
        for head in heads.values():
            head.assert_nothing_left()
    finally:
        for head in heads.values():
            head.process.kill()
            head.process.communicate()
    assert not [name for name in set(Path("/dev/shm").iterdir()) - shared if "farstep" in name.name]


SCRIPTS = {
    "forgotten": """
env = farstep.ClusterEnv({"type": "factory", "env_name": CountingEnv}, farstep.LocalConfig(workers_per_node=1))
env.collect(TableAgent(), steps=4)
""",
    "in the middle of a stream": """
env = farstep.ClusterEnv({"type": "factory", "env_name": CountingEnv}, farstep.LocalConfig(workers_per_node=1))
stream = env.stream(TableAgent(), steps=4)
next(stream)
""",
    "in a cycle": """
class Holder: pass
holder = Holder()
holder.itself = holder
holder.env = farstep.ClusterEnv({"type": "factory", "env_name": CountingEnv}, farstep.InProcessConfig())
holder.env.collect(TableAgent(), steps=4)
""",
    "on ZeroMQ": """
env = farstep.ClusterEnv(
    {"type": "factory", "env_name": CountingEnv}, farstep.LocalConfig(workers_per_node=1, transport="ipc")
)
env.collect(TableAgent(), steps=4)
""",
}


def test_program_that_ends_without_close_prints_nothing(tmp_path: Path) -> None:
    start = "import farstep\nfrom farstep.testing import CountingEnv, TableAgent\n"
    heads = {name: Head(tmp_path / name, "-c", start + script) for name, script in SCRIPTS.items()}
    for name, head in heads.items():
        output, errors = head.process.communicate(timeout=60)
        # On a busy machine a slow start is logged.
        said = [line for line in errors.splitlines() if not line.startswith("waiting ")]
        assert (head.process.returncode, output, said) == (0, "", []), name
        head.assert_nothing_left()


@pytest.mark.parametrize(
    "config", [in_process(2), farstep.LocalConfig(workers_per_node=2)], ids=["in_process", "local"]
)
def test_a_forgotten_cluster_is_freed(config: LaunchConfig) -> None:
    env = cluster(config=config)
    batch = env.collect(TableAgent(), steps=4)
    ref = weakref.ref(env)
    del env
    gc.collect()
    assert ref() is None
    assert_sound(batch)  # what was handed out stays readable; the leak check looks for the rest


@pytest.mark.parametrize(
    "config", [in_process(2), farstep.LocalConfig(workers_per_node=2)], ids=["in_process", "local"]
)
def test_close_can_be_called_at_any_time_and_again(config: LaunchConfig) -> None:
    never_launched = cluster(config=config)
    never_launched.close()
    never_launched.close()
    env = cluster(config=config)
    agent = TableAgent()
    for batch in env.stream(agent, steps=4):
        within(env.close)
        assert_sound(batch)
        break
    within(env.close)
    for call in (env.launch, env.reset, env.stats, lambda: env.collect(agent), lambda: env.publish(agent)):
        with pytest.raises(farstep.ClosedError):
            call()


FORKING = """
import os, signal, time
env = farstep.ClusterEnv({"type": "factory", "env_name": CountingEnv}, farstep.LocalConfig(workers_per_node=1))
env.collect(TableAgent(), steps=4)
if not os.fork():
    time.sleep(1000)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_end_with_the_head_even_if_a_fork_of_it_lives_on(tmp_path: Path) -> None:
    start = "import farstep\nfrom farstep.testing import CountingEnv, TableAgent\n"
    head = Head(tmp_path / "forking", "-W", "ignore", "-c", start + FORKING)
    try:
        head.process.wait(60)
        eventually(lambda: not [name for name in head.processes().values() if "farstep.worker" in name], LEASE_S)
        (fork,) = head.processes()
    finally:
        for pid in head.processes():
            os.kill(pid, signal.SIGKILL)
        head.process.communicate()
    assert fork != head.process.pid
