"""The replay buffer: `Buffer`, samplers (also used as removers) and rate limiters."""

from farstep.buffer.limiter import MinSize, Queue, RateLimiter, SampleToInsertRatio, Stack
from farstep.buffer.replay import Buffer
from farstep.buffer.samplers import (
    DPER,
    FIFO,
    LIFO,
    FullBatch,
    MaxHeap,
    MinHeap,
    NStep,
    Prioritized,
    Sampler,
    Sequence,
    Uniform,
    trajectory_priority,
)
from farstep.buffer.sampling import SampleInfo
from farstep.buffer.storage.frames import FrameStack

__all__ = [
    "DPER",
    "FIFO",
    "LIFO",
    "Buffer",
    "FrameStack",
    "FullBatch",
    "MaxHeap",
    "MinHeap",
    "MinSize",
    "NStep",
    "Prioritized",
    "Queue",
    "RateLimiter",
    "SampleInfo",
    "SampleToInsertRatio",
    "Sampler",
    "Sequence",
    "Stack",
    "Uniform",
    "trajectory_priority",
]
