"""close() releases all resources and concurrent calls wait for it; exceptions that cannot be formatted are reported."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import farstep
from farstep.cluster_env import collector_for
from farstep.errors import AgentError, RemoteEnvError
from farstep.testing import CountingEnv, TableAgent
from farstep.workflow.triggers import DataKeyTrigger
from tests.cluster.checks import cluster, eventually, in_process, within, worker_pids
from tests.cluster.faulty import MuteAgent, MuteEnv, MuteError, SlowToCloseEnv
from tests.cluster.flows import full
from tests.cluster.nodes import node_config


def descriptors() -> dict[str, str]:
    """The open descriptors of this process."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them
            found[entry.name] = str(entry.readlink())
    return found


LAUNCHES: dict[str, Callable[[Path], Any]] = {
    "local": lambda _: farstep.LocalConfig(),
    "in-process": lambda _: in_process(),
    "tcp": lambda _: farstep.LocalConfig(transport="tcp"),
    "nodes": lambda folder: node_config(folder, nodes=1, workers_per_node=1, head_address="127.0.0.1"),
}


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
def test_a_closed_cluster_keeps_no_descriptor(launch: Callable[[Path], Any], tmp_path: Path) -> None:
    """Even while the learner still holds the closed cluster and its batches."""
    before = descriptors()
    env = cluster(config=launch(tmp_path))
    kept: list[Any] = [env.collect(TableAgent(), steps=4), env.reset(), env.stats()]
    env.close()
    assert descriptors() == before
    assert kept[0]["obs"].shape[:2] == (4, 2)  # still readable


def test_a_closed_vector_keeps_no_descriptor() -> None:
    before = descriptors()
    vector = farstep.make_vec(CountingEnv, 2, farstep.LocalConfig())
    vector.reset()
    vector.close()
    assert descriptors() == before


def of_cluster(folder: str) -> tuple[Callable[[], None], int]:
    env = cluster(SlowToCloseEnv, envs=1, env_kwargs={"folder": folder})
    env.launch()
    return env.close, worker_pids()[0]


def of_vector(folder: str) -> tuple[Callable[[], None], int]:
    vector = farstep.make_vec(SlowToCloseEnv, 1, env_kwargs={"folder": folder})
    return vector.close, worker_pids()[0]


@pytest.mark.parametrize("make", [of_cluster, of_vector])
def test_a_second_close_waits_for_the_first(
    make: Callable[[str], tuple[Callable[[], None], int]], tmp_path: Path
) -> None:
    close, worker = make(str(tmp_path))
    found_running = []

    def close_and_look() -> None:
        close()
        found_running.append(Path(f"/proc/{worker}").exists())

    threads = [threading.Thread(target=close_and_look) for _ in range(3)]
    threads[0].start()
    eventually((tmp_path / "closing").exists)
    for thread in threads[1:]:
        thread.start()
    threads[1].join(0.5)  # one that does not wait is done by then
    (tmp_path / "gate").touch()
    for thread in threads:
        within(thread.join)
    assert found_running == [False, False, False]


def test_close_waits_for_a_failed_call_that_is_closing_in_another_thread(tmp_path: Path) -> None:
    env = cluster(SlowToCloseEnv, envs=1, env_kwargs={"folder": str(tmp_path)})
    env.launch()
    (worker,) = worker_pids()
    found_running = []

    def fail() -> None:
        with pytest.raises(AgentError, match="deliberate"):
            env.collect(TableAgent(), steps=4)

    def close_and_look() -> None:
        env.close()
        found_running.append(Path(f"/proc/{worker}").exists())

    closing = threading.Thread(target=close_and_look)
    collector_for(env, TableAgent()).server.fail(AgentError("deliberate"))
    failing = threading.Thread(target=fail)
    failing.start()
    eventually((tmp_path / "closing").exists)
    closing.start()
    closing.join(0.5)
    (tmp_path / "gate").touch()
    within(failing.join)
    within(closing.join)
    assert found_running == [False]


# ---- exceptions that cannot be shown ----


MUTE, ODD = ("mute", "MuteError: <its __str__ raised RuntimeError>"), ("odd", "a file named \\udcff")
ONCE: dict[str, Any] = {"restart_budget": 0}


@pytest.mark.parametrize(
    ("phase", "error", "config"),
    [
        *((phase, error, in_process(**ONCE)) for phase in ("construct", "reset", "step") for error in (MUTE, ODD)),
        ("step", MUTE, farstep.LocalConfig(**ONCE)),
    ],
)
def test_environment_exception_that_cannot_be_formatted_is_reported(
    phase: str, error: tuple[str, str], config: Any
) -> None:
    kind, said = error
    env = cluster(MuteEnv, envs=1, env_kwargs={"phase": phase, "error": kind}, config=config)
    with pytest.raises(RemoteEnvError) as caught, env:
        env.collect(TableAgent(), steps=4)
    assert said in caught.value.message
    assert caught.value.where.phase == phase


def test_agent_exception_that_cannot_be_formatted_is_reported() -> None:
    with cluster(config=in_process()) as env, pytest.raises(RemoteEnvError, match="MuteError: <its __str__ raised"):
        env.collect(MuteAgent(), steps=4)


def test_factory_exception_that_cannot_be_formatted_is_reported() -> None:
    def factory() -> Any:
        raise MuteError

    with pytest.raises(RemoteEnvError, match="MuteError: <its __str__ raised"), cluster(factory, config=in_process()):
        pass


@pytest.mark.parametrize("thread", [False, True], ids=["caller", "thread"])
def test_consumer_exception_that_cannot_be_formatted_is_raised(thread: bool) -> None:
    def consumer(message: Any) -> None:
        if thread:  # the second one's error becomes a note of the first one's
            both.wait()
        raise MuteError

    both = threading.Barrier(2, timeout=30)

    with cluster(config=in_process()) as env:
        flow = farstep.Workflow(env, TableAgent(), full(64), steps=8)
        flow.on(DataKeyTrigger(n=1, size=8), consumer, thread=thread, name="one")
        flow.on(DataKeyTrigger(n=1, size=8), consumer, thread=thread, name="other")
        with pytest.raises(MuteError) as caught:
            within(flow.run)
        besides = [note for note in caught.value.__notes__ if note.startswith("A consumer also failed")]
        assert len(besides) == thread and all(
            "MuteError: <its __str__ raised RuntimeError>" in note for note in besides
        )
