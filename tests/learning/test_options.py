"""Options of learners are checked when they are given, and kept when a run is resumed."""

from __future__ import annotations

import copy
import json
import math
import pickle
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from farstep.cli import main
from farstep.config.launch import LocalConfig
from farstep.errors import ConfigError
from farstep.learners.async_ppo import AsyncPPOConfig
from farstep.learners.impala import ImpalaConfig
from farstep.learners.loop.evaluation import Evaluator
from farstep.learners.loop.timing import WORKER_METRICS
from farstep.learners.networks.nets import NetConfig, make_agent
from farstep.learners.on_policy.optimizer import Optimizer
from farstep.learners.options.run_config import RunConfig
from farstep.learners.ppo import PPOConfig
from tests.learning.tasks import Rows, make_env, make_training


@pytest.mark.parametrize(
    ("config", "option"),
    [
        (PPOConfig, {"learning_rate": -1.0}),
        (PPOConfig, {"learning_rate": math.inf}),
        (AsyncPPOConfig, {"value_lr": 1e300}),
        (ImpalaConfig, {"value_coef": math.inf}),
        (PPOConfig, {"gamma": 3.0}),
        (PPOConfig, {"max_grad_norm": -1.0}),
        (PPOConfig, {"value_clip": -1.0}),
        (PPOConfig, {"clip_coef": 5.0}),
        (PPOConfig, {"target_kl": 0.0}),
        (PPOConfig, {"normalize_advantages": "Batch"}),
        (PPOConfig, {"value_lr": -1e-3}),
        (PPOConfig, {"critic_warmup_updates": -1}),
        (PPOConfig, {"rollout_epochs": 0}),
        (AsyncPPOConfig, {"rollout_epochs": 1.5}),
        (PPOConfig, {"critic_warmup_updates": 2.5}),
        (PPOConfig, {"critic_warmup_updates": 5, "vf_coef": 0.0}),
        (AsyncPPOConfig, {"critic_warmup_updates": 5, "value_lr": 0.0}),
        (ImpalaConfig, {"critic_warmup_updates": 5, "learning_rate": 0.0}),
        (AsyncPPOConfig, {"clip_ratio_c": 0.5}),
        (AsyncPPOConfig, {"clip_ratio_c": 1.0}),
        (AsyncPPOConfig, {"huber_delta": 0.0}),
        (AsyncPPOConfig, {"behave_weight_threshold": -1.0}),
        (AsyncPPOConfig, {"behave_weight_lower": 3.0, "behave_weight_threshold": 2.0}),
        (ImpalaConfig, {"rho_bar": 0.0}),
        (ImpalaConfig, {"pg_rho_bar": 0.0}),
        (AsyncPPOConfig, {"micro_batch_size": 64, "global_batch_size": 32}),
        (AsyncPPOConfig, {"micro_batch_size": 64, "denominator": "kept"}),
        (AsyncPPOConfig, {"micro_batch_size": 64, "num_steps": 128, "net": NetConfig(recurrent="gru")}),
        (AsyncPPOConfig, {"global_batch_size": 64, "num_steps": 128, "net": NetConfig(recurrent="lstm")}),
        (ImpalaConfig, {"vtrace_lambda": 2.0}),
        (NetConfig, {"hidden": (0,)}),
        (NetConfig, {"recurrent": "rnn"}),
        (NetConfig, {"activation": "gelu"}),
    ],
    ids=str,
)
def test_an_impossible_option_is_named(config: Any, option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        config(**option)


def small_agent() -> Any:
    spaces = gymnasium.spaces.Box(-1, 1, (4,), np.float32), gymnasium.spaces.Discrete(2)
    return make_agent(*spaces, NetConfig(hidden=(64, 64), normalize_obs=True), 0.99)


def test_agent_is_sent_without_its_optimizer() -> None:
    """All its parameters are views of one long vector."""
    agent = small_agent()
    before = len(pickle.dumps(agent))
    Optimizer(agent, 1e-3, 0.5, seed=0)
    assert len(pickle.dumps(agent)) < 1.1 * before
    agent.greedy = True
    drawn = torch.get_rng_state()
    for other in (pickle.loads(pickle.dumps(agent)), copy.deepcopy(agent)):
        assert other.greedy
        for name, tensor in agent.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name])
            assert not tensor.numel() or tensor.data_ptr() != other.state_dict()[name].data_ptr()
    assert torch.equal(drawn, torch.get_rng_state())


def test_micro_batches_change_no_parameter() -> None:
    found = []
    for micro in (None, 16):
        with make_env("CartPole-v1", 4, launcher="in-process") as env:
            config = AsyncPPOConfig(num_steps=32, micro_batch_size=micro, staleness_threshold=0)
            training, agent = make_training(env, config, 3 * 128)
            training.run()
        found.append(torch.cat([parameter.detach().flatten() for parameter in agent.parameters()]))
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-3)


