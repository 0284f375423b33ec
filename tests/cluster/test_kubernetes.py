"""Workers in pods: podman runs the manifests that Kubernetes would get. A real cluster: `make test-kubernetes`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.guarded import EngineMissing
from tests.engines.podman_pods import PodmanPods

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pods() -> Iterator[PodmanPods]:
    try:
        with PodmanPods() as running:
            yield running
    except EngineMissing as missing:
        if os.environ.get("FARSTEP_ENGINES") == "required":
            raise
        pytest.skip(str(missing))


@pytest.mark.timeout(600)
def test_daemons_in_pods_keep_the_contract_of_launchers(pods: PodmanPods) -> None:
    command: list[str | Path] = [sys.executable, "-m", "tests.engines.pods_head", pods.url, pods.folder]
    head = pods.popen("head", command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    said, _ = head.communicate(timeout=580)
    assert head.returncode == 0 and said.splitlines()[-1] == "kept", said
    assert pods.pods() == []
