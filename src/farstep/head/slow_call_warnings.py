"""Reports, from a background thread, what a blocking call is waiting for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from farstep.event import Emit

FIRST_NOTE_S, NOTE_S = 5.0, 10.0
"""Seconds before the first event about a slow start, and between further events."""


@contextlib.contextmanager
def noted_while_slow(what: str, emit: Emit) -> Iterator[None]:
    """Context manager: emit `what` after `FIRST_NOTE_S` seconds and then every `NOTE_S` seconds, until the end."""
    done, began = threading.Event(), time.monotonic()

    def note() -> None:
        pause_s = FIRST_NOTE_S
        while not done.wait(pause_s):
            emit("warned", f"waiting {time.monotonic() - began:.0f} s: {what}")
            pause_s = NOTE_S

    thread = threading.Thread(target=note, daemon=True, name="farstep-notes")
    with contextlib.suppress(RuntimeError):  # threads are exhausted: the block will raise a typed error
        thread.start()
    try:
        yield
    finally:
        done.set()
        if thread.ident is not None:
            thread.join()
