"""Runs that share a coordinator: real sockets and workers, with kills of runs and of the coordinator."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

import farstep
from farstep.cli import main
from farstep.elastic import Schedule
from farstep.elastic.coordinator.messages import PROTOCOL, Leave, Register
from farstep.elastic.coordinator.server import CoordinatorServer, connect, read_status
from farstep.launch.engines.ssh import SSHEngine
from farstep.testing import CountingEnv, TableAgent
from farstep.workflow.triggers.messages import Message
from tests.cluster.checks import cluster, within, worker_pids
from tests.cluster.nodes import SHELL, node_config
from tests.cluster.sharing import (
    LEASE_S,
    PATIENCE_S,
    held,
    runs,
    serving,
    shared,
    started,
    started_coordinator,
    times,
    turns_of,
    wait_until,
)
from tests.cluster.tables import ENDLESS


def test_error_found_during_an_update_is_raised_by_the_next_call(tmp_path: Path) -> None:
    agent = TableAgent()
    with (
        serving(tmp_path / "c", slots=1, turn_s=0.3) as name,
        shared(name, workers=1, restart_budget=0) as env,
    ):
        env.collect(agent, steps=4)
        (worker,) = worker_pids()
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: any("the run failed" in event.text for event in env.events("warned")))
        with shared(name, workers=1) as other:  # it gets the slot, since no worker of the failed run uses it
            other.collect(agent, steps=4)
        with pytest.raises(farstep.WorkerDied, match="SIGKILL"):
            env.collect(agent, steps=4)


def test_second_run_gets_its_share_and_the_first_gets_it_back(tmp_path: Path) -> None:
    agent = TableAgent()
    with serving(tmp_path / "c", slots=4) as name, shared(name, workers=4) as first:
        assert len(first.collect(agent, steps=4).slots) == 4
        with shared(name, workers=4) as second:
            wait_until(lambda: held(name) == [2, 2])
            assert len(first.collect(agent, steps=4).slots) == 2
            assert len(second.collect(agent, steps=4).slots) == 2
            second.scale(workers=1)
            wait_until(lambda: held(name) == [3, 1])
        wait_until(lambda: held(name) == [4])
        wait_until(lambda: len(first.collect(agent, steps=4).slots) == 4)


def test_scaling_rule_gets_the_slots_of_a_run_that_ends_before_its_lease(tmp_path: Path) -> None:
    columns: list[int] = []
    with (
        serving(tmp_path / "c", slots=4, lease_s=3600.0) as name,
        shared(name, workers=2, min_workers=2) as other,
        shared(name, workers=4) as env,
    ):
        buffer = farstep.Buffer(4 * 2, farstep.FullBatch())
        flow = farstep.Workflow(env, TableAgent(), buffer, scaling=Schedule(2, 4, add=2, every=2))

        def update(message: Message) -> None:
            columns.append(len(flow.batch(message).slots))
            if len(columns) == 4:  # since the second update, the rule wants 4 workers
                other.close()
            flow.publish()

        flow.on(farstep.DataKeyTrigger(n="all", size=2), update)
        flow.on(farstep.ObjectKeyTrigger("parameters"), flow.next_rollout)
        within(lambda: flow.run(until=lambda: 4 in columns))
        assert columns[:4] == [2, 2, 2, 2]
        assert "scaled from 2 to 4 workers" in [event.text for event in env.events("scaled")]


def test_two_runs_on_one_slot_take_turns_and_never_step_at_the_same_time(tmp_path: Path) -> None:
    outs = [tmp_path / "a", tmp_path / "b"]
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(serving(tmp_path / "c", slots=1, turn_s=0.3))
        run = "tests.cluster.sharing_run"
        processes = [stack.enter_context(started(run, name, out, tmp_path / "lock")) for out in outs]

        wait_until(lambda: turns_of(outs).count("01") >= 3 and turns_of(outs).count("10") >= 3)
        assert [process.poll() for process in processes] == [None, None]  # otherwise a step has found the lock taken


@pytest.mark.parametrize("slots", [1, 2])
def test_rollouts_of_two_releasing_runs_interleave_and_a_killed_run_does_not_stop_the_other(
    tmp_path: Path, slots: int
) -> None:
    outs = [tmp_path / "a", tmp_path / "b"]
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(serving(tmp_path / "c", slots))
        words = [("tests.cluster.sharing_run", name, out, tmp_path / "lock", slots) for out in outs]
        processes = [stack.enter_context(started(*each)) for each in words]
        # With turns of 30 s, only returned slots can explain this.
        wait_until(lambda: turns_of(outs).count("01") >= 5 and turns_of(outs).count("10") >= 5)
        assert [process.poll() for process in processes] == [None, None]  # otherwise too many steps at the same time
        processes[0].kill()  # anywhere: in a rollout, in between, or while it waits
        killed = len(times(outs[1]))
        wait_until(lambda: len(times(outs[1])) > killed + 5)
        wait_until(lambda: len(runs(name)) == 1)
        assert processes[1].poll() is None


def test_slots_of_a_killed_run_are_reclaimed(tmp_path: Path) -> None:
    with serving(tmp_path / "c", slots=2) as name, started("tests.cluster.sharing_run", name, tmp_path / "a") as run:
        wait_until(lambda: len(times(tmp_path / "a")) > 2)
        assert held(name) == [2]
        os.kill(run.pid, signal.SIGKILL)
        with shared(name, min_workers=2) as env:
            assert held(name) == [2]
            assert len(env.collect(TableAgent(), steps=4).slots) == 4


def test_run_survives_a_killed_coordinator_and_keeps_its_slots(tmp_path: Path) -> None:
    folder, agent = tmp_path / "c", TableAgent()
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(started_coordinator(folder, "--slots", 3))
        assert first.stdout is not None and "3 slots" in first.stdout.readline()
        env = stack.enter_context(shared(str(folder)))
        first.kill()
        first.wait()
        assert len(env.collect(agent, steps=4).slots) == 4
        second = stack.enter_context(started_coordinator(folder, "--slots", 3))
        assert second.stdout is not None and "restored 1 run" in second.stdout.readline()
        other = stack.enter_context(shared(str(folder), min_workers=1))
        wait_until(lambda: sorted(held(str(folder))) == [1, 2])
        assert len(other.collect(agent, steps=4).slots) == 2
        second.terminate()
        assert second.wait(PATIENCE_S) == 0


def test_silence_does_not_count_while_the_coordinator_is_suspended(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    with started_coordinator(folder, "--slots", 1) as coordinator, contextlib.ExitStack() as stack:
        assert coordinator.stdout is not None and "1 slot" in coordinator.stdout.readline()
        env = stack.enter_context(shared(str(folder)))
        (run,) = runs(str(folder))
        os.kill(coordinator.pid, signal.SIGSTOP)
        with pytest.raises(farstep.LaunchError, match="does not answer"):
            read_status(str(folder), timeout_s=0.1)
        time.sleep(2 * LEASE_S)
        os.kill(coordinator.pid, signal.SIGCONT)
        assert [each.workload.id for each in runs(str(folder))] == [run.workload.id]
        assert not env.events("warned")


def warnings_of(env: farstep.ClusterEnv) -> list[str]:
    return [event.text.split(";")[0] for event in env.events("warned")]


def test_run_that_waits_for_a_suspended_coordinator_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    with started_coordinator(folder, "--slots", 1) as coordinator:
        assert coordinator.stdout is not None and "1 slot" in coordinator.stdout.readline()
        os.kill(coordinator.pid, signal.SIGSTOP)
        env = shared(str(folder))
        launching = threading.Thread(target=env.launch)
        launching.start()
        wait_until(lambda: bool(env.events("warned")))
        os.kill(coordinator.pid, signal.SIGCONT)
        launching.join(PATIENCE_S)
        with env:
            assert warnings_of(env) == [f"waiting for 1 slot of coordinator {str(folder)!r}, which does not answer"]


def test_connection_is_reported_only_when_the_coordinator_has_answered(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    with contextlib.ExitStack() as stack:
        with serving(folder, slots=2) as name:
            env = stack.enter_context(shared(name))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(folder / "socket"))
            listener.listen()
            for _ in range(3):  # as while a killed coordinator ends: its connections are closed one by one
                listener.accept()[0].close()
        with serving(folder, slots=2) as name:
            wait_until(lambda: len(env.events("warned")) == 2)
            assert warnings_of(env) == [f"coordinator {name!r} has ended", f"connected to coordinator {name!r} again"]


class SlowHandler(logging.Handler):
    """Stops at the event `scaled`, which a run emits under its lock. An engine that requests nodes takes as long."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped, self.released = threading.Event(), threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "scaled from" in record.getMessage():
            self.stopped.set()
            self.released.wait(PATIENCE_S)


