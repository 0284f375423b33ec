"""Tools for tests of farstep and of code built on it: environments with known behavior, fakes, contract checks.

Each `check_<protocol>` takes a factory. It raises an AssertionError if an object of the factory breaks the contract.
`pytest -p farstep.testing.leaks` fails tests that leave processes, threads, descriptors, shared memory or files behind.

Names are imported on first use: a worker with one of the environments does not import the checks, and with them the
head, which takes a third of the CPU time of its start.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farstep.testing.buffer import check_buffer as check_buffer
    from farstep.testing.clock import FakeClock as FakeClock
    from farstep.testing.envs import CountingEnv as CountingEnv
    from farstep.testing.envs import FaultyEnv as FaultyEnv
    from farstep.testing.envs import SpacesEnv as SpacesEnv
    from farstep.testing.envs import TableAgent as TableAgent
    from farstep.testing.launcher import check_launcher as check_launcher
    from farstep.testing.start_backend import check_start_backend as check_start_backend
    from farstep.testing.sync_rule import check_sync_rule as check_sync_rule
    from farstep.testing.transport import Ends as Ends
    from farstep.testing.transport import check_transport as check_transport
    from farstep.testing.vector_env import check_vector_env as check_vector_env

_HOMES = {
    "CountingEnv": "envs",
    "Ends": "transport",
    "FakeClock": "clock",
    "FaultyEnv": "envs",
    "SpacesEnv": "envs",
    "TableAgent": "envs",
    "check_buffer": "buffer",
    "check_launcher": "launcher",
    "check_start_backend": "start_backend",
    "check_sync_rule": "sync_rule",
    "check_transport": "transport",
    "check_vector_env": "vector_env",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(f"farstep.testing.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'farstep.testing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
