"""Stores published versions: writes each version into a free buffer in shared memory, then marks it as current."""

from __future__ import annotations

import contextlib
import fcntl
import logging
from collections.abc import Iterator, Sequence
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
from farstep.head.weights.direct import DirectWeights
from farstep.rollout.weight_headers import HEADER, NEWEST, PAGE, digest, pack_word, stride, unpack_word
from farstep.wire.channels.memory import SharedMemory
from farstep.wire.delta import encode, word_bytes
from farstep.wire.messages import Parameters

log = logging.getLogger(__name__)


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
        self._direct: DirectWeights | None = None
        """The newest version on the GPU; None: all versions pass through main memory."""
        self.version = first_version - 1
        self._write(leaves)

    def message(self) -> Parameters:
        """The message that announces the shared memory to workers."""
        on_gpu = None if self._direct is None else self._direct.message
        return Parameters(self._agent_id, self.schema.nbytes, self._buffers, digest(self.schema), on_gpu)

    def share_gpu(self, agent: Agent, servers: Sequence[int]) -> None:
        """From now on, store versions also on the GPU of the agent, if it is on one.

        Args:
            agent: The agent of the current version, unchanged.
            servers: Numbers of the acting servers, which are all readers.
        """
        if self._config != ALL_WEIGHTS:
            log.info("weights of agent %d pass through main memory: the option weights is set", self._agent_id)
            return
        leaves = self._leaves(agent)
        try:
            self._direct = DirectWeights(self.memory, self.schema, leaves, servers)
        except Exception as error:
            log.info("weights of agent %d pass through main memory: %s", self._agent_id, error)
            return
        self._direct.write(self.version, leaves)

    def publish(self, agent: Agent) -> int:
        """Store the agent's parameters as a new version, even if unchanged, and return its number."""
        leaves = self._leaves(agent)
        self.schema.check(leaves)
        self._write(leaves)
        return self.version

    def changed(self, agent: Agent) -> bool:
        """Whether the agent's parameters differ from the published ones."""
        leaves, direct = self._leaves(agent), self._only_copy()
        if direct is None and self._is_host_stale():
            return True  # a later version was being written to the GPU when the user interrupted the program
        counters = self._changes.counters(leaves)
        if self._changes.same_counters(counters) and self._changes.trusted(self.schema.nbytes):
            return False
        self.schema.check(leaves)
        is_changed = self._differs(leaves) if direct is None else not direct.equals(leaves)
        if not is_changed:
            self._changes.note(counters)
        return is_changed

    def _differs(self, leaves: list[tuple[str, Any]]) -> bool:
        """Whether parameters differ from the copy in main memory."""
        current = self.schema.views(self.memory.map, self._start(self._index) + HEADER)
        for old, source, leaf in zip(current, self.schema.sources, leaves, strict=True):
            new = as_stored(*leaf)
            if new.dtype != source or not np.array_equal(old, rounded(new, old.dtype)):
                return True
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
        counters, direct, version = self._changes.counters(leaves), self._direct, self.version + 1
        suffices = direct is not None and direct.is_used_by_all()
        if direct is None or not suffices or not direct.write(version, leaves):
            with self._new_host_copy(version) as views:
                self._copy(leaves, views)
            if direct is not None and not suffices:
                direct.write(version, leaves)
        self.version = self._word[NEWEST] = version
        self._differences.clear()
        self._changes.note(counters)

    def refresh_host(self) -> None:
        """Copy the current version to main memory, for a new reader, if it is only on the GPU."""
        if (direct := self._only_copy()) is not None:
            with self._new_host_copy(self.version) as views:
                direct.copy_to(views)

    def _only_copy(self) -> DirectWeights | None:
        """The current version on the GPU, if it is not in main memory."""
        is_on_gpu = self._direct is not None and self._direct.version == self.version
        return self._direct if is_on_gpu and self._is_host_stale() else None

    def _is_host_stale(self) -> bool:
        return unpack_word(self._word[0])[0] < self.version

    @contextlib.contextmanager
    def _new_host_copy(self, version: int) -> Iterator[list[Array]]:
        """Context manager: yield a free buffer in main memory to write a version into; then make it current."""
        index = self._lock_free_buffer()
        try:
            start = self._start(index)
            yield self.schema.views(self.memory.map, start + HEADER)
            self._word[start // 8] = version
        finally:
            fcntl.lockf(self.memory.fd, fcntl.LOCK_UN, 1, index)
        self._index = index
        self._word[0] = pack_word(version, index)

    def _copy(self, leaves: list[tuple[str, Any]], views: list[Array]) -> None:
        """Copy parameters to main memory. Raise `AgentError` if one cannot be published."""
        for view, source, (name, leaf) in zip(views, self.schema.sources, leaves, strict=True):
            array = self._checked(name, leaf, source)
            view[...] = rounded(array, view.dtype)
            if view.dtype != array.dtype and not np.array_equal(np.isinf(widened(view, source)), np.isinf(array)):
                raise AgentError(
                    f"parameter {name!r} has values that are too large for half precision; {self._consequence}. "
                    f"Set weights.half to {'False' if self._config.half == 'bfloat16' else repr('bfloat16')}."
                )

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

    def close(self) -> bool:
        """Free the memory. Return False if an acting server still reads from the GPU; then call again later."""
        if self._direct is not None:
            if not self._direct.free():
                return False
            self._direct = None
        self.memory.close()
        return True
