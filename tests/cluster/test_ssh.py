"""Workers over a real sshd: the contract of launchers, unreachable hosts, and secret keys."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

import farstep
from farstep.config.launch import SSHConfig
from farstep.errors import ConfigError, LaunchError, WorkerDied, WorkerStuck
from farstep.rollout.seeds import episode_seed
from farstep.testing import CountingEnv, FaultyEnv, TableAgent, check_launcher
from farstep.wire.keys import KeyPair
from tests.cluster.checks import eventually, within, without_programs
from tests.engines.ssh_hosts import SshServer

pytestmark = pytest.mark.timeout(400)
HOSTS = ["one", "two", "three"]


@pytest.fixture
def server() -> Iterator[SshServer]:
    with SshServer(HOSTS) as server:
        yield server


def config(server: list[str], nodes: int = 1, max_nodes: int | None = None, **options: Any) -> SSHConfig:
    ssh = ("ssh", "-T", "-o", "BatchMode=yes", *server)
    return SSHConfig(ssh=ssh, hosts=HOSTS[: max_nodes or nodes], nodes=nodes, max_nodes=max_nodes, **options)


def start(config: SSHConfig, **source: Any) -> farstep.ClusterEnv:
    return farstep.ClusterEnv(
        {"type": "factory", "env_name": CountingEnv, "envs_per_node": 3, "seed": 1} | source, config
    )


def kill_daemon(node: dict[str, Any]) -> None:
    os.kill(node["pid"], signal.SIGKILL)


def test_the_contract(server: SshServer) -> None:
    """With `relay`; the files of other engines have the contract without."""
    make = functools.partial(config, server.options, relay=True)
    scarce = functools.partial(SSHConfig, ssh=make().ssh, hosts=["one", "no-such-host"], relay=True)
    check_launcher(make, kill_node=kill_daemon, scarce=scarce, missing=without_programs)


def test_the_error_names_an_unreachable_host_and_quotes_ssh(server: SshServer) -> None:
    env = start(SSHConfig(ssh=("ssh", "-T", *server.options), hosts=["one", "no-such-host"]))
    with pytest.raises(LaunchError, match=r"(?s)ended on no-such-host.*no-such-host:.*resolve"):
        within(env.launch)


def test_training_continues_without_an_unreachable_host(server: SshServer, caplog: pytest.LogCaptureFixture) -> None:
    hosts = ["one", "no-such-host"]
    ssh = ("ssh", "-T", *server.options)
    asked = SSHConfig(ssh=ssh, hosts=hosts, min_nodes=1, workers_per_node=1, timeouts=cast(Any, {"close_s": 60.0}))
    with start(asked) as env:
        batch = within(lambda: env.collect(TableAgent(), steps=4))
        assert batch["obs"].shape[1] == 3
        assert env.stats()["workers"]["queued"] == 1
        assert [node["place"] for node in env.stats()["nodes"]] == ["ssh one"]
        eventually(lambda: "Could not resolve hostname no-such-host" in caplog.text)
        within(env.close, 30)  # nodes that never joined are not waited for


def test_an_environment_that_ends_its_worker_is_named(server: SshServer) -> None:
    """The last progress report of the worker may be a second old."""
    source = {"env_name": FaultyEnv, "env_kwargs": {"fault": "sigkill", "phase": "step", "at": 3}}
    asked = config(server.options, workers_per_node=1, restart_budget=0)
    with start(asked, **source) as env, pytest.raises(WorkerDied, match="SIGKILL") as caught:
        within(lambda: env.collect(TableAgent(), steps=8))
    where = caught.value.where
    assert (where.phase, where.slot, where.seed) == ("step", 0, episode_seed(1, 0, 0))


def test_error_says_where_an_environment_hangs(server: SshServer) -> None:
    source = {"env_name": FaultyEnv, "env_kwargs": {"fault": "hang", "phase": "step", "at": 3}}
    asked = config(server.options, workers_per_node=1, restart_budget=0, timeouts={"step_s": 4.0})
    with start(asked, **source) as env, pytest.raises(WorkerStuck, match="phase 'step'") as caught:
        within(lambda: env.collect(TableAgent(), steps=8))
    assert "in do_fault" in caught.value.output and "envs.py" in caught.value.output


class LastWordsEnv(CountingEnv):
    def close(self) -> None:
        print("these were my last words")


def test_output_of_a_worker_at_its_end_is_logged(server: SshServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "farstep")
    with start(config(server.options, nodes=2, workers_per_node=1), env_name=LastWordsEnv) as env:
        within(lambda: env.collect(TableAgent(), steps=2))
    assert caplog.text.count("my last words") == 6


def test_a_daemon_whose_session_ended_is_not_waited_for(server: SshServer) -> None:
    with start(config(server.options, nodes=2, workers_per_node=1, lease_s=300)) as env:
        within(lambda: env.collect(TableAgent(), steps=2))
        victim = env.stats()["nodes"][0]
        kill_daemon(victim)
        eventually(lambda: victim["pid"] not in [node["pid"] for node in env.stats()["nodes"]], 60)
        batch = within(lambda: env.collect(TableAgent(), steps=2))
        eventually(lambda: len(env.stats()["nodes"]) == 2, 60)
        assert batch["obs"].shape[1] >= 3


def children() -> list[int]:
    """The processes that this process started and has not waited for."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(entry.name))
    return found


