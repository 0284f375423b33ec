"""After any fault of an acting server, a call returns a full batch or raises the right error in time."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farstep
from farstep.errors import LaunchError, RemoteEnvError, WorkerDied, WorkerStuck
from farstep.testing import CountingEnv, TableAgent
from farstep.testing.envs import do_fault
from farstep.wire import messages as m
from tests.cluster.checks import assert_balanced, assert_sound, cluster, eventually, together, within, worker_pids
from tests.cluster.faulty import once
from tests.cluster.served.agents import UnloadableAgent, VersionAgent
from tests.cluster.served.test_served import OVER_THE_NETWORK, actions_in_progress
from tests.cluster.toys import RememberingAgent

pytestmark = pytest.mark.slow  # real processes, or learning

LIMITS = farstep.Timeouts(act_s=1.5, idle_s=1.5, load_s=5.0, close_s=1.0)


class FaultyActor(TableAgent):
    """Fails in its 40th call; only once, if there is a folder."""

    def __init__(self, fault: str, folder: str = "") -> None:
        super().__init__()
        self._fault, self._folder, self._calls = fault, folder, 0

    def act(self, obs: Any) -> Any:
        self._calls += 1
        if self._calls > 40 and (not self._folder or once(f"{self._folder}/fault")):
            if self._fault == "memory":
                raise MemoryError("deliberate")
            do_fault(self._fault)
        return super().act(obs)


def server_pid(env: farstep.ClusterEnv) -> int:
    return int(env.stats()["acting"][0]["pid"])


@pytest.mark.parametrize(
    ("fault", "options"),
    [
        *((fault, {"inference": "served"}) for fault in ("sigkill", "exit", "hang", "sigstop", "memory")),
        *((fault, OVER_THE_NETWORK) for fault in ("sigkill", "hang")),
    ],
)
def test_a_server_that_fails_is_replaced_and_every_batch_is_whole(
    fault: str, options: dict[str, Any], tmp_path: Path
) -> None:
    agent = FaultyActor(fault, str(tmp_path))
    with cluster(envs=4, workers=2, timeouts=LIMITS, **options) as env:
        for _ in range(6):
            batch = within(lambda: env.collect(agent, 20))
            assert batch.shape == (20, 4)
            assert_sound(batch)
        stats = env.stats()
        assert_balanced(stats)
        assert stats["acting"][0]["restarts"] == stats["workers"]["restarts"] == 1
        assert stats["dropped"] == {}
        (lost,) = [event for event in env.events() if event.kind in ("lost", "stuck")]
        assert "acting server" in lost.text
        assert any("acting server 2 was restarted" in event.text for event in env.events())


def exhaust_memory(where: str) -> None:
    """Raise what torch raises if the memory of a GPU or main memory runs out."""
    import torch  # here and not above: workers import this file

    if where == "gpu":
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    torch.empty(10**15)


MEMORY_ERRORS = {"gpu": "OutOfMemoryError: CUDA out of memory", "cpu": "DefaultCPUAllocator: "}


class ExhaustingAgent(TableAgent):
    """Exhausts memory once in its 40th call, in `priorities`, or when the agent is loaded the second time.

    Args:
        memory: `gpu` or `cpu`.
        methods: Where: `act`, `priorities` or `load`; each fails once.
        folder: Where to store which of them have failed; empty: each fails every time.
    """

    def __init__(self, memory: str, methods: str, folder: str = "") -> None:
        super().__init__()
        self._memory, self._methods, self._folder, self._calls = memory, methods, folder, 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self._folder or Path(self._folder, "act").exists():
            self._fail_in("load")

    def _fail_in(self, method: str) -> None:
        if method in self._methods and (not self._folder or once(f"{self._folder}/{method}")):
            exhaust_memory(self._memory)

    def act(self, obs: Any) -> Any:
        self._calls += 1
        if self._calls > 40:
            self._fail_in("act")
        return super().act(obs)

    def priorities(self, rows: Any) -> Any:
        if self._calls > 40:
            self._fail_in("priorities")
        return rows["reward"]


@pytest.mark.usefixtures("torch_in_workers")
@pytest.mark.parametrize("memory", MEMORY_ERRORS)
@pytest.mark.parametrize("methods", ["act", "act, load", "priorities"])
def test_server_without_memory_reports_it_and_is_replaced(methods: str, memory: str, tmp_path: Path) -> None:
    agent = ExhaustingAgent(memory, methods, str(tmp_path))
    with cluster(envs=4, workers=2, inference="served") as env:
        for _ in range(6):
            batch = within(lambda: env.collect(agent, 20))
            assert batch.shape == (20, 4)
            assert_sound(batch)
        stats, failures = env.stats(), len(methods.split())
        assert_balanced(stats)
        assert stats["acting"][0]["restarts"] == stats["workers"]["restarts"] == failures
        assert stats["dropped"] == {}
        lost = [event.text for event in env.events("lost")]
        assert len(lost) == failures
        for text, method in zip(lost, methods.split(", "), strict=True):
            assert text.startswith("an acting server ran out of memory: ") and MEMORY_ERRORS[memory] in text
            assert text.endswith(f"phase {'load' if method == 'load' else 'act'}]; restarting it")


@pytest.mark.usefixtures("torch_in_workers")
def test_a_server_that_always_runs_out_of_memory_uses_up_the_restart_budget() -> None:
    agent = ExhaustingAgent("cpu", "act")
    with cluster(envs=4, workers=2, inference="served", restart_budget=1) as env:
        with pytest.raises(RemoteEnvError, match=r"restart_budget=1 is used up.*ran out of memory") as caught:
            for _ in range(9):
                within(lambda: env.collect(agent, 20))
        assert "in exhaust_memory" in caught.value.remote_traceback


@pytest.mark.usefixtures("torch_in_workers")
def test_an_agent_for_which_memory_does_not_suffice_is_rejected_and_the_next_one_works() -> None:
    with cluster(envs=4, workers=2, inference="served") as env:
        with pytest.raises(RemoteEnvError, match=MEMORY_ERRORS["cpu"]):
            within(lambda: env.collect(ExhaustingAgent("cpu", "load"), 5))
        assert_sound(within(lambda: env.collect(TableAgent(), 5)))
        assert env.stats()["workers"]["restarts"] == 0


def test_recurrent_episodes_restart_when_the_server_was_killed() -> None:
    agent = RememberingAgent()
    with cluster(envs=4, workers=2, inference="served") as env:
        stream = env.stream(agent, steps=10, max_staleness=2)
        for i in range(8):
            batch = within(lambda: next(stream))
            assert_sound(batch)
            np.testing.assert_array_equal(batch["age"], batch["obs"][..., 1] + 1)
            if i == 2:
                os.kill(server_pid(env), signal.SIGKILL)
        stream.close()
        assert_balanced(env.stats())


@pytest.mark.parametrize("envs", [6, 7])
def test_a_killed_worker_is_replaced_and_the_others_keep_their_mailboxes(envs: int) -> None:
    """With 7 environments, mailboxes have two layouts."""
    agent = RememberingAgent()
    with cluster(envs=envs, workers=3, inference="served") as env:
        stream = env.stream(agent, steps=10, max_staleness=2)
        for i in range(8):
            batch = within(lambda: next(stream))
            assert_sound(batch)
            np.testing.assert_array_equal(batch["age"], batch["obs"][..., 1] + 1)
            if i in (1, 4):
                os.kill(next(pid for pid in worker_pids() if pid != server_pid(env)), signal.SIGKILL)
        stream.close()
        stats = env.stats()
        assert_balanced(stats)
        assert stats["workers"]["restarts"] == 2 and stats["acting"][0]["restarts"] == 0


def test_a_run_that_is_saved_while_its_server_restarts_has_no_wrong_recurrent_state() -> None:
    agent = RememberingAgent()
    with cluster(envs=4, workers=2, inference="served") as env:
        actions = actions_in_progress(within(lambda: env.collect(agent, 30)))
        os.kill(server_pid(env), signal.SIGKILL)
        saved = within(env.save)
    with cluster(envs=4, workers=2, inference="served") as env:
        within(lambda: env.resume(agent, saved, actions))
        batch = within(lambda: env.collect(agent, 10))
        np.testing.assert_array_equal(batch["age"], batch["obs"][..., 1] + 1)


class SlowAgent(TableAgent):
    """Never returns from its second call."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def act(self, obs: Any) -> Any:
        self._calls += 1
        if self._calls > 1:
            time.sleep(600)
        return super().act(obs)


