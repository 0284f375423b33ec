"""Shows how many episodes of an evaluation have ended, and an estimate of the remaining time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from farstep.observe.run_status import duration, percent

_LINE_EVERY_S = 5.0


class EpisodeProgress:
    """On a terminal, rewrites one line. Otherwise, prints at most one line every five seconds.

    Args:
        episodes: Number of episodes of the evaluation.
        stream: Where to write; None: standard error, so that standard output has only the result.
        clock: A monotonic clock; returns seconds.
    """

    def __init__(
        self, episodes: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._episodes = episodes
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._began_s = clock()
        self._rewrites = self._stream.isatty()
        self._next_s = self._began_s + (0.0 if self._rewrites else _LINE_EVERY_S)

    def update(self, finished: int) -> None:
        """Show that this many episodes have ended."""
        now = self._clock()
        if now < self._next_s:
            return
        text = f"{finished:,} of {self._episodes:,} episodes ({percent(finished / self._episodes)})"
        if finished:
            left_s = (now - self._began_s) * (self._episodes - finished) / finished
            text += f", {duration(left_s)} left"
        if self._rewrites:
            self._stream.write(f"\r\x1b[K{text}")
        else:
            self._stream.write(f"{text}\n")
            self._next_s = now + _LINE_EVERY_S
        self._stream.flush()

    def close(self) -> None:
        """Remove the line from the terminal."""
        if self._rewrites:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