def test_daemon_continues_after_its_session_is_cut(server: SshServer) -> None:
    """The session only starts it; its heartbeats show that it is alive."""
    with start(config(server.options, nodes=1, workers_per_node=1)) as env:
        within(lambda: env.collect(TableAgent(), steps=2))
        (node,) = env.stats()["nodes"]
        (session,) = (pid for pid in children() if Path(f"/proc/{pid}/comm").read_text() == "ssh\n")
        os.killpg(session, signal.SIGKILL)
        eventually(lambda: session not in children())  # waited for by the thread that asks how the session is
        within(lambda: env.collect(TableAgent(), steps=2))
        time.sleep(4)
        within(lambda: env.collect(TableAgent(), steps=2))
        assert env.stats()["nodes"][0]["pid"] == node["pid"]


def test_setup_lines_come_first(server: SshServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mark, eaten = tmp_path / "mark", tmp_path / "eaten"
    setup = [f"echo here > {mark}", "no-such-program --at all", f"cat > {eaten}"]  # keys are not for them to read
    with start(config(server.options, setup=setup, workers_per_node=1)) as env:
        env.launch()
    assert mark.read_text() == "here\n" and eaten.read_text() == ""
    assert "the setup command 'no-such-program --at all' failed" in caplog.text


def test_no_key_is_in_an_argument_or_an_environment(server: SshServer, issued: dict[tuple[int, int], KeyPair]) -> None:
    with start(config(server.options, nodes=2, workers_per_node=1)) as env:
        env.launch()
        assert len(issued) == 3  # of two workers, and of the node daemons together
        secrets = [pair.secret for pair in issued.values()]
        seen = [
            (path / name).read_bytes()
            for path in Path("/proc").iterdir()
            if path.name.isdigit()
            for name in ("cmdline", "environ")
            if os.access(path / name, os.R_OK) and _readable(path / name)
        ]
        assert any(b"node_daemon" in text for text in seen)
        assert not [secret for secret in secrets for text in seen if secret in text]
    eventually(lambda: not _daemons())


def _readable(path: Path) -> bool:
    try:
        path.read_bytes()
    except OSError:
        return False
    return True


def _daemons() -> list[Path]:
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and _readable(path / "cmdline"):
            words = (path / "cmdline").read_bytes().split(b"\0")
            if b"farstep.launch.daemon.node_daemon" in words and str(os.getpid()) in _ancestors(path):
                found.append(path)
    return found


def _ancestors(path: Path) -> list[str]:
    parents = []
    while path.name != "0" and path.exists():
        parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
        parents.append(parent)
        path = path.parent / parent
    return parents


@pytest.mark.parametrize("hosts", [[], ["-oProxyCommand=bad"], [""], "", [3]])
def test_invalid_hosts_are_refused(hosts: Any) -> None:
    with pytest.raises(ConfigError, match=r"SSHConfig\.hosts is"):
        SSHConfig(hosts=hosts)


def test_without_ssh_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="'ssh' is not on this machine; install an ssh client"):
        start(SSHConfig(hosts=["somewhere"])).launch()
