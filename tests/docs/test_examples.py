"""Every example is run for a short time, and none is forgotten."""

import ast
import contextlib
import difflib
import io
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
BRIEFLY = {
    "cartpole_ppo.py": ["--total-steps 4096 --solved-return 10"],
    "clusterenv_ppo.py": [],  # see below
    "own_ppo_single.py": ["--total-timesteps 4096"],
    "own_ppo_farstep.py": ["--total-timesteps 4096"],
    "sb3_unmodified.py": ["--total-timesteps 2048", "--learner dqn --total-timesteps 1024"],
    "evolution.py": [],  # until it is solved: see below
    "jax_agent.py": ["--workers 1 --num-envs 8 --num-steps 16 --total-steps 1280"],
    "lora_policy.py": [],  # see tests/agents/test_lora.py, which has imported peft
}

IN_PROCESSES_OF_THEIR_OWN = {"cartpole_ppo.py", "jax_agent.py"}
"""The demo, as `make demo` runs it, and JAX, which must not be in a process that forks."""


def run(name: str, options: str, folder: Path) -> str:
    """Its output; what it leaves behind, as Stable-Baselines3 does, goes to a folder of the test."""
    command: list[str | Path] = [sys.executable, EXAMPLES / name, *options.split()]
    environment = os.environ | {"TMPDIR": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_here(name: str, options: str, folder: Path) -> str:
    """The same in this process, which has imported torch: that takes most of the CPU time of an example."""
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.chdir(folder)
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setattr(sys, "argv", [name, *options.split()])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return output.getvalue()


def code(name: str) -> list[str]:
    """An example's lines, but for blank ones and what its docstring says."""
    text = (EXAMPLES / name).read_text()
    docstring = ast.parse(text).body[0]
    return [line for line in text.splitlines()[docstring.end_lineno :] if line.strip()]


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(BRIEFLY)


@pytest.mark.parametrize(("name", "options"), [(name, options) for name, ways in BRIEFLY.items() for options in ways])
@pytest.mark.usefixtures("torch_in_workers")
def test_example_runs_and_prints_its_progress(name, options, tmp_path):
    run_it = run if name in IN_PROCESSES_OF_THEIR_OWN else run_here
    assert "return" in run_it(name, options, tmp_path)


@pytest.mark.usefixtures("torch_in_workers")
def test_clusterenv_example_prints_every_update(tmp_path):
    """As a program of its own, tests/cluster/test_slurm.py runs it."""
    options = "--debug --nodes 2 --envs-per-node 4 --num-steps 128 --num-updates 3 --update-epochs 1"
    output = run_here("clusterenv_ppo.py", options, tmp_path)
    assert re.findall(r"^update ([0-9]+): .*return", output, re.M) == ["1", "2", "3"]


def test_evolution_solves_cartpole(tmp_path):
    assert float(re.findall(r"return +([0-9.]+)", run_here("evolution.py", "", tmp_path))[-1]) >= 475


@pytest.mark.parametrize("name", sorted(BRIEFLY))
def test_an_example_says_what_it_is_and_takes_options(name):
    tree = ast.parse((EXAMPLES / name).read_text())
    assert ast.get_docstring(tree)
    assert "tyro.cli(Args)" in ast.unparse(tree)


def test_custom_loop_needs_few_changes():
    changes = difflib.ndiff(code("own_ppo_single.py"), code("own_ppo_farstep.py"))
    assert sum(line.startswith(("+ ", "- ")) for line in changes) <= 15


def test_evolution_needs_no_framework():
    assert not {"torch", "jax"} & set(
        re.findall(r"^(?:import|from) (\w+)", (EXAMPLES / "evolution.py").read_text(), re.M)
    )
