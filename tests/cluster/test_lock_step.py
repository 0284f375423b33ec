"""`make_vec` on local workers steps through shared memory: results, errors and lost workers are as with messages."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import farstep
from farstep.errors import PendingStepError
from farstep.head.stepping.stepper import Stepper
from farstep.testing import CountingEnv
from farstep.testing.vector_env import assert_same
from tests.work import instructions

LOCAL = farstep.LocalConfig(workers_per_node=2)
IN_PROCESS = farstep.InProcessConfig(workers_per_node=2)
MODES = pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)


class QuietEnv(CountingEnv):
    """No infos, and attributes that a test can set: the fault of the next step, and the file that marks its begin."""

    fault, marker, huge = "", "", 0

    def __init__(self) -> None:
        super().__init__(length=None)

    def reset(self, **options: Any) -> Any:
        return super().reset(**options)[0], {}

    def step(self, action: Any) -> Any:
        *results, _ = super().step(action)
        if self.marker:
            Path(self.marker).write_text(str(os.getpid()))
        match self.fault:
            case "raise":
                raise ValueError("deliberate")
            case "block" | "block and raise":  # until the test opens the other end
                Path(self.marker + ".fifo").read_bytes()
                if self.fault == "block and raise":
                    raise ValueError("deliberate, but late")
            case "hang":
                threading.Event().wait()
            case "sigkill":
                os.kill(os.getpid(), signal.SIGKILL)
        return *results, {"huge": "x" * self.huge} if self.huge else {}

    @property
    def pid(self) -> int:
        return os.getpid()


@contextlib.contextmanager
def vector(factory: Callable[[], Any] = QuietEnv, num_envs: int = 4, config: Any = LOCAL, **options: Any) -> Iterator:
    with contextlib.closing(farstep.make_vec(factory, num_envs, config, **options)) as made:
        made.reset(seed=1)
        yield made


def actions(count: int = 4) -> np.ndarray[Any, Any]:
    return np.ones(count, np.int64)


def short(limit_s: float = 5.0) -> farstep.LocalConfig:
    """Limits of steps; with half a second, a step that does not hang took longer on a busy machine."""
    limits = {"step_s": limit_s, "idle_s": limit_s}
    return farstep.LocalConfig(workers_per_node=2, timeouts=cast(Any, limits))


# ---- what a step costs ----


def test_a_step_of_local_workers_costs_no_message() -> None:
    """With messages, a step of two workers costs the head several thousand instructions."""
    with vector() as ours:
        ours.step(actions())
        assert min(instructions(lambda: ours.step(actions())) for _ in range(5)) < 800


@pytest.mark.parametrize("cores", [1, 2, 8])
def test_steps_of_processes_that_poll_before_they_sleep(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process polls, or one of two workers, or both and the head."""
    monkeypatch.setattr("farstep.rollout.step_board.usable_cpus", lambda: cores)
    theirs = SyncVectorEnv([CountingEnv] * 4)
    with vector(CountingEnv) as ours, contextlib.closing(theirs):
        theirs.reset(seed=1)
        for step in range(100):
            assert_same(ours.step(actions() * (step % 3)), theirs.step(actions() * (step % 3)))


def test_time_of_steps_is_counted() -> None:
    with vector() as ours:
        before = ours.stats()["time"]["workers"]
        for _ in range(50):
            ours.step(actions())
        after = ours.stats()["time"]["workers"]
        assert after["env"] > before["env"] and after["tickets"] > before["tickets"]
        assert ours.stats()["time"]["workers"]["env"] == after["env"]  # counted once


@pytest.mark.parametrize("config", [LOCAL, IN_PROCESS], ids=["shm", "in-process"])
def test_each_worker_has_a_rate(config: Any) -> None:
    with vector(config=config) as ours:
        assert ours.stats()["workers"]["steps_per_second"] == [0, 0]
        for _ in range(5):
            ours.step(actions())
        stats = ours.stats()
        assert stats["workers"]["steps_per_second"] == [pytest.approx(stats["steps_per_second"] / 2)] * 2
        assert stats["steps_per_second"] > 0


