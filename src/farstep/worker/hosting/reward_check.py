"""Finds rewards that are NaN or infinite, which farstep passes on as they are."""

from __future__ import annotations

import numpy as np

from farstep.rollout.rows import Rows
from farstep.worker.hosting.base import Host
from farstep.worker.hosting.hosts import AnyHost


class RewardCheck:
    """Checks all chunks of a worker until it finds such a reward."""

    def __init__(self) -> None:
        self._found = False

    def check(self, host: AnyHost | None, rows: Rows, steps: int) -> str:
        """Return the value and slot of a reward that is not finite; empty if there is none, if one was found before, or
        if the head acts."""
        if self._found or not isinstance(host, Host):
            return ""
        rewards = rows.row["reward"][:steps]
        finite = np.isfinite(rewards)
        if finite.all() or not (bad := np.argwhere(~finite & rows.row["valid"][:steps])).size:
            return ""
        self._found = True
        row, env = bad[0].tolist()
        return f"{rewards[row, env]} in environment slot {host.slots.first + env}"
