"""Workers on a real SLURM cluster of four nodes: the contract of launchers, and lost, requeued and cancelled jobs."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

import farstep
from farstep.cluster_env import status_page_of
from farstep.config.launch import SlurmConfig
from farstep.errors import LaunchError
from farstep.launch.engines.slurm import batch_script, job_sizes
from farstep.testing import CountingEnv, TableAgent, check_launcher
from tests.cluster import checks
from tests.cluster.checks import assert_balanced, within, without_programs
from tests.engines.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.timeout(400)
BATCH_S = 200.0
"""A batch may have to wait for a job: SLURM's timers, and a daemon and its workers that start beside another test."""


eventually = functools.partial(checks.eventually, pause_s=0.2)
"""Each question here starts one of SLURM's programs or collects a batch."""


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=4) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """For tests that kill no node and leave the controller running.

    Jobs of earlier tests are listed, but none is live.
    """
    join(monkeypatch, shared_cluster)
    yield shared_cluster
    shared_cluster.resume_all()
    eventually(lambda: not live_jobs(shared_cluster))
    shared_cluster.wait_until_idle()


@pytest.fixture
def own_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """For tests that kill nodes or stop the controller."""
    with SlurmCluster(nodes=4) as cluster:
        join(monkeypatch, cluster)
        yield cluster


def join(patch: pytest.MonkeyPatch, cluster: SlurmCluster) -> None:
    for name, value in cluster.environment.items():
        patch.setenv(name, value)


def config(folder: Path, **options: Any) -> SlurmConfig:
    return SlurmConfig(log_folder=str(folder / "logs"), **options)


def kill_daemon(node: dict[str, Any]) -> None:
    os.kill(node["pid"], signal.SIGKILL)


def start(folder: Path, envs: int = 3, **options: Any) -> farstep.ClusterEnv:
    source = {"type": "factory", "env_name": CountingEnv, "envs_per_node": envs, "seed": 1}
    return farstep.ClusterEnv(source, config(folder, workers_per_node=1, **options))


def live_jobs(cluster: SlurmCluster) -> list[int]:
    return [job.id for job in cluster.jobs().values() if job.state in ("PENDING", "RUNNING", "CONFIGURING")]


def test_the_contract(cluster: SlurmCluster, tmp_path: Path) -> None:
    make = functools.partial(config, tmp_path)
    scarce = functools.partial(make, nodes=2, slurm_extra=["--nodelist=n1", "--exclusive"])
    check_launcher(make, kill_node=kill_daemon, scarce=scarce, missing=without_programs)
    assert not live_jobs(cluster)


def columns(env: farstep.ClusterEnv, agent: TableAgent) -> int:
    """How many environments the next batch has; its rows must follow each other."""
    batch = within(lambda: env.collect(agent, steps=4), BATCH_S)
    count = batch["obs"][..., 1]
    continues = ~batch["episode_start"][1:]
    assert ((count[1:] - count[:-1])[continues] == 1).all()
    return int(batch["obs"].shape[1])


def test_four_nodes_in_one_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    with start(tmp_path, nodes=4) as env:
        assert columns(env, TableAgent()) == 12
        assert len(live_jobs(cluster)) == 1
        places = [node["place"] for node in env.stats()["nodes"]]
        assert sorted(place.rpartition(" ")[2] for place in places) == ["n1", "n2", "n3", "n4"]
    eventually(lambda: not live_jobs(cluster))


def test_a_node_that_loses_power_is_replaced_while_the_others_continue(
    own_cluster: SlurmCluster, tmp_path: Path
) -> None:
    with start(tmp_path, nodes=3, min_nodes=2, lease_s=3, slurm_extra=["--exclusive"]) as env:
        agent = TableAgent()
        eventually(lambda: columns(env, agent) == 9, BATCH_S)
        # Of the job that has only this one: see below for the first node of another job.
        victim = max(node["place"] for node in env.stats()["nodes"]).rpartition(" ")[2]
        own_cluster.kill_node(victim)
        eventually(lambda: columns(env, agent) == 6, BATCH_S)
        eventually(lambda: columns(env, agent) == 9, BATCH_S)  # on the fourth node
        assert victim not in str(env.stats()["nodes"])
        assert_balanced(env.stats())


