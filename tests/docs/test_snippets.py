"""Every block of Python on a page runs, here or in the test that is named here, or has a reason why it does not.

The blocks of a page are one script. If a page shows what blocks print, the script must print exactly this.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_examples import EXAMPLES, code

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks/README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
]

ELSEWHERE = {
    ("docs/cluster.md", 0): "test_cluster_pages.py",
    ("docs/slurm.md", 0): "test_cluster_pages.py",
    ("docs/ssh.md", 0): "test_cluster_pages.py",
    ("docs/kubernetes.md", 0): "test_kubernetes_page.py",
    ("docs/kubernetes.md", 1): "test_kubernetes_page.py",
    ("docs/kubernetes.md", 2): "test_kubernetes_page.py",
    ("docs/ray.md", 0): "../cluster/test_ray.py",
    ("docs/sharing.md", 0): "test_sharing_page.py",
}
"""Blocks that another test runs, by page and position."""

OWN_PROCESS = {
    "README.md",
    "docs/adaptive_batch.md",
    "docs/consumers.md",
    "docs/elasticity.md",
    "docs/releasing.md",
    "docs/workflows.md",
}
"""Pages whose script runs in a process of its own, as a user runs it; the others save the import of torch."""

SMALL_ENV = """
import farstep
env = farstep.ClusterEnv({"env_name": "CartPole-v1", "envs_per_node": 4, "seed": 1}, farstep.InProcessConfig())
"""
SETUPS = {
    "docs/aride.md": SMALL_ENV
    + """
from pathlib import Path
from farstep.learners import ArideConfig, make_agent
agent = make_agent(*env.launch(), ArideConfig().net, 0.99)
""",
    "docs/lora.md": """
import farstep
from farstep import learners
from farstep.learners import Aride, ArideConfig, Training
from lora_policy import Spelling, make_policy
described = {"type": "factory", "env_name": Spelling, "envs_per_node": 4, "seed": 1}
env = farstep.ClusterEnv(described, farstep.InProcessConfig())
policy = make_policy()
policy.add_adapters(also_train=("critic",))
def Limits(total_steps):
    return learners.Limits(total_steps=total_steps // 400)
""",
    "docs/ppo.md": SMALL_ENV
    + """
from farstep.cli import main
main("train ppo --env CartPole-v1 --num-envs 4 --total-steps 256 --launcher in-process --name NAME".split())
""",
    "docs/progress.md": SMALL_ENV
    + """
from torch.utils.tensorboard import SummaryWriter
env.collect(farstep.testing.TableAgent(), steps=4)
writer, step, before = SummaryWriter("logs"), 4, env
""",
    "docs/ray.md": "import farstep",
    "docs/sharing.md": """
import torch
from learner import move
net = torch.nn.Linear(2, 2)
optimizer = torch.optim.Adam(net.parameters())
net(torch.ones(2)).sum().backward()
optimizer.step()
move(net, optimizer, "cpu")  # the rest needs a GPU
""",
    "docs/status.md": "import farstep",
    "docs/transfer.md": """
import gymnasium
import numpy as np
import torch
from farstep.learners import NetConfig, make_agent, returns
lander = gymnasium.make("LunarLander-v3")
agent = make_agent(lander.observation_space, lander.action_space, NetConfig(), 0.99)
optimizer = torch.optim.Adam(agent.parameters())
def gae(batch):
    keys, zeros = ("reward", "value", "terminated", "truncated"), np.zeros_like(batch["value"])
    reward, value, terminated, truncated = (batch[key] for key in keys)
    return returns.gae(reward, value, zeros[0], terminated, truncated, zeros, 0.99, 0.95)[0]
def learn(batch, advantages):
    assert batch["obs"].shape[:2] == advantages.shape
def loss(batch):
    return agent.value(torch.from_numpy(batch["obs"]).flatten(0, 1)).mean()
""",
}
"""What pages assume and do not show."""

FILE = re.compile(r"# (\w+\.py)\n")
"""How a block begins that is a file of its own."""


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: str) -> list[tuple[str, str]]:
    """Blocks of Python, each with what the block that follows it says that it prints."""
    found = re.findall(r"^( *)```python\n(.*?)^ *```$(?:\n\n```\n(.*?)^```$)?", (ROOT / page).read_text(), re.S | re.M)
    return [(re.sub(rf"^{indent}", "", block, flags=re.M), printed) for indent, block, printed in found]


def run_here(script: Path) -> str:
    """Run a script in this process, which has imported torch; return what it prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        names = runpy.run_path(str(script), run_name="__main__")
    for value in names.values():
        if hasattr(value, "close") and not isinstance(value, type):
            value.close()
    return output.getvalue()


def run(script: Path) -> str:
    """Run a script in a process of its own; return what it prints."""
    command = [sys.executable, "-u", script.name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=script.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout


ALL = {(name_of(page), position) for page in PAGES for position in range(len(blocks(name_of(page))))}
RUN_HERE = ALL - ELSEWHERE.keys()


def test_listed_blocks_exist():
    assert ELSEWHERE.keys() <= ALL and OWN_PROCESS | SETUPS.keys() <= {page for page, _ in RUN_HERE}
    for page, test in {(page, test) for (page, _), test in ELSEWHERE.items()}:
        assert Path(page).name in (Path(__file__).parent / test).read_text(), f"{test} runs no block of {page}"


@pytest.mark.usefixtures("torch_in_workers")
@pytest.mark.parametrize("page", sorted({page for page, _ in RUN_HERE}))
def test_blocks_of_a_page_run_and_print_what_it_shows(page, tmp_path, monkeypatch):
    shown = [block for position, block in enumerate(blocks(page)) if (page, position) in RUN_HERE]
    files = {found[1]: block for block, _ in shown if (found := FILE.match(block))}
    script = "\n".join([SETUPS.get(page, ""), *(block for block, _ in shown if not FILE.match(block))])
    for name, content in {**files, "script.py": script}.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(EXAMPLES), *sys.path])
    before = set(sys.modules)
    try:
        printed = run(tmp_path / "script.py") if page in OWN_PROCESS else run_here(tmp_path / "script.py")
    finally:
        for name in {Path(file).stem for file in [*files, *EXAMPLES.glob("*.py")]} - before:
            sys.modules.pop(name, None)
    if any(text for _, text in shown):
        assert printed == "".join(text for _, text in shown)


def test_page_of_cleanrl_shows_the_lines_that_differ():
    (shown,) = re.findall(r"^```diff\n(.*?)^```$", (ROOT / "docs/from_cleanrl.md").read_text(), re.S | re.M)
    changes = difflib.unified_diff(code("own_ppo_single.py"), code("own_ppo_farstep.py"), lineterm="", n=0)
    lines = [line for line in list(changes)[2:] if not line.startswith("@")]
    assert shown.splitlines() == lines
