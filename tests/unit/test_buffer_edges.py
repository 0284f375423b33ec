"""Buffers at their edges: forks, starts that are rare, mistakes and what is said of them."""

from __future__ import annotations

import os
import threading

import numpy as np

from farstep import Buffer
from farstep.buffer import Uniform
from farstep.errors import ClosedError


def test_a_fork_cannot_write_over_rows() -> None:
    buffer = Buffer(100, Uniform(), seed=0)
    buffer.insert({"a": np.full(10, 1)})
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with buffer.locked():
            held.set()
            let_go.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(30)
    pid = os.fork()
    if not pid:
        refused = 0
        try:
            for call in (
                lambda: buffer.insert({"a": np.full(10, -7)}),
                lambda: buffer.sample(1),
                lambda: buffer.update_priorities(np.arange(1), np.ones(1)),
                lambda: buffer.delete(np.arange(1)),
                lambda: buffer.checkpoint("/nonexistent"),
            ):
                try:
                    call()
                except ClosedError as error:
                    refused += "its fork" in str(error)
            buffer.close()
            with Buffer(10, Uniform()) as own:
                own.insert({"a": np.zeros(3)})
                own.sample(2)
        finally:
            os._exit(refused)
    let_go.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    buffer.insert({"a": np.full(10, 2)})
    assert set(buffer.sample(400)[0]["a"]) == {1, 2}
    buffer.close()
