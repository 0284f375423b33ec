"""Tools for tests of farstep and of code built on it: environments with known behavior, fakes, contract checks.

Each `check_<protocol>` takes a factory. It raises an AssertionError if an object of the factory breaks the contract.
`pytest -p farstep.testing.leaks` fails tests that leave processes, threads, descriptors, shared memory or files behind.
"""

from farstep.testing.buffer import check_buffer
from farstep.testing.clock import FakeClock
from farstep.testing.envs import CountingEnv, FaultyEnv, SpacesEnv, TableAgent
from farstep.testing.launcher import check_launcher
from farstep.testing.sync_rule import check_sync_rule
from farstep.testing.transport import Ends, check_transport
from farstep.testing.vector_env import check_vector_env

__all__ = [
    "CountingEnv",
    "Ends",
    "FakeClock",
    "FaultyEnv",
    "SpacesEnv",
    "TableAgent",
    "check_buffer",
    "check_launcher",
    "check_sync_rule",
    "check_transport",
    "check_vector_env",
]
