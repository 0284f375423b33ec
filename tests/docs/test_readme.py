"""The README's example is run as it stands and must print what the README says."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_readme_example_prints_what_it_says(tmp_path):
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.S | re.M)
    code = [text for kind, text in blocks if kind == "python"]
    printed = [text for kind, text in blocks if not kind][-1]
    assert len(code) == 1
    assert len([line for line in code[0].splitlines() if line.strip()]) == 12
    script = tmp_path / "example.py"
    script.write_text(code[0])
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout == printed


def test_every_relative_link_exists():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
