"""Mistakes in the name of an environment are reported before slow imports."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from farstep.cli.options.env_check import check_env
from farstep.errors import ConfigError
from farstep.learners.options.run_config import RunConfig

MODULE = """
import functools
import farstep.testing

def make(size, last=None):
    return farstep.testing.CountingEnv()

@functools.wraps(make)
def accepts_all(**kwargs):
    return make(3)

def make_vector(num_envs):
    pass
"""


def test_environment_is_checked_before_torch_is_imported(tmp_path: Path) -> None:
    mistakes = {
        "--env NoSuch-v0": "Environment `NoSuch` doesn't exist",
        "--env NoSuch": "Environment `NoSuch` doesn't exist",
        "--env=ALE/Nong-v5": "Did you mean: `Pong`?",
        "--env no_module:Env-v0": "No module named 'no_module'",
        "--env LunarLander-v3": "needs Box2D, which is not installed",
        "--env no_module.make --env-type factory": "No module named 'no_module'",
        "--env no_module.make --env_type vector": "No module named 'no_module'",
        "--env Pong-v5 --env-type envpool": "needs envpool, which is not installed",
        "--env CartPole-v1 --seed 3 --wrappers gymnasium.wrappers:FlattenObservation no.module:Wrapper": "'no'",
        "--env CartPole-v1 --wrappers gymnasium.wrappers:Nothing": "has no 'Nothing'",
        "--env CartPole-v1 --wrappers my_envs:mak": "the module 'my_envs' has no 'mak'. Did you mean 'make'?",
        "--env my_envs:mak --env-type factory": "the module 'my_envs' has no 'mak'. Did you mean 'make'?",
        "--env my_envs:make": "add type='factory' (on the command line: --env-type factory)",
        "--env my_envs:Make-v0": "Environment `Make` doesn't exist",
        "--env my_envs:make --env-type vector": "make() got an unexpected keyword argument 'num_envs'",
    }
    (tmp_path / "my_envs.py").write_text(MODULE)
    script = (
        "import sys; from farstep.cli import main; sys.modules['Box2D'] = sys.modules['envpool'] = None\n"
        f"for options in {list(mistakes)}:\n"
        "    assert main(['train', 'dqn', *options.split()]) == 1\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    errors = done.stderr.splitlines()
    assert (done.returncode, done.stdout, len(errors)) == (0, "", len(mistakes)), done.stderr
    for error, words in zip(errors, mistakes.values(), strict=True):
        assert error.startswith("farstep: ") and words in error


@pytest.mark.parametrize(
    ("name", "kwargs", "refused"),
    [
        ("make", {"size": 3}, ""),
        ("make", {"size": 3, "lats": 1}, "make() got an unexpected keyword argument 'lats'"),
        ("accepts_all", {"lats": 1}, ""),
        ("fails", {}, ""),
    ],
)
def test_arguments_are_checked_before_workers_start(
    name: str, kwargs: dict[str, int], refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "args_env.py").write_text(MODULE)
    (tmp_path / "failing_env.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    module = "failing_env" if name == "fails" else "args_env"
    run = RunConfig(env=f"{module}:{name}", env_type="factory", env_kwargs=json.dumps(kwargs))
    with pytest.raises(ConfigError, match=re.escape(refused)) if refused else contextlib.nullcontext():
        check_env(run)
