"""`farstep train --config`: a file repeats a run, the command line wins, and mistakes are named."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from farstep.cli import main
from farstep.config.launch import SlurmConfig

train_options = pytest.importorskip("farstep.cli.options.train_options")

SHORT = ["--launcher", "in-process", "--num-envs", "2", "--num-steps", "16", "--total-steps", "64"]


def parsed(*arguments: str, learner: str = "ppo") -> Any:
    """The options that a command has, without running it."""
    return train_options.parse_options(learner, list(arguments))


def written(folder: Path, text: str) -> str:
    (folder / "run.yaml").write_text(text)
    return str(folder / "run.yaml")


def config(run: Path) -> dict[str, Any]:
    """The options in config.json without the tag, which covers the name."""
    found: dict[str, Any] = json.loads((run / "config.json").read_text())
    del found["tag"]
    return found


@pytest.mark.slow
def test_config_of_a_run_repeats_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--env-kwargs", '{"sutton_barto_reward": true}', "--hidden", "8", "--learning-rate", "1e-05"]
    assert main(["train", "ppo", "--env", "CartPole-v1", *SHORT, *options, "--name", "one", "--no-anneal-lr"]) == 0
    one = tmp_path / "runs" / "one"
    assert main(["train", "--config", str(one / "config.yaml")]) == 0, "the file names the learner"
    again = tmp_path / "runs" / "one-2"
    assert config(again) == config(one)
    assert (again / "config.yaml").read_text() == (one / "config.yaml").read_text()
    returns = [
        [json.loads(line)["env/episodes"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (one, again)
    ]
    assert returns[0] == returns[1]
    assert main(["train", "--resume", str(one), "--total-steps", "96"]) == 0
    assert "total_steps: 96\n" in (one / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("learner", "options"),
    [
        ("ppo", "--env X --wrappers gymnasium.wrappers:FlattenObservation a-b:c --stagger '{\"horizon\":  7}'"),
        ("ppo", '--env "odd: [name] #1" --env-kwargs \'{"a": [1, null, "no"]}\' --name yes --kl-threshold 1e-9'),
        ("async-ppo", "--env X --recurrent lstm --no-normalize-obs --target-return -200 --folder /some/where"),
        ("impala", "--env X --eval-every 100 --hidden --device cuda:1"),
        (
            "ppo",
            "--env X --launcher slurm --nodes 4 --partition 7 --slurm-extra=--exclusive --step-s 3 --setup 'a b' c",
        ),
        ("ppo", "--env X --launcher ssh --hosts a b --lease-s 5 --no-encrypted"),
        ("ppo", "--env X --launcher ray --resources-per-node '{\"gpu\": 0.5}'"),
        ("ppo", '--env X --launcher kubernetes --image x:1 --tolerations \'[{"key": "a"}]\' --requests cpu 4'),
    ],
)
def test_every_option_survives_the_file(learner: str, options: str, tmp_path: Path) -> None:
    before = parsed(*shlex.split(options), learner=learner)
    parts = {"run": before.run, "learner": before.learner, "cluster": before.nodes}
    path = written(tmp_path, train_options.as_yaml(learner, parts))
    after = parsed("--config", path, learner=learner)
    for one, other in ((before.run, after.run), (before.learner, after.learner), (before.nodes, after.nodes)):
        assert type(one) is type(other)
        assert msgspec.to_builtins(one, enc_hook=str) == msgspec.to_builtins(other, enc_hook=str)


def test_command_line_takes_precedence(tmp_path: Path) -> None:
    path = written(tmp_path, "num-envs: 8\ngamma: 0.5\nlearning_rate: 3e-4\nhidden: [4]\ncapture_video: true\n")
    options = parsed("--config", path, "--env", "X", "--gamma=0.9", "--eval-every", "10")
    assert (options.run.env, options.run.num_envs, options.run.eval_every) == ("X", 8, 10)
    assert (options.learner.gamma, options.learner.learning_rate, options.learner.net.hidden) == (0.9, 3e-4, (4,))


def test_integers_may_have_an_exponent(tmp_path: Path) -> None:
    path = written(tmp_path, "env: X\nnum_envs: 1e2\ntotal_steps: 2.5e6\n")
    assert (parsed("--config", path).run.num_envs, parsed("--config", path).run.total_steps) == (100, 2_500_000)
    steps = "--total-steps 2.5E6 --eval-every 1e5 --seed 0e0 --hidden 1e2 64"
    options = parsed(*shlex.split(f"--env X {steps} --launcher slurm --nodes 1e1 --num-envs 1e+1"))
    assert (options.run.total_steps, options.run.eval_every, options.run.num_envs) == (2_500_000, 100_000, 10)
    assert (options.run.seed, options.learner.net.hidden, options.nodes.nodes) == (0, (100, 64), 10)


def test_another_launcher_uses_the_options_that_it_has_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "env: X\nlauncher: slurm\nnodes: 4\npartition: cpu\nlease_s: 7\n")
    slurm = parsed("--config", path).nodes
    assert isinstance(slurm, SlurmConfig) and (slurm.nodes, slurm.partition, slurm.lease_s) == (4, "cpu", 7.0)
    ssh = parsed("--config", path, "--launcher", "ssh", "--hosts", "a", "b", "c", "d").nodes
    assert (ssh.nodes, ssh.lease_s) == (4, 7.0)
    assert parsed("--config", path, "--launcher", "local").run.launcher == "local"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("env: X\nnum_env: 4\n", ["unknown option 'num_env'", "did you mean num_envs?"]),
        ("env: X\nnonsense: 4\n", ["'nonsense'", "-h"]),
        ("env: X\nstaleness_threshold: 4\n", ["belongs to 'farstep train async-ppo'"]),
        ("env: X\npartition: 4\n", ["belongs to launcher: slurm"]),
        ("env: X\nnum_envs: many\n", ["num_envs is 'many'", "Expected `int`"]),
        ("env: X\nnum_envs: 1.5\n", ["num_envs is 1.5", "Expected `int`"]),
        ("env: X\nactivation: rleu\n", ["activation is 'rleu'", "Invalid enum value"]),
        ("env: X\nnum_envs: 0\n", ["num_envs", "at least 1"]),
        ("env: X\nseed: 1\nseed: 2\n", ["line 3", "seed occurs twice"]),
        ("env: X\nlauncher: slrum\n", ["launcher 'slrum'", "'slurm'"]),
        ("algorithm: impala\n", ["is for impala, not for ppo", "farstep train impala --config"]),
        ("seed: 1\n", ["'farstep train ppo' needs --env"]),
        ("", ["needs --env"]),
        ("- env\n", ["contains a list", "env: CartPole-v1"]),
        ("env: [\n", ["is not YAML: line 2, column 1: ", "while parsing a flow node"]),
        ("env: X\n\tseed: 1\n", ["is not YAML: line 2, column 1: found character '\\t' that cannot start any token"]),
        ("env: X\n\x07\n", ["is not YAML", "special characters are not allowed"]),
        ("run:\n  env: X\n", ["unknown option 'run'", "without indentation"]),
        ("env: X\nenv_kwargs: {since: 2024-01-01}\n", ["env_kwargs must have only numbers, text, lists", "date"]),
        ("env: X\nenv_kwargs: &a {x: *a}\n", ["env_kwargs must have only", "Circular"]),
        ("env: X\nenv_kwargs: {a: 1, a: 2}\n", ["line 2", "a occurs twice"]),
        ("env: X\nenv_kwargs: {on: 1}\n", ["the key True, which is not text", "quotes"]),
        ("env: X\nseed: !!int abc\n", ["cannot be read", "abc"]),
    ],
)
def test_mistakes_in_the_file_are_named(
    text: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "ppo", "--config", written(tmp_path, text)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("farstep: ") and error.count("\n") == 1, error
    for word in words:
        assert word in error


def test_numbers_without_a_decimal_point_are_numbers_in_mappings_too(tmp_path: Path) -> None:
    path = written(tmp_path, "env: X\nenv_kwargs: {gravity: 1e-3, name: e3}\nlearning_rate: 3e-4\ntotal_steps: 1e6\n")
    options = parsed("--config", path)
    assert json.loads(options.run.env_kwargs) == {"gravity": 0.001, "name": "e3"}
    assert (options.learner.learning_rate, options.run.total_steps) == (3e-4, 1_000_000)


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        (["--config", "run.yaml"], "env: CartPole-v1", "run.yaml names no learner; add 'algorithm: ppo' to it"),
        (["--config", "run.yaml"], "algorithm: pppo", "unknown learner 'pppo'"),
        (["--env", "CartPole-v1"], "", "needs a learner (ppo, async-ppo, impala, "),
        (["--config"], "", "--config needs a YAML file"),
    ],
)
def test_a_missing_learner_is_named(
    arguments: list[str],
    text: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, text)
    assert main(["train", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_two_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "env: X\n")
    assert main(["train", "ppo", "--config", path, "--config", path]) == 1
    assert "--config was given twice" in capsys.readouterr().err


def test_mistakes_around_the_file_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "env: X\n")
    for arguments, words in (
        (["--config"], "--config needs a YAML file"),
        (["--config", str(tmp_path / "none.yaml")], "none.yaml cannot be read"),
        (["--config", path, "--resume", str(tmp_path)], "--resume and --config contradict each other"),
    ):
        assert main(["train", "ppo", *arguments]) == 1
        assert words in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert main(["train", "ppo", "--config", path]) == 1
    assert "pip install 'farstep[yaml]'" in capsys.readouterr().err