def test_a_resumed_run_learns_at_the_rate_it_is_given(tmp_path: Path) -> None:
    sink = Rows()
    for learning_rate, total, resume in ((1e-3, 128, False), (5e-3, 256, True)):
        with make_env("CartPole-v1", 4, launcher="in-process") as env:
            config = PPOConfig(num_steps=32, learning_rate=learning_rate, anneal_lr=False)
            training, _ = make_training(env, config, total, checkpoints=tmp_path, sink=sink)
            if resume:
                training.resume()
            training.run()
    assert [row["train/actor/lr"] for row in sink.rows] == [1e-3, 5e-3]


def test_run_cannot_be_resumed_with_other_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = ["train", "ppo", "--env", "CartPole-v1", "--launcher", "in-process", "--num-envs", "4", "--num-steps", "16"]
    assert main([*train, "--total-steps", "64", "--folder", str(tmp_path), "--name", "run"]) == 0
    for more in (["--env", "Acrobot-v1"], ["--hidden", "32"], ["--seed", "2"]):
        capsys.readouterr()
        assert main(["train", "ppo", "--resume", str(tmp_path / "run"), "--total-steps", "128", *more]) == 1
        assert "cannot be resumed with" in capsys.readouterr().err
    assert main(["train", "ppo", "--resume", str(tmp_path / "run"), "--total-steps", "128"]) == 0
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["run"]["total_steps"] == 128 and saved["run"]["env"] == "CartPole-v1"


def test_a_run_in_one_process_is_evaluated_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("a process was started")

    monkeypatch.setattr("farstep.launch.launchers.LocalLauncher", refuse)
    train = ["train", "ppo", "--env", "CartPole-v1", "--launcher", "in-process", "--num-envs", "4", "--num-steps", "16"]
    evaluate = ["--eval-every", "64", "--eval-episodes", "4"]
    assert main([*train, *evaluate, "--total-steps", "192", "--folder", str(tmp_path), "--name", "run"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [row["eval/step"] for row in rows if "eval/step" in row] == [64, 128, 192]


def test_bytes_of_weights_and_probes_are_logged_over_tcp(tmp_path: Path) -> None:
    where = ["--workers", "1", "--transport", "tcp", "--folder", str(tmp_path), "--name", "run"]
    options = ["--num-envs", "4", "--num-steps", "64", "--total-steps", "1024", "--kl-threshold", "0.0001"]
    assert main(["train", "ppo", "--env", "CartPole-v1", *options, *where]) == 0
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["sync/pulls_per_worker"] >= 2 and last["bytes/weights_sent"] > 0 and last["bytes/probes_sent"] > 0
    assert 0 <= last["sync/divergence_mean"] <= last["sync/divergence_max"]
    parts = [last[name] for name in WORKER_METRICS.values()]
    assert min(parts) > 0, "environment, inference, tickets, sending and weights all took time"
    run = RunConfig(env="CartPole-v1", workers=1, transport="tcp")
    assert run.launch_config() == LocalConfig(workers_per_node=1, transport="tcp")


def test_watch_samples_the_same_actions_with_one_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = ["train", "ppo", "--env", "CartPole-v1", "--launcher", "in-process", "--num-envs", "4", "--num-steps", "16"]
    assert main([*train, "--total-steps", "64", "--folder", str(tmp_path), "--name", "run"]) == 0
    found = []
    for seed in (3, 3, 4):
        capsys.readouterr()
        assert main(["watch", str(tmp_path / "run"), "--sample", "--episodes", "3", "--seed", str(seed)]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1] != found[2]


def test_pictures_need_no_screen(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SDL_VIDEODRIVER", "XDG_RUNTIME_DIR", "DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    train = ["train", "ppo", "--env", "CartPole-v1", "--launcher", "in-process", "--num-envs", "4", "--num-steps", "16"]
    evaluate = ["--eval-every", "64", "--eval-episodes", "1", "--capture-video"]
    assert main([*train, *evaluate, "--total-steps", "64", "--folder", str(tmp_path), "--name", "run"]) == 0
    assert "error" not in capfd.readouterr().err
    assert list((tmp_path / "run" / "videos").iterdir())


class Endless(gymnasium.Env[Any, Any]):
    """Has no end."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(2, np.float32), 0.0, False, False, {}


def test_an_evaluation_whose_episodes_do_not_end_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("farstep.learners.loop.evaluation.MAX_STEPS", 128)
    with make_env(Endless, 2, launcher="in-process") as env:
        agent = make_agent(*env.launch(), NetConfig(), 0.99)
        evaluator = Evaluator(env.env_config, 2, seed=0)
        try:
            evaluator.start(agent, 0, 0)
            evaluator.wait()
            found = evaluator.take()
        finally:
            evaluator.close()
    assert found is not None and found.metrics() == {}
    assert "cut off" in caplog.text
