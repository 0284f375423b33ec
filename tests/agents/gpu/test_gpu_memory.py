"""Memory of the GPU that processes share, and the parameters in it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from farstep.agents.gpu import gpu_memory
from farstep.agents.gpu.gpu_memory import SharedGpuMemory, UnsuitableError, common_device, has_nan, views_of
from farstep.agents.parameters import ParameterSchema
from tests.agents.gpu.fake_gpu import FakeGpuMemory

if torch.cuda.is_available():
    torch.zeros(1, device="cuda")  # CUDA keeps descriptors open, which no test has to close
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NBYTES = 3_000_001

OPENER = """
import sys, torch
from farstep.agents.gpu.gpu_memory import SharedGpuMemory
memory = SharedGpuMemory(torch.device("cuda:0"))
block = memory.open(bytes.fromhex(sys.argv[1]), int(sys.argv[2]))
print(memory.uuid, block.sum().item(), block[-1].item())
block[0] = 5
memory.close(block)
"""


@needs_cuda
def test_another_process_reads_and_writes_the_memory() -> None:
    memory = SharedGpuMemory(torch.device("cuda:0"))
    block, handle = memory.allocate(NBYTES)
    try:
        assert block.sum().item() == 0
        block[10], block[-1] = 3, 7
        memory.synchronize()
        command = [sys.executable, "-c", OPENER, handle.hex(), str(NBYTES)]
        out = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        assert out.split() == [memory.uuid, "10", "7"]
        assert block[0].item() == 5
    finally:
        memory.free(block)


@needs_cuda
def test_blocks_do_not_overlap_and_are_freed() -> None:
    memory = SharedGpuMemory(torch.device("cuda:0"))
    free_before = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        blocks = [memory.allocate(nbytes) for nbytes in (100, 2**28)]
        for k, (block, _) in enumerate(blocks):
            block.fill_(k + 1)
        assert [block.max().item() for block, _ in blocks] == [1, 2]
        for block, _ in blocks:
            memory.free(block)
    assert free_before - torch.cuda.mem_get_info()[0] < 2**28


@needs_cuda
def test_a_handle_that_cannot_be_opened_is_reported() -> None:
    memory = SharedGpuMemory(torch.device("cuda:0"))
    block, handle = memory.allocate(100)
    for wrong in (bytes(64), handle):  # CUDA does not open memory in the process that allocated it
        with pytest.raises(UnsuitableError, match="cuIpcOpenMemHandle_v2 failed with CUDA error"):
            memory.open(wrong, 100)
    memory.free(block)
    assert torch.zeros(1, device="cuda").add(1).item() == 1  # torch is not affected


@needs_cuda
def test_too_much_memory_is_refused() -> None:
    with pytest.raises(UnsuitableError, match="cuMemAlloc_v2 failed with CUDA error 2"):
        SharedGpuMemory(torch.device("cuda:0")).allocate(2**45)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64])
def test_nan_is_found_in_every_dtype(device: str, dtype: torch.dtype) -> None:
    numbers = [torch.arange(3, device=device), torch.zeros(0, device=device), torch.ones(2, 3, device=device).to(dtype)]
    assert not has_nan(numbers)
    assert has_nan([*numbers, torch.tensor([1.0, float("nan")], device=device).to(dtype)])
    assert not has_nan(numbers[:1])


@pytest.mark.parametrize(
    ("leaf", "reason"),
    [
        (np.zeros(2), "'b' is a ndarray"),
        (torch.zeros(2).to_sparse(), "'b' is a torch.sparse_coo tensor on cpu"),
        (torch.zeros(2, device="meta"), "'b' is a torch.strided tensor on meta"),
    ],
)
def test_leaves_that_are_not_on_the_gpu_are_named(leaf: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "SharedGpuMemory", FakeGpuMemory)
    assert common_device([("a", torch.zeros(2))]) == torch.device("cpu")
    with pytest.raises(UnsuitableError, match=reason):
        common_device([("a", torch.zeros(2)), ("b", leaf)])
    with pytest.raises(UnsuitableError, match="no parameters"):
        common_device([])


def test_views_have_the_layout_of_main_memory() -> None:
    leaves = [("a", torch.arange(3.0)), ("b", torch.tensor(True)), ("c", torch.ones(2, 2).bfloat16())]
    schema = ParameterSchema.of(leaves)
    block = torch.zeros(schema.nbytes, dtype=torch.uint8)
    for view, (_, leaf) in zip(views_of(block, schema, [leaf.dtype for _, leaf in leaves]), leaves, strict=True):
        view.copy_(leaf)
    for array, (_, leaf) in zip(schema.views(block.numpy()), leaves, strict=True):
        assert array.tobytes() == leaf.contiguous().view(torch.uint8).numpy().tobytes()
    with pytest.raises(UnsuitableError, match=r"'a' has dtype torch\.float64"):
        views_of(block, schema, [torch.float64, torch.bool, torch.bfloat16])
