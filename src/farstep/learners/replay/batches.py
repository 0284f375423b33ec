"""Batches of replayed rows as tensors on the learner's device."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from farstep.buffer.replay import Buffer
from farstep.core import Array, Nested
from farstep.learners.replay.complete_episodes import CompleteEpisodes
from farstep.schema import map_leaves


@dataclass(frozen=True)
class ReplayBatch:
    """Items that were sampled together: rows, or whole episodes."""

    rows: Mapping[str, Nested]
    """Tensors `[batch, ...]` by name, nested like the environment's observations and actions; `[batch, longest, ...]`
    if items are episodes."""
    weights: Tensor
    """Importance weight of each item; 1 without priorities."""
    keys: Array
    """Keys of the items in the buffer, to update their priorities."""


class DeviceBatches:
    """Samples batches and moves them to a device.

    On a GPU, the next batch is sampled in another thread, copied into pinned memory and sent while the learner works on
    the current one. The limiter counts it when it is sampled, so at most one batch is counted ahead of its update.

    Args:
        buffer: The replay buffer.
        batch_size: Items per batch.
        names: The arrays that the learner needs.
        device: Device of the learner.
        episodes: The episodes of the buffer, if items are episodes.
    """

    def __init__(
        self,
        buffer: Buffer,
        batch_size: int,
        names: Collection[str],
        device: torch.device,
        episodes: CompleteEpisodes | None = None,
    ) -> None:
        self._buffer, self._batch_size, self._names, self._device = buffer, batch_size, names, device
        self._episodes = episodes
        self._prefetches = device.type == "cuda"
        self._thread = ThreadPoolExecutor(1, "farstep-prefetch") if self._prefetches else None
        self._stream = torch.cuda.Stream(device) if self._prefetches else None  # type: ignore[no-untyped-call]
        self._next: Future[ReplayBatch] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether a batch was prefetched, or can be sampled without waiting."""
        if self._next is not None:
            return True
        can_sample = self._buffer.limiter.can_sample(self._batch_size)
        return can_sample and (self._episodes is None or self._episodes.are_present)

    def take(self) -> ReplayBatch:
        """Return the next batch, and start to prefetch the one after it if the limiter allows it."""
        if self._thread is None or self._stream is None:
            return self._sample()
        batch = self._sample() if self._next is None else self._next.result()
        self._next = None
        if self.is_ready:
            self._next = self._thread.submit(self._sample)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in (batch.weights, *_tensors(batch.rows)):
            tensor.record_stream(current)  # its memory is not reused before the learner is done with it
        return batch

    def _sample(self) -> ReplayBatch:
        sampled, info = self._buffer.sample(self._batch_size)
        return self._on_device(sampled, torch.from_numpy(info.weights).float(), info.keys)

    def read(self, keys: Array) -> ReplayBatch:
        """Return the items with these keys that are still in the buffer, in this order; their weights are 1."""
        found, is_present = self._buffer.read(keys)
        return self._on_device(found, torch.ones(int(is_present.sum())), keys[is_present])

    def _on_device(self, sampled: Mapping[str, Nested], weights: Tensor, keys: Array) -> ReplayBatch:
        rows = {name: map_leaves(torch.from_numpy, sampled[name]) for name in self._names}
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                rows = {name: map_leaves(self._moved, value) for name, value in rows.items()}
                weights = self._moved(weights)
        elif self._device.type != "cpu":
            rows = {name: map_leaves(lambda tensor: tensor.to(self._device), value) for name, value in rows.items()}
            weights = weights.to(self._device)
        return ReplayBatch(rows, weights, keys)

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def close(self) -> None:
        """Drop a prefetched batch and end the thread."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)


def _tensors(rows: Mapping[str, Nested]) -> list[Tensor]:
    found: list[Tensor] = []
    map_leaves(found.append, dict(rows))
    return found