def test_run_keeps_its_lease_while_its_lock_is_held_for_longer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "farstep")
    with serving(tmp_path / "c", slots=2) as name, shared(name) as env:
        (run,) = runs(name)
        handler = SlowHandler()
        logging.getLogger("farstep").addHandler(handler)
        try:
            env.scale(workers=1)
            assert handler.stopped.wait(PATIENCE_S)
            past_lease = run.workload.slot_s + 2 * 2 * LEASE_S  # of two slots
            wait_until(lambda: not runs(name) or runs(name)[0].workload.slot_s > past_lease)
            assert [each.workload.id for each in runs(name)] == [run.workload.id]
        finally:
            handler.released.set()
            logging.getLogger("farstep").removeHandler(handler)
        wait_until(lambda: held(name) == [1])
        assert not env.events("warned")


def test_run_with_descriptors_above_1023_gets_its_slots(tmp_path: Path, descriptors_above_1023: None) -> None:
    with serving(tmp_path / "c", slots=2) as name, shared(name) as env:
        assert len(env.collect(TableAgent(), steps=4).slots) == 4


def test_runs_take_a_device_in_turn(tmp_path: Path) -> None:
    order: list[int] = []
    with serving(tmp_path / "c", slots=2, devices=1) as name, contextlib.ExitStack() as stack:
        envs = [stack.enter_context(shared(name, workers=1)) for _ in range(2)]
        inside = threading.Semaphore(1)

        def learn(index: int) -> None:
            for _ in range(10):
                with envs[index].device_token() as device:
                    assert device == 0
                    assert inside.acquire(blocking=False)
                    order.append(index)
                    if len(order) == 1:  # until the other run waits as well
                        wait_until(lambda: any(run.device_position for run in runs(name)))
                    time.sleep(0.02)
                    inside.release()

        threads = [threading.Thread(target=learn, args=[index]) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert sorted(order) == [0] * 10 + [1] * 10
        assert order[:16] in ([0, 1] * 8, [1, 0] * 8)
        assert [run.workload.device_uses for run in runs(name)] == [10, 10]
        assert all(run.workload.device_s > 0 for run in runs(name))


def test_launch_without_coordinator_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(farstep.LaunchError, match="farstep coordinator start --slots N --name"):
        shared(str(tmp_path / "c")).launch()


def test_run_that_needs_more_slots_than_there_are_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path / "c", slots=1) as name:
        env = shared(name, min_workers=2)
        with pytest.raises(farstep.ConfigError, match="at least 2 slots"):
            env.launch()
        assert not env.events("warned")  # in particular not that its lease has ended


