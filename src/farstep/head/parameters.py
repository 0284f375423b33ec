"""Versions of the policy: the head flattens each one into a free buffer and names it the current one."""

from __future__ import annotations

import fcntl
from typing import Any

import numpy as np

from farstep.agents.parameters import ChangeDetector, ParameterSchema, as_stored, has_nan, leaves_of, parameters_of
from farstep.core import Agent, Buffer
from farstep.errors import AgentError
from farstep.wire.memory import SharedMemory
from farstep.wire.messages import Parameters
from farstep.worker.weights import HEADER, PAGE, digest, pack_word, stride


class ParameterStore:
    """All versions of one agent; the newest is in memory that local workers read from."""

    def __init__(self, agent: Agent, agent_id: int, workers: int, first_version: int = 0) -> None:
        leaves = leaves_of(parameters_of(agent))
        self.schema = ParameterSchema.of(leaves)
        self._agent_id = agent_id
        # Every worker can hold one buffer, one is current: one more is always free.
        self._buffers = workers + 2
        self._stride = stride(self.schema.nbytes)
        self.memory = SharedMemory.create(PAGE + self._buffers * self._stride, "farstep-parameters")
        self.memory.refuse_other_writers()
        self._word = memoryview(self.memory.map).cast("q")
        self._changes = ChangeDetector()
        self._index = -1
        self.version = first_version - 1
        self._write(leaves)

    def message(self) -> Parameters:
        return Parameters(self._agent_id, self.schema.nbytes, self._buffers, digest(self.schema))

    def publish(self, agent: Agent) -> int:
        """A new version from the agent's parameters, whether they changed or not."""
        leaves = leaves_of(agent.get_parameters())
        self.schema.check(leaves)
        self._write(leaves)
        return self.version

    def publish_if_changed(self, agent: Agent) -> bool:
        """A new version if the parameters differ from the published ones."""
        leaves = leaves_of(agent.get_parameters())
        if self._changes.same_counters(leaves) and self._changes.trusted(self.schema.nbytes):
            return False
        self.schema.check(leaves)
        current = self.schema.views(self.memory.map, self._start(self._index) + HEADER)
        if all(np.array_equal(old, as_stored(*entry)) for old, entry in zip(current, leaves, strict=True)):
            self._changes.note(leaves)
            return False
        self._write(leaves)
        return True

    def payload(self) -> Buffer:
        """The current version's bytes, for a worker that shares no memory."""
        start = self._start(self._index) + HEADER
        return memoryview(self.memory.map)[start : start + self.schema.nbytes]

    def _start(self, index: int) -> int:
        return PAGE + index * self._stride

    def _write(self, leaves: list[tuple[str, Any]]) -> None:
        index = self._lock_free_buffer()
        try:
            start = self._start(index)
            for view, (name, leaf) in zip(self.schema.views(self.memory.map, start + HEADER), leaves, strict=True):
                array = as_stored(name, leaf)
                if array.dtype != view.dtype:
                    raise AgentError(
                        f"parameter {name!r} changed its dtype from {view.dtype} to {array.dtype}; version "
                        f"{self.version} stays in force. Convert it back, or make another agent of it."
                    )
                if has_nan(leaf, array):
                    raise AgentError(
                        f"parameter {name!r} has a NaN; version {self.version} stays in force. "
                        "Workers would act on it: lower the learning rate, or clip gradients."
                    )
                view[...] = array
            self._word[start // 8] = self.version + 1
        finally:
            fcntl.lockf(self.memory.fd, fcntl.LOCK_UN, 1, index)
        self.version += 1
        self._index = index
        self._word[0] = pack_word(self.version, index)
        self._changes.note(leaves)

    def _lock_free_buffer(self) -> int:
        for index in range(self._buffers):
            if index == self._index:
                continue
            try:
                fcntl.lockf(self.memory.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, index)
            except OSError:
                continue  # a worker is reading it
            return index
        raise AssertionError("every worker holds at most one buffer, so one is free")

    def close(self) -> None:
        self.memory.close()
