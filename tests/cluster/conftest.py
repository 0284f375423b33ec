"""Fixtures for tests of clusters."""

from __future__ import annotations

import pytest

from farstep.wire.channels.zmq import Hub
from farstep.wire.keys import KeyPair


@pytest.fixture
def issued(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], KeyPair]:
    """All keys that heads have issued, by number and incarnation of the worker (nodes have numbers below zero)."""
    pairs: dict[tuple[int, int], KeyPair] = {}
    admit = Hub.admit

    def noting(self: Hub, worker: int, incarnation: int) -> KeyPair:
        pairs[worker, incarnation] = admit(self, worker, incarnation)
        return pairs[worker, incarnation]

    monkeypatch.setattr(Hub, "admit", noting)
    return pairs
