"""Batches of replayed rows as tensors on the learner's device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from farstep.buffer.bound_arrays import internals_of
from farstep.buffer.replay import Buffer
from farstep.core import Array, Nested
from farstep.learners.replay.complete_episodes import CompleteEpisodes
from farstep.schema import flat, map_leaves


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


class Copies(Protocol):
    """Copies tensors to a device while another thread computes there."""

    def send(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """Start to copy tensors.

        Args:
            tensors: Tensors in main memory.

        Returns:
            The tensors on the device, whose contents may not be there yet; and an event that `receive` waits for.
        """
        ...

    def receive(self, tensors: Sequence[Tensor], event: Any) -> None:
        """Let all further work of the calling thread on the device wait until tensors have been copied.

        Args:
            tensors: What `send` returned.
            event: The event that `send` returned with them.
        """
        ...


class CudaCopies:
    """Copies tensors to a GPU by a stream of its own, through pinned memory.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], torch.cuda.Event]:
        """Start to copy tensors. torch reuses their pinned memory only after the copies have ended."""
        with torch.cuda.stream(self._stream):
            moved = [tensor.pin_memory().to(self._device, non_blocking=True) for tensor in tensors]
            event: torch.cuda.Event = self._stream.record_event()
        return moved, event

    def receive(self, tensors: Sequence[Tensor], event: torch.cuda.Event) -> None:
        """Let the current stream wait for these tensors, but not for later ones."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(current)  # its memory is not reused before the learner is done with it


@dataclass(frozen=True)
class _Sent:
    """A batch whose tensors may still be on their way to the device."""

    batch: ReplayBatch
    tensors: Sequence[Tensor] = ()
    event: Any = None


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
        copies: How batches are prefetched; default: `CudaCopies` on a GPU. None on other devices: no prefetching.
    """

    def __init__(
        self,
        buffer: Buffer,
        batch_size: int,
        names: Collection[str],
        device: torch.device,
        episodes: CompleteEpisodes | None = None,
        copies: Copies | None = None,
    ) -> None:
        self._buffer, self._batch_size, self._names, self._device = buffer, batch_size, names, device
        self._episodes = episodes
        self._copies = CudaCopies(device) if copies is None and device.type == "cuda" else copies
        self._thread = None if self._copies is None else ThreadPoolExecutor(1, "farstep-prefetch")
        self._next: Future[_Sent] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether a batch was prefetched, or can be sampled without waiting."""
        if self._next is not None:
            return True
        can_sample = self._buffer.limiter.can_sample(self._batch_size)
        return can_sample and (self._episodes is None or self._episodes.are_present)

    def take(self) -> ReplayBatch:
        """Return the next batch, and start to prefetch the one after it if the limiter allows it.

        Raises:
            BufferTimeout: There were not enough items in time.
            ClosedError: The buffer is closed.
        """
        prefetched, self._next = self._next, None
        sent = self._sample() if prefetched is None else prefetched.result()
        if self._thread is not None and self.is_ready:
            self._next = self._thread.submit(self._sample)
        return self._received(sent)

    def _sample(self) -> _Sent:
        sampled, info = self._buffer.sample(self._batch_size)
        return self._send(sampled, torch.from_numpy(info.weights).float(), info.keys)

    def read(self, keys: Array) -> ReplayBatch:
        """Return the items with these keys that are still in the buffer, in this order; their weights are 1."""
        found, is_present = self._buffer.read(keys)
        return self._received(self._send(found, torch.ones(int(is_present.sum())), keys[is_present]))

    def _send(self, sampled: Mapping[str, Nested], weights: Tensor, keys: Array) -> _Sent:
        rows: dict[str, Nested] = {name: map_leaves(torch.from_numpy, sampled[name]) for name in self._names}
        if self._copies is None:
            if self._device.type != "cpu":
                rows, weights = map_leaves(lambda tensor: tensor.to(self._device), rows), weights.to(self._device)
            return _Sent(ReplayBatch(rows, weights, keys))
        moved, event = self._copies.send([weights, *flat(rows)])
        weights, *others = moved
        left = iter(others)
        rows = map_leaves(lambda _: next(left), rows)
        return _Sent(ReplayBatch(rows, weights, keys), moved, event)

    def _received(self, sent: _Sent) -> ReplayBatch:
        """Return a batch that the calling thread may use."""
        if self._copies is not None:
            self._copies.receive(sent.tensors, sent.event)
        return sent.batch

    def close(self) -> None:
        """Drop a prefetched batch and end the thread, even if it waits for rows."""
        if self._thread is not None:
            with internals_of(self._buffer).gate.halted():
                self._thread.shutdown(cancel_futures=True)
