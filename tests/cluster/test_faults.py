"""The fault matrix: after any fault of a worker, a call returns a full batch or raises the right error in time.

Faults: an exception, a process that ends (SIGKILL, SIGSEGV, `os._exit`), one that is stopped, one that hangs, one
that hangs and keeps the interpreter. Phases: connect, construct, reset, step, load (of weights), act, close.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import socket
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit

import farstep
from farstep.errors import ClosedError, RemoteEnvError, WorkerDied, WorkerError, WorkerStuck
from farstep.rollout.seeds import episode_seed
from farstep.testing import CountingEnv, FaultyEnv, TableAgent
from farstep.testing.envs import do_fault
from tests.cluster.checks import assert_balanced, assert_sound, cluster, eventually, in_process, together, within
from tests.cluster.faulty import (
    BareResetEnv,
    EachOnceEnv,
    FaultyAgent,
    FussyBoxEnv,
    NoInfoEnv,
    OddRewardEnv,
    OldGymEnv,
    OnceOnlyEnv,
    PoisonEnv,
    SelfNamingEnv,
    SevenAgent,
    UnseededEnv,
    faulty_vector,
    poisoned_vector,
)
from tests.cluster.toys import counting_vector

DEATHS = {"sigkill": "SIGKILL", "sigsegv": "SIGSEGV", "exit": "status 3"}
HANGS = ["sigstop", "hang", "hang-gil"]
SILENT = [*DEATHS, *HANGS]
ALL = ["raise", *SILENT]
LIMITS = farstep.Timeouts(construct_s=2.0, reset_s=1.0, step_s=1.0, act_s=1.0, load_s=2.0, idle_s=2.0, close_s=1.0)

# What an environment or agent raises has a file and a line: that of the `raise` in do_fault.
_source, _first = inspect.getsourcelines(do_fault)
RAISE_LINE = _first + next(i for i, line in enumerate(_source) if "raise UnpicklableError" in line)

# `sitecustomize` is what the interpreter runs first of all: the way to misbehave before farstep says hello.
SITECUSTOMIZE = """
import ctypes, os, signal, sys, time
if "farstep.worker" in sys.orig_argv:
    for fault in os.environ["FARSTEP_TEST_FAULTS"].split():
        folder = os.environ["FARSTEP_TEST_FOLDER"]
        try:
            if folder:
                os.close(os.open(f"{folder}/{fault}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        if fault == "exit": os._exit(3)
        elif fault == "hang": time.sleep(3600)
        elif fault == "hang-gil": ctypes.PyDLL(None).sleep(3600)
        else: os.kill(os.getpid(), getattr(signal, fault.upper()))
        break
"""


@pytest.fixture
def before_hello(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes workers that start from now on misbehave before they connect."""
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def misbehave(faults: list[str], folder: str = "") -> None:
        monkeypatch.setenv("FARSTEP_TEST_FAULTS", " ".join(faults))
        monkeypatch.setenv("FARSTEP_TEST_FOLDER", folder)

    return misbehave


def assert_continues(env: farstep.ClusterEnv, agent: TableAgent, faults: list[str], folder: Path) -> None:
    """Every fault happens, and every batch is complete nevertheless."""
    with env:
        for _ in range(20):
            batch = within(lambda: env.collect(agent, steps=6))
            assert batch.shape == (6, env.num_envs)
            assert_sound(batch)
            if len(list(folder.iterdir())) == len(faults):
                break
        assert_sound(within(lambda: env.collect(agent, steps=6)))
        stats = env.stats()
        assert len(list(folder.iterdir())) == len(faults)
        assert stats["workers"]["restarts"] + stats["dropped"].get("environment_failed", 0) >= len(faults)
        assert stats["workers"]["alive"] == env.num_workers
        assert_balanced(stats)


# Not here: an exception while the first environments are built, which is a mistake in the program and raised at
# once (below); a fault in close, after which there is no environment left (below).
@pytest.mark.parametrize("phase, faults", [("construct", SILENT), ("reset", ALL), ("step", ALL)])
def test_run_continues_after_an_environment_fails_once(phase: str, faults: list[str], tmp_path: Path) -> None:
    kwargs = {"faults": faults, "phase": phase, "folder": str(tmp_path)}
    env = cluster(EachOnceEnv, envs=4, workers=4, env_kwargs=kwargs, timeouts=LIMITS, restart_budget=20)
    assert_continues(env, TableAgent(), faults, tmp_path)


# An agent that raises is not tried again: it would raise again (below).
@pytest.mark.parametrize("phase", ["load", "act"])
def test_run_continues_after_an_agent_fails_once(phase: str, tmp_path: Path) -> None:
    agent = FaultyAgent(SILENT, str(tmp_path), phase)
    assert_continues(cluster(envs=4, workers=4, timeouts=LIMITS, restart_budget=20), agent, SILENT, tmp_path)


# Nothing of the user's runs before hello, so nothing can raise there.
def test_a_worker_that_fails_to_connect_is_started_again(before_hello, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("once")
    before_hello(SILENT, str(folder))
    limits = farstep.Timeouts(connect_s=4.0)
    env = cluster(envs=6, workers=6, timeouts=limits, restart_budget=20, start_method="cold")
    assert_continues(env, TableAgent(), SILENT, folder)


def failure(fault: str, phase: str) -> WorkerError:
    """The error of a call with a permanent fault and a restart budget of 0."""
    agent = FaultyAgent([fault], where=phase)
    kwargs = {"fault": fault, "phase": phase}
    connect = {"timeouts": farstep.Timeouts(connect_s=3.0), "start_method": "cold"}
    options = connect if phase == "connect" else {"timeouts": LIMITS}
    env = cluster(FaultyEnv, envs=1, env_kwargs=kwargs, restart_budget=0, **options)
    with pytest.raises(WorkerError) as caught:
        env.launch()
        env.collect(agent, steps=8)
    for call in (lambda: env.collect(agent), env.reset, lambda: env.step(agent), lambda: env.publish(agent)):
        with pytest.raises(ClosedError):
            call()
    env.close()
    env.close()
    return caught.value


def assert_says_all(error: WorkerError, fault: str, phase: str) -> None:
    kinds = {"raise": RemoteEnvError, **dict.fromkeys(DEATHS, WorkerDied), **dict.fromkeys(HANGS, WorkerStuck)}
    assert isinstance(error, kinds[fault]), error
    where, text = error.where, str(error)
    assert (where.worker, where.host, where.phase) == (0, socket.gethostname(), phase), text
    assert where.pid > 0
    assert f"worker 0, host {where.host}, pid {where.pid}, phase {phase}" in text
    if phase in ("construct", "reset", "step"):
        assert where.slot == 0
        assert "environment slot 0" in text
    if fault == "raise":
        assert text.count("UnpicklableError: deliberate") == 2  # in the first line, and where the traceback ends
        assert text.count(f'envs.py", line {RAISE_LINE}, in do_fault') == 1
        if phase in ("reset", "step"):
            assert f"seed {where.seed}" in text
    elif fault in DEATHS:
        assert DEATHS[fault] in text
    elif fault != "sigstop" and phase != "connect":  # a stopped process says nothing, an early one knows nothing
        assert "in do_fault" in text


@pytest.mark.parametrize("phase", ["construct", "reset", "step", "load", "act"])
def test_a_fault_that_happens_always_is_raised(phase: str) -> None:
    outcomes = together({fault: partial(failure, fault, phase) for fault in ALL})
    for fault, outcome in outcomes.items():
        assert_says_all(outcome.get(), fault, phase)


def test_a_worker_that_never_says_hello_is_raised(before_hello, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("once")
    before_hello(SILENT, str(folder))
    outcomes = together({f"cluster {k}": lambda: failure("", "connect") for k in range(len(SILENT))})
    errors = [outcome.get() for outcome in outcomes.values()]
    for fault, ending in DEATHS.items():  # which cluster got which fault is random
        (died,) = (error for error in errors if ending in str(error))
        assert_says_all(died, fault, "connect")
    stuck = [error for error in errors if isinstance(error, WorkerStuck)]
    assert len(stuck) == len(HANGS)
    for error in stuck:
        assert_says_all(error, "hang", "connect")


def test_close_returns_after_any_fault_in_the_close_of_environments() -> None:
    def closed(fault: str) -> None:
        env = cluster(FaultyEnv, envs=1, env_kwargs={"fault": fault, "phase": "close"}, timeouts=LIMITS)
        assert_sound(env.collect(TableAgent(), steps=4))
        env.close()
        env.close()

    for outcome in together({fault: partial(closed, fault) for fault in ALL}).values():
        outcome.get()


def test_the_restart_budget_is_spent_before_the_run_fails() -> None:
    env = cluster(FaultyEnv, envs=1, env_kwargs={"fault": "exit", "phase": "step"}, restart_budget=2)
    said = r"^restart_budget=2 is used up: 3 failures within 10 minutes. The last: a worker .*worker 0 \(restart 2\)"
    with env, pytest.raises(WorkerDied, match=said):
        within(lambda: env.collect(TableAgent(), steps=8))


def test_an_exception_after_the_restart_budget_is_raised_in_this_process_too() -> None:
    env = cluster(
        FaultyEnv, envs=1, env_kwargs={"fault": "raise", "phase": "step"}, config=in_process(restart_budget=2)
    )
    said = r"^restart_budget=2 is used up.* The last: the environment raised .*environment slot 0"
    with env, pytest.raises(RemoteEnvError, match=said):
        within(lambda: env.collect(TableAgent(), steps=8))


@pytest.mark.parametrize("steps", [3, 8], ids=["later chunk", "first chunk"])
def test_an_exception_says_how_far_its_episode_was(steps: int) -> None:
    kwargs = {"fault": "raise", "phase": "step", "at": 6}
    with (
        cluster(FaultyEnv, envs=2, env_kwargs=kwargs, config=in_process(restart_budget=0)) as env,
        pytest.raises(RemoteEnvError, match=r"environment slot 0, seed \d+, episode step 5,") as caught,
    ):
        agent = TableAgent()
        for _ in range(3):
            env.collect(agent, steps=steps)
    assert caught.value.where.seed == episode_seed(5, 0, 0)


@pytest.mark.parametrize("reward", [None, "1.5", 1j, np.ones(2)], ids=repr)
def test_reward_that_is_not_a_number_is_an_error(reward: Any) -> None:
    seed = episode_seed(5, 1, 0)
    kwargs = {"reward": reward, "seed": seed}
    env = cluster(OddRewardEnv, envs=3, env_kwargs=kwargs, config=in_process(restart_budget=0))
    with env, pytest.raises(RemoteEnvError, match="a number is expected") as caught:
        env.collect(TableAgent(), steps=4)
    where = caught.value.where
    assert (where.slot, where.seed, where.episode_step) == (1, seed, 2)


@pytest.mark.parametrize("reward", [float("nan"), 2, True, np.float32(2), np.array(2.0)], ids=repr)
def test_reward_of_any_numeric_type_is_kept(reward: Any) -> None:
    kwargs = {"reward": reward, "seed": episode_seed(5, 1, 0)}
    with cluster(OddRewardEnv, envs=3, env_kwargs=kwargs, config=in_process()) as env:
        np.testing.assert_array_equal(env.collect(TableAgent(), steps=4)["reward"][2], [3, float(reward), 3])


@pytest.mark.parametrize(
    ("action", "words"), [(7, r"action 7 is outside Discrete\(3\)"), (1.5, "action 1.5 of type float64 is outside")]
)
@pytest.mark.parametrize("kind", ["factory", "vector"])
def test_an_action_outside_its_space_is_the_agents_mistake(kind: str, action: float, words: str) -> None:
    options: Any = {"type": "vector", "env_kwargs": {"mode": "SAME_STEP"}} if kind == "vector" else {}
    source = counting_vector if kind == "vector" else CountingEnv
    with cluster(source, envs=2, config=in_process(), **options) as env:
        with pytest.raises(farstep.AgentError, match=f"the agent's {words}") as caught:
            env.collect(SevenAgent(action), steps=2)
        assert "in environment slot 0; the step raised AssertionError" in str(caught.value)
        assert str(caught.value).startswith("the agent's")  # without the prefix of exceptions of environments


def test_action_outside_a_box_is_mentioned_in_the_error_of_the_environment() -> None:
    with (
        cluster(FussyBoxEnv, envs=1, config=in_process(restart_budget=0)) as env,
        pytest.raises(RemoteEnvError, match=r"of its own(?s:.*)The agent's action \[0. 3.\] is outside Box"),
    ):
        env.collect(SevenAgent([0.0, 3.0]), steps=2)


def test_make_vec_mentions_an_action_outside_its_space() -> None:
    with contextlib.closing(farstep.make_vec(CountingEnv, 2, in_process())) as vector:
        vector.reset(seed=7)
        with pytest.raises(AssertionError, match=r"The action 7 is outside Discrete\(3\)"):
            vector.step(np.array([0, 7]))


def limited(env: Any) -> Any:
    return TimeLimit(env, 5)


@pytest.mark.parametrize("wrappers", [[], [limited]], ids=["bare", "wrapped"])
def test_environments_with_the_old_gym_api_are_recognized(wrappers: list[Any]) -> None:
    with (
        cluster(OldGymEnv, wrappers=wrappers, config=in_process(restart_budget=0)) as env,
        pytest.raises(ValueError, match="a step returned 4 values, as in the old Gym API"),
    ):
        env.collect(TableAgent(), steps=2)
    with (
        cluster(BareResetEnv, config=in_process(restart_budget=0)) as env,
        pytest.raises(TypeError, match=r"reset returned a ndarray; expected the pair \(obs, info\)"),
    ):
        env.collect(TableAgent(), steps=2)
    with (
        cluster(UnseededEnv, config=in_process(restart_budget=0)) as env,
        pytest.raises(TypeError, match=r"keyword argument 'seed'. .*def reset\(self, \*, seed=None, options=None\)"),
    ):
        env.collect(TableAgent(), steps=2)


def test_info_none_counts_as_empty() -> None:
    with cluster(NoInfoEnv, config=in_process()) as env:
        assert env.reset()[1] == {}
        assert env.step(TableAgent())[4].keys() == {"action", "value", "version", "valid", "episode_start"}
        assert env.step(TableAgent())[4]["episode"]["l"].tolist() == [2, 2]
    with contextlib.closing(farstep.make_vec(NoInfoEnv, 2, in_process(), autoreset_mode="SameStep")) as vector:
        assert vector.reset()[1] == {}
        assert vector.step(np.zeros(2, np.int64))[4] == {}
        assert vector.step(np.zeros(2, np.int64))[4]["final_info"] == {}
    with (
        cluster(NoInfoEnv, env_kwargs={"info": [3]}, config=in_process(restart_budget=0)) as env,
        pytest.raises(TypeError, match=r"the info \[3\]; a dictionary is expected"),
    ):
        env.reset()


def test_make_vec_says_how_far_an_episode_was() -> None:
    vector = farstep.make_vec(lambda: FaultyEnv("raise", "step", at=6), 2, in_process(2))
    with contextlib.closing(vector), pytest.raises(RemoteEnvError, match="slot 0, seed 7, episode step 2"):
        vector.reset(seed=7)
        for t in range(6):
            if t == 3:
                vector.reset()
            vector.step(np.zeros(2, np.int64))


@pytest.mark.parametrize("phase", ["construct", "reset", "step"])
def test_an_exception_in_a_vector_names_no_slot(phase: str) -> None:
    env = cluster(
        faulty_vector, envs=2, type="vector", env_kwargs={"phase": phase}, config=in_process(restart_budget=0)
    )
    with pytest.raises(RemoteEnvError) as caught, env:
        env.collect(TableAgent(), steps=8)
    where = caught.value.where
    assert (where.phase, where.slot, where.seed, where.episode_step) == (phase, None, None, None)


def test_vector_continues_after_an_episode_that_always_raises() -> None:
    poison = [episode_seed(5, 1, 0)]
    options: Any = {"type": "vector", "env_kwargs": {"seeds": poison}, "config": in_process(restart_budget=1)}
    with cluster(poisoned_vector, envs=2, **options) as env:
        assert env.collect(TableAgent(), steps=8).shape == (8, 2)
        assert env.stats()["dropped"] == {"environment_failed": 1}


@pytest.mark.parametrize("phase", ["reset", "step"])
@pytest.mark.parametrize(
    ("how", "said"), [("sys.exit", "SystemExit: 3"), ("KeyboardInterrupt", r"KeyboardInterrupt \[")]
)
def test_exceptions_that_end_a_process_are_reported_like_others(phase: str, how: str, said: str) -> None:
    kwargs = {"seeds": [episode_seed(5, 1, 0)], "phase": phase, "how": how}
    with cluster(PoisonEnv, envs=2, env_kwargs=kwargs, restart_budget=1) as env:
        assert_sound(env.collect(TableAgent(), steps=4))
        assert env.stats()["workers"]["restarts"] == 0
    options: dict[str, Any] = {"env_kwargs": kwargs, "restart_budget": 0}
    with pytest.raises(RemoteEnvError, match=said) as caught, cluster(PoisonEnv, envs=2, **options) as env:
        env.collect(TableAgent(), steps=4)
    assert (caught.value.where.phase, caught.value.where.slot) == (phase, 1)


def test_an_episode_that_kills_its_worker_is_left_out_after_a_reset_with_a_seed_too() -> None:
    kwargs = {"seeds": [episode_seed(7, 1, 0)], "phase": "reset", "how": "SIGSEGV"}
    with cluster(PoisonEnv, envs=2, env_kwargs=kwargs, restart_budget=2) as env:
        obs, _ = within(lambda: env.reset(seed=7))
        np.testing.assert_array_equal(obs[1], CountingEnv().reset(seed=episode_seed(7, 1, 1))[0])
        np.testing.assert_array_equal(obs[0], CountingEnv().reset(seed=episode_seed(7, 0, 0))[0])


@pytest.mark.parametrize("phase", ["reset", "step"])
@pytest.mark.parametrize("how", ["SIGSEGV", "hang"])
def test_an_episode_that_kills_or_stalls_its_worker_is_named_and_tried_twice_only(phase: str, how: str) -> None:
    poison = episode_seed(5, 1, 0)
    limits = farstep.Timeouts(step_s=1.0, reset_s=1.0, close_s=1.0)
    kwargs = {"seeds": [poison], "phase": phase, "how": how}
    with cluster(PoisonEnv, envs=2, env_kwargs=kwargs, timeouts=limits, restart_budget=2) as env:
        batch = within(lambda: env.collect(TableAgent(), steps=4))
        assert_sound(batch)
        np.testing.assert_array_equal(batch["obs"][0, 1], CountingEnv().reset(seed=episode_seed(5, 1, 1))[0])
        assert env.stats()["workers"]["restarts"] == 2, "once more, since it might have been bad luck"
    options: dict[str, Any] = {"env_kwargs": kwargs, "timeouts": limits, "restart_budget": 0}
    with pytest.raises(farstep.WorkerError) as caught, cluster(PoisonEnv, envs=2, **options) as env:
        within(lambda: env.collect(TableAgent(), steps=4))
    where = caught.value.where
    assert (where.phase, where.slot, where.seed) == (phase, 1, poison)


def test_slow_environment_is_not_killed() -> None:
    def batch(transport: str) -> farstep.Batch:
        kwargs = {"fault": "slow", "phase": "step", "at": 0, "slow_s": 0.2}
        limits = farstep.Timeouts(step_s=0.9, act_s=0.9)  # less than the time between two heartbeats
        options: dict[str, Any] = {"timeouts": limits, "restart_budget": 0, "transport": transport}
        with cluster(FaultyEnv, envs=2, env_kwargs=kwargs, **options) as env:
            return env.collect(TableAgent(), steps=4)

    for outcome in together({name: partial(batch, name) for name in ("shm", "ipc")}).values():
        assert_sound(outcome.get())


def test_faults_are_found_without_shared_memory(tmp_path: Path) -> None:
    faults = [fault for fault in ALL if fault != "raise"]  # its report is lost if the next fault stops the same process
    kwargs = {"faults": faults, "phase": "step", "folder": str(tmp_path)}
    options = {"timeouts": LIMITS, "restart_budget": 20, "transport": "tcp"}
    assert_continues(
        cluster(EachOnceEnv, envs=4, workers=4, env_kwargs=kwargs, **options), TableAgent(), faults, tmp_path
    )


def test_a_later_death_is_not_blamed_on_an_earlier_exception(tmp_path: Path) -> None:
    kwargs = {"faults": ["raise", "exit"], "phase": "step", "folder": str(tmp_path)}
    env = cluster(EachOnceEnv, envs=1, env_kwargs=kwargs, restart_budget=1)
    with env, pytest.raises(WorkerDied, match="status 3"):
        for _ in range(3):
            within(lambda: env.collect(TableAgent(), steps=6))


def test_a_worker_that_is_stopped_between_two_calls_is_replaced() -> None:
    limits = farstep.Timeouts(idle_s=3.0, close_s=1.0)
    with cluster(SelfNamingEnv, envs=2, workers=2, timeouts=limits) as env:
        agent = TableAgent()
        _, info = env.reset()
        os.kill(info["pid"][0], signal.SIGSTOP)
        assert_sound(within(lambda: env.collect(agent, steps=4)))
        assert env.stats()["workers"]["restarts"] == 1
        _, info = env.reset()
        os.kill(info["pid"][1], signal.SIGSTOP)  # and close() does not wait for it forever


def test_a_worker_that_died_between_two_calls_is_replaced() -> None:
    with cluster(SelfNamingEnv, envs=2, workers=2) as env:
        first, second = TableAgent(), TableAgent()
        for agent in (first, second, first):  # the new worker must get the agent and the layout from before
            _, info = env.reset()
            os.kill(info["pid"][0], signal.SIGKILL)
            assert_sound(within(partial(env.collect, agent, steps=4)))
        assert env.stats()["workers"]["restarts"] == 3
        assert_balanced(env.stats())


@pytest.mark.parametrize("config", [in_process, farstep.LocalConfig], ids=["in_process", "local"])
def test_an_environment_that_cannot_be_built_again_is_raised(config: Any, tmp_path: Path) -> None:
    kwargs = {"marker": str(tmp_path / "built")}
    env = cluster(OnceOnlyEnv, envs=1, env_kwargs=kwargs, config=config(restart_budget=2))
    with env, pytest.raises(RemoteEnvError, match=r"phase construct, environment slot 0(.|\n)*only once"):
        within(lambda: env.collect(TableAgent(), steps=8))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_processes_of_an_environment_end_with_its_worker(transport: str) -> None:
    with cluster(SelfNamingEnv, envs=1, wrappers=["tests.cluster.faulty:with_a_child"], transport=transport) as env:
        _, info = env.reset()
        os.kill(info["pid"][0], signal.SIGKILL)
        _, after = env.reset()
        assert after["child"][0] != info["child"][0]
        eventually(lambda: not Path(f"/proc/{info['child'][0]}").exists())


@pytest.mark.parametrize("fault", ["raise", "sigkill"])
def test_batches_of_a_stream_follow_each_other_after_a_fault(fault: str, tmp_path: Path) -> None:
    """A row that does not continue the batch before is marked as the start of an episode."""
    kwargs = {"faults": [fault], "phase": "step", "folder": str(tmp_path), "at": 6}
    with cluster(EachOnceEnv, envs=2, workers=2, env_kwargs=kwargs) as env:
        last, cuts = None, 0
        for k, batch in enumerate(env.stream(TableAgent(), steps=4, max_staleness=3)):
            assert_sound(batch)
            cuts += int((~batch.continues).sum())
            if last is not None:
                follows = (batch["obs"][0] == last).all(axis=1)
                assert (batch["episode_start"][0] | follows).all()
                np.testing.assert_array_equal(batch.continues, follows)
            last = batch.last_obs.copy()
            if k == 8:
                break
        stats = env.stats()
        assert stats["workers"]["restarts"] + stats["dropped"].get("environment_failed", 0) == 1
        assert cuts == 3, "both slots begin once, and the one that failed is cut once more"
        assert_balanced(stats)
