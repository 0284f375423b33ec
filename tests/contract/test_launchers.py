"""Every launcher keeps the contract of `farstep.testing.check_launcher`."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import farstep
from farstep.testing import check_launcher


def test_inprocess() -> None:
    check_launcher(farstep.InProcessConfig, processes=False)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "ipc", "tcp"])
def test_local(transport: Any) -> None:
    check_launcher(functools.partial(farstep.LocalConfig, transport=transport))
