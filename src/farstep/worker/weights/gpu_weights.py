"""Copies weights within the GPU, if the learner is on the same one; see `head/weights/direct.py`."""

from __future__ import annotations

import contextlib
import fcntl
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from farstep.agents.parameters import ParameterLoader, as_stored
from farstep.core import Array
from farstep.rollout.weight_headers import GPU_LOCK, IS_RETIRED, ON_GPU, OPENED_LOCK, unpack_word
from farstep.wire.messages import GpuParameters

log = logging.getLogger(__name__)


class GpuWeights:
    """The newest version in memory of the GPU that the head has allocated.

    Weights are loaded from it only after one version was the same, bit for bit, as in main memory.

    Args:
        message: Where the memory is.
        nbytes: Size of the parameters.
        number: Number of this acting server.
        fd: Descriptor of the parameters in main memory, of which bytes are locked.
        words: The words at the start of this memory.
    """

    def __init__(self, message: GpuParameters, nbytes: int, number: int, fd: int, words: memoryview) -> None:
        self._message, self._nbytes, self._fd, self._words = message, nbytes, fd, words
        self._opened_lock = OPENED_LOCK + number
        self._is_rejected = False
        self._gpu: Any = None
        self._block: Any = None
        """The memory, if weights may be loaded from it."""

    def load(self, loader: ParameterLoader) -> int | None:
        """Load the version on the GPU, if it is at least as new as the one in main memory, and return its number."""
        if self._block is None:
            return None
        with self._locked(GPU_LOCK):
            version = self._words[ON_GPU] - 1
            if version < unpack_word(self._words[0])[0]:
                return None
            assert loader.own is not None
            for (_, target), view in zip(loader.own, self._views(loader, self._block), strict=True):
                target.detach().copy_(view)
            self._gpu.synchronize()
            return version

    def verify(self, loader: ParameterLoader, version: int, arrays: Sequence[Array]) -> None:
        """Open the memory if it has the same parameters as main memory. If it has another version, try again next time.

        Args:
            loader: Writes into the agent.
            version: A version that was loaded from main memory.
            arrays: Its parameters.
        """
        if self._block is not None or self._is_rejected:
            return
        try:
            self._open(loader, version, arrays)
        except Exception as error:
            self._is_rejected = True
            log.warning("weights pass through main memory, although the learner is on a GPU: %s", error)

    def close(self) -> None:
        """Close the memory. The head may free it then."""
        if self._block is not None:
            self._gpu.close(self._block)
            self._block = None
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, self._opened_lock)

    def _open(self, loader: ParameterLoader, version: int, arrays: Sequence[Array]) -> None:
        from farstep.agents.gpu import gpu_memory  # imports torch

        if loader.own is None:
            raise gpu_memory.UnsuitableError("the agent converts its weights, or loads them with set_parameters")
        gpu = gpu_memory.SharedGpuMemory(gpu_memory.common_device(loader.own))
        if gpu.uuid != self._message.gpu:
            raise gpu_memory.UnsuitableError(f"the learner is on GPU {self._message.gpu}, the server on {gpu.uuid}")
        with contextlib.ExitStack() as undo:
            fcntl.lockf(self._fd, fcntl.LOCK_SH, 1, self._opened_lock)
            undo.callback(fcntl.lockf, self._fd, fcntl.LOCK_UN, 1, self._opened_lock)
            if self._words[IS_RETIRED]:  # after locking: the head writes this word before it looks for locks
                return
            block = gpu.open(self._message.handle, self._nbytes)
            undo.callback(gpu.close, block)
            with self._locked(GPU_LOCK):
                if self._words[ON_GPU] - 1 != version:
                    return
                views = self._views(loader, block)
                for name, view, array in zip(loader.schema.names, views, arrays, strict=True):
                    if as_stored(name, view).tobytes() != array.tobytes():
                        raise gpu_memory.UnsuitableError(f"{name!r} has other values on the GPU than in main memory")
            undo.pop_all()
            self._gpu, self._block = gpu, block

    def _views(self, loader: ParameterLoader, block: Any) -> list[Any]:
        from farstep.agents.gpu.gpu_memory import views_of

        assert loader.own is not None
        return views_of(block, loader.schema, [target.dtype for _, target in loader.own])

    @contextlib.contextmanager
    def _locked(self, byte: int) -> Iterator[None]:
        fcntl.lockf(self._fd, fcntl.LOCK_SH, 1, byte)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, byte)