def test_device_of_a_coordinator_without_devices_is_refused(tmp_path: Path) -> None:
    with (
        serving(tmp_path / "c", slots=1) as name,
        shared(name) as env,
        pytest.raises(farstep.ConfigError, match="--devices"),
        env.device_token(),
    ):
        pass


def test_second_coordinator_of_a_folder_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path / "c", slots=1), pytest.raises(farstep.LaunchError, match="another coordinator"):
        CoordinatorServer(tmp_path / "c", 1)


def test_run_that_left_before_its_registration_was_read_holds_nothing(tmp_path: Path) -> None:
    server = CoordinatorServer(tmp_path / "c", 1, lease_s=3600.0)
    with connect(tmp_path / "c", 5.0) as client:
        client.send(msgspec.msgpack.encode(Register("id", "name", 1, 1, 1, protocol=PROTOCOL)))
        client.send(msgspec.msgpack.encode(Leave("id")))
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        wait_until(lambda: not runs(str(tmp_path / "c")))
    finally:
        server.stop()
        thread.join()


@pytest.mark.parametrize("name", ["tcp://node1:5000", "node1:5000"])
def test_address_is_no_name_of_a_coordinator(name: str) -> None:
    with pytest.raises(farstep.ConfigError, match="is an address"):
        shared(name).launch()


