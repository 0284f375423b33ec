"""Workers are forks of a zygote: they are like workers that start cold, and no fault of the zygote stops a run."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import farstep
from farstep.errors import RemoteEnvError, WorkerDied, WorkerStuck
from farstep.testing import CountingEnv, TableAgent
from farstep.testing.zygote import shared_zygote
from tests.cluster import checks
from tests.cluster.checks import assert_sound, cluster, eventually, worker_pids
from tests.cluster.nodes import on_nodes
from tests.cluster.parking_head import TellingEnv
from tests.cluster.tables import ENDLESS

MODULE = """
import json, os, sys, threading, time
from farstep.testing import CountingEnv
{on_import}

def make(path=None):
    if path is not None:
        with open(path, "w") as file:
            json.dump(describe(), file)
    return CountingEnv()

def describe():
    own = {{os.getpid(): "own"}}
    return {{
        "folder": os.getcwd(),
        "variables": {{name: value for name, value in os.environ.items() if name != "FARSTEP_WORKER"}},
        "marked": os.environ["FARSTEP_WORKER"] == str(os.getpid()),
        "path": sys.path,
        "session": own.get(os.getsid(0)),
        "group": own.get(os.getpgrp()),
        "stdin": os.readlink("/proc/self/fd/0"),
        "output": [os.readlink(f"/proc/self/fd/{{fd}}").partition(":")[0] for fd in (1, 2)],
        "arguments": sys.argv[0],
        "umask": os.umask(0o22),
        "nice": os.nice(0),
        "interrupt": str(__import__("signal").getsignal(2)),
        "threads": threading.active_count(),
    }}
"""


AGENT = """
import os, threading, time
from pathlib import Path
from farstep.testing import TableAgent

with Path(__file__).with_suffix(".pids").open("a") as file:
    print(os.getpid(), file=file)
{on_import}

class LaterAgent(TableAgent):
    pass
