"""Runs that must be equal are equal to the last bit."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from farstep.checkpoint import folder as checkpoint
from farstep.cli import main
from farstep.learners.async_ppo import AsyncPPOConfig
from farstep.learners.loop.training import Stopped
from farstep.learners.networks.nets import NetConfig
from farstep.learners.ppo import PPOConfig
from tests.learning.tasks import Rows, make_env, make_training, trained

# One variant in worker processes, each of which imports torch: the LSTM's, since its state is in the workers, too.
VARIANTS = [("plain", "in-process"), ("lstm", "local"), ("normalized", "in-process"), ("gru", "in-process")]
NETS = {
    "plain": NetConfig(normalize_obs=False, normalize_reward=False),
    "normalized": NetConfig(),
    "lstm": NetConfig(recurrent="lstm", core=16, normalize_obs=False, normalize_reward=False),
    "gru": NetConfig(recurrent="gru", core=16, normalize_reward=False),
}


def assert_equal(a: torch.nn.Module, b: torch.nn.Module) -> None:
    first, second = a.state_dict(), b.state_dict()
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


STEPS, ENVS = 16, 8
SHARED: dict[str, Any] = {"num_steps": STEPS, "value_clip": 0.2, "update_epochs": 2}


def run_of_ppo(net: str, launcher: str) -> torch.nn.Module:
    config = PPOConfig(
        clip_coef=0.2, vf_coef=0.5, ent_coef=0.01, minibatch_size=STEPS * ENVS // 4, net=NETS[net], **SHARED
    )
    return trained("CartPole-v1", config, ENVS * STEPS * 6, num_envs=ENVS, launcher=launcher)[1]


first_run_of_ppo = functools.cache(run_of_ppo)
"""Trained once per variant; the tests compare their own runs with it."""


@pytest.mark.parametrize(("net", "launcher"), VARIANTS)
def test_two_runs_with_one_seed_give_equal_parameters(net: str, launcher: str) -> None:
    assert_equal(first_run_of_ppo(net, launcher), run_of_ppo(net, launcher))


def test_another_seed_gives_other_parameters() -> None:
    config = PPOConfig(num_steps=16)
    _, first = trained("CartPole-v1", config, 8 * 16 * 2, num_envs=8, launcher="in-process")
    _, second = trained("CartPole-v1", config, 8 * 16 * 2, num_envs=8, launcher="in-process", seed=2)
    critics: list[Any] = [first.critic[1], second.critic[1]]
    assert not torch.equal(critics[0].weight, critics[1].weight)


@pytest.mark.parametrize(("net", "launcher"), VARIANTS)
def test_async_ppo_without_staleness_is_ppo(net: str, launcher: str) -> None:
    asynchronous = AsyncPPOConfig(
        staleness_threshold=0,
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        clip_ratio_c=None,
        value_coef=0.5,
        entropy_bonus=0.01,
        global_batch_size=STEPS * ENVS // 4,
        recompute_logprobs=net != "gru",  # interpolated there: rows of the current version stay as they are, too
        net=NETS[net],
        **SHARED,
    )
    _, second = trained("CartPole-v1", asynchronous, ENVS * STEPS * 6, num_envs=ENVS, launcher=launcher)
    assert_equal(first_run_of_ppo(net, launcher), second)


SYNCHRONOUS: dict[str, Any] = {"ppo": PPOConfig, "async": functools.partial(AsyncPPOConfig, staleness_threshold=0)}


@pytest.mark.parametrize(
    ("kind", "net", "launcher"), [("ppo", *variant) for variant in VARIANTS] + [("async", "normalized", "in-process")]
)
def test_a_run_that_was_resumed_equals_one_that_was_not(kind: str, net: str, launcher: str, tmp_path: Path) -> None:
    config, rows = SYNCHRONOUS[kind](num_steps=20, update_epochs=2, anneal_lr=True, net=NETS[net]), 6 * 20

    def run(folder: str, resume: bool = False, stop_at: int | None = None) -> torch.nn.Module:
        with make_env("CartPole-v1", 6, seed=3, launcher=launcher, workers=1) as env:
            # The learning rate falls over the same number of steps, however many of them are done now.
            options: dict[str, Any] = {"checkpoints": tmp_path / folder, "sink": Rows(stop_at)}
            training, agent = make_training(env, config, 8 * rows, **options)
            if resume:
                training.resume()
            with pytest.raises(Stopped) if stop_at else contextlib.nullcontext():
                training.run()
            assert env.version == (stop_at or 8)
        return agent

    whole = run("whole")
    run("parts", stop_at=5)
    assert_equal(whole, run("parts", resume=True))


UPDATES, UPDATES_BEFORE_KILL = 16, 5


def train_options(folder: Path, name: str, launcher: str) -> list[str]:
    options = ["--env", "LunarLander-v3", "--num-envs", "6", "--workers", "1", "--num-steps", "32", "--seed", "5"]
    options += ["--launcher", launcher, "--threads", "1"]
    options += ["--total-steps", str(6 * 32 * UPDATES), "--checkpoint-every", "4", "--update-epochs", "2"]
    return ["train", "ppo", *options, "--folder", str(folder), "--name", name]


def after_updates(folder: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Wait until the run has logged the given number of updates."""
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        if metrics.exists() and metrics.read_text().count("\n") >= count:
            return
        time.sleep(0.02)
    raise AssertionError("the run made no progress")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """For each launcher, the folder of one run that was not interrupted."""

    @functools.cache
    def run(launcher: str) -> Path:
        folder = tmp_path_factory.mktemp("runs")
        assert main(train_options(folder, "whole", launcher)) == 0
        return folder / "whole"

    return run


@pytest.mark.parametrize(
    ("how", "status", "launcher"),
    [
        ("SIGKILL", -9, "local"),
        ("SIGTERM", 143, "in-process"),
        pytest.param("SIGINT", 130, "in-process", marks=pytest.mark.long),
    ],
)
def test_a_run_that_was_killed_and_resumed_equals_one_that_was_not(
    how: str, status: int, launcher: str, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    killed = tmp_path / "killed"
    command = [sys.executable, "-m", "farstep", *train_options(tmp_path, "killed", launcher)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    after_updates(killed, UPDATES_BEFORE_KILL, process)
    os.kill(process.pid, signal.Signals[how])
    output = process.communicate(timeout=60)
    assert process.returncode == status, output
    assert len((killed / "metrics.jsonl").read_text().splitlines()) < UPDATES
    assert main(["train", "ppo", "--resume", str(killed)]) == 0
    first, second = (checkpoint.load(run / "checkpoints").arrays for run in (whole(launcher), killed))
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], err_msg=name)
    rows = [[json.loads(line) for line in (run / "metrics.jsonl").open()] for run in (whole(launcher), killed)]
    for key in ("step", "update", "train/actor/current_version", "train/actor/policy_loss", "env/episodes"):
        assert [row[key] for row in rows[0]] == [row[key] for row in rows[1]], key