def test_malformed_messages_end_only_their_connection(tmp_path: Path) -> None:
    with serving(tmp_path / "c", slots=1) as name, connect(tmp_path / "c", 5.0) as client:
        client.send(b"\xff" * 100)
        assert client.recv(10) == b""
        assert held(name) == []
        assert (tmp_path / "c" / "socket").stat().st_mode & 0o777 == 0o600


def test_status_shows_which_run_holds_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path / "c", slots=2, devices=1) as name, shared(name, workers=1) as env, env.device_token():
        assert main(["coordinator", "status", "--name", name]) == 0
    out = capsys.readouterr().out
    assert "1 of 2 slots in use, 1 of 1 device in use" in out
    assert f"({os.getpid()})" in out and "running, holds device 0" in out


def test_vector_and_in_process_environments_refuse_a_coordinator() -> None:
    with pytest.raises(farstep.ConfigError, match="LocalConfig"):
        farstep.InProcessConfig(coordinator="default")
    with pytest.raises(farstep.ConfigError, match="no coordinator"):
        farstep.make_vec("CartPole-v1", num_envs=2, config=farstep.LocalConfig(coordinator="default"))
    with pytest.raises(farstep.ConfigError, match="only a coordinator"):
        farstep.LocalConfig(priority=2)


@contextlib.contextmanager
def names_of_runs(coordinator: str) -> Iterator[set[str]]:
    """The names of all runs of a coordinator until the end of the block."""
    names, ended = set[str](), threading.Event()

    def read() -> None:
        while not ended.wait(0.02):
            names.update(run.workload.name for run in runs(coordinator))

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield names
    finally:
        ended.set()
        thread.join()


@pytest.mark.usefixtures("torch_in_workers")
def test_trained_run_with_parked_workers_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    train = ["train", "ppo", "--env", "CartPole-v1", "--workers", "2", "--num-envs", "4", "--num-steps", "16"]
    saved = ["--folder", str(tmp_path), "--name", "run"]
    with serving(tmp_path / "c", slots=1) as name:
        with names_of_runs(name) as names:
            assert main([*train, *saved, "--coordinator", name, "--total-steps", "64"]) == 0
        assert names == {f"{tmp_path / 'run'} ({os.getpid()})"}
        assert main(["train", "ppo", "--resume", str(tmp_path / "run"), "--total-steps", "128"]) == 0
        assert runs(name) == []
    # A resumed run keeps its options, so now it finds no coordinator.
    assert main(["train", "ppo", "--resume", str(tmp_path / "run"), "--total-steps", "256"]) == 1
    assert "no coordinator can be reached" in capsys.readouterr().err


def test_run_that_gets_slots_but_no_nodes_says_why_and_uses_nodes_that_come_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise farstep.LaunchError("the partition is closed")

    with serving(tmp_path / "c", slots=2) as name:
        config = node_config(tmp_path, 1, 2, min_nodes=1, workers_per_node=1, coordinator=name)
        other = shared(name)
        other.launch()
        with other, cluster(envs=1, config=config) as env:
            env.launch()
            with monkeypatch.context() as refusing:
                refusing.setattr(SSHEngine, "request", refuse)
                other.close()
                wait_until(
                    lambda: any("may use 2 workers, but its nodes" in event.text for event in env.events("warned"))
                )
            agent = TableAgent()
            wait_until(lambda: env.collect(agent, steps=2).slots.size == 2)


def on_two_hosts(folder: Path, name: str, gate: Path | None = None) -> farstep.ClusterEnv:
    """A run with two workers on each of two hosts, one environment each. With `gate`, a login to the first host takes
    until this file exists."""
    config = node_config(folder, 2, min_nodes=1, workers_per_node=2, coordinator=name)
    if gate is not None:
        shell = folder / "slow_shell"
        shell.write_text(SHELL.replace("shift", f'[ "$1" = host1 ] || until [ -e {gate} ]; do sleep 0.05; done\nshift'))
        shell.chmod(0o755)
        config = dataclasses.replace(config, ssh=(str(shell),))
    return cluster(envs=2, config=config, env_kwargs=ENDLESS)


