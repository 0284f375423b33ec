"""The README is short, its commands are accepted, and links of all pages lead somewhere."""

import re
from pathlib import Path
from typing import Any

import pytest

import farstep

ROOT = Path(__file__).parents[2]


def example(page: str) -> tuple[str, str]:
    """A page's only block of Python that is followed by what it prints, and what it prints."""
    text = (ROOT / page).read_text()
    (found,) = re.findall(r"^```python\n(.*?)^```\n\n```\n(.*?)^```$", text, re.S | re.M)
    return found


def test_the_readme_and_its_example_are_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    assert len([line for line in example("README.md")[0].splitlines() if line.strip()]) == 12


def test_the_line_that_moves_the_example_to_slurm_takes_its_place():
    text = (ROOT / "README.md").read_text()
    _, line = re.findall(r"^```python\n(.*?)^```$", text, re.S | re.M)
    assert line.count("\n") == 1 and 'seed": 1}, config) as env' in example("README.md")[0]
    names: dict[str, Any] = {"farstep": farstep}
    exec(line, names)
    env = farstep.ClusterEnv({"env_name": "CartPole-v1", "envs_per_node": 8, "seed": 1}, names["config"])
    assert isinstance(names["config"], farstep.SlurmConfig) and env.num_envs == 4 * 8


def test_the_readmes_commands_are_accepted():
    train_options = pytest.importorskip("farstep.cli.options.train_options")
    blocks = "".join(re.findall(r"^```bash\n(.*?)^```$", (ROOT / "README.md").read_text(), re.S | re.M))
    lines = re.findall(r"^farstep (\w+) (.*?)(?: +#.*)?$", blocks, re.M)
    assert [command for command, _ in lines] == ["train", "train", "eval", "watch", "status", "plot"]
    learner, *options = lines[0][1].split()
    assert train_options.parse_options(learner, options).run.env == "CartPole-v1"


def test_the_demo_ends_with_the_readmes_next_commands():
    readme, makefile = ((ROOT / name).read_text() for name in ("README.md", "Makefile"))
    (activate, train) = re.findall(r'^\t@echo "next: (.*), then (.*)"$', makefile, re.M)[0]
    assert f"`{activate.replace('$(BIN)', '.venv/bin')}`" in readme and f"\n{train} " in readme


def test_every_relative_link_exists():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_link_to_a_heading_has_one():
    pages = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md", *(ROOT / "docs").glob("*.md"))
    for page in pages:
        for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
            linked = page.parent / target if target else page
            assert anchor in headings(linked), f"{page.name} links to {target}#{anchor}"
