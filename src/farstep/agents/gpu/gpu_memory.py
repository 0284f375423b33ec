"""GPU memory that processes share, and parameters in it.

`SharedGpuMemory` is the only class that calls the CUDA driver; tests replace it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from farstep.agents.parameters import ParameterSchema, is_tensor

_BLOCK_BYTES = 2**21
"""Smaller allocations can share a block of this size, and a handle opens the whole block."""


class UnsuitableError(Exception):
    """Why parameters cannot be copied within the GPU."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class SharedGpuMemory:
    """Allocates memory of one GPU, or opens memory that another process has allocated there.

    Args:
        device: The GPU.

    Raises:
        UnsuitableError: The CUDA driver cannot be called.
    """

    device_type = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        number, self._context = _primary_context(device.index)
        uuid = (ctypes.c_ubyte * 16)()
        _call("cuDeviceGetUuid_v2", uuid, number)
        self.uuid = bytes(uuid).hex()
        """Identifies the GPU on this machine. The index does not: processes may see different GPUs."""

    def allocate(self, nbytes: int) -> tuple[Tensor, bytes]:
        """Allocate zeroed bytes. Return them, and a handle with which another process opens them."""
        address, handle = ctypes.c_uint64(), _Handle()
        with self._current():
            _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(-(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES))
            try:
                _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
                block = self._tensor(address.value, nbytes)
                block.zero_()
            except BaseException:
                _call("cuMemFree_v2", address)
                raise
        return block, bytes(handle)

    def free(self, block: Tensor) -> None:
        """Free what `allocate` returned. No process may have it open."""
        self.synchronize()
        with self._current():
            _call("cuMemFree_v2", ctypes.c_uint64(block.data_ptr()))

    def open(self, handle: bytes, nbytes: int) -> Tensor:
        """Open memory of another process."""
        address = ctypes.c_uint64()
        with self._current():
            lazy_peer_access = ctypes.c_uint(1)  # the only flag there is; required
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), lazy_peer_access)
            try:
                return self._tensor(address.value, nbytes)
            except BaseException:
                _call("cuIpcCloseMemHandle", address)
                raise

    def close(self, block: Tensor) -> None:
        """Close what `open` returned."""
        self.synchronize()
        with self._current():
            _call("cuIpcCloseMemHandle", ctypes.c_uint64(block.data_ptr()))

    def synchronize(self) -> None:
        """Wait until all copies that this thread has started have ended."""
        torch.cuda.current_stream(self._device).synchronize()

    def _tensor(self, address: int, nbytes: int) -> Tensor:
        block = torch.as_tensor(_Bytes(address, nbytes), device=self._device)
        if block.data_ptr() != address:
            raise UnsuitableError("torch made a copy of the shared GPU memory")
        return block

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """Context manager: let the driver use the same context as torch."""
        _call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


class _Bytes:
    """Bytes at an address of the GPU, as torch takes them."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


@functools.cache
def _primary_context(index: int) -> tuple[ctypes.c_int, ctypes.c_void_p]:
    """The driver's number of a GPU, and the context that torch uses there. It is retained until the process ends."""
    context, device = ctypes.c_void_p(), ctypes.c_int()
    torch.cuda.init()  # type: ignore[no-untyped-call]
    _call("cuInit", ctypes.c_uint(0))
    _call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return device, context


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the CUDA driver."""
    try:
        status = getattr(_driver(), name)(*arguments)
    except (OSError, AttributeError) as error:
        raise UnsuitableError(f"the CUDA driver cannot be called: {error}") from error
    if status:
        raise UnsuitableError(f"{name} failed with CUDA error {status}")


def common_device(leaves: Sequence[tuple[str, Any]]) -> torch.device:
    """The GPU of all leaves.

    Raises:
        UnsuitableError: They are not dense tensors on one GPU.
    """
    device: torch.device | None = None
    for name, leaf in leaves:
        if not is_tensor(leaf) or leaf.device.type != SharedGpuMemory.device_type or leaf.layout != torch.strided:
            where = f"a {leaf.layout} tensor on {leaf.device}" if is_tensor(leaf) else f"a {type(leaf).__name__}"
            raise UnsuitableError(f"{name!r} is {where}, not a dense tensor on a GPU")
        if device is not None and leaf.device != device:
            raise UnsuitableError(f"{name!r} is on {leaf.device}, other parameters are on {device}")
        device = leaf.device
    if device is None:
        raise UnsuitableError("the agent has no parameters")
    return device


def views_of(block: Tensor, schema: ParameterSchema, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """The parameters in a block as tensors of these dtypes.

    Raises:
        UnsuitableError: A dtype has another size than the one in the schema.
    """
    views = []
    for name, shape, dtype, (start, stop) in zip(schema.names, schema.shapes, dtypes, schema.ranges, strict=True):
        if math.prod(shape) * dtype.itemsize != stop - start:
            raise UnsuitableError(f"{name!r} has dtype {dtype}, another size than the one that is sent")
        views.append(block[start:stop].view(dtype).view(shape))
    return views


def has_nan(tensors: Sequence[Tensor]) -> bool:
    """Whether a tensor has a NaN; waits for the GPU once."""
    floats = [tensor.detach() for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    found = [(tensor if tensor.element_size() > 1 else tensor.float()).isnan().any() for tensor in floats]
    return bool(found) and bool(torch.stack(found).any())
