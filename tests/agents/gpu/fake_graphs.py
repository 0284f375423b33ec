"""A fake of `CudaGraphs` on the CPU, which runs operations later than the host asks for them, as a GPU does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from farstep.agents.gpu.cuda_graphs import capturable
from farstep.agents.tape.unread_array import tensor_of
from farstep.schema import flat, map_leaves


class FakeGraphs:
    """A GPU with one stream. An operation of the stream runs when an event after it is awaited, or at a poll.

    A replay repeats a call and, like a graph, writes its results into the memory of the first one.
    """

    device = "cpu"

    def __init__(self) -> None:
        self._stream: deque[Callable[[], object]] = deque()
        self.num_enqueued = self.num_run = 0

    def pinned(self, like: Tensor) -> Tensor:
        memory = torch.empty(like.shape, dtype=like.dtype).as_subclass(_Pinned)
        memory.gpu = self
        return memory

    def event(self) -> Any:
        return FakeEvent(self)

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        with _Captures(), capturable():
            result = map_leaves(tensor_of, function())

        def run() -> None:
            with capturable(), torch.no_grad():
                for target, source in zip(flat(result), flat(function()), strict=True):
                    target.copy_(tensor_of(source))

        return lambda: self.enqueue(run), result

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
    """Host memory. It must not change until copies from it have run, and cannot be read until copies to it have run."""

    gpu: FakeGraphs

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.copy_:
            return super().__torch_function__(func, types, args, kwargs)
        assert (kwargs or {}).get("non_blocking"), "the host would wait for the copy"
        gpu = next(memory.gpu for memory in args if isinstance(memory, _Pinned))
        target, source = (memory.as_subclass(Tensor) for memory in args)
        if isinstance(args[0], _Pinned):
            target.view(torch.uint8).fill_(0x55)
            gpu.enqueue(lambda: target.copy_(source))
            return args[0]
        before = source.numpy().tobytes()

        def copy() -> None:
            assert source.numpy().tobytes() == before, "pinned memory was overwritten before the GPU has read it"
            target.copy_(source)

        gpu.enqueue(copy)
        return args[0]


class _Captures(TorchFunctionMode):
    """Refuses, like a capture, to read values of tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("item", "tolist", "numpy", "cpu", "__bool__", "nonzero"):
            raise RuntimeError("operation not permitted when stream is capturing")
        return func(*args, **(kwargs or {}))
