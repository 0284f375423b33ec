"""Each learner has one thread, and its workers have imported torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread(torch_in_workers: None) -> Iterator[None]:
    """With several threads, operations on small matrices wait for other threads, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
