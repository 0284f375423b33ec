"""`make_vec` on workers that hang or die: every call raises like `reset`, and none returns a part of its values."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

import farstep
from farstep.testing import CountingEnv, FaultyEnv
from farstep.testing.envs import do_fault
from tests.cluster.nodes import shell_in

ERRORS = {"hang": farstep.WorkerStuck, "sigkill": farstep.WorkerDied}


class TroubledEnv(CountingEnv):
    """Hangs or dies in the next reset or call, once `fault` is set."""

    fault = ""

    def reset(self, **options: Any) -> Any:
        self._trouble()
        return super().reset(**options)

    def multiply(self, factor: int) -> int:
        self._trouble()
        return factor * 2

    @property
    def answer(self) -> int:
        self._trouble()
        return 42

    @property
    def parent(self) -> int:
        return os.getppid()

    def _trouble(self) -> None:
        if self.fault:
            do_fault(self.fault)


CALLS: dict[str, Callable[[Any], Any]] = {
    "reset": lambda vector: vector.reset(),
    "call": lambda vector: vector.call("multiply", 3),
    "get_attr": lambda vector: vector.get_attr("answer"),
}


@contextlib.contextmanager
def troubled(faults: list[str]) -> Iterator[Any]:
    limit_s = 0.5 if "hang" in faults else 20.0  # on a busy machine a worker may take a while to die
    config = farstep.LocalConfig(workers_per_node=2, timeouts=cast(Any, {"step_s": limit_s, "reset_s": limit_s}))
    with contextlib.closing(farstep.make_vec(TroubledEnv, 2, config)) as vector:
        vector.set_attr("fault", faults)
        yield vector


@pytest.mark.parametrize(
    ("call", "faults"),
    [
        ("reset", ["hang", ""]),
        ("call", ["hang", ""]),
        ("call", ["hang", "hang"]),
        ("call", ["", "sigkill"]),
        ("get_attr", ["", "hang"]),
    ],
)
def test_call_raises_when_workers_stick_or_die(call: str, faults: list[str]) -> None:
    with troubled(faults) as vector:
        with pytest.raises(ERRORS[faults[0] or faults[1]]):
            CALLS[call](vector)
        with pytest.raises(farstep.ClosedError, match="failed earlier"):
            CALLS[call](vector)
    lost = [event for event in vector.events() if event.kind in ("lost", "stuck")]
    assert {event.worker for event in lost} <= {i for i in range(2) if faults[i]}
    assert lost[0].kind == ("stuck" if "hang" in faults else "lost") and lost[0].node == socket.gethostname()
    if "hang" in faults:
        assert "in do_fault" in lost[0].traceback
    assert vector.events()[-1].text.startswith("the run failed: ")


def test_environment_that_raises_is_an_event_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    fault = {"fault": "raise", "phase": "step", "at": 1}
    vector = farstep.make_vec(FaultyEnv, 1, farstep.InProcessConfig(), env_kwargs=fault)
    vector.reset(seed=1)
    with contextlib.closing(vector), pytest.raises(farstep.RemoteEnvError):
        vector.step([0])
    joined, warned = vector.events()  # also after the end
    assert (joined.kind, joined.worker, warned.kind, warned.worker) == ("joined", 0, "warned", 0)
    assert "deliberate" in warned.text and "in do_fault" in warned.traceback and warned.node == socket.gethostname()
    assert vector.events("warned") == vector.events(["lost", "warned"], since=joined.time) == [warned]
    with pytest.raises(farstep.ConfigError, match=r"unknown kind of event 'warning'. Did you mean 'warned'"):
        vector.events("warning")  # type: ignore[arg-type]
    assert not caplog.messages  # the exception has it


def test_vector_ends_when_its_node_is_lost(tmp_path: Path) -> None:
    """Another worker in its place would have other episodes than those that the learner began."""
    ssh = (shell_in(tmp_path),)
    # The parent of a worker that starts cold is the node daemon.
    config = farstep.SSHConfig(hosts=["host"], ssh=ssh, workers_per_node=1, lease_s=2, start_method="cold")
    with contextlib.closing(farstep.make_vec(TroubledEnv, 1, config)) as vector:
        vector.reset(seed=1)
        os.kill(vector.get_attr("parent")[0], signal.SIGKILL)
        with pytest.raises(farstep.WorkerDied):
            while True:  # the worker may answer before it ends
                vector.call("multiply", 3)
    (lost,), failed = vector.events("lost"), vector.events()[-1]
    assert lost.node == socket.gethostname() and lost.worker is None
    assert failed.text.startswith("the run failed: ") and failed.worker == 0


def test_vector_refuses_nodes_that_may_be_missing() -> None:
    cases: list[dict[str, Any]] = [{"min_nodes": 1}, {"max_nodes": 3}]
    for options in cases:
        config = farstep.SSHConfig(hosts=["a", "b", "c"], nodes=2, **options)
        with pytest.raises(farstep.ConfigError, match="needs all nodes at all times"):
            farstep.make_vec(TroubledEnv, 2, config)
