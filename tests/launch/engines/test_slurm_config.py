"""Words of `SlurmConfig` that ClusterEnv's programs use: `gpu_type` and `debug`."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest

import farstep
from farstep.cli.doctor import main as doctor
from farstep.cli.slurm import main as slurm
from farstep.errors import ConfigError
from farstep.launch.engines.slurm import batch_script, step_command
from farstep.testing import CountingEnv, TableAgent


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"gpu_type": "a100"}, "--gres=gpu:a100:1"),
        ({"gpu_type": "a100", "gpus_per_node": 4}, "--gres=gpu:a100:4"),
        ({"gpu_type": "gpu:volta", "gpus_per_node": 2}, "--gres=gpu:volta:2"),
        ({"gpu_type": "gpu"}, "--gpus-per-node=1"),
        ({"gpus_per_node": 2}, "--gpus-per-node=2"),
    ],
    ids=repr,
)
def test_jobs_and_steps_ask_for_gpus_of_a_type(options: dict[str, Any], asked: str) -> None:
    config = farstep.SlurmConfig(**options)
    assert f"#SBATCH {asked}" in batch_script(config, 1, 1).splitlines()
    assert asked in step_command(config, 1, 1)
    assert config.gpu_of(0) == 0  # its workers act on them


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpu_type": "a100:2"}, ["'a100:2'", "gpus_per_node"]),
        ({"gpu_type": ""}, ["gpu_type is ''", "'a100'"]),
        ({"gpu_type": "a100", "slurm_extra": ["--exclusive --gres=gpu:1"]}, ["gpu_type='a100'", "'--gres=gpu:1'"]),
        ({"gpu_type": "a100", "slurm_extra": ["--gpus-per-task=1"]}, ["'--gpus-per-task=1'", "one of them"]),
        ({"debug": 1}, ["debug is 1", "True or False"]),
    ],
    ids=repr,
)
def test_gpu_and_debug_options_that_do_not_fit_are_refused(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        farstep.SlurmConfig(**options)
    assert all(word in str(error.value) for word in words), error.value


def test_debug_runs_as_many_workers_on_this_machine(caplog: pytest.LogCaptureFixture) -> None:
    source = {"type": "factory", "env_name": CountingEnv, "envs_per_node": 3, "seed": 1}
    config = farstep.SlurmConfig(nodes=2, workers_per_node=1, debug=True, gpu_type="a100", partition="gpu")
    with caplog.at_level(logging.WARNING, "farstep"), farstep.ClusterEnv(source, config) as env:
        assert "running all workers of 2 nodes on the CPU of this machine, without SLURM" in caplog.text
        assert env.collect(TableAgent(), steps=2)["obs"].shape == (2, 6, 3)
        assert env.stats()["workers"]["alive"] == env.num_workers == 2


def test_debug_with_make_vec() -> None:
    config = farstep.SlurmConfig(workers_per_node=1, debug=True)
    with contextlib.closing(farstep.make_vec(CountingEnv, 2, config)) as env:
        assert env.reset()[0].shape == (2, 3)


@pytest.mark.slow
def test_debug_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="no job"):
        slurm(["--print", "--debug"])
    assert slurm(["--print", "--gpu-type", "a100"]) == 0
    assert "--gres=gpu:a100:1" in capsys.readouterr().out
    assert doctor(["--launcher", "slurm", "--debug", "--workers-per-node", "1"]) == 0
    assert "--debug does not use SLURM" in capsys.readouterr().out