"""


class EnvWithProcess(CountingEnv):
    """Starts a process and writes its id to a file."""

    def __init__(self, path: str) -> None:
        super().__init__()
        Path(path).write_text(str(subprocess.Popen(["sleep", "1000"]).pid))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a module with a factory, and returns the path of the factory."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(on_import: str = "") -> str:
        (tmp_path / "zygote_module.py").write_text(MODULE.format(on_import=on_import))
        return "zygote_module:make"

    return write


@pytest.fixture
def later_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a module with an agent, imports it, and returns the agent."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(on_import: str = "") -> TableAgent:
        (tmp_path / "later_module.py").write_text(AGENT.format(on_import=on_import))
        agent: TableAgent = importlib.import_module("later_module").LaterAgent()
        return agent

    yield make
    sys.modules.pop("later_module", None)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def restart(env: farstep.ClusterEnv, agent: TableAgent) -> int:
    """Kill a worker, continue the run, and return the new worker."""
    before = worker_pids()
    os.kill(before[0], signal.SIGKILL)
    for _ in range(2):
        assert_sound(env.collect(agent, steps=8))
    (new,) = set(worker_pids()) - set(before)
    return new


def test_a_forked_worker_is_like_one_that_started_cold(module, tmp_path: Path, monkeypatch) -> None:
    found = {}
    for method in ("zygote", "cold"):
        path = tmp_path / f"{method}.json"
        env = cluster(module(), env_kwargs={"path": str(path)}, envs=1, start_method=method, cpus_per_worker=2)
        monkeypatch.setenv("SET_AFTER_THE_ZYGOTE", "yes")
        monkeypatch.chdir(tmp_path)
        with env:
            env.launch()
        found[method] = json.loads(path.read_text())
    assert found["zygote"] == found["cold"]
    assert found["cold"]["variables"]["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize("method", ["zygote", "cold"])
def test_output_of_a_module_at_import_is_in_the_output_of_a_worker(method: str, module) -> None:
    name = module("print('printed by an import'); print('and to stderr', file=sys.stderr)")
    with cluster(name, envs=1, start_method=method, restart_budget=0) as env:
        env.collect(TableAgent(), steps=2)
        os.kill(worker_pids()[0], signal.SIGKILL)
        with pytest.raises(WorkerDied) as raised:
            for _ in range(2):
                env.collect(TableAgent(), steps=8)
    for text in ("printed by an import", "and to stderr"):
        assert raised.value.output.count(text) == 1


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_killed_worker_is_replaced_by_a_fork(transport: str) -> None:
    agent = TableAgent()
    with cluster(envs=4, workers=2, transport=transport) as env:
        env.collect(agent, steps=8)
        (zygote,) = {parent(pid) for pid in worker_pids()}
        assert zygote != os.getpid()
        assert parent(restart(env, agent)) == zygote
        assert env.stats()["workers"]["restarts"] == 1


@pytest.mark.parametrize("where", ["shm", "tcp", "node"])
def test_zygote_imports_the_module_of_a_later_agent_before_its_next_fork(
    where: str, later_agent, tmp_path: Path
) -> None:
    local: Any = {"envs": 2, "workers": 2, "transport": where, "env_kwargs": ENDLESS}
    with on_nodes(tmp_path, 1, 1, env=TellingEnv) if where == "node" else cluster(TellingEnv, **local) as env:
        pids_of(env, TableAgent())
        agent = later_agent()
        first = pids_of(env, agent)
        (zygote,) = {parent(pid) for pid in first}
        os.kill(first[0], signal.SIGKILL)
        new, _ = eventually(lambda: (pids := pids_of(env, agent)) != first and pids)
        assert parent(new) == zygote
        imported_in = [int(line) for line in (tmp_path / "later_module.pids").read_text().split()]
        assert set(imported_in[:3]) == {os.getpid(), *first}
        assert imported_in[3:] == [zygote]  # the new worker has imported nothing


def pids_of(env: farstep.ClusterEnv, agent: TableAgent) -> list[int]:
    return [int(pid) for pid in env.step(agent)[4]["pid"]]


def test_zygote_forks_without_the_module_of_a_later_agent_that_starts_threads(later_agent) -> None:
    agent = later_agent(
        'if "FARSTEP_WORKER" in os.environ: threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()'
    )
    with cluster(envs=2, workers=2) as env:
        env.collect(agent, steps=8)
        (zygote,) = {parent(pid) for pid in worker_pids()}
        assert parent(restart(env, agent)) == os.getpid()
        second = parent(restart(env, agent))
        assert second not in (os.getpid(), zygote) and not Path(f"/proc/{zygote}").exists()
        assert parent(restart(env, agent)) == second
        assert env.stats()["workers"]["restarts"] == 3 and not env.events("warned")


def test_workers_continue_without_their_zygote(recwarn) -> None:
    agent = TableAgent()
    with cluster(envs=4, workers=2) as env:
        env.collect(agent, steps=8)
        workers = worker_pids()
        (zygote,) = {parent(pid) for pid in workers}
        os.kill(zygote, signal.SIGKILL)
        eventually(lambda: parent(workers[0]) != zygote)
        for _ in range(3):
            assert_sound(env.collect(agent, steps=8))
        assert env.stats()["workers"]["restarts"] == 0
        assert all(Path(f"/proc/{pid}").exists() for pid in workers)
        os.kill(workers[0], signal.SIGKILL)
        for _ in range(2):
            assert_sound(env.collect(agent, steps=8))
        counts = {key: value for key, value in env.stats()["workers"].items() if not isinstance(value, list) and value}
        assert counts == {"alive": 2, "restarts": 1}
        (lost,) = env.events("lost")
    assert "a worker ended; its exit status is unknown, because" in lost.text


def test_a_stopped_zygote_is_replaced() -> None:
    agent = TableAgent()
    with cluster(envs=2, workers=2, timeouts=farstep.Timeouts(connect_s=2.0), restart_budget=4) as env:
        env.collect(agent, steps=8)
        (zygote,) = {parent(pid) for pid in worker_pids()}
        os.kill(zygote, signal.SIGSTOP)
        assert parent(restart(env, agent)) != zygote


def test_workers_start_cold_if_an_import_starts_a_thread(module) -> None:
    path = module("threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()")
    with cluster(path, envs=2, workers=2, restart_budget=0) as env:
        assert_sound(env.collect(TableAgent(), steps=8))
        assert {parent(pid) for pid in worker_pids()} == {os.getpid()}
        (warned,) = (event for event in env.events() if event.kind == "warned")
        assert "importing zygote_module starts threads" in warned.text


def test_a_module_that_ends_the_process_is_reported_by_the_worker(module) -> None:
    env = cluster(module("os._exit(7)"), restart_budget=0)
    with pytest.raises(WorkerDied, match="status 7"):
        env.launch()
    env.close()


def test_a_module_that_cannot_be_imported_is_reported_by_the_worker(module) -> None:
    env = cluster(module("import no_such_module_at_all"))
    with pytest.raises(RemoteEnvError, match="No module named 'no_such_module_at_all'"):
        env.launch()
    assert not [event for event in env.events() if "the zygote" in event.text]
    env.close()


def test_a_module_that_does_not_finish_its_import_is_reported(module) -> None:
    limits = farstep.Timeouts(connect_s=1.0, construct_s=1.0)
    env = cluster(module("time.sleep(1000)"), timeouts=limits, restart_budget=0)
    with pytest.raises(WorkerStuck):
        env.launch()
    env.close()


def test_runs_fork_a_shared_zygote(module, monkeypatch, tmp_path: Path) -> None:
    path = tmp_path / "seen.json"
    with shared_zygote([]):
        monkeypatch.setenv("OF_THIS_RUN", "yes")
        with cluster(module(), env_kwargs={"path": str(path)}, envs=1) as env:
            assert_sound(env.collect(TableAgent(), steps=8))
            (worker,) = worker_pids()
            assert parent(parent(worker)) != os.getpid()
    assert json.loads(path.read_text())["variables"]["OF_THIS_RUN"] == "yes"


def test_the_modules_of_environments_are_found() -> None:
    from farstep.rollout.sources import Source

    def modules(**options):
        return Source.of(farstep.EnvConfig(**options)).modules()

    assert modules(env_name="CartPole-v1") == ["gymnasium.envs.classic_control.cartpole"]
    assert modules(env_name="zygote_module:Some-v0") == ["zygote_module"]
    assert modules(type="factory", env_name=CountingEnv) == ["farstep.testing.envs"]
    wrapped = modules(env_name="CartPole-v1", wrappers=[("gymnasium.wrappers:TimeLimit", {"max_episode_steps": 3})])
    assert wrapped == ["gymnasium.envs.classic_control.cartpole", "gymnasium.wrappers"]
    assert modules(type="factory", env_name=lambda: CountingEnv()) == []  # of a module that is pickled by value


def test_processes_of_an_environment_end_with_their_worker_after_the_zygote_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    agent = TableAgent()
    with cluster(EnvWithProcess, env_kwargs={"path": str(path)}, envs=1) as env:
        env.collect(agent, steps=4)
        (worker,) = worker_pids()
        os.kill(parent(worker), signal.SIGKILL)
        started = int(path.read_text())
        os.kill(worker, signal.SIGKILL)
        env.collect(agent, steps=4)
        eventually(lambda: not Path(f"/proc/{started}").exists())


def test_worker_pids_ignores_a_process_that_ends_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own helper: it once raised FileNotFoundError."""
    process = subprocess.Popen(["sh", "-c", "read line", "farstep.worker"], stdin=subprocess.PIPE)
    eventually(Path(f"/proc/{process.pid}/cmdline").read_bytes)  # empty until the kernel has loaded the program

    original = checks.is_zygote

    def is_zygote(pid: int) -> bool:
        if pid == process.pid:
            process.communicate()  # ends it
        return original(pid)

    with monkeypatch.context() as patch:
        patch.setattr(checks, "is_zygote", is_zygote)
        found = worker_pids()
    assert process.returncode is not None and process.pid not in found
