"""The command line: help, and one-sentence errors for wrong use."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import farstep
from farstep.cli import LEARNERS, main
from farstep.cli.options.algorithms import ALGORITHMS
from farstep.observe.glossary import EXPOSED, METRICS, STATS
from farstep.observe.run_folder import RunFolder
from farstep.testing import CountingEnv

TRAIN = ["train", "ppo", "--env", "CartPole-v1"]
VIDEO = ["--capture-video", "--eval-every", "1000"]
HERE = ["--launcher", "in-process"]
INSIDE = ["--env-type", "factory", *HERE]
CARTPOLE = [*TRAIN, *HERE]


class OddActions(CountingEnv):
    """Has actions that farstep's learners cannot choose."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Box(0, 9, (2,), np.int64)


class Broken(CountingEnv):
    """Raises the exception of a wrong argument because of a bug inside the environment."""

    def __init__(self) -> None:
        super().__init__(size=3)  # type: ignore[call-arg]


def passes_all(**kwargs: Any) -> CountingEnv:
    """Passes arguments that the environment may not have."""
    return CountingEnv(**kwargs)


def outdated() -> gymnasium.Env[Any, Any]:
    """Makes an environment that is not registered."""
    return gymnasium.make("NoSuchEnv-v0")


class NoSpace(CountingEnv):
    """Has observations without a layout."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Text(8)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        status = main(arguments)
    except SystemExit as end:
        status = int(end.code or 0)
    output = capsys.readouterr()
    return status, output.out, output.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tran"], ["command", "'tran'", "train"]),
        (["train", "pppo"], ["learner", "'pppo'", "ppo"]),
        (["train", "PPO"], ["unknown learner 'PPO'. Did you mean 'ppo'?"]),
        (["resume", "runs/a"], ["farstep train --resume runs/NAME"]),
        (["train", "ppo", "CartPole-v1"], ["takes only options", "did you mean --env CartPole-v1?"]),
        (["train", "ppo", "-env", "CartPole-v1"], ["no option -env; did you mean --env?"]),
        (["status", "--grafana", "nowhere/x.json"], ["nowhere/x.json cannot be written: nowhere is no folder"]),
        (["train", "ppo"], ["'farstep train ppo' needs --env. 'farstep train ppo --help'"]),
        ([*TRAIN, "--num-env", "4"], ["no option --num-env", "--num-envs"]),
        (["train", "ppo", "--wokers", "4"], ["did you mean --workers"]),
        (["train", "ppo", "--nonsense"], ["no option --nonsense; --help lists them all"]),
        (["train", "ppo", "--staleness-threshold", "1"], ["it belongs to 'farstep train async-ppo'"]),
        (["train", "ppo", "--value-coef", "1"], ["it belongs to 'farstep train async-ppo'"]),
        ([*TRAIN, "--num-envs", "x"], ["--num-envs: expected a whole number, such as 100000 or 1e5, got 'x'"]),
        ([*TRAIN, "--total-steps", "1.5"], ["--total-steps: expected a whole number", "'1.5'"]),
        ([*TRAIN, "--total-steps", "1.25e1"], ["--total-steps: expected a whole number", "'1.25e1'"]),
        ([*TRAIN, "--total-steps", "1e-3"], ["--total-steps: expected a whole number", "'1e-3'"]),
        ([*TRAIN, "--total-steps", "1e999999999"], ["--total-steps: expected a whole number", "'1e999999999'"]),
        ([*TRAIN, "--total-steps", "1e"], ["--total-steps: expected a whole number", "'1e'"]),
        ([*TRAIN, "--gamma", "x"], ["--gamma: expected a number, got 'x'"]),
        ([*TRAIN, "--workers", "x"], ["--workers: expected a whole number, such as 100000 or 1e5, got 'x'"]),
        (
            [*TRAIN, "--hidden", "4", "x"],
            ["--hidden: expected a whole number, such as 100000 or 1e5, got 'x'"],
        ),
        ([*TRAIN, "--num-envs", "0"], ["--num-envs is 0", "0", "at least 1"]),
        ([*TRAIN, "--recurrent", "lsmt"], ["'lsmt'", "lstm"]),
        ([*TRAIN, "--env-kwargs", "{a"], ["--env-kwargs", "not JSON"]),
        ([*TRAIN, "--capture-video"], ["--eval-every"]),
        ([*TRAIN, "--device", "tpu"], ["device", "tpu"]),
        ([*TRAIN, "--device", "cuda:99"], ["device", "cuda:99", "use cpu"]),
        ([*TRAIN, "--device", "cuda:x"], ["device", "cuda:x"]),
        (["train", "ppo", "--env", "json:loads", "--env-type", "vector", *VIDEO], ["vector", "rendered"]),
        (["train", "ppo", "--env", "Pong-v5", "--env-type", "envpool", *VIDEO], ["envpool", "rendered"]),
        (["train", "ppo", "--env", "farstep.testing:CountingEnv", *INSIDE, *VIDEO], ["no argument render_mode"]),
        (["train", "ppo", "--env", "tests.cli.test_cli:passes_all", *INSIDE, *VIDEO], ["render_mode='rgb_array'"]),
        (["train", "ppo", "--env", "tests.cli.test_cli:OddActions", *INSIDE], ["no policy for the action space"]),
        (["train", "async-ppo", "--env", "CartPole-v1", "--staleness-threshold", "-1"], ["--staleness-threshold"]),
        (["train", "ppo", "--resume", "nowhere"], ["nowhere", "does not exist"]),
        (["train", "ppo", "--resume"], ["--resume", "folder"]),
        (["train", "ppo", "--env", "CartPol-v1"], ["CartPol"]),
        (["train", "ppo", "--env", "nomodule:Env", *HERE], ["'nomodule:Env'", "No module named 'nomodule'", "Install"]),
        (["train", "ppo", "--env", "nomodule:Env", *INSIDE], ["No module named 'nomodule'", "PYTHONPATH"]),
        (["train", "ppo", "--env", "tests.cli.test_cli:Nothing", *INSIDE], ["'tests.cli.test_cli' has no 'Nothing'"]),
        ([*CARTPOLE, "--env-kwargs", '{"x": 1}'], ["{'x': 1}", "unexpected keyword argument 'x'", "env_kwargs"]),
        ([*CARTPOLE, "--env-type", "vector", "--env-kwargs", '{"x": 1}'], ["{'x': 1}", "'x'", "env_kwargs"]),
        pytest.param(
            [*CARTPOLE[:4], "--env-type", "envpool", "--env-kwargs", '{"x": 1}'],
            ["{'x': 1}", "'x'", "env_kwargs"],
            marks=pytest.mark.slow,  # imports EnvPool
        ),
        ([*CARTPOLE, "--wrappers", "gymnasium.wrappers:Nothing"], ["'gymnasium.wrappers' has no 'Nothing'"]),
        ([*CARTPOLE, "--wrappers", "gymnasium.wrappers:TransformReward"], ["'func'", "your own function"]),
        (["watch"], ["folder of a run", "farstep watch runs/NAME"]),
        (["watch", "nowhere"], ["nowhere", "does not exist"]),
        (["watch", "nowhere", "--fps", "0"], ["fps=0", "30"]),
        (["watch", "nowhere", "--max-steps", "0"], ["max_steps"]),
        (["watch", "nowhere", "--seed", "-1"], ["seed", "-1"]),
        (["eval"], ["folder of a run", "farstep eval runs/NAME"]),
        (["eval", "nowhere"], ["nowhere", "does not exist"]),
        (["eval", "nowhere", "--episodes", "0"], ["episodes", "at least 1"]),
        (["eval", "nowhere", "--greedy", "--sample"], ["--greedy and --sample"]),
        (["plot"], ["at least one run"]),
        (["plot", "nowhere"], ["nowhere"]),
        (["metrics", "nothing"], ["'nothing'", "farstep metrics"]),
        (["kubernetes", "--image", "x"], ["--print"]),
        (["kubernetes", "--print"], ["image", "docs/kubernetes.md"]),
        (["kubernetes", "--print", "--image", "x", "--kind", "pod"], ["--kind", "'pod'", "deployment"]),
        (["kubernetes", "--print", "--image", "x", "--pod-template", "{a"], ["--pod-template"]),
        (["kubernetes", "--print", "--image", "x", "--tolerations", "{}"], ["tolerations", "list"]),
        (["kubernetes", "--print", "--imag", "x"], ["no option --imag", "--image"]),
        ([*TRAIN, "--launcher", "slrum"], ["launcher 'slrum'", "'slurm'"]),
        ([*TRAIN, "--launcher"], ["launcher ''", "slurm"]),
        ([*TRAIN, "--partition", "gpu"], ["--partition", "--launcher local", "belongs to --launcher slurm"]),
        ([*TRAIN, "--launcher", "ssh", "--partition", "gpu"], ["--launcher ssh", "belongs to --launcher slurm"]),
        ([*TRAIN, "--launcher", "slurm", "--partitoin", "gpu"], ["no option --partitoin", "--partition"]),
        ([*TRAIN, "--launcher", "ssh"], ["SSHConfig.hosts"]),
        ([*TRAIN, "--launcher", "slurm", "--nodes", "3"], ["num_envs=16", "3 nodes", "15 or 18"]),
        ([*TRAIN, "--launcher", "slurm", "--nodes", "x"], ["--nodes", "'x'"]),
        ([*TRAIN, "--launcher", "slurm", "--nodes", "2", "--min-nodes", "3"], ["--min-nodes=3", "--nodes=2"]),
        ([*TRAIN, "--launcher", "slurm", "--workers", "3"], ["workers=3", "--workers-per-node"]),
        ([*TRAIN, "--launcher", "slurm", "--transport", "tcp"], ["transport='tcp'", "--launcher local"]),
        (["slurm"], ["farstep slurm", "--print"]),
        (["slurm", "--print", "--node", "3"], ["no option --node", "--nodes"]),
        (["slurm", "--print", "--slurm-extra", "exclusive"], ["slurm_extra", "--exclusive"]),
        (["doctor", "--launcher", "in-process"], ["in-process", "local"]),
        (["doctor", "--hosts", "a"], ["--hosts", "belongs to --launcher ssh"]),
        (["doctor", "--wait-s", "0"], ["--wait-s"]),
        (["doctor", "--env", "CartPole-v1", "--env-kwargs", "{a"], ["env_kwargs", "not JSON"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_ends_in_one_sentence(
    arguments: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, error = said(capsys, *arguments)
    assert status == 1
    assert "Traceback" not in error and error.startswith("farstep: ")
    for word in words:
        assert word in error, error
    assert not list(tmp_path.iterdir()), "something was written"


def test_a_video_without_its_encoder_is_refused_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    monkeypatch.chdir(tmp_path)
    status, _, error = said(capsys, "train", "ppo", "--env", "CartPole-v1", *VIDEO)
    assert status == 1 and "pip install imageio-ffmpeg" in error
    assert not list(tmp_path.iterdir())


def test_errors_about_options_on_workers_have_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, error = said(capsys, "train", "ppo", "--env", "tests.cli.test_cli:NoSpace", *INSIDE)
    assert status == 1 and "Traceback" not in error and "On the worker" not in error
    assert "worker 0" in error


def test_errors_inside_environments_keep_their_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    for name, line in (("Broken", "super().__init__(size=3)"), ("outdated", 'gymnasium.make("NoSuchEnv-v0")')):
        status, _, error = said(capsys, "train", "ppo", "--env", f"tests.cli.test_cli:{name}", *INSIDE)
        assert status == 1 and "Traceback" in error and line in error


@pytest.mark.parametrize("arguments", [[], ["--help"], ["help"], ["train", "--help"]])
def test_help_names_the_commands(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, output, _ = said(capsys, *arguments)
    assert status == 0 and "farstep train ppo" in output


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"farstep {farstep.__version__}\n"


def test_sigint_ends_a_command_with_its_usual_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("farstep.cli.metrics.main", interrupt)
    assert main(["metrics"]) == 130
    assert "stopped by SIGINT" in capsys.readouterr().err


def test_slow_imports_happen_where_sigint_is_handled() -> None:
    script = "import sys, farstep.cli; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=120, check=False).returncode == 0


def unread(*arguments: str, **env: str) -> tuple[int, str]:
    """Return the status of a command whose output is a pipe without a reader, and what it writes to stderr."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "farstep", *arguments]
    try:
        done = subprocess.run(
            command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120, check=False, env=os.environ | env
        )
    finally:
        os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.parametrize("command", ["--version", "metrics", "metrics --help", "train ppo --help"])
