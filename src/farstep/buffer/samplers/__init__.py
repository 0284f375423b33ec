"""Samplers choose the items of a batch and build its arrays.

A sampler is only a set of options: frozen, comparable, and saved in checkpoints. Its `selector` draws the items.
Samplers of single rows (`FIFO`, `LIFO`, `Uniform`, `Prioritized`, `MinHeap`, `MaxHeap`) are also used as removers.
"""

from __future__ import annotations

from farstep.buffer.samplers.checks import check_remover, check_sampler, with_beta
from farstep.buffer.samplers.consecutive_rows import NStep, Sequence
from farstep.buffer.samplers.episodes import DPER, EpisodeSelector, trajectory_priority
from farstep.buffer.samplers.sampler import Sampler
from farstep.buffer.samplers.single_rows import FIFO, LIFO, FullBatch, MaxHeap, MinHeap, Prioritized, Uniform

__all__ = [
    "DPER",
    "FIFO",
    "LIFO",
    "EpisodeSelector",
    "FullBatch",
    "MaxHeap",
    "MinHeap",
    "NStep",
    "Prioritized",
    "Sampler",
    "Sequence",
    "Uniform",
    "check_remover",
    "check_sampler",
    "trajectory_priority",
    "with_beta",
]