@pytest.mark.parametrize("config", [LOCAL, IN_PROCESS], ids=["shm", "in-process"])
def test_only_steps_that_succeeded_are_counted(config: Any) -> None:
    with vector(config=config) as ours:
        for fault in ("", "raise", ""):
            ours.set_attr("fault", fault)
            with pytest.raises(ValueError) if fault else contextlib.nullcontext():
                ours.step(actions())
            ours.reset()
        assert ours.stats()["steps"] == 8


def test_single_steps_are_counted_when_they_are_received() -> None:
    with vector(batch_size=2) as ours:
        ours.async_reset(seed=1)
        ours.recv(), ours.recv()
        ours.send(actions(), np.arange(4))
        assert ours.stats()["steps"] == 0
        ours.recv(), ours.recv()
        assert ours.stats()["steps"] == 4


# ---- step_async and step_wait ----


@MODES
@pytest.mark.parametrize("config", [LOCAL, IN_PROCESS], ids=["shm", "in-process"])
def test_step_wait_returns_what_step_returns(config: Any, mode: AutoresetMode) -> None:
    theirs = SyncVectorEnv([CountingEnv] * 4, autoreset_mode=mode)
    with vector(CountingEnv, config=config, autoreset_mode=mode) as ours, contextlib.closing(theirs):
        theirs.reset(seed=1)
        for _ in range(12):
            ours.step_async(actions())
            result, expected = ours.step_wait(), theirs.step(actions())
            assert_same(result, expected)
            ended = expected[2] | expected[3]
            if mode == AutoresetMode.DISABLED and ended.any():
                options = {"reset_mask": ended}
                assert_same(ours.reset(options=options), theirs.reset(options=options))


@pytest.mark.parametrize("config", [LOCAL, IN_PROCESS], ids=["shm", "in-process"])
def test_calls_are_refused_while_a_step_is_unfinished(config: Any) -> None:
    with vector(config=config) as ours:
        with pytest.raises(PendingStepError, match="without step_async"):
            ours.step_wait()
        ours.step_async(actions())
        for call in (ours.step, ours.step_async, lambda _: ours.get_attr("count")):
            with pytest.raises(PendingStepError, match="step_wait first"):
                call(actions())
        assert ours.step_wait()[1].tolist() == [1.0] * 4
        assert ours.get_attr("count") == (1,) * 4
        ours.step_async(actions())
        ours.reset(seed=1)  # discards the step
        assert ours.step(actions())[1].tolist() == [1.0] * 4


# ---- send and recv ----


