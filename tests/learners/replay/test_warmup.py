"""Recorded episodes: recording, replay before the first rollout, and errors for recordings that do not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import farstep
from farstep.buffer import DPER, Buffer
from farstep.cli import main
from farstep.learners.aride import ArideConfig
from farstep.learners.networks.nets import NetConfig
from farstep.learners.replay.config import EpisodeReplayConfig
from farstep.learners.replay.recorded_episodes import RecordedEpisodes, record_episodes
from tests.learners.replay.test_aride import InvalidActions
from tests.learning.tasks import Identity, Recall, Rows, make_env, make_training

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("torch_in_workers")]  # real processes, or learning

PLAIN = NetConfig(hidden=(8,))
EPISODES = EpisodeReplayConfig(buffer_size=2_000, learning_starts=100, batch_size=8, report_every=200)


class Biased:
    """Takes the first of several actions with a probability of 0.6, and the others equally often."""

    def __init__(self, first: int = 0, count: int = 2) -> None:
        self._first = first
        self._probabilities = np.full(count, 0.4 / (count - 1))
        self._probabilities[0] = 0.6

    def act(self, obs: Any) -> dict[str, Any]:
        chosen = np.random.default_rng().choice(len(self._probabilities), len(obs), p=self._probabilities)
        logprob = np.log(self._probabilities[chosen]).astype(np.float32)
        return {"action": chosen + self._first, "logprob": logprob}

    def get_parameters(self) -> dict[str, Any]:
        return {}

    def set_parameters(self, parameters: Any) -> None:
        pass


def recording(path: Path, env: Any = Recall, episodes: int = 30, agent: Any = None, **options: Any) -> RecordedEpisodes:
    with make_env(env, 4, launcher="in-process", **options) as cluster:
        if agent is None:
            _, agent = make_training(cluster, ArideConfig(net=PLAIN), 100)
        found = record_episodes(cluster, agent, episodes, seed=3)
    found.save(path)
    return found


def events_of(env: farstep.ClusterEnv) -> list[str]:
    return [event.text for event in env.events("loaded")]


def test_recorded_episodes_are_those_that_were_played(tmp_path: Path) -> None:
    """`Recall` shows the bit at the first step and rewards it at the last."""
    found = recording(tmp_path / "file.npz", agent=Biased(), episodes=30)
    loaded = RecordedEpisodes.load(tmp_path / "file.npz")
    assert len(loaded) == 30 and loaded.lengths.tolist() == [5] * 30
    bits = loaded.rows["obs"].reshape(30, 5, 2)[:, 0, 0] > 0
    last = loaded.rows["action"].reshape(30, 5)[:, -1]
    np.testing.assert_array_equal(loaded.returns, last == bits)
    expected = np.log(np.where(loaded.rows["action"] == 0, 0.6, 0.4))
    np.testing.assert_allclose(loaded.rows["logprob"], expected, rtol=1e-6)
    for name, array in found.rows.items():
        np.testing.assert_array_equal(loaded.rows[name], array)


def test_recording_takes_at_most_max_steps_of_each_environment() -> None:
    with make_env(Recall, 4, launcher="in-process") as cluster:
        with pytest.raises(farstep.errors.RunError, match=r"only 0 of 8 episodes ended within 4 steps"):
            record_episodes(cluster, Biased(), 8, max_steps=4)
        assert len(record_episodes(cluster, Biased(), 8, max_steps=10)) == 8


def test_replayed_rows_are_the_recorded_ones_with_their_final_observations(tmp_path: Path) -> None:
    recorded = recording(tmp_path / "file.npz", Identity, 10, env_kwargs={"kind": "dict"})
    config = ArideConfig(net=PLAIN)
    with make_env(Identity, 4, launcher="in-process", env_kwargs={"kind": "dict"}) as env:
        _, agent = make_training(env, config, 100)
        with Buffer(1_000, DPER(), seed=1) as buffer:
            buffer.insert(env.collect(agent, 2))  # unfinished: no item
            recorded.insert_into(buffer)
            rows, _ = buffer.read(buffer.keys())
    assert rows["valid"].all() and rows["logprob"].shape == (10, 10)
    by_episode = {name: array.reshape(10, 10, *array.shape[1:]) for name, array in recorded.rows.items()}
    order = [next(i for i in range(10) if np.array_equal(by_episode["logprob"][i], each)) for each in rows["logprob"]]
    assert sorted(order) == list(range(10))
    for name in by_episode:
        if name in rows:
            np.testing.assert_array_equal(rows[name], by_episode[name][order])
    for name, final in recorded.final_obs.items():
        np.testing.assert_array_equal(rows[f"next_{name}"][:, -1], final[order])


@pytest.mark.parametrize("launcher", ["in-process", "local"])
def test_learner_replays_recorded_episodes_before_workers_roll(tmp_path: Path, launcher: str) -> None:
    """60 episodes of 5 rows are 200 rows beyond `learning_starts`: 800 samples, 20 updates of 8 episodes."""
    recording(tmp_path / "file.npz", episodes=60, agent=Biased())
    config = ArideConfig(net=PLAIN, replay=replace(EPISODES, warmup=tmp_path / "file.npz"))
    with make_env(Recall, 4, launcher=launcher) as env:
        training, _ = make_training(env, config, 240, sink=(rows := Rows()))
        progress = training.run()
        texts = events_of(env)
    assert any("60 recorded episodes of 300 rows" in text for text in texts)
    assert progress.updates == pytest.approx(20 + progress.steps * 4 / 40, abs=1.1)
    assert 240 <= progress.steps < 300  # recorded rows are no environment steps
    assert rows.rows[-1]["replay/rows"] == 300 + progress.steps


def test_learner_imitates_the_better_recorded_actions(tmp_path: Path) -> None:
    """Recorded episodes alone teach what to do in the only step that counts."""
    recording(tmp_path / "file.npz", FirstStep, 120, agent=Biased(-1, 4))
    replay = replace(EPISODES, warmup=tmp_path / "file.npz", samples_per_step=20.0)
    config = ArideConfig(net=PLAIN, learning_rate=1e-2, replay=replay)
    with make_env(FirstStep, 4, launcher="in-process") as env:
        training, agent = make_training(env, config, 4)
        training.run()
        agent.greedy = True
        batch = env.collect(agent, 40)
    assert batch["reward"].mean() > 0.9  # 0.95 to 0.99 in 13 runs, since timing decides which rows are sampled


class FirstStep(Identity):
    """Episodes of one step that pay for doing what is shown."""

    def __init__(self) -> None:
        super().__init__("discrete", 1)


# ---- files that do not fit ----


def refused(path: Path, env: Any = Recall, **options: Any) -> str:
    config = ArideConfig(net=PLAIN, replay=replace(EPISODES, warmup=path, **options))
    with make_env(env, 4, launcher="in-process") as cluster:
        training, _ = make_training(cluster, config, 240)
        with pytest.raises(farstep.ConfigError) as raised:
            training.run()
    assert str(path) in str(raised.value)
    return str(raised.value)


def test_files_that_are_not_recordings_are_refused(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "missing.npz")
    (tmp_path / "text.npz").write_text("episodes")
    assert "farstep eval RUN --sample --record" in refused(tmp_path / "text.npz")
    np.savez(tmp_path / "other.npz", obs=np.zeros(3))
    assert "format" in refused(tmp_path / "other.npz")


def changed(path: Path, recorded: RecordedEpisodes, **rows: Any) -> Path:
    kept = {name: array for name, array in {**recorded.rows, **rows}.items() if array is not None}
    replace(recorded, rows=kept).save(path)
    return path


def test_recordings_that_do_not_fit_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "file.npz"
    recorded = recording(path, agent=Biased())
    assert "'logprob'" in refused(changed(path, recorded, logprob=None))
    assert "not finite" in refused(changed(path, recorded, logprob=recorded.rows["logprob"] * np.nan))
    assert "float32[3]" in refused(changed(path, recorded, obs=np.zeros((150, 3), np.float32)))
    assert str(spaces.Discrete(2)) in refused(changed(path, recorded, action=recorded.rows["action"] + 7))
    assert "last row of every episode" in refused(changed(path, recorded, terminated=np.zeros(150, bool)))
    assert "expected 150 rows" in refused(changed(path, recorded, reward=np.zeros(3, np.float32)))
    recorded.save(path)
    assert "--buffer-size" in refused(path, buffer_size=100)
    replace(recorded, lengths=recorded.lengths * 0).save(path)
    assert "positive number" in refused(path)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    whole = tmp_path / "file.npz"
    recording(whole, agent=Biased())
    content = whole.read_bytes()
    np.save(tmp_path / "single.npy", np.zeros(3))
    (tmp_path / "short.npz").write_bytes(content[: len(content) // 2])
    middle = len(content) // 3
    (tmp_path / "bits.npz").write_bytes(content[:middle] + bytes(40) + content[middle + 40 :])
    for name in ("single.npy", "short.npz", "bits.npz"):
        with pytest.raises(farstep.ConfigError, match=name):
            RecordedEpisodes.load(tmp_path / name)


def test_recording_without_the_infos_that_a_penalty_needs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.npz"
    config = ArideConfig(net=PLAIN, invalid_penalty=1.0, replay=replace(EPISODES, warmup=path))
    for keys in ((), config.info_keys):
        recording(path, InvalidActions, agent=Biased(), info_keys=keys)
        with make_env(InvalidActions, 4, launcher="in-process", info_keys=config.info_keys) as env:
            training, _ = make_training(env, config, 100)
            if keys:
                training.run()
            else:
                with pytest.raises(farstep.ConfigError, match=r"info\.invalid_action"):
                    training.run()


# ---- the commands ----


def test_command_records_episodes_that_the_next_run_warms_up_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    environment = ["--env", "tests.learning.tasks:Recall", "--env-type", "factory", "--launcher", "in-process"]
    sizes = ["--num-envs", "4", "--total-steps", "128", "--learning-starts", "64", "--folder", str(tmp_path)]
    run, file = str(tmp_path / "first"), tmp_path / "warmup.npz"
    assert main(["train", "aride", *environment, *sizes, "--name", "first"]) == 0
    assert main(["eval", run, "--episodes", "24", "--record", str(file)]) == 1
    assert "--record needs --sample" in capsys.readouterr().err
    assert main(["eval", run, "--episodes", "24", "--sample", "--record", str(file)]) == 0
    assert len(RecordedEpisodes.load(file)) == 24
    assert main(["train", "aride", *environment, *sizes, "--name", "second", "--warmup", str(file)]) == 0
    events = (tmp_path / "second" / "events.jsonl").read_text()
    assert "24 recorded episodes of 120 rows" in events
    resumed = ["--resume", str(tmp_path / "second"), "--total-steps", "192"]
    file.unlink()  # a resumed run has them in its buffer
    assert main(["train", "aride", *resumed]) == 0
    assert events.count("recorded episodes") == 1
