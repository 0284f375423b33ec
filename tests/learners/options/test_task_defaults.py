"""Options of PPO and asynchronous PPO whose defaults differ between vectors and images."""

import re
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from farstep.cli import main
from farstep.config.field_docs import field_docs
from farstep.learners.async_ppo import AsyncPPOConfig
from farstep.learners.on_policy.optimizer import Optimizer, Schedule
from farstep.learners.options.task_defaults import IMAGES, VECTORS, Defaults, rollout_steps
from farstep.learners.ppo import PPOConfig
from tests.learning.tasks import Rows, make_env, make_training

pytestmark = pytest.mark.slow  # real processes, or learning
DOCS = Path(__file__).parents[3] / "docs"
CONFIGS: dict[str, Any] = {"ppo": PPOConfig, "async-ppo": AsyncPPOConfig}
KINDS = {"vectors": ("CartPole-v1", VECTORS), "images": (lambda: Pictures(), IMAGES)}


class Pictures(gymnasium.Env[Any, Any]):
    """Small images; an episode has 8 steps."""

    observation_space = gymnasium.spaces.Box(0, 255, (1, 36, 36), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self.np_random.integers(0, 256, (1, 36, 36), np.uint8), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return self.np_random.integers(0, 256, (1, 36, 36), np.uint8), float(action), self._steps == 8, False, {}


def first_update(
    env: Any, config: Any, monkeypatch: pytest.MonkeyPatch, total_steps: int = 1, **options: Any
) -> tuple[dict[str, float], Schedule]:
    """The metrics of the last update of a short run, and its epochs and minibatch size; the update does not train."""
    schedules: list[Schedule] = []

    def record(self: Any, rollout: Any, columns: Any, loss: Any, schedule: Schedule, **_: Any) -> dict[str, float]:
        schedules.append(schedule)
        return {"actor/lr": self._policy.lr, "critic/lr": self._critic.lr}

    monkeypatch.setattr(Optimizer, "learn", record)
    sink, resume = Rows(), options.pop("resume", False)
    with make_env(env, 128, launcher="in-process") as cluster:
        training, _ = make_training(cluster, config, total_steps, sink=sink, **options)
        if resume:
            training.resume()
        training.run()
    return sink.rows[-1], schedules[-1]


def test_defaults_are_the_measured_ones() -> None:
    assert Defaults(learning_rate=5e-4, update_epochs=8, rollout_rows=4096, minibatch_rows=128) == VECTORS
    assert Defaults(learning_rate=2.5e-4, update_epochs=4, rollout_rows=2048, minibatch_rows=256) == IMAGES


@pytest.mark.parametrize(
    ("given", "num_envs", "recurrent", "defaults", "steps"),
    [
        (None, 16, False, VECTORS, 256),
        (None, 16, False, IMAGES, 128),
        (None, 1024, False, IMAGES, 16),
        (None, 8, False, IMAGES, 256),
        (None, 8, True, IMAGES, 128),
        (5, 8, True, IMAGES, 5),
    ],
)
def test_length_of_a_rollout(given: int | None, num_envs: int, recurrent: bool, defaults: Defaults, steps: int) -> None:
    assert rollout_steps(given, num_envs, recurrent, defaults) == steps


@pytest.mark.parametrize("learner", CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
def test_learner_uses_the_defaults_for_its_observations(
    learner: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    env, defaults = KINDS[kind]
    row, schedule = first_update(env, CONFIGS[learner](), monkeypatch)
    assert (row["step"], row["train/actor/lr"], row["train/critic/lr"]) == (
        defaults.rollout_rows,
        defaults.learning_rate,
        defaults.learning_rate,
    )
    assert (schedule.epochs, schedule.batch_size) == (defaults.update_epochs, defaults.minibatch_rows)


@pytest.mark.parametrize("learner", CONFIGS)
def test_given_options_replace_the_defaults_for_images(learner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS[learner](learning_rate=1e-3, update_epochs=3, num_steps=2)
    row, schedule = first_update(KINDS["images"][0], config, monkeypatch)
    assert (row["step"], row["train/actor/lr"], schedule.epochs) == (256, 1e-3, 3)


def test_resumed_run_keeps_the_defaults_for_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env, _ = KINDS["images"]
    first_update(env, PPOConfig(), monkeypatch, 2048, checkpoints=tmp_path)
    row, schedule = first_update(env, PPOConfig(), monkeypatch, 4096, checkpoints=tmp_path, resume=True)
    assert (row["step"], row["train/actor/lr"], schedule.epochs) == (4096, 2.5e-4, 4)


@pytest.mark.parametrize("config", CONFIGS.values())
def test_critic_warmup_needs_no_learning_rate(config: Any) -> None:
    assert config(critic_warmup_updates=2).learning_rate is None


@pytest.mark.parametrize("learner", CONFIGS)
def test_help_states_the_defaults_for_images(
    learner: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main(["train", learner, "--help"])
    helped = " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    docs = field_docs(CONFIGS[learner])
    for name, default in {"learning_rate": "2.5e-4", "update_epochs": "4", "num_steps": "2,048"}.items():
        assert f"{default} if observations are images" in docs[name].replace("\n", " ")
        assert f"{default} if observations are images" in helped


def test_page_states_the_defaults_for_images() -> None:
    lines = (DOCS / "ppo.md").read_text().splitlines()
    rows = {line.split("|")[1].strip(): line.split("|")[2] for line in lines if line.startswith("| `--")}
    assert "images: 2,048 / `num_envs`" in rows["`--num-steps`"]
    assert "images: 4" in rows["`--update-epochs`"]
    assert "images: 256" in rows["`--minibatch-size`"]
    assert "images: 2.5e-4" in rows["`--learning-rate`, `--anneal-lr`"]
    assert "PPO's defaults for images apply" in (DOCS / "async_ppo.md").read_text()


@pytest.mark.parametrize(("env", "normalized"), [("CartPole-v1", "observations and rewards"), ("images", "rewards")])
def test_start_of_a_run_says_what_is_normalized(
    env: str, normalized: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = ["--env", env] if env != "images" else ["--env-type", "factory", "--env", f"{__name__}:Pictures"]
    sizes = ["--num-envs", "4", "--num-steps", "8", "--learning-rate", "1e-3", "--total-steps", "32"]
    folder = ["--launcher", "in-process", "--folder", str(tmp_path), "--name", "run"]
    assert main(["train", "ppo", *source, *sizes, *folder]) == 0
    output = capsys.readouterr().out
    assert f"normalized: {normalized} (--no-" in output
    used = "observations are images, with other defaults (--help): learning rate 0.001, 4 epochs, 32 rows per rollout"
    assert (used in output) == (env == "images")
