"""Decides for `inference="auto"` whether workers act themselves or acting servers act for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Literal, NamedTuple

from farstep.agents.parameters import is_torch_module
from farstep.batch import Batch
from farstep.core import Agent
from farstep.event import Emit
from farstep.head.members.worker_records import ResetRequest
from farstep.head.warnings.user_warnings import UserWarnings
from farstep.head.weights.publisher import Publisher
from farstep.resources import available_memory

Inference = Literal["local", "local-cpu", "served"]
"""`local-cpu`: workers act on the CPU although they have GPUs."""
PREFER_LOCAL = 1.1
"""Acting servers must be faster by this factor: workers that act themselves need no other process."""
_ROWS, _SECONDS = 512, 1.0
"""Measure each way until this many rows have arrived, or for about this many seconds."""
_CAPTURE_S = 2.0
"""Seconds without measurement in which servers on a GPU capture CUDA graphs, when a batch size first occurs."""


class _Rate(NamedTuple):
    """Steps per second: of all environments, and of each one. A coordinator may change the number of workers."""

    total: float
    per_env: float


class InferenceChoice:
    """Measures all ways with the first agent, and keeps the fastest one.

    Args:
        publisher: Sends the agent to workers or to servers.
        warnings: Silent during the measurement.
        copies_per_machine: Number of workers per machine, each of which would hold a copy of the policy.
        has_gpus: Whether workers have GPUs, on which torch modules act with `local`.
        emit: Emits the event that says what was chosen.
        start: Resets all environments to the episodes with which the run starts.
        is_open: Whether there is a choice.
    """

    def __init__(
        self,
        publisher: Publisher,
        warnings: UserWarnings,
        copies_per_machine: int,
        has_gpus: bool,
        emit: Emit,
        start: ResetRequest,
        is_open: bool,
    ) -> None:
        self._publisher, self._warnings, self._copies, self._emit = publisher, warnings, copies_per_machine, emit
        self._start, self._is_open, self._lock = start, is_open, threading.Lock()
        self._has_gpus = has_gpus
        self._resets: list[ResetRequest] = []
        """Resets that lead to the current episodes; empty: no environment was reset."""
        self.chosen: Inference | None = None
        """What was chosen; None before, and if there is no choice."""

    def keep(self, chosen: Inference | None) -> None:
        """Use what an earlier process has chosen, instead of measuring."""
        with self._lock:
            if self._is_open and chosen is not None:
                self._use(chosen)
                self._emit("announced", f"inference='auto': {chosen} inference, as before this run was resumed")

    def note_reset(self, request: ResetRequest) -> None:
        """Record a reset, to repeat it after the measurement."""
        if not self._is_open:
            return
        if not self._resets and request.seeds is None:
            # the first reset without seeds starts the run's first episodes
            seeded = replace(request, seeds=self._start.seeds)
            masked = [] if request.options is None else [seeded]
            self._resets = [seeded] if request.mask is None else [self._start, *masked]
        elif request.mask is None and request.seeds is not None:
            self._resets = [request]
        else:
            self._resets = [*(self._resets or [self._start]), request]

    def decide(
        self,
        agent: Agent,
        collect: Callable[[int], Batch],
        reset: Callable[[ResetRequest], object],
        keeping_slots: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Choose, if this was not done yet. Afterwards workers have no agent.

        Args:
            agent: The agent to measure with.
            collect: Collects a batch of this many steps.
            reset: Resets environments.
            keeping_slots: Returns a context manager inside which calls of `collect` do not wait for slots again.
        """
        with self._lock:
            if not self._is_open:
                return
            self._warnings.silent = True
            try:
                with keeping_slots():
                    chosen, text = self._measure(agent, collect)
            finally:
                self._warnings.silent, self._warnings.inference = False, ""
            self._use(chosen)
            self._emit("announced", f"inference='auto': {chosen} inference: {text}")
            for request in self._resets or [self._start]:
                reset(request)

    def _measure(self, agent: Agent, collect: Callable[[int], Batch]) -> tuple[Inference, str]:
        served = self._steps_per_second("served", agent, collect)
        needed = self._copies * self._publisher.parameters_bytes
        if 2 * needed > available_memory():
            return "served", f"a copy of the policy per worker would take {needed / 1e9:.1f} GB"
        ways: dict[Inference, str] = {"local": "if workers act"}
        if self._has_gpus and is_torch_module(agent):
            ways = {"local-cpu": "if workers act on the CPU", "local": "if workers act on GPUs"}
        rates = {way: self._steps_per_second(way, agent, collect) for way in ways}
        best = max(rates, key=lambda way: rates[way].per_env)
        speeds = [f"{rates[way].total:,.0f} steps/s {text}" for way, text in ways.items()]
        text = ", ".join([*speeds, f"{served.total:,.0f} steps/s if acting servers act"])
        return ("served" if served.per_env > PREFER_LOCAL * rates[best].per_env else best), text

    def _steps_per_second(self, way: Inference, agent: Agent, collect: Callable[[int], Batch]) -> _Rate:
        self._publisher.use_servers(way == "served", on_cpu=way == "local-cpu")
        self._publisher.adopt(agent)
        collect(2)  # the first calls of `act` are slow, and the first one may wait for slots
        captured = time.monotonic() + (_CAPTURE_S if way == "served" and self._has_gpus else 0.0)
        while time.monotonic() < captured:
            collect(4)
        began, rows, steps, done = time.monotonic(), 0, 4, 0
        while rows < _ROWS and (elapsed := time.monotonic() - began) < _SECONDS:
            if rows and elapsed * 2 > _SECONDS:
                break
            batch = collect(steps)
            rows += batch.shape[0] * batch.shape[1]
            done += steps
            steps *= 2
        elapsed = time.monotonic() - began
        return _Rate(rows / elapsed, done / elapsed)

    def _use(self, chosen: Inference) -> None:
        self._publisher.use_servers(chosen == "served", on_cpu=chosen == "local-cpu")
        if chosen != "served":
            self._publisher.dismiss_servers()
        self.chosen, self._is_open = chosen, False