@pytest.mark.slow
def test_command_ends_quietly_if_its_output_is_not_read(command: str) -> None:
    assert unread(*command.split()) == (141, "")


def test_command_ends_quietly_if_its_unbuffered_output_is_not_read() -> None:
    assert unread("metrics", PYTHONUNBUFFERED="1") == (141, "")


@pytest.mark.slow
def test_training_continues_if_its_output_is_not_read(tmp_path: Path) -> None:
    options = [
        "--total-steps",
        "64",
        "--num-envs",
        "1",
        "--num-steps",
        "64",
        "--folder",
        str(tmp_path),
        "--name",
        "run",
    ]
    status, error = unread(*CARTPOLE, *options)
    assert status == 0, error
    assert error == "the program that read the output of this run has ended; training continues without printing\n"
    assert list(RunFolder(tmp_path / "run").checkpoints.iterdir())


@pytest.mark.parametrize("cluster", [[], ["--launcher", "slurm", "--debug", "--nodes", "2"]], ids=["local", "cluster"])
@pytest.mark.slow
def test_workers_without_an_environment_are_named(
    cluster: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*TRAIN, *cluster, "--num-envs", "2", "--num-steps", "32", "--total-steps", "64"]
    workers, found, where = ("--workers-per-node", 1, " per node") if cluster else ("--workers", 2, "")
    for wanted in (found, 20):
        status, output, error = said(capsys, *options, workers, str(wanted), "--folder", str(tmp_path))
        assert status == 0, error
        line = f"workers: {found}{where}, not 20 ({workers}): a worker needs an environment; raise --num-envs\n"
        assert (line in output) == (wanted == 20) and ("workers:" in output) == (wanted == 20), output


