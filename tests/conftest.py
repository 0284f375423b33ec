"""What all tests share; the leak check comes from `farstep.testing.leaks`."""

import pytest


@pytest.fixture(autouse=True)
def no_preloading(monkeypatch):
    """Workers import torch only for an agent that needs it, not because an earlier test imported it here."""
    monkeypatch.setattr("farstep.head.server._PRELOADED", ())
