"""Resumed runs replay actions to restore environments; episodes that cannot be replayed restart with new seeds."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farstep
from farstep.errors import CheckpointError
from farstep.learners.loop.checkpoints.journal import Journal
from farstep.testing import CountingEnv, TableAgent

ENVS, STEPS = 6, 7


class Changed(CountingEnv):
    """Changes its behavior once its file exists, like an environment that does not depend on its seed alone."""

    def __init__(self, how: str, flag: Path) -> None:
        super().__init__(length=1000)
        self._how, self._flag, self._wrong = how, flag, False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._wrong = False
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        changed = self.count == 3 and self._flag.exists() and self.episode % 2 == 0
        if changed and self._how == "raise":
            raise RuntimeError("no way back")
        if changed and self._how == "kill":
            with contextlib.suppress(FileNotFoundError):  # the other worker was first
                self._flag.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        self._wrong |= changed
        if self._wrong and self._how == "differ":
            obs[2] += 100
        return obs, reward, terminated, truncated or (changed and self._how == "end"), info


class Telling(CountingEnv):
    """Its info has the id of its process."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        *rest, _ = super().step(action)
        return *rest, {"pid": os.getpid()}


class Run:
    """A run of a few rollouts that can be saved and resumed."""

    def __init__(self, env: Any, launcher: Any = farstep.LocalConfig, workers: int = 2, **options: Any) -> None:
        config = {"type": "factory", "env_name": env, "envs_per_node": ENVS, "seed": 5, **options}
        self.env = farstep.ClusterEnv(config, launcher(workers_per_node=workers))
        self.agent, self.journal = TableAgent(), Journal()

    def __enter__(self) -> Run:
        self.env.launch()
        return self

    def __exit__(self, *_: object) -> None:
        self.env.close()

    def roll(self, batches: int = 1) -> list[Any]:
        found = [self.env.collect(self.agent, STEPS).copy() for _ in range(batches)]
        for batch in found:
            self.journal.add(batch)
        return found

    def last_worker(self) -> int:
        """Its process, found by a step."""
        return int(self.env.step(self.agent)[4]["pid"][-1])

    def save(self) -> tuple[Any, Any]:
        return self.env.save(), self.journal.actions()

    def resume(self, saved: Any, actions: Any) -> Run:
        self.env.resume(self.agent, saved, actions)
        return self


def first_seen(run: Run) -> Any:
    """The first observations of a run's episodes."""
    return run.roll()[0]["obs"][0, :, 0]


@pytest.mark.parametrize("launcher", [farstep.LocalConfig, farstep.InProcessConfig])
def test_episodes_continue_after_a_resume(launcher: Any, caplog: pytest.LogCaptureFixture) -> None:
    with Run(partial(CountingEnv, 50), launcher) as run:
        run.roll(3)
        saved = run.save()
        (then,) = run.roll()
    with Run(partial(CountingEnv, 50), launcher) as other:
        (now,) = other.resume(*saved).roll()
    np.testing.assert_array_equal(then["obs"], now["obs"])
    assert now.continues.all() and not now["episode_start"].any()
    assert "restarting" not in caplog.text


def test_only_a_worker_lost_before_the_checkpoint_restarts_its_episodes(caplog: pytest.LogCaptureFixture) -> None:
    with Run(partial(Telling, 50)) as run:
        last = run.last_worker()
        run.env.reset()
        first = run.roll(3)[0]
        os.kill(last, signal.SIGKILL)
        saved = run.save()
        (then,) = run.roll()
    assert saved[0]["workers"][1] is None
    with Run(partial(Telling, 50)) as other:
        (now,) = other.resume(*saved).roll()
    np.testing.assert_array_equal(then["obs"][:, :3], now["obs"][:, :3])
    np.testing.assert_array_equal(now.continues, [True] * 3 + [False] * 3)
    assert now["episode_start"][0].tolist() == [False] * 3 + [True] * 3
    assert not set(now["obs"][0, 3:, 0]) & set(first["obs"][0, :, 0]), "the run's first seeds came again"
    assert "restarting episodes of worker 1: it was not alive" in caplog.text