def hosts_of(env: farstep.ClusterEnv) -> Counter[str]:
    """Number of workers of a batch on each host."""
    workers, nodes = env.collect(TableAgent(), steps=2).slots, env.stats()["nodes"]
    return Counter(node["place"] for node in nodes for worker in node["workers"] if worker in workers)


@pytest.mark.timeout(120)
def test_runs_on_the_same_hosts_use_each_host_evenly(tmp_path: Path) -> None:
    each, gate = {"ssh host0": 1, "ssh host1": 1}, tmp_path / "gate"
    with serving(tmp_path / "c", slots=4) as name, on_two_hosts(tmp_path, name) as first:
        wait_until(lambda: hosts_of(first) == {"ssh host0": 2, "ssh host1": 2})
        with on_two_hosts(tmp_path, name, gate) as second:
            wait_until(lambda: hosts_of(second) == {"ssh host1": 1})  # this host is the first one to connect
            wait_until(lambda: hosts_of(first) == each)
            gate.touch()
            wait_until(lambda: hosts_of(second) == each)
            assert hosts_of(first) == each
            assert [run.workload.held for run in runs(name)] == [[0, 1], [2, 3]]
            for env in (first, second):  # otherwise slots of different runs may be on the same host
                workers = {node["place"]: node["workers"] for node in env.stats()["nodes"]}
                assert workers == {"ssh host0": [0, 1], "ssh host1": [2, 3]}
        wait_until(lambda: hosts_of(first) == {"ssh host0": 2, "ssh host1": 2})


def lose(env: farstep.ClusterEnv, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill the node daemon of a host, to which nobody can log in any more."""

    def refuse(*_: object) -> Any:
        raise farstep.LaunchError("the host is down")

    monkeypatch.setattr(SSHEngine, "request", refuse)
    (daemon,) = (node["pid"] for node in env.stats()["nodes"] if node["place"] == f"ssh {host}")
    os.kill(daemon, signal.SIGKILL)


class DoorEnv(CountingEnv):
    """Never ends, and waits in each step while the file `closed` exists. Beside it is then a file `inside-PID`."""

    def __init__(self, closed: str) -> None:
        super().__init__(length=None)
        self._closed = Path(closed)

    def step(self, action: Any) -> Any:
        while self._closed.exists():
            self._closed.with_name(f"inside-{os.getpid()}").touch()
            time.sleep(0.01)
        return super().step(action)


@pytest.mark.timeout(120)
def test_slot_is_released_only_when_its_worker_is_parked_even_if_other_workers_have_lost_their_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "closed"
    with serving(tmp_path / "c", slots=4) as name, contextlib.ExitStack() as stack:
        config = node_config(tmp_path, 2, min_nodes=1, workers_per_node=2, coordinator=name)
        env = stack.enter_context(cluster(DoorEnv, envs=2, config=config, env_kwargs={"closed": str(closed)}))
        wait_until(lambda: hosts_of(env) == {"ssh host0": 2, "ssh host1": 2})
        lose(env, "host1", monkeypatch)
        wait_until(lambda: hosts_of(env) == {"ssh host0": 2})
        closed.touch()
        pool = stack.enter_context(ThreadPoolExecutor())
        stack.callback(closed.unlink, missing_ok=True)
        collecting = pool.submit(env.collect, TableAgent(), steps=2)
        wait_until(lambda: len(list(tmp_path.glob("inside-*"))) == 2)
        other = stack.enter_context(contextlib.closing(shared(name, min_workers=2)))
        launching = pool.submit(other.launch)
        wait_until(lambda: any("from 4 to 2" in event.text for event in env.events("scaled")))
        for _ in range(20):
            time.sleep(0.02)
            assert held(name) == [4, 0]  # both workers of host0 are in a step
        closed.unlink()
        wait_until(lambda: held(name) == [2, 2])
        collecting.result()
        launching.result()


@pytest.mark.timeout(120)
def test_run_with_a_slot_on_each_host_continues_when_a_host_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path / "c", slots=2) as name, on_two_hosts(tmp_path, name) as env:
        wait_until(lambda: hosts_of(env) == {"ssh host0": 1, "ssh host1": 1})
        lose(env, "host0", monkeypatch)
        wait_until(lambda: hosts_of(env) == {"ssh host1": 1})