@pytest.mark.parametrize("cores", [1, 8], ids=["sleeping", "polling"])
def test_environments_received_in_any_order_step_as_in_gymnasium(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farstep.rollout.step_board.usable_cpus", lambda: cores)
    num_envs, size = 6, 2
    theirs = SyncVectorEnv([CountingEnv] * num_envs)
    with vector(CountingEnv, num_envs, batch_size=size) as ours, contextlib.closing(theirs):
        first, first_info = theirs.reset(seed=3)
        rows = [(first, np.zeros(num_envs), *np.zeros((2, num_envs), bool), first_info)]
        rows += [theirs.step(np.full(num_envs, k % 3)) for k in range(12)]
        expected = [[(o[i], r[i], t[i], u[i], _info(info, i)) for o, r, t, u, info in rows] for i in range(num_envs)]
        ours.async_reset(seed=3)
        seen: list[list[Any]] = [[] for _ in range(num_envs)]
        while min(map(len, seen)) < 8:
            obs, reward, terminated, truncated, info = ours.recv()
            ids = info["env_id"]
            assert len(ids) == len(obs) == len(reward) == size
            for k, i in enumerate(ids):
                seen[i].append((obs[k], reward[k], terminated[k], truncated[k], _info(info, k)))
            ours.send(np.array([(len(seen[i]) - 1) % 3 for i in ids]))
        for ours_of, theirs_of in zip(seen, expected, strict=True):
            assert_same(ours_of[:8], theirs_of[:8])


def _info(info: dict[str, Any], row: int) -> dict[str, Any]:
    """The entries of one environment that are set."""
    return {key: value[row] for key, value in info.items() if "_" + key in info and info["_" + key][row]}


def test_infos_of_environments_that_were_sent_one_by_one_arrive() -> None:
    with vector(CountingEnv, 8, short(10.0), batch_size=2) as ours:
        ours.async_reset(seed=1)
        for _ in range(300):
            obs, _, _, _, info = ours.recv()
            for row in range(2):
                entries = _info(info, row)
                assert entries == ({"count": obs[row, 1]} if obs[row, 1] else {"episode_id": obs[row, 0]})
            for i in info["env_id"]:
                ours.send(actions(1), [i])


def test_recv_returns_the_others_while_one_environment_is_busy(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "began.fifo")
    with vector(num_envs=4, batch_size=2) as ours:
        ours.set_attr("marker", [str(tmp_path / "began"), "", "", ""])
        ours.set_attr("fault", ["block", "", "", ""])
        ours.async_reset(seed=1)
        received = [set(ours.recv()[4]["env_id"].tolist()) for _ in range(2)]
        assert set.union(*received) == {0, 1, 2, 3}
        ours.send(actions(4), np.arange(4))
        for _ in range(3):  # worker 1 continues, while worker 0 is in its first environment
            assert sorted(ours.recv()[4]["env_id"].tolist()) == [2, 3]
            ours.send(actions(2))
        (tmp_path / "began.fifo").write_text("continue")
        ids = {i for _ in range(2) for i in ours.recv()[4]["env_id"].tolist()}
        assert ids == {0, 1, 2, 3}


def test_wrong_use_of_send_and_recv_is_refused() -> None:
    with pytest.raises(farstep.ConfigError, match="needs local workers with shared memory"):
        farstep.make_vec(QuietEnv, 4, IN_PROCESS, batch_size=2)
    with pytest.raises(farstep.ConfigError, match="larger than num_envs=4"):
        farstep.make_vec(QuietEnv, 4, LOCAL, batch_size=5)
    with vector(config=IN_PROCESS) as ours, pytest.raises(farstep.ConfigError, match="share memory"):
        ours.recv()
    with vector(batch_size=2) as ours:
        with pytest.raises(PendingStepError, match="only 0 were reset"):
            ours.recv()
        ours.async_reset(seed=1)
        with pytest.raises(PendingStepError, match=r"\[0\] have a step whose result was not received"):
            ours.send(actions(1), [0])
        ours.recv()
        for ids in ([0, 0], [4], [-1], [0.5], []):
            with pytest.raises(farstep.ConfigError, match="env_id is"):
                ours.send(actions(len(ids)), ids)
        with pytest.raises(farstep.ConfigError, match="cannot be cast"):
            ours.send(np.array([0.5, 1.5]))
        ours.send(np.ones(2, np.int32))
        with pytest.raises(PendingStepError, match="recv first"):
            ours.step(actions())
        ours.recv(), ours.recv()
        assert ours.step(actions())[1].tolist() in ([2.0, 2.0, 1.0, 1.0], [1.0, 1.0, 2.0, 2.0])


def test_error_in_recv_names_the_environment_and_reset_recovers() -> None:
    with vector(batch_size=4) as ours:
        ours.set_attr("fault", ["", "", "", "raise"])
        ours.async_reset(seed=1)
        ours.recv()
        ours.send(actions())
        with pytest.raises(ValueError, match="deliberate") as raised:
            ours.recv()
        assert cast(farstep.WorkerError, raised.value).where.slot == 3
        ours.reset(seed=1)
        ours.set_attr("fault", "")
        assert ours.step(actions())[1].tolist() == [1.0] * 4


# ---- infos and errors ----


def test_infos_larger_than_the_info_buffer_arrive() -> None:
    with vector() as ours:
        ours.step(actions())
        ours.set_attr("huge", [0, 300_000, 10, 0])
        info = ours.step(actions())[4]
        assert [len(text or "") for text in info["huge"]] == [0, 300_000, 10, 0]
        ours.set_attr("huge", 0)
        assert ours.step(actions())[4] == {}


def test_an_environment_that_raises_leaves_the_others_running() -> None:
    with vector() as ours:
        ours.step(actions())
        ours.set_attr("fault", ["", "raise", "", ""])
        for _ in range(2):
            with pytest.raises(ValueError, match="deliberate") as raised:
                ours.step(actions())
            where = cast(farstep.WorkerError, raised.value).where
            assert (where.slot, where.worker, where.phase) == (1, 0, "step")
        ours.set_attr("fault", "")
        ours.reset(seed=1)
        for count in (1.0, 2.0):
            assert ours.step(actions())[1].tolist() == [count] * 4
        assert len(ours.events("warned")) == 2


# ---- workers that die or hang, interruptions ----


@pytest.mark.parametrize(("fault", "error"), [("sigkill", farstep.WorkerDied), ("hang", farstep.WorkerStuck)])
def test_step_raises_when_a_worker_dies_or_hangs(fault: str, error: type[Exception]) -> None:
    with vector(config=short() if fault == "hang" else LOCAL) as ours:
        ours.step(actions())
        ours.set_attr("fault", ["", "", fault, ""])
        with pytest.raises(error) as raised:
            ours.step(actions())
        where = cast(farstep.WorkerError, raised.value).where
        assert (where.slot, where.worker, where.phase) == (2, 1, "step")
        with pytest.raises(farstep.ClosedError, match="failed earlier"):
            ours.step(actions())


def test_a_worker_that_does_not_begin_is_stuck() -> None:
    with vector(config=short()) as ours:
        ours.step(actions())
        pid = ours.get_attr("pid")[3]
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(farstep.WorkerStuck):
            ours.step(actions())


def test_recv_raises_when_a_worker_dies() -> None:
    with vector(batch_size=2) as ours:
        ours.set_attr("fault", ["", "", "sigkill", "sigkill"])
        ours.async_reset(seed=1)
        with pytest.raises(farstep.WorkerDied):
            while True:
                ours.recv()
                ours.send(actions(2))


def wait_for(path: Path) -> None:
    for _ in range(2000):
        if path.exists() and path.read_text():
            return
        threading.Event().wait(0.01)
    raise TimeoutError(path)


@contextlib.contextmanager
def blocked_step(ours: Any, folder: Path, on_start: Callable[[], None]) -> Iterator[None]:
    """The next step blocks in environment 3; `on_start` is called from another thread when it does."""
    os.mkfifo(folder / "began.fifo")
    ours.set_attr("marker", ["", "", "", str(folder / "began")])
    ours.set_attr("fault", ["", "", "", "block"])

    def act_when_blocked() -> None:
        wait_for(folder / "began")
        on_start()

    thread = threading.Thread(target=act_when_blocked)
    thread.start()
    yield
    thread.join()


def test_worker_that_has_stepped_may_be_idle_while_another_one_steps(tmp_path: Path) -> None:
    limits = {"idle_s": 2.0, "step_s": 60.0}

    def go_on() -> None:
        time.sleep(2 * limits["idle_s"])
        (tmp_path / "began.fifo").write_text("continue")

    with vector(config=farstep.LocalConfig(workers_per_node=2, timeouts=cast(Any, limits))) as ours:
        with blocked_step(ours, tmp_path, go_on):
            assert ours.step(actions())[1].tolist() == [1.0] * 4
        assert not ours.events(["stuck", "lost"])


def test_vector_is_usable_after_ctrl_c_in_a_step(tmp_path: Path) -> None:
    with vector() as ours:
        ours.step(actions())
        interrupt = lambda: os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
        with blocked_step(ours, tmp_path, interrupt), pytest.raises(KeyboardInterrupt):
            ours.step(actions())
        (tmp_path / "began.fifo").write_text("continue")
        ours.set_attr("fault", "")
        assert ours.step(actions())[1].tolist() == [3.0] * 4  # the interrupted step was finished first
        ours.reset(seed=1)
        assert ours.step(actions())[1].tolist() == [1.0] * 4


@pytest.fixture
def steppers(monkeypatch: pytest.MonkeyPatch) -> list[Stepper]:
    """The steppers of all vector environments that the test makes."""
    made: list[Stepper] = []

    def make(*arguments: Any) -> Stepper:
        made.append(Stepper(*arguments))
        return made[-1]

    monkeypatch.setattr("farstep.vector_env.Stepper", make)
    return made


@pytest.mark.parametrize("left_over", ["error", "infos"])
def test_messages_of_a_step_that_raised_do_not_reach_the_next_call(
    left_over: str, steppers: list[Stepper], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "began.fifo")
    with vector() as ours:
        ours.step(actions())
        ours.set_attr("marker", ["", "", "", str(tmp_path / "began")])
        ours.set_attr("fault", ["raise", "", "", "block and raise" if left_over == "error" else "block"])
        ours.set_attr("huge", [0, 0, 0, 300_000])
        with pytest.raises(ValueError, match="deliberate") as raised:
            ours.step(actions())  # worker 1 is still in this step
        assert cast(farstep.WorkerError, raised.value).where.worker == 0
        wait_for(tmp_path / "began")
        (stepper,) = steppers
        assert stepper.lock_step is not None
        board = stepper.lock_step.board
        with stepper.server.locked():  # so that nothing reads the messages of worker 1 before the next call does
            (tmp_path / "began.fifo").write_text("continue")
            deadline = time.monotonic() + 60
            while board.done != board.requested_step:
                assert time.monotonic() < deadline
            ours.reset(seed=1)
        for name, value in (("marker", ""), ("fault", ""), ("huge", [0, 0, 0, 400_000])):
            ours.set_attr(name, value)
        for _ in range(2):
            info = ours.step(actions())[4]
            assert len(info["huge"][3]) == 400_000


def interrupt_ring(worker: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C arrives instead of the head's next ring of this worker; it rings them in their order."""
    write, me, rings = os.eventfd_write, threading.get_ident(), itertools.count()

    def interrupted(fd: int, value: int) -> None:
        if threading.get_ident() == me and next(rings) == worker:
            monkeypatch.setattr(os, "eventfd_write", write)
            raise KeyboardInterrupt
        write(fd, value)

    monkeypatch.setattr(os, "eventfd_write", interrupted)


@pytest.mark.parametrize("worker", [0, 1])
def test_vector_is_usable_after_ctrl_c_before_a_worker_is_woken(worker: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with vector(config=short(), batch_size=4) as ours:
        ours.step(actions())
        interrupt_ring(worker, monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            ours.step(actions())
        ours.reset(seed=1)
        assert ours.step(actions())[1].tolist() == [1.0] * 4
        ours.async_reset(seed=1)
        ours.recv()
        interrupt_ring(worker, monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            ours.send(actions(), np.arange(4))
        ours.async_reset(seed=1)
        ours.recv()
        ours.send(actions())
        assert ours.recv()[1].tolist() == [1.0] * 4


def test_close_from_another_thread_ends_a_step(tmp_path: Path) -> None:
    with vector(config=farstep.LocalConfig(workers_per_node=2, timeouts=cast(Any, {"close_s": 0.3}))) as ours:
        ours.step(actions())
        with blocked_step(ours, tmp_path, ours.close), pytest.raises(farstep.ClosedError):
            ours.step(actions())


def test_a_fork_of_the_head_neither_steps_nor_disturbs_it() -> None:
    with vector() as ours:
        ours.step(actions())
        pid = os.fork()
        if not pid:
            try:
                ours.step(actions())
            except farstep.ClosedError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert ours.step(actions())[1].tolist() == [2.0] * 4


def test_actions_of_another_dtype_keep_the_order_of_steps() -> None:
    with vector() as ours:
        for count, dtype in enumerate((np.int64, np.int32, np.int32, np.int64), start=1):
            obs, reward, *_ = ours.step(np.full(4, count % 3, dtype))
            assert reward.tolist() == [count] * 4 and obs[:, 2].tolist() == [count % 3] * 4