def test_train_requires_a_learner(capsys: pytest.CaptureFixture[str]) -> None:
    needed = "farstep: 'farstep train' needs a learner: ppo, async-ppo, impala, dqn, apex, sac, aride.\n"
    assert said(capsys, "train") == (1, "", needed)


def test_learner_is_checked_before_torch_is_imported(tmp_path: Path) -> None:
    assert tuple(ALGORITHMS) == LEARNERS
    script = (
        "import sys; from farstep.cli import main; statuses = main(['train']), main(['train', 'poo', '--env', 'X'])\n"
        "assert statuses == (1, 1) and not {'torch', 'gymnasium'} & sys.modules.keys()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0 and "unknown learner 'poo'. Did you mean 'ppo'?" in done.stderr, done.stderr


@pytest.mark.parametrize("learner", ["ppo", "async-ppo", "impala", "dqn", "apex"])
def test_every_option_is_explained(learner: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, output, _ = said(capsys, "train", learner, "--help")
    assert status == 0 and "--total-steps" in output and "--learning-rate" in output


@pytest.mark.parametrize(
    ("learner", "options"),
    [
        ("ppo", ["value-lr", "critic-warmup-updates", "rollout-epochs", "minibatch-size"]),
        ("async-ppo", ["value-lr", "critic-warmup-updates", "rollout-epochs", "global-batch-size"]),
        ("impala", ["value-lr", "critic-warmup-updates"]),
    ],
)
def test_help_says_when_to_use_an_option(learner: str, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _, output, _ = said(capsys, "train", learner, "--help")
    for option in options:
        (helped,) = re.findall(rf"--{option} (.*?)(?:--[a-z]|$)", output, re.S)
        assert {"Use", "Raise"} & set(helped.split()), option


@pytest.mark.parametrize("arguments", [["train", "ppo"], ["watch"], ["plot"], ["train", "ppo", "--launcher", "slurm"]])
def test_help_breaks_lines_only_where_the_next_word_does_not_fit(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    _, output, _ = said(capsys, *arguments, "--help")
    lines = [line.strip("│").rstrip() for line in output.splitlines()]
    width = max(map(len, lines[lines.index("") :]))
    for line, following in itertools.pairwise(lines):
        has_text = not line.strip().startswith("-") or "  " in line.strip()
        if line[25:].strip() and has_text and following.startswith(" " * 25):
            assert len(f"{line} {following.split()[0]}") > width - 3, f"{line!r} ends early, before {following!r}"


def test_help_describes_groups_of_options(capsys: pytest.CaptureFixture[str]) -> None:
    _, output, _ = said(capsys, "train", "ppo", "--help")
    assert "Options of a training run" in output and "Options of synchronous PPO" in output


def test_status_page_is_named_only_if_the_run_is_not_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    status, output, error = said(capsys, *TRAIN, "--coordinator", str(tmp_path / "none"))
    assert (status, output) == (1, "") and "no coordinator can be reached" in error
    (tmp_path / "config.json").write_text(
        json.dumps({"algorithm": "ppo", "run": {"env": "CartPole-v1"}, "learner": {}})
    )
    status, output, error = said(capsys, "train", "ppo", "--resume", str(tmp_path), "--trust")
    assert (status, output) == (1, "") and "ended before its first checkpoint" in error
    options = ["--total-steps", "64", "--num-envs", "1", "--num-steps", "64", "--name", "my run"]
    status, output, _ = said(capsys, *CARTPOLE, *options)
    assert status == 0 and output.startswith("status: farstep status 'runs/my run'\n"), output
    assert output.count("status: ") == 1 and output.endswith("plot:  farstep plot 'runs/my run'\n")
    assert "Runs in runs: my run." in said(capsys, "eval", "my-run")[2]


@pytest.mark.slow
def test_run_that_does_not_start_names_no_folder_that_it_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--env", "Pendulum-v1", "--launcher", "in-process", "--num-envs", "1", "--name", "run"]
    status, output, error = said(capsys, "train", "dqn", *options)
    assert (status, output) == (1, "") and "DQN needs an action space of type Discrete" in error
    (tmp_path / "ssh").write_text("#!/bin/sh\nexit 255\n")
    (tmp_path / "ssh").chmod(0o755)
    nodes = ["--launcher", "ssh", "--hosts", "a", "--ssh", "./ssh", "--name", "run"]
    status, output, error = said(capsys, "train", "ppo", "--env", "CartPole-v1", *nodes)
    assert status == 1 and "1 node is missing" in error
    assert output.splitlines() == [
        "status: farstep status runs/run",
        "runs/run is removed, because the run did not start",
    ]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["train", "eval", "watch"])
def test_commands_that_need_torch_name_the_missing_package(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    status, _, error = said(capsys, command, "ppo" if command == "train" else "runs/NAME")
    assert status == 1
    assert f"'farstep {command}' needs the package torch" in error and "pip install torch" in error


def test_metrics_are_explained_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    status, text, _ = said(capsys, "metrics", "divergence_max", "time/per_worker/3/env")
    assert status == 0 and re.findall(r"^\S+", text, re.M) == ["sync/divergence_max", "time/per_worker/<worker>/env"]
    assert "(gauge, nats)" in text and "stepping and resetting environments" in text
    assert said(capsys, "metrics")[1].count("\n    ") == len(METRICS | STATS | EXPOSED)


@pytest.mark.slow
def test_plots_are_written_to_the_current_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [RunFolder.create(tmp_path / "runs", name, {}) for name in ("one", "other")]
    for run in runs:
        run.metrics_file.write_text('{"step": 1, "env/return_mean": 1.0}\n{"step": 2, "env/return_mean": 2.0}\n')
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert said(capsys, "plot", str(runs[0].path))[:2] == (0, "one.png\n")
    assert said(capsys, "plot", *(str(run.path) for run in runs))[:2] == (0, "comparison.png\n")
    assert said(capsys, "plot", str(runs[0].path), "--out", "deep/own.svg")[:2] == (0, "deep/own.svg\n")
    assert sorted(entry.name for entry in here.iterdir()) == ["comparison.png", "deep", "one.png"]
    assert {entry.name for entry in runs[0].path.iterdir()} == {"config.json", "metrics.jsonl", "checkpoints", "videos"}


@pytest.mark.parametrize("is_terminal", [True, False])
def test_long_imports_are_announced_on_a_terminal(
    is_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    assert main(["eval", str(tmp_path)]) == 1
    notice, erased, error = capsys.readouterr().err.rpartition("\r\x1b[K")
    assert (notice, bool(erased)) == (("loading PyTorch ...", True) if is_terminal else ("", False))
    assert error.startswith("farstep: ")
