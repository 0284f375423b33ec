"""`.ci/run` installs what tests need on a machine that has some of it, or nothing."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import podman_pods

ROOT = Path(__file__).parents[2]
PYTHON_AND_COMPILERS = {"make", "g++", "python3", "python3-venv", "python3-dev"}
OTHERS = {"kubernetes_build.py", "kubernetes_cluster.py", "test_engines.py"}
"""Not engines of CI: `make test-kubernetes` runs the first two."""


def required_packages() -> set[str]:
    """Packages that the engines of tests ask for."""
    found = set(podman_pods.PACKAGES.split())
    for path in (ROOT / "tests" / "engines").glob("*.py"):
        if path.name not in OTHERS:
            found.update(re.findall(r'\brequire\(\s*"([^"]+)"', path.read_text()))
    return found


def installed_by_ci(folder: Path, present: set[str]) -> set[str]:
    """What `.ci/run` asks apt for, where these packages are installed; nothing is."""
    programs = {
        "dpkg-query": f'case " {" ".join(present)} " in *" $4 "*) printf installed;; *) exit 1; esac',
        "apt-get": f'[ "$1" != install ] || echo "$@" > {folder}/asked',
        "make": f'echo "$@" > {folder}/made',
    }
    (folder / "bin").mkdir()
    for name, script in programs.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / "bin" / name).chmod(0o755)
    environment = {"PATH": f"{folder}/bin:/usr/local/bin:/usr/bin:/bin", "HOME": str(folder)}
    subprocess.run([ROOT / ".ci" / "run"], env=environment, check=True, timeout=60, capture_output=True)
    assert (folder / "made").read_text().split() == ["lint", "test"]
    if not (folder / "asked").exists():
        return set()
    words = (folder / "asked").read_text().split()[1:]
    return {word for word in words if not word.startswith("-")} - PYTHON_AND_COMPILERS


def test_ci_installs_the_packages_of_every_engine(tmp_path: Path) -> None:
    assert installed_by_ci(tmp_path, present=set()) >= required_packages()


def test_a_present_podman_hides_none_of_its_packages(tmp_path: Path) -> None:
    assert required_packages() - installed_by_ci(tmp_path, present={"podman"}) == {"podman"}


def test_nothing_is_installed_if_all_packages_are_present(tmp_path: Path) -> None:
    assert installed_by_ci(tmp_path, present=required_packages() | {"procps"}) == set()
