"""Fakes of a GPU: its memory, in which parameters on the CPU count as parameters on a GPU, and the device itself."""

from __future__ import annotations

import mmap
import os
from typing import Any, ClassVar

import torch

from farstep.agents.gpu import cuda_graphs, gpu_memory
from farstep.agents.gpu.gpu_memory import UnsuitableError
from tests.agents.gpu.fake_graphs import FakeGraphs


class FakeGpuMemory:
    """Memory that another process opens by the number of this process and a descriptor."""

    device_type = "cpu"
    uuid = "fake-gpu"
    allocated: ClassVar[dict[int, tuple[int, Any]]] = {}
    """Descriptor and tensor of each block of this process, by address."""
    opened: ClassVar[set[int]] = set()

    def __init__(self, device: Any) -> None:
        assert device.type == self.device_type

    def allocate(self, nbytes: int) -> tuple[Any, bytes]:
        fd = os.memfd_create("fake-gpu")
        os.ftruncate(fd, nbytes)
        block = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
        self.allocated[block.data_ptr()] = (fd, block)
        return block, f"{os.getpid()}/fd/{fd}".encode()

    def free(self, block: Any) -> None:
        os.close(self.allocated.pop(block.data_ptr())[0])

    def open(self, handle: bytes, nbytes: int) -> Any:
        if handle.startswith(f"{os.getpid()}/".encode()):
            raise UnsuitableError("CUDA cannot open memory in the process that allocated it")
        fd = os.open(f"/proc/{handle.decode()}", os.O_RDWR)
        block = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
        os.close(fd)
        self.opened.add(block.data_ptr())
        return block

    def close(self, block: Any) -> None:
        self.opened.remove(block.data_ptr())

    def synchronize(self) -> None:
        pass


def install() -> None:
    """Use the fake in this process."""
    gpu_memory.SharedGpuMemory = FakeGpuMemory  # type: ignore[assignment, misc]


def install_device() -> None:
    """Let torch see a GPU in this process. Modules and tensors that move to it stay in main memory; a module that has
    moved has `is_on_fake_gpu`."""
    move = torch.Tensor.to

    def move_module(module: torch.nn.Module, _device: str) -> torch.nn.Module:
        module.is_on_fake_gpu = True  # type: ignore[assignment]
        return module

    torch.cuda.is_available = lambda: True
    torch.nn.Module.to = move_module  # type: ignore[assignment, method-assign]
    torch.Tensor.to = lambda tensor, target: tensor if target == "cuda" else move(tensor, target)  # type: ignore
    cuda_graphs.CudaGraphs = FakeGraphs  # type: ignore[assignment, misc]
