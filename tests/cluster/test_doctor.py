"""`farstep doctor` on this machine, by real ssh with a host that is missing, and on a real SLURM."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import farstep
from farstep.cli import main
from farstep.wire.versions import versions
from tests.engines.slurm_cluster import SlurmCluster
from tests.engines.ssh_hosts import SshServer

pytestmark = pytest.mark.timeout(300)
SOURCE = Path(farstep.__file__).parents[1]
SETUP = ["--setup", f"export PYTHONPATH={SOURCE}"]
"""Hosts are logged in to, so they do not have the path of this process."""


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    """Its status, and what it found: lines that follow a finding belong to it."""
    status = main(["doctor", *arguments])
    output = capsys.readouterr().out
    return status, re.split(r"\n(?=  (?:ok|warning|problem) |\w)", output)


def one(found: list[str], level: str, *words: str) -> str:
    """The only finding of that level with all these words."""
    (match,) = [text for text in found if text.startswith(f"  {level}") and all(word in text for word in words)]
    return match


def test_this_machine_is_fit(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = doctor(capsys, "--env", "CartPole-v1")
    assert status == 0, found
    one(found, "ok", "farstep", "Python", "gymnasium", "zmq")
    one(found, "ok", "listen on 127.0.0.1", "two ports")
    one(found, "ok", f"numpy {versions()['numpy']}", "as here")
    one(found, "ok", "cores", "GiB of memory", "GPUs")
    one(found, "ok", "its clock agrees")
    one(found, "ok", "CartPole-v1 can be built and reset")
    rate = re.search(r"([\d,]+) MB/s to it and ([\d,]+) MB/s from it", "".join(found))
    assert rate and all(int(number.replace(",", "")) > 0 for number in rate.groups())
    assert re.search(r"round trip takes \d+\.\d\d ms", "".join(found))
    assert found[-1].startswith("no problems")


def leave_a_child() -> None:
    subprocess.Popen(["sleep", "3600"])  # it has our output open
    raise RuntimeError("no environment today")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (["--env", "NoSuchEnv-v0"], ["NoSuchEnv-v0", "your_module:NoSuchEnv-v0"]),
        (["--env", "no_such_module:Id-v0"], ["No module named 'no_such_module'"]),
        (["--env", "os:abort", "--env-type", "factory"], ["ended by signal 6"]),
        (["--env", f"{__name__}:leave_a_child", "--env-type", "factory"], ["no environment today"]),
    ],
    ids=["unknown", "not installed", "crashes", "leaves a child"],
)
def test_an_environment_that_cannot_be_made(
    environment: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = doctor(capsys, *environment)
    assert status == 1
    text = one(found, "problem", "cannot be built")
    assert all(word in text for word in words), text
    assert found[-1].startswith("1 problem")


def test_an_address_that_is_not_ours(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--launcher", "ssh", "--hosts", "here", "--ssh", "false", "--head-address", "203.0.113.7"]
    status, found = doctor(capsys, *asked)
    assert status == 1
    one(found, "problem", "cannot listen on 203.0.113.7", "--head-address")


def test_a_run_with_an_address_that_is_not_ours() -> None:
    with pytest.raises(farstep.LaunchError, match=r"cannot listen on 203\.0\.113\.7.*head_address must name"):
        farstep.ClusterEnv(
            {"env_name": "CartPole-v1"}, farstep.SSHConfig(hosts="x", head_address="203.0.113.7")
        ).launch()


def test_without_the_engines_program(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    status, found = doctor(capsys, "--launcher", "slurm")
    assert status == 1
    one(found, "problem", "sbatch", "login node")
    assert not any("nodes" in text.splitlines() for text in found), "no node was asked for"


def test_hosts_of_which_one_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with SshServer(["one"]) as server:
        ssh = " ".join(["ssh", "-T", *server.options])
        asked = ["--launcher", "ssh", "--ssh", ssh, "--hosts", "no-such-host", "one", *SETUP]
        status, found = doctor(capsys, *asked)
    assert status == 1
    one(found, "ok", "one answers to ssh")
    one(found, "problem", "no-such-host: ", "resolve", "~/.ssh/config")
    one(found, "problem", "1 of 2 nodes did not connect", "no-such-host", "resolve")
    assert sum("reached the head at tcp://" in text for text in found) == 1, found
    assert sum("MB/s" in text for text in found) == 1
    assert found[-1].startswith("2 problems")


def test_hosts_with_other_versions(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import gymnasium\ngymnasium.__version__ = '0.0.1'\n")
    with SshServer(["one"]) as server:
        ssh = " ".join(["ssh", "-T", *server.options])
        setup = f"export PYTHONPATH={tmp_path}:{SOURCE}"
        status, found = doctor(capsys, "--launcher", "ssh", "--ssh", ssh, "--hosts", "one", "--setup", setup)
    assert status == 1
    one(found, "problem", "gymnasium", "0.0.1 on the worker")


def test_python_that_is_elsewhere_on_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    with SshServer(["one"]) as server:
        ssh = " ".join(["ssh", "-T", *server.options])
        status, found = doctor(capsys, "--launcher", "ssh", "--ssh", ssh, "--hosts", "one", "--python", "/no/python")
    assert status == 1
    one(found, "problem", "one: ", "/no/python", "--python PATH")
    assert not any("nodes" in text.splitlines() for text in found), "no host is left that could be asked"


def stand_in(folder: Path, *lines: str) -> list[str]:
    """Options for a shell in place of ssh, and a host."""
    (folder / "shell").write_text("\n".join(["#!/bin/sh", "shift", *lines, ""]))
    (folder / "shell").chmod(0o755)
    return ["--launcher", "ssh", "--ssh", str(folder / "shell"), "--hosts", "one"]


def test_nodes_with_slow_workers_are_not_reported_as_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    slow = "import sys, time\nif 'farstep.worker' in sys.orig_argv: time.sleep(60)\n"
    (tmp_path / "sitecustomize.py").write_text(slow)
    asked = stand_in(tmp_path, f"export PYTHONPATH={tmp_path}:{SOURCE}", 'exec sh -c "$*"')
    # Long enough for the daemon to come, on a busy machine, too: it is the worker that does not.
    status, found = doctor(capsys, *asked, "--wait-s", "20")
    assert status == 1
    one(found, "problem", "1 node connected, but no worker was ready there within 20 s", "--wait-s")
    assert "did not connect" not in "".join(found)


@pytest.mark.parametrize("wait_s", ["6", "60"], ids=["still trying", "given up"])
def test_a_head_behind_a_firewall(capsys: pytest.CaptureFixture[str], tmp_path: Path, wait_s: str) -> None:
    """The daemon runs in a network of its own, from which nothing can be reached."""
    asked = stand_in(tmp_path, f"export PYTHONPATH={SOURCE}", 'exec unshare --net sh -c "$*"')
    status, found = doctor(capsys, *asked, "--connect-s", "10", "--wait-s", wait_s)
    assert status == 1
    one(found, "ok", "one answers to ssh")
    text = one(found, "problem", "ports", "--head-address")
    assert ("the head answers at none of" in text) == (wait_s == "60"), text


def test_gpus_that_slurm_does_not_know(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {
        "sinfo": "echo 'main|up|2|idle'",
        "sbatch": "echo 'sbatch: error: Invalid generic resource (gres) specification' >&2; exit 1",
        **dict.fromkeys(("squeue", "scancel"), "true"),
    }
    for name, line in said.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    status, found = doctor(capsys, "--launcher", "slurm", "--gpus-per-node", "1")
    assert status == 1
    one(found, "problem", "gres", "lists GPUs", "--gpus-per-node")


def test_a_cluster_that_kubernetes_is_not_configured_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("kubernetes")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-such-file"))
    status, found = doctor(capsys, "--launcher", "kubernetes", "--image", "farstep:1")
    assert status == 1
    one(found, "problem", "no Kubernetes cluster is configured", "-> set KUBECONFIG to a file")


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=2) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SlurmCluster]:
    monkeypatch.chdir(tmp_path)
    for name, value in shared_cluster.environment.items():
        monkeypatch.setenv(name, value)
    yield shared_cluster
    shared_cluster.command("scontrol", "update", "PartitionName=main", "MaxNodes=UNLIMITED")
    shared_cluster.resume_all()
    shared_cluster.wait_until_idle()


def test_nodes_of_slurm(cluster: SlurmCluster, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = doctor(capsys, "--launcher", "slurm", "--nodes", "2", "--partition", "main", "--env", "CartPole-v1")
    assert status == 0, found
    one(found, "ok", "SLURM answers", "2 idle in main")
    for node in ("n1", "n2"):
        one(found, "ok", f"node {node})", "reached the head at")
        one(found, "ok", f"node {node})", "can be built")
    assert not [job for job in cluster.jobs().values() if job.state in ("PENDING", "RUNNING")]


def test_a_partition_that_is_not_there(cluster: SlurmCluster, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = doctor(capsys, "--launcher", "slurm", "--partition", "mian")
    assert status == 1
    one(found, "problem", "unknown partition 'mian'", "main")


def test_several_partitions_of_which_one_is_not_there(
    cluster: SlurmCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found = doctor(capsys, "--launcher", "slurm", "--partition", "main,mian", "--wait-s", "1")
    one(found, "problem", "unknown partition 'mian'", "main")


def test_more_nodes_than_there_are(cluster: SlurmCluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.command("scontrol", "update", "PartitionName=main", "MaxNodes=1")
    status, found = doctor(capsys, "--launcher", "slurm", "--nodes", "2", "--wait-s", "5")
    assert status == 1
    one(found, "problem", "PartitionNodeLimit", "wait forever", "fewer nodes")


def test_a_queue_that_is_long(cluster: SlurmCluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.down("n2")
    status, found = doctor(capsys, "--launcher", "slurm", "--nodes", "2", "--wait-s", "5")
    assert status == 1
    text = one(found, "problem", "2 of 2 nodes did not connect", "is PENDING", "--wait-s")
    assert re.search(r"SLURM job \d+ has not started, so it has no log", text)
    assert not [job for job in cluster.jobs().values() if job.state in ("PENDING", "RUNNING")]
