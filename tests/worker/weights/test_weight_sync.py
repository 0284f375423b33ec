"""When a worker pulls weights, and which version those in use count as."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from farstep.worker.weights.weight_sync import WeightSync


class FakeWeights:
    """Version 7 of some weights."""

    def newest(self) -> int:
        return 7

    def load(self, loader: object) -> tuple[int, int]:
        return 7, 100

    def close(self) -> None:
        pass


def test_a_new_agent_does_not_inherit_the_version_of_the_old_one() -> None:
    sync = WeightSync(memoryview(bytearray(512)).cast("q"))
    actor: Any = SimpleNamespace(version=-1, loader=None)
    actor.loaded = lambda version: setattr(actor, "version", version)
    weights: Any = FakeWeights()
    sync.weights = weights
    ticket: Any = SimpleNamespace(steps=1, min_version=0)
    sync.pull_if_needed(ticket, actor)
    assert sync.passed == 7
    sync.close()
    actor.version = -1
    sync.pull_if_needed(ticket, actor)  # an agent without parameters pulls nothing
    assert sync.passed == -1
