"""What all tests share; the leak check comes from `farstep.testing.leaks`."""

import signal

import pytest

# A shell's `&` and nohup have Ctrl-C ignored, here and in all that tests start; some of them are about Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_preloading(monkeypatch):
    """Workers import torch only for an agent that needs it, not because an earlier test imported it here."""
    monkeypatch.setattr("farstep.head.server._PRELOADED", ())
