"""What tests of farstep, and of what is built on it, need: environments with known behaviour, fakes, checks."""

from farstep.testing.clock import FakeClock
from farstep.testing.envs import CountingEnv, FaultyEnv, SpacesEnv, TableAgent

__all__ = ["CountingEnv", "FakeClock", "FaultyEnv", "SpacesEnv", "TableAgent"]
