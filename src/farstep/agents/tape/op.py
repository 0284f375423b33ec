"""One recorded operation, and queries about the memory of its tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class Op:
    """One recorded operation, with the tensors it read and wrote."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor]
    reads: set[int] = field(default_factory=set)
    """Storages of the tensors among the arguments."""
    writes: set[int] = field(default_factory=set)
    """Storages that the operation allocates or changes."""
    mutates: bool = False
    """Whether the operation changes its arguments."""
    is_random: bool = False
    """Whether the operation draws from torch's random generator."""
    initial: list[Tensor] | None = None
    """Copies of the outputs if they do not depend on any input, parameter or random number."""

    @property
    def name(self) -> str:
        return str(self.func.overloadpacket.__name__)

    @property
    def out(self) -> Tensor:
        return self.outputs[0]


def storage_of(tensor: Tensor) -> int:
    """Return the id of a tensor's storage. Tensors that may share memory have the same id."""
    return int(tensor.untyped_storage()._cdata)


def producer(ops: Iterable[Op], tensor: Tensor) -> Op | None:
    """Return the operation whose only output is this tensor, if no other operation writes to its memory."""
    writers = [op for op in ops if storage_of(tensor) in op.writes]
    if len(writers) != 1 or writers[0].mutates or len(writers[0].outputs) != 1:
        return None
    return writers[0] if writers[0].out.numel() == tensor.numel() else None


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors hold the same bits. NaN then equals NaN, and -0.0 differs from 0.0."""
    a, b = a.detach().contiguous(), b.detach().contiguous()
    return a.shape == b.shape and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
