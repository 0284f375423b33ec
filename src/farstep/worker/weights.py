"""How a worker gets parameters: out of memory it shares with the head, or by asking for them."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Protocol

from farstep.agents.parameters import ParameterLoader
from farstep.core import BytesLike
from farstep.errors import WireError
from farstep.rollout.weight_headers import HEADER, PAGE, stride, unpack_word
from farstep.wire.channels.memory import mapped
from farstep.wire.delta import decode


class Weights(Protocol):
    """The newest parameters, from wherever they are."""

    def newest(self) -> int:
        """The latest published version that this worker has heard of."""
        ...

    def load(self, loader: ParameterLoader) -> tuple[int, int]:
        """Load the newest version whole; returns it, and the bytes that it took to get it."""
        ...

    def close(self) -> None: ...


class SharedWeights:
    """One copy for all workers of the host. A buffer is locked while it is read, so the head never writes into it;
    the lock is the kernel's and goes with its holder, so a worker killed while reading blocks nobody.

    Locks of one process never conflict, and go when it closes any descriptor of the file. A worker inside the head's
    process needs none: it loads only while the head waits for it, in one thread, so nothing is written or closed.
    """

    def __init__(self, fd: int, nbytes: int, buffers: int) -> None:
        self._fd, self._nbytes = fd, nbytes
        self._map = mapped(fd, PAGE + buffers * stride(nbytes), prot=mmap.PROT_READ)
        self._word = self._map.cast("q")

    def newest(self) -> int:
        return unpack_word(self._word[0])[0]

    def load(self, loader: ParameterLoader) -> tuple[int, int]:
        while True:
            version, index = unpack_word(self._word[0])
            fcntl.lockf(self._fd, fcntl.LOCK_SH, 1, index)
            try:
                start = PAGE + index * stride(self._nbytes)
                # Between reading the word and locking, the head may have reused the buffer: look again.
                if self._word[start // 8] != version or unpack_word(self._word[0])[0] != version:
                    continue
                loader.load(loader.schema.views(self._map, start + HEADER))
                return version, self._nbytes
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, index)

    def close(self) -> None:
        os.close(self._fd)


class RemoteWeights:
    """Parameters that arrive as messages.

    `ask` says which version is here and returns the newest one, the version to add the frames to (-1: they are whole),
    and the frames.
    """

    def __init__(self, ask: Callable[[int], tuple[int, int, Sequence[BytesLike]]], delta: bool = False) -> None:
        self._ask, self._delta = ask, delta
        self._held: tuple[int, BytesLike] = (-1, b"")
        self.announced = 0

    def newest(self) -> int:
        return self.announced

    def load(self, loader: ParameterLoader) -> tuple[int, int]:
        version, base, frames = self._ask(self._held[0])
        if base not in (-1, self._held[0]):
            raise WireError(f"a difference to version {base}; this worker has {self._held[0]}.")
        payload = frames[0] if base < 0 else decode(self._held[1], frames)
        loader.load(loader.schema.views(payload))
        if self._delta:
            self._held = (version, payload)
        return version, sum(memoryview(frame).nbytes for frame in frames)

    def close(self) -> None:
        """Nothing is held."""
