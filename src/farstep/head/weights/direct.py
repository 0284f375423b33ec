"""Stores the newest version also on the learner's GPU, from where acting servers on the same GPU copy it.

A word in the parameters' shared memory has the version on the GPU. Head and servers guard the memory of the GPU with
locks of single bytes of the file (`fcntl.lockf`), which the kernel releases if a process dies:

- The head writes, and servers read, only while they hold the first lock. If a server is reading, the head does not
  wait: it writes this version to main memory.
- Each server has a lock of its own. After it has compared one version with the copy in main memory, it holds this lock
  until it closes the memory. While all servers do, versions are not copied to main memory.
- The head frees the memory only when no server holds its own lock: CUDA does not allow it earlier.

Before a restarted server learns about the parameters, the head copies the newest version to main memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from farstep.agents.parameters import ParameterSchema, as_stored, is_tensor
from farstep.core import Array
from farstep.errors import described
from farstep.rollout.weight_headers import GPU_LOCK, IS_RETIRED, ON_GPU, OPENED_BYTES, OPENED_LOCK
from farstep.wire.channels.memory import SharedMemory
from farstep.wire.messages import GpuParameters

log = logging.getLogger(__name__)


class DirectWeights:
    """The newest version on the GPU.

    Args:
        memory: The parameters' shared memory.
        schema: Names, shapes and dtypes of the parameters.
        leaves: The parameters.
        servers: Numbers of the acting servers.

    Raises:
        Exception: The parameters are not on one GPU, or its memory cannot be shared.
    """

    def __init__(
        self, memory: SharedMemory, schema: ParameterSchema, leaves: list[tuple[str, Any]], servers: Sequence[int]
    ) -> None:
        from farstep.agents.gpu import gpu_memory  # imports torch

        self._memory, self._word = memory, memory.map.cast("q")
        self._schema, self._servers = schema, servers
        self._has_nan, self._common_device = gpu_memory.has_nan, gpu_memory.common_device
        self._device = self._common_device(leaves)
        self._gpu = gpu_memory.SharedGpuMemory(self._device)
        self._block, handle = self._gpu.allocate(schema.nbytes)
        self._is_used = self._is_reported = False
        try:
            self._views = gpu_memory.views_of(self._block, schema, [leaf.dtype for _, leaf in leaves])
        except BaseException:
            self._gpu.free(self._block)
            raise
        self.message = GpuParameters(self._gpu.uuid, handle)
        """Tells acting servers where the memory is."""

    @property
    def version(self) -> int:
        """The version on the GPU; -1: none."""
        return self._word[ON_GPU] - 1

    def write(self, version: int, leaves: list[tuple[str, Any]]) -> bool:
        """Store a version on the GPU. Return False if it must be read from main memory instead."""
        try:
            return self._write(version, leaves)
        except Exception as error:
            if not self._is_reported:
                log.info("version %d passes through main memory: %s", version, error)
            self._is_reported = True
            return False

    def _write(self, version: int, leaves: list[tuple[str, Any]]) -> bool:
        if (device := self._common_device(leaves)) != self._device:
            raise ValueError(f"the agent has moved from {self._device} to {device}")
        tensors = [leaf.detach() for _, leaf in leaves]
        is_same_type = all(tensor.dtype == view.dtype for tensor, view in zip(tensors, self._views, strict=True))
        if not is_same_type or self._has_nan(tensors):
            return False  # publishing it in main memory raises the error
        with self._locked(GPU_LOCK) as is_locked:
            if not is_locked:
                return False  # a server is reading
            self._word[ON_GPU] = 0
            for view, tensor in zip(self._views, tensors, strict=True):
                view.copy_(tensor)
            self._gpu.synchronize()
            self._word[ON_GPU] = version + 1
        return True

    def is_used_by_all(self) -> bool:
        """Whether all acting servers read this memory, so that none needs a copy in main memory."""
        for server in self._servers:
            with self._locked(OPENED_LOCK + server) as is_locked:
                if is_locked:
                    return False
        if not self._is_used:
            log.info("acting servers copy weights within GPU %s", self._gpu.uuid)
        self._is_used = True
        return True

    def equals(self, leaves: list[tuple[str, Any]]) -> bool:
        """Whether the parameters equal the version on the GPU."""
        for view, (_, leaf) in zip(self._views, leaves, strict=True):
            if not is_tensor(leaf) or leaf.is_meta or leaf.dtype != view.dtype:
                return False
            if not view.equal(leaf.detach().to(view.device)):
                return False
        return True

    def copy_to(self, arrays: Sequence[Array]) -> None:
        """Copy the version on the GPU to main memory."""
        for array, name, view in zip(arrays, self._schema.names, self._views, strict=True):
            array[...] = as_stored(name, view)

    def free(self) -> bool:
        """Free the memory. Return False if an acting server still has it open; then call again later."""
        self._word[IS_RETIRED] = 1  # first: a server locks first, then reads this word
        with self._locked(OPENED_LOCK, OPENED_BYTES) as is_locked:
            if not is_locked:
                return False
        self._views.clear()
        try:
            self._gpu.free(self._block)
        except Exception as error:  # after an earlier error of the GPU, the driver refuses every call
            log.info("shared memory of the GPU could not be freed: %s", described(error))
        return True

    @contextlib.contextmanager
    def _locked(self, start: int, nbytes: int = 1) -> Iterator[bool]:
        """Context manager: lock bytes of the file. Yield False if another process has locked one of them."""
        try:
            fcntl.lockf(self._memory.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, nbytes, start)
        except OSError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.lockf(self._memory.fd, fcntl.LOCK_UN, nbytes, start)