def test_nodes_that_a_job_holds_without_daemons_are_freed(own_cluster: SlurmCluster, tmp_path: Path) -> None:
    """The first node of a job of two fails, and the daemon on the other ends, as it does where it misses `srun`."""
    with start(tmp_path, nodes=3, min_nodes=2, lease_s=3, slurm_extra=["--exclusive"]) as env:
        agent = TableAgent()
        eventually(lambda: columns(env, agent) == 9, BATCH_S)
        first, second = sorted((node["place"], node["pid"]) for node in env.stats()["nodes"])[:2]
        own_cluster.kill_node(first[0].rpartition(" ")[2])
        with contextlib.suppress(ProcessLookupError):
            os.kill(second[1], signal.SIGKILL)
        eventually(lambda: columns(env, agent) == 9, BATCH_S)
        assert second[0].rpartition(" ")[2] in str(env.stats()["nodes"])  # there are four nodes, and three are needed
        assert_balanced(env.stats())


def test_a_killed_node_daemon_is_restarted_inside_its_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    """All nodes of the cluster are in use, so that a replacement from the queue could never come."""
    with start(tmp_path, nodes=4, slurm_extra=["--exclusive"]) as env:
        agent = TableAgent()
        assert columns(env, agent) == 12
        (job,) = live_jobs(cluster)
        before = env.stats()["nodes"]
        kill_daemon(before[0])
        eventually(lambda: columns(env, agent) == 12 and before[0] not in env.stats()["nodes"], 60)
        assert {node["place"] for node in env.stats()["nodes"]} == {node["place"] for node in before}
        assert live_jobs(cluster) == [job]
        assert_balanced(env.stats())
    eventually(lambda: not live_jobs(cluster), 60)


def test_nodes_of_a_requeued_job_join_again(cluster: SlurmCluster, tmp_path: Path) -> None:
    with start(tmp_path, nodes=2, lease_s=3) as env:
        agent = TableAgent()
        assert columns(env, agent) == 6
        (job,) = live_jobs(cluster)
        cluster.command("scontrol", "requeue", str(job))
        eventually(lambda: cluster.jobs()[job].restarts == 1)
        eventually(lambda: not env.stats()["nodes"])
        assert columns(env, agent) == 6
        assert live_jobs(cluster) == [job]
        assert_balanced(env.stats())


@pytest.mark.long
def test_a_cancelled_job_is_requested_again(cluster: SlurmCluster, tmp_path: Path) -> None:
    with start(tmp_path, nodes=1, lease_s=3) as env:
        agent = TableAgent()
        assert columns(env, agent) == 3
        (job,) = live_jobs(cluster)
        cluster.command("scancel", str(job))
        eventually(lambda: live_jobs(cluster) not in ([job], []), 60)
        assert columns(env, agent) == 3
        assert_balanced(env.stats())


def test_nodes_of_a_cancelled_job_are_requested_together_again(cluster: SlurmCluster, tmp_path: Path) -> None:
    """One job of two nodes, on two hosts, during a stream."""
    with start(tmp_path, nodes=2, lease_s=3) as env:
        stream = env.stream(TableAgent(), steps=4, max_staleness=1)
        next(stream)
        (job,) = live_jobs(cluster)
        cluster.command("scancel", str(job))
        eventually(lambda: not env.stats()["nodes"])
        eventually(lambda: within(lambda: next(stream), 120) and len(env.stats()["nodes"]) == 2, 120)
        assert next(stream)["obs"].shape[1] == 6
        assert job not in live_jobs(cluster) and len(live_jobs(cluster)) == 1
        assert len({node["place"].rpartition(" ")[2] for node in env.stats()["nodes"]}) == 2
        cast(Any, stream).close()
        assert_balanced(env.stats())


