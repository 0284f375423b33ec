"""The leak check finds what a test leaves behind."""

from __future__ import annotations

import threading

from farstep.testing.leaks import _snapshot


def test_a_second_thread_of_the_same_name_is_seen() -> None:
    end = threading.Event()
    threads = [threading.Thread(target=end.wait, name="twin", daemon=True) for _ in range(2)]
    try:
        threads[0].start()
        before = _snapshot()
        threads[1].start()
        assert any("twin" in thing for thing in _snapshot() - before)
    finally:
        end.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
