"""The few functions of `torch.cuda` that replay a policy: pinned memory, graph capture, events and times."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from farstep.agents.tape.unread_array import UnreadArray

_TIMED_CALLS = 5
_WARM_UPS = 3
"""Calls before a capture, in which libraries such as cuBLAS allocate their workspaces."""


class CudaGraphs:
    """Captures functions on the current GPU. All graphs share one pool of memory, so only one may run at a time: replay
    them on one stream."""

    device = "cuda"

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def pinned(self, like: Tensor) -> Tensor:
        """Return host memory of the same shape, to and from which the GPU can copy without waiting."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def event(self) -> torch.cuda.Event:
        """Return an event. `record` marks the end of the work so far; `query` and `synchronize` refer to this work,
        not to later work."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Capture a call.

        Returns:
            A function that replays the operations of the call, and the result, which each replay overwrites.

        Raises:
            Exception: The function cannot be captured, for example because it reads a value of a tensor.
        """
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        with capturable():
            self._warm_up(function)
            try:
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                    result = function()
            except Exception:
                torch.cuda.set_stream(stream)  # torch.cuda.graph does not, if it cannot end the capture
                self._end_failed_capture()
                raise
        return graph.replay, result

    def seconds(self, function: Callable[[], object]) -> float:
        """Return the shortest time in seconds, over a few calls, of a function that waits for the GPU."""
        found = []
        for _ in range(_TIMED_CALLS):
            began = time.perf_counter()
            function()
            found.append(time.perf_counter() - began)
        return min(found)

    def _warm_up(self, function: Callable[[], Any]) -> None:
        """Call a function on another stream, as torch requires. Raise an error if it waits for the GPU."""
        stream, mode = torch.cuda.Stream(), torch.cuda.get_sync_debug_mode()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # set_sync_debug_mode is called a prototype
                function()  # may wait: it creates lazily initialized modules and caches
                # A failed capture leaves torch in a state that is hard to repair, so find most reasons before it.
                torch.cuda.set_sync_debug_mode("error")
                try:
                    for _ in range(_WARM_UPS - 1):
                        function()
                finally:
                    torch.cuda.set_sync_debug_mode(mode)
        finally:
            torch.cuda.current_stream().wait_stream(stream)  # copies that the function has started may still run

    def _end_failed_capture(self) -> None:
        """Repair what torch leaves behind if it cannot end a capture.

        Memory would still be taken from the pool of the graph, and the random generator would refuse to be used outside
        of a graph until a capture ends.
        """
        torch.cuda.synchronize()
        with contextlib.suppress(RuntimeError):  # if torch has ended it
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
        scratch, graph = torch.zeros(1, device=self.device), torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            graph.capture_begin(capture_error_mode="thread_local")
            scratch.add_(1)
            graph.capture_end()


@contextlib.contextmanager
def capturable() -> Iterator[None]:
    """Context manager: replace operations that many policies run on the host, which a capture does not allow."""
    checks = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        with _OnGpu():
            yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(checks)


class _OnGpu(TorchFunctionMode):
    """Leaves results on the GPU that `act` would move to the host, and samples without checks on the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.multinomial and len(args) in (2, 3) and args[1] == 1 and not kwargs:
            # The operations that torch uses after it has checked the weights.
            weights = args[0]
            return (weights / torch.empty_like(weights).exponential_(1)).argmax(-1, keepdim=True)
        if func is Tensor.cpu:
            return args[0].view_as(args[0])
        if func is Tensor.numpy:
            return UnreadArray(args[0].detach(), _refuse_read)
        return func(*args, **(kwargs or {}))


def _refuse_read(name: str) -> NoReturn:
    raise RuntimeError(f"act reads an array that it made with numpy(): {name}")
