"""A run's share of the slots and devices of its coordinator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from farstep.config.launch import LaunchConfig
from farstep.elastic.coordinator.client import CoordinatorClient
from farstep.elastic.coordinator.device_ledger import DeviceLedger
from farstep.elastic.coordinator.worker_pool import WorkerPool
from farstep.errors import ConfigError, counted
from farstep.event import Emit


class RunShare:
    """What a run may use. Without a coordinator, it may use all of its workers, and nothing waits.

    Args:
        config: Names the coordinator, if there is one, and the run's priority and minimum.
        num_workers: Number of workers that the run can use.
        emit: Receives events.
        name: Name of the run for people; empty: that of the script.
        per_session: Whether the run holds slots only while it launches and while a session of tickets is open.

    Raises:
        LaunchError: The coordinator cannot be reached.
    """

    def __init__(
        self, config: LaunchConfig, num_workers: int, emit: Emit, *, name: str = "", per_session: bool = False
    ) -> None:
        self._min_workers, self._per_session = config.min_workers, per_session
        self._devices = DeviceLedger()
        self._client: CoordinatorClient | None = None
        if config.coordinator is not None:
            self._client = CoordinatorClient(
                config.coordinator,
                config.priority,
                config.min_workers,
                num_workers,
                emit,
                run_name=name,
                per_session=per_session,
            )

    def wait(self, check_open: Callable[[], None]) -> None:
        """Wait for the coordinator's slots.

        Args:
            check_open: Raises if the wait is to end.

        Raises:
            ConfigError: The coordinator has fewer slots than the run needs.
        """
        if self._client is not None:
            self._slots = self._client.wait(check_open)

    @property
    def waiting_for(self) -> str:
        """The slots that the run waits for; empty if it waits for none."""
        return "" if self._client is None else self._client.waiting_for

    def drive(self, pool: WorkerPool) -> None:
        """From now on, keep the number of running workers within the share."""
        if self._client is not None:
            if not self._per_session:
                pool.use_slots(self._slots)
            self._client.drive(pool, self._slots)

    def scale(self, pool: WorkerPool, workers: int) -> None:
        """Run this number of workers; with a coordinator, request them."""
        if self._client is None:
            pool.scale_workers(workers)
            return
        if workers < self._min_workers:
            raise ConfigError(f"scale got {counted(workers, 'worker')}; min_workers is {self._min_workers}.")
        self._client.want(workers)

    @contextlib.contextmanager
    def device_token(self, check_open: Callable[[], None]) -> Iterator[int]:
        """Context manager: wait for a device, yield its number (0 without a coordinator), and return it at the end."""
        token = contextlib.nullcontext(0) if self._client is None else self._client.device_token(check_open)
        with self._devices.held(token) as device:
            yield device

    def snapshot(self) -> dict[str, Any]:
        """Return the use of devices and what the coordinator has granted, as in `ClusterEnv.stats`."""
        granted = {} if self._client is None else self._client.snapshot()
        return {"devices": self._devices.snapshot(), "coordinator": granted}

    def waited_seconds(self) -> float:
        """Return for how many seconds the run has waited for slots, as in `ClusterEnv.stats`."""
        return 0.0 if self._client is None else self._client.waited_seconds()

    def close(self) -> None:
        """Give everything back. Call it after the workers have ended."""
        if self._client is not None:
            self._client.close()