def test_worker_replaced_before_the_checkpoint_continues_with_its_next_episodes() -> None:
    with Run(partial(Telling, 50)) as run:
        last = run.last_worker()
        run.env.reset()
        run.roll(2)
        os.kill(last, signal.SIGKILL)
        run.env.reset(options={"reset_mask": np.zeros(ENVS, bool)})  # waits for the one that replaces it
        saved = run.save()
        (then,) = run.roll()
    with Run(partial(Telling, 50)) as other:
        (now,) = other.resume(*saved).roll()
    np.testing.assert_array_equal(then["obs"], now["obs"])


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "RuntimeError: no way back"),
        ("end", "ended earlier"),
        ("differ", "the observation differs"),
    ],
)
def test_environment_that_cannot_be_replayed_is_named_and_restarts(
    how: str, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flag = tmp_path / "flag"
    make = partial(Changed, how, flag)
    with Run(make) as run:
        run.roll(2)
        saved = run.save()
        (then,) = run.roll()
    strayed = then["obs"][0, :, 0] % 2 == 0
    assert strayed.any() and not strayed.all()
    flag.touch()
    with Run(make) as other:
        other.resume(*saved)
        flag.unlink()
        (now,) = other.roll()
    np.testing.assert_array_equal(then["obs"][:, ~strayed], now["obs"][:, ~strayed])
    np.testing.assert_array_equal(now.continues, ~strayed)
    np.testing.assert_array_equal(now["episode_start"][0], strayed & (how != "differ"))
    said = [record.message for record in caplog.records if "replay did not restore" in record.message]
    assert len(said) == 1 and words in said[0]
    assert f"slot {', '.join(map(str, np.flatnonzero(strayed)))}:" in said[0]


def test_worker_that_dies_during_the_replay_restarts_its_episodes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flag = tmp_path / "flag"
    make = partial(Changed, "kill", flag)
    with Run(make) as run:
        first = run.roll(2)[0]
        saved = run.save()
        (then,) = run.roll()
    flag.touch()
    with Run(make) as other:
        (now,) = other.resume(*saved).roll()
    lost = ~now.continues
    assert lost[:3].all() != lost[3:].all(), "one worker was lost"
    np.testing.assert_array_equal(then["obs"][:, ~lost], now["obs"][:, ~lost])
    assert not set(now["obs"][0, lost, 0]) & set(first["obs"][0, :, 0])
    assert "it died while replaying them" in caplog.text


def test_a_worker_that_is_replaced_after_a_resume_has_the_seeds_of_the_saved_run() -> None:
    def episodes_after_a_loss(resume: Any) -> Any:
        with Run(partial(Telling, 5)) as run:
            if resume is None:
                run.env.reset(seed=77)
                run.roll(3)
                saved = run.save()
            else:
                saved = run.resume(*resume).save()
            os.kill(run.last_worker(), signal.SIGKILL)
            return saved, run.roll()[0]["obs"]

    saved, then = episodes_after_a_loss(None)
    np.testing.assert_array_equal(then, episodes_after_a_loss(saved)[1])


NOT_REPLAYABLE: dict[str, dict[str, Any]] = {
    "seed_episodes=False": {"seed_episodes": False},
    "staggered": {"stagger": {"horizon": 5}},
    "older weights": {"sync": farstep.sync.EveryK(2)},
}


@pytest.mark.parametrize("reason", NOT_REPLAYABLE)
def test_environments_that_cannot_be_replayed_restart_with_new_seeds(
    reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(partial(CountingEnv, 50), **NOT_REPLAYABLE[reason]) as run:
        first = first_seen(run)
        saved, actions = run.save()
    assert saved["workers"] == []
    found = []
    for _ in "ab":
        with Run(partial(CountingEnv, 50), **NOT_REPLAYABLE[reason]) as other:
            found.append(first_seen(other.resume(saved, actions)))
    assert not set(found[0]) & set(first)
    np.testing.assert_array_equal(*found)
    assert reason in caplog.text and "restarting all episodes" in caplog.text


def test_all_episodes_restart_if_the_number_of_workers_changed(caplog: pytest.LogCaptureFixture) -> None:
    with Run(partial(CountingEnv, 50)) as run:
        first = first_seen(run)
        run.env.publish(run.agent)
        saved = run.save()
    with Run(partial(CountingEnv, 50), workers=3) as other:
        now = first_seen(other.resume(*saved))
        assert other.env.version == saved[0]["version"] == 1
    assert not set(now) & set(first)
    assert "other numbers of workers" in caplog.text


def forged_numpy(worker: dict[str, Any]) -> None:
    worker["generators"]["numpy"][2] = 10_000  # a position behind the end of the table


def forged_rng(worker: dict[str, Any]) -> None:
    state = np.random.PCG64(1).state
    worker["agent"]["generators"] = [state | {"state": {"state": -1, "inc": 1}}] + [state] * 2


def forged_observation(worker: dict[str, Any]) -> None:
    worker["obs"]["obs"] = worker["obs"]["obs"][:, :1]


def forged_steps(worker: dict[str, Any]) -> None:
    worker["steps"].pop()


FORGED = {
    "numpy": (forged_numpy, r"env is malformed: Expected `int` <= 624 - at `\$\.workers\[0\]\.generators\.numpy\[2\]`"),
    "rng": (forged_rng, r"env.workers\[0\].agent.generators\[0\] is no state of a generator"),
    "observation": (forged_observation, r"env.workers\[0\].obs\[obs\] is float32\[3, 1\], float32\[3, 3\] expected"),
    "steps": (forged_steps, r"env.workers\[0\] has 3 roots, 3 episodes and 2 counts of steps"),
}


def test_saved_state_that_does_not_fit_is_refused_before_it_is_sent_to_workers() -> None:
    with Run(partial(CountingEnv, 50)) as run:
        run.roll(2)
        saved, actions = run.save()
        for forge, words in FORGED.values():
            forged = copy.deepcopy(saved)
            forge(forged["workers"][0])
            with pytest.raises(CheckpointError, match=words):
                run.resume(forged, actions)
        with pytest.raises(CheckpointError, match="the actions of slot 0, action, are not all in the space"):
            run.resume(saved, [{"action": slot["action"] + 1000} for slot in actions])
        (then,) = run.roll()
        assert then.continues.all(), "a refusal leaves the episodes as they are"


class WholeTorques:
    """Returns integers for a space of floats, which environments take as well."""

    def __init__(self) -> None:
        self._parameters = np.zeros(1)

    def act(self, obs: Any) -> dict[str, Any]:
        return {"action": np.ones((len(obs), 1), np.int64)}

    def get_parameters(self) -> Any:
        return self._parameters


def test_episodes_continue_with_integer_actions_for_a_box_of_floats() -> None:
    make = partial(farstep.ClusterEnv, {"env_name": "Pendulum-v1", "envs_per_node": 2}, farstep.InProcessConfig())
    agent, journal = WholeTorques(), Journal()
    with make() as env:
        batch = env.collect(agent, STEPS)
        journal.add(batch)
        saved, expected = env.save(), env.collect(agent, STEPS)["obs"].copy()
    with make() as env:
        env.resume(agent, saved, journal.actions())
        np.testing.assert_array_equal(env.collect(agent, STEPS)["obs"], expected)


class BestSoFar(WholeTorques):
    """Its initial state is minus infinity, as for a running maximum."""

    def initial_state(self, count: int) -> Any:
        return np.full((count, 1), -np.inf, np.float32)

    def act(self, obs: Any, state: Any, episode_start: Any) -> dict[str, Any]:  # type: ignore[override]
        best = np.where(obs[:, :1] > 0.9, np.maximum(state, obs[:, :1]), state)
        return {"action": np.ones((len(obs), 1), np.float32), "state": best}


def test_a_recurrent_state_that_begins_with_infinity_is_resumed() -> None:
    make = partial(farstep.ClusterEnv, {"env_name": "Pendulum-v1", "envs_per_node": 4}, farstep.InProcessConfig())
    agent: Any = BestSoFar()
    journal = Journal()
    with make() as env:
        journal.add(env.collect(agent, STEPS))
        saved, expected = env.save(), env.collect(agent, STEPS).initial_state
        assert np.isinf(expected).any()
    with make() as env:
        env.resume(agent, saved, journal.actions())
        np.testing.assert_array_equal(env.collect(agent, STEPS).initial_state, expected)
