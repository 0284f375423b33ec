"""Sums the workers' reports on their time and steps. The sums continue when a worker is replaced."""

from __future__ import annotations

from farstep.head.stats.rates import Rate
from farstep.wire.messages import Times

_PARTS = Times.__struct_fields__


class WorkerTimes:
    """For each worker, the seconds of each part of its time, and its rate."""

    def __init__(self, num_workers: int) -> None:
        self._seconds = [dict.fromkeys(_PARTS, 0.0) for _ in range(num_workers)]
        self._rates = [Rate() for _ in range(num_workers)]
        self._held_since: list[float | None] = [None] * num_workers
        self.held_s = 0.0
        """Seconds in which workers without shared memory had a ticket, or their chunk was on its way; all workers."""

    def add(self, worker: int, times: Times) -> None:
        """Add the report that came with a chunk."""
        seconds = self._seconds[worker]
        seconds["env"] += times.env
        seconds["inference"] += times.inference
        seconds["tickets"] += times.tickets
        seconds["send"] += times.send
        seconds["weights"] += times.weights

    def arrived(self, worker: int, steps: int, now: float) -> None:
        """Count the environment steps of a chunk that was accepted at time `now`."""
        self._rates[worker].add(steps, now)

    def issued(self, worker: int, now: float) -> None:
        """A ticket was sent to a remote worker."""
        if self._held_since[worker] is None:
            self._held_since[worker] = now

    def accepted(self, worker: int, now: float, has_more: bool) -> None:
        """A chunk of a remote worker has arrived; `has_more`: it has further tickets."""
        since = self._held_since[worker]
        self.held_s += 0.0 if since is None else now - since
        self._held_since[worker] = now if has_more else None

    def forget(self, worker: int) -> None:
        """Forget the rate of a worker that has ended, and its tickets. Its seconds stay in the sums."""
        self._rates[worker], self._held_since[worker] = Rate(), None

    def cancelled(self) -> None:
        """All tickets were cancelled."""
        self._held_since = [None] * len(self._held_since)

    def total(self) -> dict[str, float]:
        """The seconds of each part, summed over all workers."""
        return {part: sum(seconds[part] for seconds in self._seconds) for part in _PARTS}

    def used_s(self) -> float:
        """The seconds in which workers did not wait for tickets, summed over all workers."""
        return sum(seconds for part, seconds in self.total().items() if part != "tickets")

    def per_worker(self) -> list[dict[str, float]]:
        """The seconds of each part, by worker."""
        return [dict(seconds) for seconds in self._seconds]

    def rates(self, now: float) -> list[float]:
        """Environment steps per second of each worker over the last 10 s."""
        return [rate.per_second(now) for rate in self._rates]
