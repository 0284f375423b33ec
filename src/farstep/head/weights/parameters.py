"""Stores published versions: writes each version into a free buffer in shared memory, then marks it as current."""

from __future__ import annotations

import fcntl
from typing import Any

import numpy as np

from farstep.agents.parameters import (
    ChangeDetector,
    ParameterSchema,
    as_stored,
    given_parameters,
    has_nan,
    leaves_of,
    parameters_of,
    rounded,
    travelling,
    widened,
)
from farstep.config.env import ALL_WEIGHTS, WeightsConfig
from farstep.core import Agent, Array, BytesLike
from farstep.errors import AgentError
from farstep.rollout.weight_headers import HEADER, PAGE, digest, pack_word, stride
from farstep.wire.channels.memory import SharedMemory
from farstep.wire.delta import encode, word_bytes
from farstep.wire.messages import Parameters


class ParameterStore:
    """The published versions of one agent. Local workers read the newest version from shared memory.

    Args:
        agent: The agent; its parameters become the first version.
        agent_id: Number of the agent in this run.
        workers: Number of workers. Each may read one buffer at a time.
        first_version: Number of the first version.
        config: Which parameters are sent, and in which precision.
    """

    def __init__(
        self,
        agent: Agent,
        agent_id: int,
        workers: int,
        first_version: int = 0,
        config: WeightsConfig = ALL_WEIGHTS,
    ) -> None:
        self._config = config
        leaves = travelling(leaves_of(parameters_of(agent)), config)
        self.schema = ParameterSchema.of(leaves, config.half)
        self._agent_id = agent_id
        # Each worker may read one buffer, and one buffer is current, so one of these buffers is always free.
        self._buffers = workers + 2
        self._stride = stride(self.schema.nbytes)
        self.memory = SharedMemory.create(PAGE + self._buffers * self._stride, "farstep-parameters")
        self.memory.refuse_other_writers()
        self._word = self.memory.map.cast("q")
        self._changes = ChangeDetector()
        self._index = -1
        self._handed: dict[int, tuple[int, bytes]] = {}
        """For each worker without shared memory, the version sent last and its bytes, to compute deltas."""
        self._differences: dict[int, list[bytes]] = {}
        """For each earlier version, the encoded delta to the current version."""
        self.version = first_version - 1
        self._write(leaves)

    def message(self) -> Parameters:
        """The message that announces the shared memory to workers."""
        return Parameters(self._agent_id, self.schema.nbytes, self._buffers, digest(self.schema))

    def publish(self, agent: Agent) -> int:
        """Store the agent's parameters as a new version, even if unchanged, and return its number."""
        leaves = self._leaves(agent)
        self.schema.check(leaves)
        self._write(leaves)
        return self.version

    def changed(self, agent: Agent) -> bool:
        """Whether the agent's parameters differ from the published ones."""
        leaves = self._leaves(agent)
        counters = self._changes.counters(leaves)
        if self._changes.same_counters(counters) and self._changes.trusted(self.schema.nbytes):
            return False
        self.schema.check(leaves)
        current = self.schema.views(self.memory.map, self._start(self._index) + HEADER)
        for old, source, leaf in zip(current, self.schema.sources, leaves, strict=True):
            new = as_stored(*leaf)
            if new.dtype != source or not np.array_equal(old, rounded(new, old.dtype)):
                return True
        self._changes.note(counters)
        return False

    def check(self, agent: Agent) -> None:
        """Raise `AgentError` if a parameter cannot be published; the message names the parameter."""
        leaves = self._leaves(agent)
        self.schema.check(leaves)
        for source, (name, leaf) in zip(self.schema.sources, leaves, strict=True):
            self._checked(name, leaf, source)

    def _checked(self, name: str, leaf: Any, source: str) -> Array:
        array = as_stored(name, leaf)
        if array.dtype != source:
            raise AgentError(
                f"parameter {name!r} changed its dtype from {np.dtype(source)} to {array.dtype}; "
                f"{self._consequence}. Convert it back, or create a new agent object with this dtype."
            )
        if has_nan(leaf, array):
            raise AgentError(
                f"parameter {name!r} has a NaN; {self._consequence}. Workers would act with it: lower the learning "
                "rate, or clip gradients."
            )
        return array

    @property
    def _consequence(self) -> str:
        """The consequence of rejecting a version, for error messages."""
        return "it was not published" if self.version < 0 else f"version {self.version} stays in force"

    def _leaves(self, agent: Agent) -> list[tuple[str, Any]]:
        return self.schema.ordered(travelling(leaves_of(given_parameters(agent)), self._config))

    def payload(self) -> BytesLike:
        """The bytes of the current version, for a worker without shared memory."""
        start = self._start(self._index) + HEADER
        return self.memory.map[start : start + self.schema.nbytes]

    def handover(self, worker: int, held: int) -> tuple[int, list[BytesLike]]:
        """Frames that bring a worker to the current version.

        Args:
            worker: A worker without shared memory.
            held: The version that the worker has; -1 if none.

        Returns:
            The base version of the delta (-1: the frames are the full parameters), and the frames.
        """
        if not self._config.delta or not self.schema.nbytes:
            return -1, [self.payload()]
        known = self._handed.get(worker, (-1, b""))
        same = next((bytes_ for version, bytes_ in self._handed.values() if version == self.version), None)
        self._handed[worker] = (self.version, same or bytes(self.payload()))  # one copy for all workers
        if held < 0 or known[0] != held:
            return -1, [self.payload()]
        if held not in self._differences:
            self._differences[held] = encode(known[1], self.payload(), word_bytes(self._config))
        return held, list(self._differences[held])

    def _start(self, index: int) -> int:
        return PAGE + index * self._stride

    def _write(self, leaves: list[tuple[str, Any]]) -> None:
        index, counters = self._lock_free_buffer(), self._changes.counters(leaves)
        try:
            start = self._start(index)
            views = self.schema.views(self.memory.map, start + HEADER)
            for view, source, (name, leaf) in zip(views, self.schema.sources, leaves, strict=True):
                array = self._checked(name, leaf, source)
                view[...] = rounded(array, view.dtype)
                if view.dtype != array.dtype and not np.array_equal(np.isinf(widened(view, source)), np.isinf(array)):
                    raise AgentError(
                        f"parameter {name!r} has values that are too large for half precision; {self._consequence}. "
                        f"Set weights.half to {'False' if self._config.half == 'bfloat16' else repr('bfloat16')}."
                    )
            self._word[start // 8] = self.version + 1
        finally:
            fcntl.lockf(self.memory.fd, fcntl.LOCK_UN, 1, index)
        self.version += 1
        self._differences.clear()
        self._index = index
        self._word[0] = pack_word(self.version, index)
        self._changes.note(counters)

    def _lock_free_buffer(self) -> int:
        for index in range(self._buffers):
            if index == self._index:
                continue
            try:
                fcntl.lockf(self.memory.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, index)
            except OSError:
                continue  # a worker is reading this buffer
            return index
        raise AssertionError("every worker holds at most one buffer, so one is free")

    def close(self) -> None:
        self.memory.close()
