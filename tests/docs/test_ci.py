"""`.ci/run` installs the packages that tests need and are missing; the longest test files start first."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import longest_first
from tests.engines import podman_pods

ROOT = Path(__file__).parents[2]
PYTHON_AND_COMPILERS = {"make", "g++", "python3", "python3-venv", "python3-dev"}
OBSERVERS = {"chromium", "chromium-driver", "fonts-dejavu-core", "prometheus"}
"""What tests look at the status page with."""
OTHERS = {"kubernetes_build.py", "kubernetes_cluster.py", "test_engines.py"}
"""Not engines of CI: `make test-kubernetes` runs the first two."""


def required_packages() -> set[str]:
    """Packages that the engines of tests ask for."""
    found = set(podman_pods.PACKAGES.split())
    for path in (ROOT / "tests" / "engines").glob("*.py"):
        if path.name not in OTHERS:
            found.update(re.findall(r'\brequire\(\s*"([^"]+)"', path.read_text()))
    return found | OBSERVERS


def run_ci(folder: Path, present: set[str], failing: str = "") -> subprocess.CompletedProcess[str]:
    """Run `.ci/run` where these packages are installed, and where `make` does nothing. Let apt or a target fail."""
    programs = {
        "dpkg-query": f'case " {" ".join(present)} " in *" $4 "*) printf installed;; *) exit 1; esac',
        "apt-get": f'[ "{failing}" != apt-get ] || exit 1; [ "$1" != install ] || echo "$@" > {folder}/asked',
        "uv": "true",
        "make": f'echo "$1" >> {folder}/made; echo "output of $1"; [ "$1" != "{failing}" ]',
    }
    (folder / "bin").mkdir()
    for name, script in programs.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / "bin" / name).chmod(0o755)
    environment = {"PATH": f"{folder}/bin:/usr/local/bin:/usr/bin:/bin", "HOME": str(folder)}
    return subprocess.run([ROOT / ".ci" / "run"], env=environment, timeout=60, capture_output=True, text=True)


def installed_by_ci(folder: Path, present: set[str]) -> set[str]:
    """What `.ci/run` asks apt for, where these packages are installed; nothing is."""
    done = run_ci(folder, present)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"CI took \d+ s", done.stdout.splitlines()[-1])
    if not (folder / "asked").exists():
        return set()
    words = (folder / "asked").read_text().split()[1:]
    return {word for word in words if not word.startswith("-")} - PYTHON_AND_COMPILERS


def test_ci_installs_the_packages_of_every_engine(tmp_path: Path) -> None:
    assert installed_by_ci(tmp_path, present=set()) >= required_packages()


@pytest.mark.parametrize("failing", ["setup", "lint", "coverage"])
def test_ci_fails_if_a_target_fails(failing: str, tmp_path: Path) -> None:
    done = run_ci(tmp_path, required_packages() | PYTHON_AND_COMPILERS, failing)
    assert done.returncode != 0
    assert f"output of {failing}" in done.stdout


def test_ci_fails_if_packages_cannot_be_installed(tmp_path: Path) -> None:
    assert run_ci(tmp_path, PYTHON_AND_COMPILERS, "apt-get").returncode != 0


def test_ci_prints_what_linting_prints_after_the_tests(tmp_path: Path) -> None:
    done = run_ci(tmp_path, required_packages() | PYTHON_AND_COMPILERS)
    assert (tmp_path / "made").read_text().split()[0] == "setup"
    printed = re.findall(r"output of (\w+)", done.stdout)
    assert printed == ["setup", "coverage", "lint"]


def test_a_present_podman_hides_none_of_its_packages(tmp_path: Path) -> None:
    assert required_packages() - installed_by_ci(tmp_path, present={"podman"}) == {"podman"}


def test_nothing_is_installed_if_all_packages_are_present(tmp_path: Path) -> None:
    assert installed_by_ci(tmp_path, present=required_packages() | {"procps"}) == set()


def test_files_start_in_the_order_of_their_recorded_durations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longest_first, "DURATIONS", tmp_path / "tests" / "durations.json")
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    recorder: Any = longest_first.Recorder()
    (tmp_path / "tests").mkdir()
    for name, durations in (("quick", [0.1, 0.2]), ("long", [0.2, 30.0]), ("medium", [1.0, 1.0])):
        (tmp_path / "tests" / f"test_{name}.py").touch()
        for number, duration in enumerate(durations):
            nodeid = f"tests/test_{name}.py::test_{number}"
            recorder.pytest_runtest_logreport(SimpleNamespace(nodeid=nodeid, duration=duration))
    recorder.pytest_sessionfinish()
    ids = [f"tests/test_{name}.py::test_{number}" for name in ("quick", "long", "new", "medium") for number in (0, 1)]
    items: Any = [SimpleNamespace(nodeid=nodeid) for nodeid in ids]
    longest_first.pytest_collection_modifyitems(items)
    files = ("new", "long", "medium", "quick")
    assert [item.nodeid for item in items] == [f"tests/test_{name}.py::test_{i}" for name in files for i in (0, 1)]
