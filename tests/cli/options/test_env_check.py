"""Mistakes in the name of an environment are reported before slow imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


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
    }
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
