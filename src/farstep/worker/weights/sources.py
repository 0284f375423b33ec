"""The sources from which a worker pulls parameters: shared memory, or messages from the head."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Protocol

from farstep.agents.parameters import ParameterLoader
from farstep.config.env import ALL_WEIGHTS, WeightsConfig
from farstep.core import BytesLike
from farstep.errors import WireError
from farstep.rollout.weight_headers import HEADER, NEWEST, PAGE, stride, unpack_word
from farstep.wire.channels.memory import mapped
from farstep.wire.delta import decode, word_bytes
from farstep.wire.messages import GpuParameters
from farstep.worker.weights.gpu_weights import GpuWeights


class Weights(Protocol):
    """A source of the newest parameters."""

    def newest(self) -> int:
        """The newest published version known to this worker."""
        ...

    def load(self, loader: ParameterLoader) -> tuple[int, int]:
        """Load all parameters of the newest version. Return this version and the number of bytes transferred."""
        ...

    def close(self) -> None: ...


class SharedWeights:
    """Parameters in shared memory, one copy for all workers of a host.

    A worker locks a buffer (`fcntl.lockf`) while it reads, and the head does not write into locked buffers. If the
    worker dies, the kernel releases the lock, so a worker killed while reading does not block other processes.

    Locks within one process do not conflict, and closing any descriptor of the file releases them. This is safe even
    for a worker inside the head's process: both run in one thread, so the head neither writes nor closes anything while
    the worker loads.

    Args:
        fd: Descriptor of the memory; closed by `close`.
        nbytes: Size of one set of parameters.
        buffers: Number of sets.
        on_gpu: Where the head also stores parameters, for an acting server on a GPU; None: nowhere else.
        number: Number of this acting server.
    """

    def __init__(
        self, fd: int, nbytes: int, buffers: int, on_gpu: GpuParameters | None = None, number: int = -1
    ) -> None:
        self._fd, self._nbytes = fd, nbytes
        self._map = mapped(fd, PAGE + buffers * stride(nbytes), prot=mmap.PROT_READ)
        self._word = self._map.cast("q")
        self._on_gpu = None if on_gpu is None else GpuWeights(on_gpu, nbytes, number, fd, self._word)

    def newest(self) -> int:
        return self._word[NEWEST]

    def load(self, loader: ParameterLoader) -> tuple[int, int]:
        if self._on_gpu is not None and (loaded := self._on_gpu.load(loader)) is not None:
            return loaded, self._nbytes
        while True:
            version, index = unpack_word(self._word[0])
            fcntl.lockf(self._fd, fcntl.LOCK_SH, 1, index)
            try:
                start = PAGE + index * stride(self._nbytes)
                # Read the word again: the head may have reused the buffer before it was locked.
                if self._word[start // 8] != version or unpack_word(self._word[0])[0] != version:
                    continue
                arrays = loader.schema.views(self._map, start + HEADER)
                loader.load(arrays)
                if self._on_gpu is not None:
                    self._on_gpu.verify(loader, version, arrays)
                return version, self._nbytes
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, index)

    def close(self) -> None:
        if self._on_gpu is not None:
            self._on_gpu.close()
        os.close(self._fd)


class RemoteWeights:
    """Parameters that the head sends on request.

    Args:
        request: Takes the version that this worker holds (-1: none). Returns the newest version, the base version of
            the delta (-1: no delta, the frames are the full parameters), and the frames.
        config: In what form parameters are sent.
    """

    def __init__(
        self, request: Callable[[int], tuple[int, int, Sequence[BytesLike]]], config: WeightsConfig = ALL_WEIGHTS
    ) -> None:
        self._request, self._config = request, config
        self._held: tuple[int, BytesLike] = (-1, b"")
        self.announced = 0
        """The version of the last `Newest`."""

    def newest(self) -> int:
        return self.announced

    def load(self, loader: ParameterLoader) -> tuple[int, int]:
        version, base, frames = self._request(self._held[0])
        if base not in (-1, self._held[0]):
            raise WireError(f"weights are a difference to version {base}, but this worker has {self._held[0]}.")
        payload = frames[0] if base < 0 else decode(self._held[1], frames, word_bytes(self._config))
        loader.load(loader.schema.views(payload))
        if self._config.delta:
            self._held = (version, payload)
        return version, sum(memoryview(frame).nbytes for frame in frames)

    def close(self) -> None:
        """Nothing to release."""
