"""A fake of `CudaGraphs` on the CPU, which runs operations later than the host asks for them, as a GPU does."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from farstep.agents.gpu.cuda_graphs import capturable


class FakeGraphs:
    """A GPU with one stream. An operation of the stream runs when an event after it is awaited, or at a poll.

    A replay repeats a call. It is two operations, so that a poll may find it half done.
    """

    device = "cpu"

    def __init__(self) -> None:
        self._stream: deque[Callable[[], object]] = deque()
        self.num_enqueued = self.num_run = 0
        self.copies: list[tuple[Tensor, Tensor]] | None = None
        """Target and source of the copies of the call that is being captured."""
        self.times: Iterator[float] = itertools.repeat(1.0)
        """What `seconds` returns for each size, in the order of their captures."""

    def pinned(self, like: Tensor) -> Tensor:
        memory = torch.empty(like.shape, dtype=like.dtype).as_subclass(_Pinned)
        memory.gpu = self
        return memory

    def event(self) -> Any:
        return FakeEvent(self)

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        copies: list[tuple[Tensor, Tensor]] = []
        self.copies = copies
        try:
            with _Captures(), capturable():
                result = function()
        finally:
            self.copies = None

        def replay() -> None:
            read = [source for _, source in copies if isinstance(source, _Pinned)]
            before = [_bytes(source) for source in read]
            for target, _ in copies:
                if isinstance(target, _Pinned):
                    target.as_subclass(Tensor).view(torch.uint8).fill_(0x55)

            def run() -> None:
                assert [_bytes(source) for source in read] == before, "overwritten before the GPU has read it"
                with capturable(), torch.no_grad():
                    function()

            self.enqueue(lambda: None)
            self.enqueue(run)

        return replay, result

    def seconds(self, function: Callable[[], object]) -> float:
        function()
        return next(self.times)

    def enqueue(self, operation: Callable[[], object]) -> None:
        self._stream.append(operation)
        self.num_enqueued += 1

    def run(self, count: int) -> None:
        """Run the first `count` operations that were ever enqueued, except those that have run."""
        while self.num_run < count:
            self._stream.popleft()()
            self.num_run += 1


class FakeEvent:
    """As `torch.cuda.Event`. Each `query` lets the stream run one more operation."""

    def __init__(self, gpu: FakeGraphs) -> None:
        self._gpu, self._position = gpu, 0

    def record(self) -> None:
        self._position = self._gpu.num_enqueued

    def query(self) -> bool:
        if self._gpu.num_run >= self._position:
            return True
        self._gpu.run(self._gpu.num_run + 1)
        return False

    def synchronize(self) -> None:
        self._gpu.run(self._position)


class _Pinned(Tensor):
    """Host memory. Replays read it and write to it."""

    gpu: FakeGraphs

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.copy_:
            return super().__torch_function__(func, types, args, kwargs)
        assert (kwargs or {}).get("non_blocking"), "the host would wait for the copy"
        gpu = next(memory.gpu for memory in args if isinstance(memory, _Pinned))
        if gpu.copies is not None:
            gpu.copies.append((args[0], args[1]))
        target, source = (memory.as_subclass(Tensor) for memory in args)
        target.copy_(source)
        return args[0]


def _bytes(memory: Tensor) -> bytes:
    return memory.as_subclass(Tensor).numpy().tobytes()


class _Captures(TorchFunctionMode):
    """Refuses, like a capture, to read values of tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("item", "tolist", "numpy", "cpu", "__bool__", "nonzero"):
            raise RuntimeError("operation not permitted when stream is capturing")
        return func(*args, **(kwargs or {}))
