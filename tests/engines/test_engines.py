"""The engines of other tests: they start, work, fail on demand, and leave no process or file behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.guarded import EngineError, EngineMissing, Guarded, expect_line, require, wait_until
from tests.engines.namespaces import Network
from tests.engines.slurm_cluster import SlurmCluster
from tests.engines.ssh_hosts import SshServer

HERE = Path(__file__).parent
TAG = "FARSTEP_ENGINE_TAG"
pytestmark = pytest.mark.long


def tagged(tag: str) -> dict[int, str]:
    """Processes, zombies not, that have the tag in their environment."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if f"{TAG}={tag}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
    return found


def left_on_machine() -> list[str]:
    """Mounts and interfaces as engines make them, outside of their own hosts."""
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if "farstep-" in line]
    names = [path.name for path in Path("/sys/class/net").iterdir()]
    return mounts + [name for name in names if name.startswith(("bridge0", "port"))]


def networks_in_use() -> set[str]:
    """The network namespaces of all processes."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            found.add(str((entry / "ns" / "net").readlink()))
        except OSError:
            continue  # it ended meanwhile
    return found


@pytest.fixture(autouse=True)
def tag(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """In the environment of all that a test starts, of which nothing may be left."""
    name = uuid.uuid4().hex
    monkeypatch.setenv(TAG, name)
    yield name
    assert tagged(name) == {}
    assert left_on_machine() == []


def probe(network: Network, host: str, what: str, target: str) -> str:
    return network.run(host, [sys.executable, HERE / "net_probe.py", what, network.address(target)]).strip()


def serve(network: Network, host: str) -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    expect_line(network.popen(host, [sys.executable, HERE / "net_probe.py", "serve"], **pipes), "ready", "the probe")


def test_a_guarded_program_ends_as_it_would_alone():
    for command, status in (["true"], 0), (["sh", "-c", "exit 3"], 3), (["sh", "-c", "kill -USR1 $$"], -signal.SIGUSR1):
        process = Guarded(command)
        assert process.wait(20) == status
        process.end()
    process = Guarded(["no-such-program"], stderr=subprocess.PIPE, text=True)
    assert process.wait(20) == 127
    assert process.stderr is not None
    assert "no-such-program cannot be run" in process.stderr.read()
    process.end()


def test_signals_are_forwarded_to_the_program():
    process = Guarded(["sleep", "1000"])
    process.terminate()
    assert process.wait(20) == -signal.SIGTERM
    process.end()


def test_a_stopped_program_stops_with_all_that_it_started(tag):
    def states() -> set[str]:
        sleeping = [pid for pid, command in tagged(tag).items() if command.startswith("sleep")]
        return {Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] for pid in sleeping}

    process = Guarded(["sh", "-c", "sleep 1000 & setsid sleep 1000"])
    wait_until(lambda: len(tagged(tag)) == 4 and states() == {"S"}, "a guard, a shell and two that sleep")
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: states() == {"T"}, "both to stop")
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: states() == {"S"}, "both to continue")
    process.end()


@pytest.mark.parametrize("end", ["kill", "end", "exit"])
def test_daemons_do_not_outlive_the_program(tag, tmp_path, end):
    daemon = f"setsid sh -c 'sleep 1000 & touch {tmp_path}/there; wait' &"
    process = Guarded(["sh", "-c", f"({daemon}); while ! test -e {tmp_path}/{end}; do sleep 0.05; done"])
    wait_until((tmp_path / "there").exists, "the daemon")
    if end == "exit":
        (tmp_path / "exit").touch()
    else:
        getattr(process, end)()
    process.wait(20)
    assert tagged(tag) == {}
    process.end()


def test_a_missing_program_names_its_package():
    with pytest.raises(EngineMissing, match="apt-get install --no-install-recommends good-package"):
        require("good-package", "sh", "no-such-program")


def test_hosts_have_a_name_an_address_and_shared_memory_of_their_own():
    with Network(["h1", "h2"]) as network:
        assert network.run("h1", ["hostname"]) == "h1\n"
        look_up = [sys.executable, "-c", "import socket; print(socket.gethostbyname('h2'), socket.gethostbyname('h1'))"]
        assert network.run("h1", look_up).split() == [network.address("h2"), network.address("h1")]
        network.run("h1", ["touch", "/dev/shm/farstep-there"])
        assert network.run("h1", ["ls", "/dev/shm"]) == "farstep-there\n"
        assert network.run("h2", ["ls", "/dev/shm"]) == ""
        with pytest.raises(EngineError, match="no host 'h3' in this network; there are h1, h2"):
            network.cut("h3")
    with Network(["h1", "h2"], debian_hosts=True) as network:
        assert network.run("h1", look_up).split() == [network.address("h2"), "127.0.1.1"]


@pytest.mark.parametrize("delay_ms", [0, 1], ids=["bridge", "switch"])
def test_networks_end_with_their_block(delay_ms):
    with pytest.raises(RuntimeError, match="deliberate"), Network(["h1", "h2"], delay_ms=delay_ms) as network:
        named = {network.run(host, ["readlink", "/proc/self/ns/net"]).strip() for host in network.hosts}
        network.popen("h1", ["sleep", "1000"])
        assert named <= networks_in_use()
        raise RuntimeError("deliberate")
    assert not named & networks_in_use()
    assert not any(str(path.readlink()) in named for path in Path("/proc/self/fd").iterdir() if path.is_symlink())


def test_crash_of_a_host_ends_all_its_processes():
    with Network(["h1", "h2"]) as network:
        on_1, on_2 = network.popen("h1", ["sleep", "1000"]), network.popen("h2", ["sleep", "1000"])
        network.crash("h1")
        assert on_1.wait(20) == -signal.SIGKILL
        assert on_2.poll() is None
        assert network.run("h1", ["hostname"]) == "h1\n"


@pytest.mark.parametrize("delay_ms", [0, 10], ids=["bridge", "switch"])
def test_partitions_can_be_made_and_healed(delay_ms):
    with Network(["h1", "h2", "h3"], delay_ms=delay_ms) as network:
        for host in network.hosts:
            serve(network, host)
        assert probe(network, "h1", "rtt", "h2") != "none"
        network.cut("h2")
        assert probe(network, "h1", "rtt", "h2") == "none"
        assert probe(network, "h2", "rtt", "h3") == "none"
        assert probe(network, "h1", "rtt", "h3") != "none"
        network.heal("h2")
        assert probe(network, "h1", "rtt", "h2") != "none"
        network.cut_pair("h1", "h2")
        assert probe(network, "h2", "rtt", "h1") == "none"
        assert probe(network, "h2", "rtt", "h3") != "none"
        network.heal_pair("h1", "h2")
        assert probe(network, "h2", "rtt", "h1") != "none"


@pytest.mark.parametrize("delay_ms", [0, 10], ids=["bridge", "switch"])
def test_links_can_lose_and_delay_packets(delay_ms):
    with Network(["h1", "h2"], delay_ms=delay_ms) as network:
        serve(network, "h2")
        assert float(probe(network, "h1", "loss", "h2")) < 0.05
        network.lose("h2", 0.3)  # there and back: about half
        assert 0.2 < float(probe(network, "h1", "loss", "h2")) < 0.8
        network.lose("h2", 0)
        network.limit("h2", 8)
        assert 1 < float(probe(network, "h1", "rate", "h2")) < 16
        network.limit("h2", None)
        assert float(probe(network, "h1", "rate", "h2")) > 16


def test_a_slow_network_has_its_delay_its_loss_and_its_rate():
    with Network(["h1", "h2"], delay_ms=25, loss=0.01, rate_mbit=100) as network:
        serve(network, "h2")
        assert 50 <= float(probe(network, "h1", "rtt", "h2")) < 500
        assert 0 < float(probe(network, "h1", "loss", "h2")) < 0.2
        assert 1 < float(probe(network, "h1", "rate", "h2")) < 110


def test_concurrent_networks_are_isolated():
    with Network(["h1", "h2"]) as one, Network(["h1", "h2"]) as other:
        serve(one, "h2")
        assert probe(one, "h1", "rtt", "h2") != "none"
        assert one.address("h2") == other.address("h2")
        assert probe(other, "h1", "rtt", "h2") == "none"


def submit(cluster: SlurmCluster, out: Path, *words: str, command: str) -> int:
    """A job that says on which nodes it began, and runs a command on each."""
    script = out.with_suffix(".sh")
    script.write_text(f"#!/bin/sh\necho begins on $SLURM_JOB_NODELIST\n{command}\n")
    return int(cluster.command("sbatch", "--parsable", "--open-mode=append", "-o", str(out), *words, str(script)))


def count(out: Path, what: str) -> int:
    return out.read_text().count(what) if out.exists() else 0


def test_slurm_runs_jobs_and_queues_them_again_when_a_node_dies(tmp_path):
    with SlurmCluster(nodes=3) as cluster:
        out = tmp_path / "out"
        program = "import os, time; print('runs on', os.environ['SLURMD_NODENAME'], flush=True); time.sleep(1000)"
        job = submit(cluster, out, "-N2", command=f'srun {sys.executable} -c "{program}"')
        wait_until(lambda: count(out, "runs on") == 2, "both nodes", logs=[out])
        assert cluster.jobs()[job].state == "RUNNING"
        cluster.kill_node("n2")
        wait_until(lambda: count(out, "begins on") == 2, "a second run", 60, [out], pause_s=0.2)
        assert cluster.states()["n2"] == "down*"
        assert cluster.jobs()[job].restarts == 1
        cluster.start_node("n2")
        cluster.command("scancel", str(job))
        wait_until(lambda: cluster.jobs()[job].state == "CANCELLED", "the job's end")
        wait_until(lambda: set(cluster.states().values()) == {"idle"}, "idle nodes")
        cluster.down("n1")
        assert cluster.states()["n1"] == "down"
        cluster.resume("n1")
        wait_until(lambda: cluster.states()["n1"] == "idle", "the node's return")


def test_concurrent_slurm_clusters_are_isolated(tmp_path):
    with SlurmCluster(nodes=1) as one, SlurmCluster(nodes=1) as other:
        for name, cluster in ("one", one), ("other", other):
            submit(cluster, tmp_path / name, command="srun sh -c 'echo of $SLURM_CONF'")
            wait_until(lambda: count(tmp_path / name, f"of {cluster.folder}") == 1, "the job", logs=[tmp_path / name])
            assert len(cluster.jobs()) == 1


def test_jobs_get_the_indices_of_their_gpus(tmp_path):
    with SlurmCluster(nodes=1, gpus=2) as cluster:
        out = tmp_path / "out"
        submit(cluster, out, "--gpus-per-node=2", command="srun sh -c 'echo has $CUDA_VISIBLE_DEVICES.'")
        wait_until(lambda: count(out, "has") == 1, "the job", logs=[out])
        assert count(out, "has 0,1.") == 1


def test_urgent_jobs_preempt_nodes_after_a_grace_period(tmp_path):
    with SlurmCluster(nodes=1, preemption=True, grace_s=3) as cluster:
        out = tmp_path / "out"
        program = f"sh -c 'trap \"echo told; exit\" TERM; touch {tmp_path}/there; while :; do sleep 0.1; done'"
        # A job that ends within its grace has ended: only what outlives it is queued again.
        job = submit(cluster, out, "--exclusive", command=f"srun {program}; sleep 1000")
        wait_until((tmp_path / "there").exists, "the job", logs=[out])
        urgent = submit(cluster, tmp_path / "urgent", "--exclusive", "-p", "urgent", command="exit")
        wait_until(lambda: cluster.jobs()[urgent].state == "COMPLETED", "the urgent job", 60, [out], pause_s=0.2)
        assert count(out, "told") == 1
        assert cluster.jobs()[job].restarts == 1


def test_slurm_on_hosts_of_a_network_notices_a_partition(tmp_path):
    with Network(["control", "a", "b"]) as network, SlurmCluster(network=network) as cluster:
        out = tmp_path / "out"
        submit(cluster, out, "-N2", command="srun hostname")
        wait_until(lambda: count(out, "a\n") >= 1 and count(out, "b\n") >= 1, "both hosts", logs=[out])
        environment = {**os.environ, **cluster.environment}
        assert network.run("b", ["sinfo", "-h", "-o", "%D"], env=environment) == "2\n"
        network.cut("a")
        wait_until(lambda: cluster.states()["a"] == "down*", "the partition", 60, pause_s=0.2)


def test_ssh_runs_commands_and_its_sessions_die_with_it(tmp_path):
    with SshServer(["alpha", "beta"]) as server:
        for host in server.hosts:
            assert subprocess.check_output(["ssh", *server.options, host, "echo $HOME"], text=True, timeout=30).strip()
        remote = f"sleep 1000 & echo $! > {tmp_path}/pid; mv {tmp_path}/pid {tmp_path}/there; wait"
        session = subprocess.Popen(["ssh", *server.options, "alpha", remote])
        wait_until((tmp_path / "there").exists, "the session")
        server.kill()
        assert session.wait(20) == 255
        assert not Path("/proc", (tmp_path / "there").read_text().strip()).exists()
        server.start("alpha")
        assert subprocess.run(["ssh", *server.options, "alpha", "exit 3"], timeout=30).returncode == 3


def test_ssh_to_hosts_of_a_network():
    with Network(["h1", "h2"]) as network, SshServer(network=network) as server:
        assert network.run("h1", ["ssh", *server.options, "h2", "hostname"]) == "h2\n"


USER = """
import os, signal, sys, tempfile, time
from tests.engines.guarded import Engine
from tests.engines.namespaces import Network
from tests.engines.slurm_cluster import SlurmCluster
Engine.parent = tempfile.gettempdir()
with Network(["h1", "h2"], delay_ms=1) as network, SlurmCluster(network=network) as cluster:
    cluster.command("sbatch", "--wrap", "sleep 1000", "-o", "/dev/null")
    while "RUNNING" not in [job.state for job in cluster.jobs().values()]:
        time.sleep(0.1)
    print("ready", flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_no_process_outlives_a_test_that_is_ended_by_a_signal(tag, tmp_path, number):
    # A short name, because the path of a socket in it has at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="u", dir="/tmp"))
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "TMPDIR": str(folder)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", USER], env=environment, start_new_session=True, **pipes) as user:
        expect_line(user, "ready", "the user", 60)
        assert len(tagged(tag)) > 5
        user.send_signal(number)
        user.wait(20)
    wait_until(lambda: not tagged(tag), "all processes to end", 20)
    if number == signal.SIGINT:
        assert list(folder.iterdir()) == []
    shutil.rmtree(folder)
