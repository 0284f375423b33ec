"""The tree of errors matches its drawing in the docstring."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

import farstep
from farstep import errors
from farstep.errors import FarstepError, RemoteEnvError, Where, WorkerDied, memory_error_of, remote_error, unknown_name

WHERE = Where(worker=3, incarnation=1, host="n7", pid=12, phase="step", slot=5, seed=9, episode_step=4, version=2)


def drawn_tree() -> dict[str, str | None]:
    """Child and parent of every line of the docstring's drawing."""
    parents: dict[str, str | None] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^([│├└─\s]*)([A-Z]\w+)(\s{2,}|$)", line)
        if match:
            depth = len(match[1]) // 4
            path[depth:] = [match[2]]
            parents[match[2]] = path[depth - 1] if depth else None
    return parents


def test_the_drawn_tree_equals_the_classes() -> None:
    classes = {
        name: kind
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, FarstepError) and kind.__module__ == errors.__name__
    }
    real = {
        name: next((b.__name__ for b in kind.__bases__ if b.__name__ in classes), None)
        for name, kind in classes.items()
    }
    assert drawn_tree() == real


def test_builtin_bases_in_the_drawing_are_correct() -> None:
    for name, builtin in re.findall(r"(\w+) .*\(also an? (\w+)\)", errors.__doc__ or ""):
        assert issubclass(getattr(errors, name), getattr(__import__("builtins"), builtin)), name


def test_error_of_a_worker_names_its_place_and_quotes_its_output() -> None:
    error = WorkerDied("a worker was killed by SIGKILL", WHERE, output="last line\n")
    for part in ("worker 3 (restart 1)", "host n7", "pid 12", "phase step", "slot 5", "seed 9", "step 4", "version 2"):
        assert part in str(error)
    assert str(error).endswith("last line")


@pytest.mark.parametrize("kind", ["", "KeyError", "AgentError"])
def test_a_preface_stands_before_the_message(kind: str) -> None:
    error = remote_error(kind, "one", WHERE, "Traceback ...")
    before = str(error)
    error.preface("zero,")
    assert str(error) == f"zero, {before}"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize("kind", ["ValueError", "KeyError", "AssertionError", "ZeroDivisionError"])
def test_builtin_exceptions_of_workers_can_be_caught_by_type(kind: str) -> None:
    error = remote_error(kind, f"the environment raised {kind}: x", WHERE, "Traceback ...")
    assert isinstance(error, RemoteEnvError) and isinstance(error, getattr(__import__("builtins"), kind))
    assert str(error).startswith("the environment raised") and str(error).endswith("Traceback ...")


@pytest.mark.parametrize("kind", ["", "MyOwnError", "SystemExit", "KeyboardInterrupt"])
def test_other_kinds_are_remote_errors_only(kind: str) -> None:
    assert type(remote_error(kind, "x", WHERE, "")) is RemoteEnvError


@pytest.mark.parametrize(
    "text",
    [
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to",
        "[enforce fail at alloc_cpu.cpp:113] data. DefaultCPUAllocator: not enough memory: you tried to",
        "CUDA error: out of memory",
    ],
)
def test_errors_of_torch_that_memory_ran_out_are_recognized_by_their_text(text: str) -> None:
    cause, error = RuntimeError(text), ValueError("the agent cannot be loaded")
    error.__cause__ = cause
    assert memory_error_of(cause) is memory_error_of(error) is cause
    assert memory_error_of(RuntimeError("not enough memory cells for this sequence")) is None


def test_an_unknown_name_lists_the_known_ones() -> None:
    assert (
        unknown_name("thing", "bett", ["beta", "alpha"])
        == "unknown thing 'bett'. Did you mean 'beta'? Known: alpha, beta."
    )
    assert "Did you mean" not in unknown_name("thing", "zzz", ["alpha"])


def test_public_errors_are_of_the_tree() -> None:
    public = [getattr(farstep, name) for name in farstep.__all__ if name.endswith(("Error", "Died", "Stuck"))]
    assert public and all(issubclass(kind, FarstepError) for kind in public)