def test_a_run_can_be_closed_while_workers_wait_for_the_server() -> None:
    env = cluster(envs=4, workers=2, timeouts=farstep.Timeouts(close_s=1.0), **OVER_THE_NETWORK)
    env.launch()
    outcomes = together({"collect": lambda: env.collect(SlowAgent(), 20), "close": lambda: close_when_acting(env)})
    outcomes["close"].get()
    with pytest.raises(farstep.ClosedError):
        outcomes["collect"].get()


def close_when_acting(env: farstep.ClusterEnv) -> None:
    eventually(lambda: env.stats()["in_flight"])
    env.close()


class BlockingEnv(CountingEnv):
    """The first environment that steps while the file `block` exists waits for its removal."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = Path(folder)

    def step(self, action: Any) -> Any:
        block = self._folder / "block"
        if block.exists() and once(f"{self._folder}/blocked"):
            eventually(lambda: not block.exists())
        elif (self._folder / "published").exists():
            (self._folder / "stepped").touch()
        return super().step(action)


def test_a_call_after_an_interrupt_uses_new_weights_although_a_worker_still_steps(tmp_path: Path) -> None:
    agent, blocked, stepped = VersionAgent(), tmp_path / "blocked", tmp_path / "stepped"

    def interrupt() -> None:
        eventually(blocked.exists)
        os.kill(os.getpid(), signal.SIGINT)

    def unblock() -> None:
        eventually(stepped.exists)
        (tmp_path / "block").unlink()

    with cluster(BlockingEnv, envs=4, workers=2, inference="served", env_kwargs={"folder": str(tmp_path)}) as env:
        within(lambda: env.collect(agent, 2))
        (tmp_path / "block").touch()
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            env.collect(agent, 5)
        thread.join()
        agent.number = agent.number + 1
        within(lambda: env.publish(agent))
        (tmp_path / "published").touch()
        outcomes = together({"collect": lambda: env.collect(agent, 5), "unblock": unblock})
        outcomes["unblock"].get()
        assert (outcomes["collect"].get()["number"] == 1).all()


def test_exception_of_act_reaches_the_caller_with_its_traceback() -> None:
    agent = FaultyActor("raise")
    with cluster(envs=4, workers=2, inference="served") as env, pytest.raises(RemoteEnvError) as caught:
        for _ in range(9):
            within(lambda: env.collect(agent, 20))
    assert "the agent raised UnpicklableError: deliberate" in str(caught.value)
    assert "in do_fault" in caught.value.remote_traceback and caught.value.where.phase == "act"


@pytest.mark.parametrize("options", [{"inference": "served"}, OVER_THE_NETWORK], ids=["node", "head"])
@pytest.mark.parametrize("error", [FileNotFoundError, EOFError])
def test_exception_of_priorities_is_not_taken_for_a_lost_connection(
    error: type[Exception], options: dict[str, Any]
) -> None:
    class Unprioritized(TableAgent):
        def priorities(self, rows: Any) -> Any:
            raise error("no table")

    with cluster(envs=4, workers=2, **options) as env:
        with pytest.raises(RemoteEnvError, match="no table") as caught:
            within(lambda: env.collect(Unprioritized(), 5), 20)
        assert caught.value.where.phase == "act"


def test_weights_that_cannot_be_loaded_raise_at_the_caller() -> None:
    agent = UnloadableAgent()
    with cluster(envs=4, workers=2, inference="served") as env:
        within(lambda: env.collect(agent, 5))
        agent.number = agent.number + 1
        within(lambda: env.publish(agent))
        with pytest.raises(RemoteEnvError, match="cannot load this version") as caught:
            within(lambda: env.collect(agent, 5))
        assert caught.value.where.phase == "load"


def test_an_agent_that_cannot_act_is_rejected_and_the_next_one_works() -> None:
    class Broken(TableAgent):
        def act(self, obs: Any) -> Any:
            raise KeyError("no such layer")

    with cluster(envs=4, workers=2, inference="served") as env:
        with pytest.raises(RemoteEnvError, match="no such layer"):
            within(lambda: env.collect(Broken(), 5))
        assert_sound(within(lambda: env.collect(TableAgent(), 5)))


@pytest.mark.parametrize(("fault", "error"), [("sigkill", WorkerDied), ("hang", WorkerStuck)])
def test_a_server_that_always_fails_uses_up_the_restart_budget(fault: str, error: type[Exception]) -> None:
    agent = FaultyActor(fault)
    with cluster(envs=4, workers=2, inference="served", timeouts=LIMITS, restart_budget=1) as env:
        with pytest.raises(error, match="restart_budget=1 is used up") as caught:
            for _ in range(9):
                within(lambda: env.collect(agent, 20))
        assert "acting server 2" in str(caught.value)


@pytest.mark.parametrize("options", [{"inference": "served"}, OVER_THE_NETWORK], ids=["node", "head"])
def test_a_worker_that_dies_does_not_disturb_the_server(options: dict[str, Any], tmp_path: Path) -> None:
    kwargs = {"fault": "sigkill", "phase": "step", "at": 12, "marker": str(tmp_path / "dead")}
    with cluster(farstep.testing.FaultyEnv, envs=4, workers=2, env_kwargs=kwargs, **options) as env:
        for _ in range(4):
            assert_sound(within(lambda: env.collect(TableAgent(), 10)))
        assert env.stats()["acting"][0]["restarts"] == 0


def test_the_server_ends_with_a_head_that_is_killed(tmp_path: Path) -> None:
    script = """
        import sys, time
        import farstep
        from farstep.cluster_env import collector_for
        from farstep.testing import CountingEnv, TableAgent
        agent = TableAgent()
        env = farstep.ClusterEnv(
            {"type": "factory", "env_name": CountingEnv, "envs_per_node": 4, "inference": "served"},
            {"workers_per_node": 2},
        )
        env.collect(agent, 5)
        print(*collector_for(env, agent).server.local_pids().values(), flush=True)
        time.sleep(600)
    """
    head = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    assert head.stdout is not None
    with head, head.stdout as output:
        pids = [int(pid) for pid in output.readline().split()]
        assert len(pids) == 4
        head.kill()
        head.wait()
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids[1:]))


def test_a_port_that_cannot_be_reached_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # it does not listen
        port = str(unused.getsockname()[1])
        real = m.UseServer
        monkeypatch.setattr(m, "UseServer", lambda _, *others: real(port, *others))
        limits = farstep.Timeouts(connect_s=6.0, close_s=1.0)
        with cluster(envs=2, workers=1, timeouts=limits, **OVER_THE_NETWORK) as env:
            with pytest.raises(LaunchError, match=f"127.0.0.1:{port} within connect_s=6 s.*where='node'"):
                within(lambda: env.collect(TableAgent(), 4))
            assert env.stats()["workers"]["restarts"] == 0
