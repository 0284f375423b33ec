"""A module that launches when it is imported, as scripts without `if __name__ == "__main__":` do, and whose environment
workers must import: launches inside workers are refused, so that the number of processes stays bounded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import farstep
from farstep.testing import CountingEnv
from tests.cluster.checks import cluster, in_process
from tests.cluster.nodes import shell_in

MODULE = """
import os
from pathlib import Path

import farstep
import farstep.cli
from farstep.testing import CountingEnv, TableAgent

imports = Path("imports.txt")
with imports.open("a") as file:
    file.write(f"{{os.getpid()}}\\n")
if len(imports.read_text().splitlines()) > 8:
    os._exit(3)  # without the refusal, a test of it must end, too


class Env(CountingEnv):
    pass


def env_config(name):
    return {{"type": "factory", "env_name": name, "envs_per_node": 2}}


{launch}
"""
LOCAL = "farstep.LocalConfig(workers_per_node=2)"
OTHER_RUN = """
import farstep
from farstep.testing import CountingEnv

farstep.make_vec(CountingEnv, 1, farstep.InProcessConfig()).close()
"""
CHILDREN = """
import subprocess
import sys

def make():
    done = subprocess.run([sys.executable, "-c", "import breeding"], capture_output=True, text=True)
    raise RuntimeError(done.stderr)
"""
BY_PATH = ["breeding.py"]
IMPORTED = ["-c", "import breeding"]
LAUNCHES = {
    "cluster": (IMPORTED, f"farstep.ClusterEnv(env_config(Env), {LOCAL}).launch()"),
    "script": (BY_PATH, f"farstep.ClusterEnv(env_config('breeding:Env'), {LOCAL}).launch()"),
    "vector-tcp": (IMPORTED, "farstep.make_vec(Env, 2, farstep.LocalConfig(workers_per_node=1, transport='tcp'))"),
    "workflow-in_process": (
        BY_PATH,
        "env = farstep.ClusterEnv(env_config('breeding:Env'), farstep.InProcessConfig(workers_per_node=1))\n"
        "flow = farstep.Workflow(env, TableAgent(), farstep.Buffer(16, farstep.FullBatch()), max_staleness=0)\n"
        "flow.on(farstep.DataKeyTrigger(keys=['obs'], size=4, n=2), print)\n"
        "flow.run(1)",
    ),
    "train": (
        BY_PATH,
        "raise SystemExit(farstep.cli.main('train ppo --env breeding:Env --env-type factory --workers 1 --num-envs 2 "
        "--launcher local'.split()))",
    ),
    "nodes": (
        IMPORTED,
        "shell = (os.path.abspath('shell'),)\n"
        "nodes = farstep.SSHConfig(hosts=['a'], ssh=shell, workers_per_node=1)\n"
        "farstep.ClusterEnv(env_config(Env), nodes).launch()",
    ),
}


def run(folder: Path, arguments: list[str], launch: str) -> tuple[subprocess.CompletedProcess[str], int]:
    """Run the module, and count how many processes imported it."""
    (folder / "breeding.py").write_text(MODULE.format(launch=launch))
    (folder / "children.py").write_text(CHILDREN)
    shell_in(folder)
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=120)
    return done, len((folder / "imports.txt").read_text().splitlines())


@pytest.mark.parametrize("kind", LAUNCHES)
def test_launch_at_import_is_refused_in_workers_and_reported(kind: str, tmp_path: Path) -> None:
    done, imports = run(tmp_path, *LAUNCHES[kind])
    assert done.returncode == 1
    assert "importing the module 'breeding' (" in done.stderr and "if __name__ == '__main__':" in done.stderr
    if kind != "train":  # whose command prints one line
        assert "RemoteLaunchError: importing the module 'breeding'" in done.stderr
    assert imports <= 4, "one import in the program, one in the zygote and one in each of two workers"


def test_launch_in_a_process_that_an_environment_started_is_refused(tmp_path: Path) -> None:
    done, imports = run(tmp_path, IMPORTED, f"farstep.ClusterEnv(env_config('children:make'), {LOCAL}).launch()")
    assert done.returncode == 1 and "importing the module 'breeding' (" in done.stderr
    assert imports <= 3


class LaunchingEnv(CountingEnv):
    def __init__(self) -> None:
        super().__init__()
        farstep.make_vec(LaunchingEnv, 1, farstep.InProcessConfig())


@pytest.mark.parametrize(
    "config", [in_process(1), farstep.LocalConfig(workers_per_node=1)], ids=["in_process", "local"]
)
def test_environment_that_launches_is_refused(config: Any) -> None:
    with pytest.raises(farstep.LaunchError, match=r"inside a worker.*Launch in the learner's program") as caught:
        cluster(LaunchingEnv, envs=1, config=config).launch()
    assert isinstance(caught.value, farstep.RemoteEnvError) and caught.value.where.phase == "construct"
    with cluster(envs=1, config=in_process(1)) as env:
        assert env.launch()


class SubmittingEnv(CountingEnv):
    """Starts a run of its own in another process, with or without the variable that refuses it."""

    def __init__(self, unset: str) -> None:
        super().__init__()
        variables = {name: value for name, value in os.environ.items() if name != unset}
        done = subprocess.run([sys.executable, "-c", OTHER_RUN], env=variables, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)


def test_a_process_that_an_environment_starts_may_launch_on_purpose() -> None:
    with pytest.raises(farstep.RemoteEnvError) as caught:
        cluster(SubmittingEnv, envs=1, workers=1, env_kwargs={"unset": ""}).launch()
    (variable,) = re.findall(r"without the environment variable (\w+)", caught.value.message)
    with cluster(SubmittingEnv, envs=1, workers=1, env_kwargs={"unset": variable}) as env:
        assert env.launch()
