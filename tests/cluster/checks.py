"""Deadlines, and the invariants of every batch and of all counters, for tests with a running cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farstep
from farstep.testing import CountingEnv

DEADLINE_S = 60.0


def within(call: Callable[[], Any], seconds: float = DEADLINE_S) -> Any:
    """The result of `call`, which must return or raise before the deadline."""
    return together({"call": call}, seconds)["call"].get()


class Outcome:
    """The result or the exception of a call."""

    def __init__(self) -> None:
        self.value: Any = None
        self.error: BaseException | None = None

    def get(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


def together(calls: Mapping[str, Callable[[], Any]], seconds: float = DEADLINE_S) -> dict[str, Outcome]:
    """Run calls at the same time, each in a thread; a call that does not return in time fails the test."""
    outcomes = {name: Outcome() for name in calls}

    def run(name: str) -> None:
        try:
            outcomes[name].value = calls[name]()
        except BaseException as error:
            outcomes[name].error = error

    threads = {name: threading.Thread(target=run, args=(name,), name=f"call {name}", daemon=True) for name in calls}
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads.values():
        thread.join(max(0.0, deadline - time.monotonic()))
    hanging = [name for name, thread in threads.items() if thread.is_alive()]
    assert not hanging, f"no answer within {seconds} s from {hanging}"
    return outcomes


def eventually(what: Callable[[], Any], seconds: float = DEADLINE_S, pause_s: float = 0.03) -> Any:
    """Return the first true result of `what`, for events that cannot be waited on; fail at the deadline."""
    deadline = time.monotonic() + seconds
    while not (answer := what()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(pause_s)
    return answer


def cluster(env: Any = CountingEnv, *, envs: int = 2, workers: int = 1, **options: Any) -> farstep.ClusterEnv:
    """A ClusterEnv over a factory; `options` go to the environment configuration or to the launch configuration."""
    names = {field.name for field in dataclasses.fields(farstep.EnvConfig)}
    chosen = {name: options.pop(name) for name in names if name in options}
    config = options.pop("config", None) or farstep.LocalConfig(workers_per_node=workers, **options)
    return farstep.ClusterEnv({"type": "factory", "env_name": env, "envs_per_node": envs, "seed": 5, **chosen}, config)


def worker_pids() -> list[int]:
    """The local worker processes that this process started, in the order of their start."""
    found: dict[int, tuple[int, int]] = {}
    zygotes = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile
            if entry.name.isdigit() and b"farstep.worker" in (entry / "cmdline").read_bytes().split(b"\0"):
                pid, fields = int(entry.name), (entry / "stat").read_text().rpartition(")")[2].split()
                if is_zygote(pid):
                    zygotes.add(pid)
                if fields[0] != "Z":
                    found[pid] = (int(fields[19]), int(fields[1]))

    def is_mine(pid: int) -> bool:
        return pid == os.getpid() or (pid in found and is_mine(found[pid][1]))

    zygotes |= {parent for _, parent in found.values()}
    mine = [(start, pid) for pid, (start, parent) in found.items() if is_mine(parent) and pid not in zygotes]
    return [pid for _, pid in sorted(mine)]


def is_zygote(pid: int) -> bool:
    """Whether a process of `farstep.worker` forks workers: its output is not read."""
    return Path(f"/proc/{pid}/fd/1").readlink() == Path(os.devnull)


def in_process(workers: int = 1, **options: Any) -> farstep.InProcessConfig:
    return farstep.InProcessConfig(workers_per_node=workers, **options)


BOTH = pytest.mark.parametrize(
    "config", [in_process(2), farstep.LocalConfig(workers_per_node=2)], ids=["in_process", "local"]
)


def assert_sound(batch: farstep.Batch) -> None:
    """A batch of `CountingEnv`: every row follows from the one before, or is marked as the start of an episode."""
    obs, following = batch["obs"], np.concatenate([batch["obs"][1:], batch.last_obs[None]])
    ended = batch["terminated"] | batch["truncated"]
    final = batch.final_obs
    assert batch["valid"].all()
    assert sorted(zip(final.row, final.slot, strict=True)) == list(zip(*np.nonzero(ended), strict=True))
    np.testing.assert_array_equal(batch["episode_start"], obs[..., 1] == 0)
    after = following.copy()
    after[final.row, final.slot] = final.obs
    np.testing.assert_array_equal(after, np.stack([obs[..., 0], obs[..., 1] + 1, batch["action"]], axis=-1))
    np.testing.assert_array_equal(batch["reward"], after[..., 1])
    assert (following[ended][:, 1:] == [0, -1]).all()


def assert_balanced(stats: Mapping[str, Any]) -> None:
    """No row is lost or counted twice."""
    rest = sum(stats["dropped"].values()) + stats["buffered"] + stats["in_flight"]
    assert stats["rolled"] == stats["delivered"] + rest, stats


def arrays_of(batch: farstep.Batch) -> dict[str, np.ndarray]:
    """All arrays of a batch that are reproducible, with ended episodes in order of slot and row."""
    order = np.lexsort((batch.final_obs.row, batch.final_obs.slot))
    episodes = {f"episodes {key}": batch.episodes[key][order] for key in ("return", "length", "slot")}
    final = {"final row": batch.final_obs.row, "final slot": batch.final_obs.slot, "final obs": batch.final_obs.obs}
    copies = {name: array.copy() for name, array in batch.arrays.items()}
    return {**copies, "last": batch.last_obs.copy(), **{k: v[order] for k, v in final.items()}, **episodes}


def assert_same(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> None:
    """Equal bit for bit, in names, dtypes and contents."""
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert array.dtype == other[name].dtype
        np.testing.assert_array_equal(array, other[name], err_msg=name)


@contextlib.contextmanager
def without_programs() -> Iterator[None]:
    """Hide all installed programs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "")
        yield
