"""Every way to start and to park workers keeps the contract of `farstep.testing.check_start_backend`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

import farstep
from farstep.launch.daemon.process import WorkerProcess
from farstep.testing import check_start_backend
from tests.contract.test_nodes import config as node_config

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("method", ["cold", "zygote"])
def test_workers_of_this_machine(method: Any) -> None:
    check_start_backend(functools.partial(farstep.LocalConfig, start_method=method))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("relay", [False, True], ids=["direct", "relay"])
def test_workers_of_a_node_daemon(tmp_path: Path, relay: bool) -> None:
    check_start_backend(functools.partial(node_config, tmp_path, relay=relay))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("method", ["cold", "zygote"])
def test_workers_that_are_parked_on_disk(tmp_path: Path, method: Any, criu: None) -> None:
    make = functools.partial(node_config, tmp_path, relay=True, park_method="criu", start_method=method)
    check_start_backend(make, keeps_memory=False)


def test_check_notices_a_parked_worker_that_is_not_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerProcess, "suspend", lambda process, parked: None)
    with pytest.raises(AssertionError, match="expected 'T'"):
        check_start_backend(farstep.LocalConfig)


def test_check_notices_a_parked_worker_that_starts_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerProcess, "resume", lambda process: process.kill())
    with pytest.raises(AssertionError, match=r"must continue where they were parked|must run and the others"):
        check_start_backend(farstep.LocalConfig)
