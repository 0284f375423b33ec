"""Mistakes in options are reported before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from farstep.cli.options.algorithms import ALGORITHMS
from farstep.cli.options.early_check import CONFIGS, check_early, options_of
from farstep.cli.options.parsing import option_names

MISTAKES = {
    "--num-env 4": "has no option --num-env; did you mean --num-envs or --num-steps",
    "--learing-rate 1e-3": "has no option --learing-rate; did you mean --learning-rate?",
    "-num-envs 4": "has no option -num-envs; did you mean --num-envs?",
    "--num_envs=0": "--num-envs is 0; it must be an integer of at least 1.",
    "--num-envs -1 --learning-rate 1e-3": "--num-envs is -1; it must be an integer of at least 1.",
    "--total-steps many": "--total-steps: expected a whole number, such as 100000 or 1e5, got 'many'.",
    "--launcher slrum": "unknown launcher 'slrum'. Did you mean 'slurm'?",
    "--launcher slurm --nodes 0": "nodes is 0; it must be an integer of at least 1.",
    "--config run.yaml --learing-rate 1e-3": "has no option --learing-rate; did you mean --learning-rate?",
}


def test_options_are_checked_before_torch_is_imported(tmp_path: Path) -> None:
    script = (
        "import sys; from farstep.cli import main\n"
        f"for options in {list(MISTAKES)}:\n"
        "    assert main(['train', 'ppo', '--env', 'CartPole-v1', *options.split()]) == 1\n"
        "assert main(['train', 'ppo', '--num-envs', '4']) == 1\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    expected = [*MISTAKES.values(), "'farstep train ppo' needs --env."]
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    for error, words in zip(done.stderr.splitlines(), expected, strict=True):
        assert error.startswith("farstep: ") and words in error


def test_options_in_the_source_are_those_of_the_classes() -> None:
    assert CONFIGS.keys() == ALGORITHMS.keys()
    for name, algorithm in ALGORITHMS.items():
        assert options_of(name) == set(option_names(algorithm.config))


@pytest.mark.parametrize(
    "options",
    [
        "--env CartPole-v1 --learning-rate 1e-3 --no-anneal-lr --trust",
        "--env CartPole-v1 --buffer-size 3",  # of other learners; checked later, with a better message
        "--env CartPole-v1 --hosts a",
        "--env CartPole-v1 --num-envs 0 --help",
        "--resume runs/run --num-envs 0",
    ],
)
def test_other_options_are_left_to_the_parser(options: str) -> None:
    check_early("ppo", options.split())
