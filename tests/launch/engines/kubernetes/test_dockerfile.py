"""The Dockerfile names existing files and extras (no test builds it: base images come from a registry)."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path

from farstep.launch.engines.kubernetes import manifests

ROOT = Path(__file__).parents[4]
TEXT = (ROOT / "Dockerfile").read_text()


def test_copied_files_exist_and_are_not_ignored() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", TEXT, re.M):
        for source in sources.split():
            assert (ROOT / source).exists(), source
            assert any(fnmatch.fnmatch(source, pattern) for pattern in kept), source


def test_extras_exist_and_python_is_new_enough() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"^ARG EXTRAS=(.*)$", TEXT, re.M)
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    (python,) = re.findall(r"^ARG PYTHON=(.*)$", TEXT, re.M)
    assert project["requires-python"] == f">={python}"


def test_user_of_the_image_is_that_of_pods() -> None:
    assert f"USER {manifests.POD_USER}:{manifests.POD_USER}" in TEXT
    assert f"--uid {manifests.POD_USER}" in TEXT