def test_spread_nodes_are_on_different_hosts(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Those that come later, too; without it SLURM fills one host first."""
    cluster.down("n4")
    with start(tmp_path, nodes=3, min_nodes=2, max_nodes=4, spread=True) as env:
        agent = TableAgent()
        eventually(lambda: columns(env, agent) == 9, 60)
        env.scale(4)
        cluster.resume("n4")
        eventually(lambda: columns(env, agent) == 12, 60)
        places = sorted(node["place"].rpartition(" ")[2] for node in env.stats()["nodes"])
        assert places == ["n1", "n2", "n3", "n4"]


def test_a_preempted_node_delivers_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SlurmCluster(nodes=2, preemption=True, grace_s=5) as cluster:
        join(monkeypatch, cluster)
        with start(tmp_path, nodes=1, partition="main", slurm_extra=["--exclusive"]) as env:
            agent = TableAgent()
            stream = env.stream(agent, steps=4, max_staleness=1)
            next(stream)
            (job,) = live_jobs(cluster)
            cluster.command("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--wrap=sleep 3")
            # It is queued again, and restarts when the others are done.
            eventually(lambda: within(lambda: next(stream)) and cluster.jobs()[job].restarts == 1, 60)
            within(lambda: next(stream))
            assert not env.stats()["dropped"]


def test_the_papers_loop_learns_on_the_cluster(cluster: SlurmCluster, tmp_path: Path) -> None:
    """The example that `docs/clusterenv.md` points to, briefly, with nodes that SLURM gives."""
    example = Path(__file__).parents[2] / "examples" / "clusterenv_ppo.py"
    options = "--nodes 1 --envs-per-node 4 --partition main --num-steps 32 --num-updates 2 --kl-threshold 0.0001"
    command = [sys.executable, str(example), *options.split()]
    earlier = set(cluster.jobs())
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=360)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"update 2: mean return -?[0-9]+, 2 pulls per worker", done.stdout), done.stdout
    jobs = [job for job in cluster.jobs().values() if job.id not in earlier]
    assert [(job.name, job.partition) for job in jobs] == [("ppo_lander", "main")]
    eventually(lambda: not live_jobs(cluster))


class SeeingEnv(CountingEnv):
    """Its info has the GPUs that its worker sees."""

    def reset(self, **options: Any) -> Any:
        return super().reset(**options)[0], {"gpus": os.environ.get("CUDA_VISIBLE_DEVICES", "")}


def test_gpus_of_a_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SlurmCluster(nodes=1, gpus=2, gpu_type="a100") as cluster:
        join(monkeypatch, cluster)
        source = {"type": "factory", "env_name": SeeingEnv, "envs_per_node": 2}
        asked = config(tmp_path, gpu_type="a100", gpus_per_node=2, workers_per_node=2)
        with farstep.ClusterEnv(source, asked) as env:
            assert list(env.reset()[1]["gpus"]) == ["0", "1"]  # a worker each
            (job,) = live_jobs(cluster)
            assert "gpu:a100:2" in cluster.command("scontrol", "show", "job", str(job))
        with pytest.raises(LaunchError, match="sbatch failed"), start(tmp_path, nodes=1, gpu_type="h100"):
            pass


def test_concurrent_runs_are_isolated(cluster: SlurmCluster, tmp_path: Path) -> None:
    with start(tmp_path, nodes=1) as one, start(tmp_path, nodes=1) as two:
        agents = TableAgent(), TableAgent()
        for _ in range(3):
            assert [columns(env, agent) for env, agent in zip((one, two), agents, strict=True)] == [3, 3]
        assert len(live_jobs(cluster)) == 2


def test_a_queued_job_is_cancelled_when_its_head_is_killed(cluster: SlurmCluster, tmp_path: Path) -> None:
    for node in cluster.nodes:
        cluster.down(node)
    head = os.fork()
    if not head:
        try:
            start(tmp_path, nodes=1).launch()
        finally:
            os._exit(1)
    eventually(lambda: live_jobs(cluster))
    os.kill(head, signal.SIGKILL)
    os.waitpid(head, 0)
    eventually(lambda: not live_jobs(cluster))


def test_ctrl_c_cancels_the_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    head = os.fork()
    if not head:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with start(tmp_path, nodes=1) as env:
                (tmp_path / "ready").touch()
                while True:
                    env.collect(TableAgent(), steps=4)
        finally:
            os._exit(1)
    eventually((tmp_path / "ready").exists, 60)
    assert len(live_jobs(cluster)) == 1
    os.kill(head, signal.SIGINT)
    os.waitpid(head, 0)
    eventually(lambda: not live_jobs(cluster))


def test_batches_continue_while_the_controller_is_down(own_cluster: SlurmCluster, tmp_path: Path) -> None:
    with start(tmp_path, nodes=2, lease_s=3) as env:
        agent = TableAgent()
        assert columns(env, agent) == 6
        own_cluster.stop_controller()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            assert columns(env, agent) == 6
            time.sleep(0.2)
        assert not env.stats()["dropped"] and env.stats()["workers"]["restarts"] == 0
    own_cluster.start_controller()  # the run ended without it: its job is cancelled now
    eventually(lambda: not live_jobs(own_cluster), 60)


def test_a_node_that_is_lost_while_the_controller_is_down_is_replaced_when_it_is_back(
    own_cluster: SlurmCluster, tmp_path: Path
) -> None:
    with start(tmp_path, nodes=2, min_nodes=1, lease_s=3, restart_budget=50) as env:
        agent = TableAgent()
        eventually(lambda: columns(env, agent) == 6, BATCH_S)
        own_cluster.stop_controller()
        kill_daemon(env.stats()["nodes"][1])
        eventually(lambda: columns(env, agent) == 3, BATCH_S)
        own_cluster.start_controller()
        # farstep pauses between orders, for up to as long as the controller was away; then a daemon and a worker start.
        eventually(lambda: columns(env, agent) == 6, BATCH_S)
        assert_balanced(env.stats())


def test_two_losses_of_different_kinds_are_both_made_up_for(cluster: SlurmCluster, tmp_path: Path) -> None:
    """A job is cancelled, and another one loses a node."""
    with start(tmp_path, nodes=3, min_nodes=2, lease_s=3, slurm_extra=["--exclusive"]) as env:
        agent = TableAgent()
        eventually(lambda: columns(env, agent) == 9, BATCH_S)
        first, second = sorted(live_jobs(cluster))
        cluster.command("scancel", str(second))
        eventually(lambda: second not in live_jobs(cluster))
        eventually(lambda: columns(env, agent) == 9, BATCH_S)
        pids = [node["pid"] for node in env.stats()["nodes"] if f"job {first}," in node["place"]]
        os.kill(pids[-1], signal.SIGKILL)
        eventually(lambda: columns(env, agent) == 6, BATCH_S)
        eventually(lambda: columns(env, agent) == 9, BATCH_S)
        assert_balanced(env.stats())


def test_nodes_that_come_late_join(cluster: SlurmCluster, tmp_path: Path) -> None:
    for node in cluster.nodes[1:]:
        cluster.down(node)
    with start(tmp_path, nodes=2, min_nodes=1, slurm_extra=["--exclusive"]) as env:
        agent = TableAgent()
        assert columns(env, agent) == 3
        assert env.stats()["workers"]["queued"] == 1
        cluster.resume(cluster.nodes[1])
        eventually(lambda: columns(env, agent) == 6, BATCH_S)


def test_inside_an_allocation_daemons_are_a_step(cluster: SlurmCluster, tmp_path: Path) -> None:
    code = "from tests.cluster import test_slurm; test_slurm.inside()"
    (tmp_path / "activate").write_text(f"echo sourced > {tmp_path}/mark\n")
    script = (
        f"#!/bin/sh\nexport PYTHONPATH={Path(__file__).parents[2]}:$PYTHONPATH\nexec {sys.executable} -c '{code}'\n"
    )
    log = tmp_path / "inside.log"
    path = tmp_path / "script"
    path.write_text(script)
    earlier = set(cluster.jobs())
    cluster.command("sbatch", "--nodes=2", "--cpus-per-task=2", f"--output={log}", f"--chdir={tmp_path}", str(path))
    eventually(lambda: log.exists() and "six columns" in log.read_text(), 60)
    eventually(lambda: not live_jobs(cluster))
    assert len(set(cluster.jobs()) - earlier) == 1, "no other job was submitted"
    assert (tmp_path / "mark").read_text() == "sourced\n"


def inside() -> None:
    """The function that the job of the test above runs."""
    with start(Path.cwd(), nodes=2, setup=["source ./activate"]) as env:
        print({6: "six columns"}[columns(env, TableAgent())], flush=True)


def test_status_page_says_that_the_job_is_queued(cluster: SlurmCluster, tmp_path: Path) -> None:
    command = ("sbatch", "--parsable", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 300")
    other = cluster.command(*command).strip()
    source = {"type": "factory", "env_name": CountingEnv, "envs_per_node": 3, "seed": 1}
    env = farstep.ClusterEnv(source, config(tmp_path, workers_per_node=1, nodes=1, relay=True))
    try:
        page = status_page_of(env).source
        launching = threading.Thread(target=env.launch)
        launching.start()
        eventually(lambda: "PENDING" in page.read()["diagnoses"][0]["text"])
        assert page.read()["state"] == "starting" and page.read()["workers"]["state"] == ["queued"]
        assert page.read()["workers"]["host"] == [None] and "PENDING" in page.read()["workers"]["unconnected_nodes"]
        cluster.command("scancel", other)
        launching.join(BATCH_S)
        assert page.read()["state"] == "running" and page.read()["workers"]["state"] == ["alive"]
    finally:
        env.close()


def test_job_that_can_never_start_ends_the_launch(
    cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farstep.launch.engines.slurm.HOPELESS_S", 1.0)
    with pytest.raises(LaunchError, match=r"is PENDING \(Partition\w+: .* request fewer nodes.*9 nodes are missing"):
        within(start(tmp_path, nodes=9).launch)
    eventually(lambda: not live_jobs(cluster))


def test_error_quotes_sbatch(cluster: SlurmCluster, tmp_path: Path) -> None:
    known = r"(?s)sbatch failed: .*[Ii]nvalid partition.*unknown partition 'mian'\. Did you mean 'main'\? Known: main\."
    with pytest.raises(LaunchError, match=known):
        start(tmp_path, partition="mian").launch()


def test_a_missing_controller_is_explained(
    cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text(re.sub(r"SlurmctldPort=\d+", "SlurmctldPort=1", Path(os.environ["SLURM_CONF"]).read_text()))
    monkeypatch.setenv("SLURM_CONF", str(conf))
    with pytest.raises(LaunchError, match="check that slurmctld is running and that SLURM_CONF is right"):
        start(tmp_path, nodes=1).launch()


def test_error_quotes_the_output_of_a_node(cluster: SlurmCluster, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"(?s)SLURM job \d+ is .*The end of .*\.log:.*No such file") as caught:
        within(start(tmp_path, python="/no/such/python").launch)
    assert "secret" not in str(caught.value)
    assert not live_jobs(cluster)


def test_a_log_folder_that_cannot_be_made_is_named(cluster: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(LaunchError, match=r"log_folder='.*/logs' cannot be created: File exists; choose another\."):
        start(tmp_path).launch()


def test_without_slurm_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match=r"'sbatch' is not on this machine; .*slurm-client"):
        start(tmp_path).launch()


@pytest.mark.parametrize("status", [0, 3, 137])
def test_the_job_ends_as_its_daemons_did(tmp_path: Path, status: int) -> None:
    (tmp_path / "srun").write_text(f"#!/bin/sh\nexit {status}\n")
    (tmp_path / "srun").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(["bash"], input=batch_script(config(tmp_path), 1, 1), text=True, env={"PATH": path})
    assert done.returncode == status


def test_job_of_reclaimed_nodes_does_not_end_even_if_a_setup_line_fails(tmp_path: Path) -> None:
    """SLURM would not queue it again if it ended by itself."""
    for name, line in (("srun", "exit 75"), ("sleep", f"echo $* > {tmp_path}/slept")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "activate").write_text("false\n")  # what others wrote has reasons of its own
    setup = ["set -u", f"source {tmp_path}/activate || true", "set -e"]
    script = batch_script(config(tmp_path, setup=setup), 1, 1)
    done = subprocess.run(["bash"], input=script, text=True, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert done.returncode == 75 and int((tmp_path / "slept").read_text()) > 60


@pytest.mark.parametrize(
    ("nodes", "together", "sizes"),
    [(4, [2], [2, 1, 1]), (3, [3], [3]), (2, [3], [2]), (3, [2, 2], [2, 1]), (2, [], [1, 1]), (3, [1, 2], [1, 2])],
)
def test_nodes_requested_together_are_one_job(nodes: int, together: list[int], sizes: list[int]) -> None:
    assert job_sizes(nodes, *together) == sizes


def test_script_has_the_requested_options(tmp_path: Path) -> None:
    asked = config(
        tmp_path,
        job_name="mine, all mine",
        partition="gpu",
        gpus_per_node=2,
        time_limit="1:00:00",
        slurm_account="me",
        slurm_extra=["--exclusive"],
        setup=["module load cuda"],
    )
    lines = batch_script(asked, 4, 3).splitlines()
    typed = batch_script(config(tmp_path, gpus_per_node=2, gpu_type="a100"), 4, 3)
    assert "#SBATCH --gres=gpu:a100:2\n" in typed and "gpus-per-node" not in typed
    odd = SlurmConfig(log_folder=str(tmp_path / "100% mine"))
    assert f"#SBATCH --output='{tmp_path}/100%% mine/%j.log'" in batch_script(odd, 1, 1)
    for option in (
        "job-name='mine, all mine'",
        "partition=gpu",
        "gpus-per-node=2",
        "time=1:00:00",
        "account=me",
        "nodes=3",
    ):
        assert f"#SBATCH --{option}" in lines
    assert "#SBATCH --exclusive" in lines and "#SBATCH --cpus-per-task=4" in lines
    assert any(line.startswith("srun --cpus-per-task=4 ") for line in lines)
    assert lines.index("module load cuda") < next(i for i, line in enumerate(lines) if line.startswith("srun"))
