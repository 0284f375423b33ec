"""Checkpoints of the replay buffer of a run.

They are independent of the learner's checkpoints: larger, rarer, and written in a thread of their own. Each names the
newest checkpoint of the learner at the moment of its contents. A resumed learner continues with the buffer unless the
buffer is newer than the learner.
"""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Protocol

import msgspec

from farstep.buffer.bound_arrays import internals_of
from farstep.buffer.limiter import RateLimiter
from farstep.buffer.replay import Buffer
from farstep.buffer.samplers import Sampler
from farstep.checkpoint.checks import Count, converted
from farstep.checkpoint.files import Refused
from farstep.errors import CheckpointError, ClosedError
from farstep.event import EventKind
from farstep.learners.loop.iteration import Loop
from farstep.learners.replay.config import LoopConfig

_FOLDER = "buffer"
"""Folder of the buffer's checkpoints, within that of the learner's."""
_MIB = 2**20


class Emit(Protocol):
    """Adds an event to the run."""

    def __call__(self, kind: EventKind, text: str) -> None: ...


class _Marker(msgspec.Struct, forbid_unknown_fields=True):
    """The learner's checkpoint to which a buffer belongs."""

    checkpoint: Count
    step: Count


class BufferCheckpoints:
    """Writes and restores the checkpoints of one run's replay buffer.

    Args:
        config: Options of the loop.
        emit: Adds an event to the run.
        loop: The training loop, which writes the learner's checkpoints.
    """

    def __init__(self, config: LoopConfig, emit: Emit, loop: Loop) -> None:
        self._config, self._emit, self._loop = config, emit, loop
        self._folder: Path | None = None
        if loop.checkpoints is not None and config.buffer_checkpoint_s:
            self._folder = loop.checkpoints / _FOLDER
        self._buffer: Buffer | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._newest: _Marker | None = None
        """The marker of the newest complete checkpoint."""

    # ---- resuming ----

    def restore(self, sampler: Sampler, limiter: RateLimiter) -> Buffer:
        """Return the buffer of the newest checkpoint.

        Args:
            sampler: The sampler of the learner.
            limiter: The limiter for the current options; the restored buffer gets these options and keeps its counters.

        Returns:
            The buffer.

        Raises:
            CheckpointError: There is no checkpoint, or it does not fit the learner or the options.
        """
        if self._folder is None:
            raise CheckpointError("the run writes no checkpoints of its buffer (--buffer-checkpoint-s 0).")
        buffer = Buffer.restore(self._folder, sampler)
        try:
            marker = self._check(buffer)
            _set_options(buffer, limiter)
        except BaseException:
            buffer.close()
            raise
        self._newest = marker
        self._emit(
            "checkpointed",
            f"restored {len(buffer):,} rows of the replay buffer, which belongs to checkpoint {marker.checkpoint:06d} "
            f"at step {marker.step:,}",
        )
        return buffer

    def _check(self, buffer: Buffer) -> _Marker:
        try:
            marker = converted("the marker", dict(buffer.marker), _Marker)
        except Refused as reason:
            raise CheckpointError(f"its checkpoint in {self._folder} does not name a learner's: {reason}.") from None
        learner = self._loop.newest_checkpoint
        if learner is None or marker.checkpoint > learner.number:
            raise CheckpointError(
                f"its checkpoint in {self._folder} belongs to checkpoint {marker.checkpoint:06d} of the learner, but "
                f"the run continues from {0 if learner is None else learner.number:06d}, which is older."
            )
        size = self._config.buffer_size
        if buffer.capacity != size - size % internals_of(buffer).store.columns:
            raise CheckpointError(
                f"its checkpoint in {self._folder} has room for {buffer.capacity:,} rows, but --buffer-size is "
                f"{size:,}."
            )
        return marker

    # ---- writing ----

    def start(self, buffer: Buffer) -> None:
        """Announce the bytes on disk, and write checkpoints of `buffer` from now on.

        Args:
            buffer: The buffer, with its arrays.
        """
        self._buffer = buffer
        if self._folder is None:
            return
        disk = next(folder for folder in self._folder.parents if folder.is_dir())
        needed, free = buffer.checkpoint_bytes, shutil.disk_usage(disk).free
        text = (
            f"a checkpoint of the full replay buffer takes {needed / _MIB:,.1f} MiB in {self._folder}; one is written "
            f"every {self._config.buffer_checkpoint_s:g} s and at the end, next to the one before"
        )
        if (stack := buffer.options.frame_stack) is not None:
            text += f" (each of {stack.num_frames} stacked frames is stored once)"
        if free < 2 * needed:
            self._emit(
                "warned",
                f"{text}, but the disk has only {free / _MIB:,.1f} MiB left: free some space, or choose a smaller "
                "--buffer-size or --buffer-checkpoint-s 0",
            )
        else:
            self._emit("announced", text)
        self._thread = threading.Thread(target=self._write_regularly, name="farstep-buffer-checkpoints", daemon=True)
        self._thread.start()

    def _write_regularly(self) -> None:
        while not self._ended.wait(min(self._config.buffer_checkpoint_s, threading.TIMEOUT_MAX)):
            if self._loop.newest_checkpoint is not None:  # otherwise the run cannot be resumed
                self._write()

    def _write(self) -> None:
        """Write a checkpoint. A failure does not end the run."""
        assert self._folder is not None and self._buffer is not None
        if not os.path.lexists(self._folder.parent):
            return  # deleted during the run, so the learner's next checkpoint raises an error
        markers: list[_Marker] = []

        def mark() -> dict[str, object]:
            newest = self._loop.newest_checkpoint
            if newest is None:
                raise CheckpointError("the run's folder was deleted")
            markers.append(_Marker(newest.number, newest.step))
            return msgspec.structs.asdict(markers[-1])

        try:
            folder = self._buffer.checkpoint(self._folder, keep=1, marker=mark)
        except ClosedError:
            return  # the run has failed
        except CheckpointError as error:
            self._emit("warned", f"the run continues without a new checkpoint of its replay buffer: {error}")
            return
        self._newest = markers[-1]
        self._emit(
            "checkpointed",
            f"wrote the replay buffer to {folder}; it belongs to checkpoint {self._newest.checkpoint:06d} at step "
            f"{self._newest.step:,}",
        )

    def finish(self) -> None:
        """Write the learner's last checkpoint, then that of the buffer. No thread may insert or sample any more."""
        if self._folder is None:
            return
        self._loop.save_last()  # first: it is small, and a signal may leave little time
        self.close()  # a checkpoint in progress has the final contents
        last = self._loop.newest_checkpoint
        if last is not None and (self._newest is None or self._newest.checkpoint != last.number):
            self._write()

    def close(self) -> None:
        """End the writing thread. If the buffer is closed, a checkpoint in progress is abandoned."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _set_options(buffer: Buffer, wanted: RateLimiter) -> None:
    """Give the limiter of a buffer the options of `wanted`. The learner is as far behind as before, in rows."""
    limiter = buffer.limiter
    names = ("samples_per_insert", "min_size", "min_diff", "max_diff")
    options = {name: getattr(wanted, name) for name in names}
    if options == {name: getattr(limiter, name) for name in names}:
        return
    rows_behind = (limiter.diff - limiter.min_diff) / limiter.samples_per_insert
    if limiter.samples:
        samples = limiter.inserts * wanted.samples_per_insert - wanted.min_diff
        limiter.samples = max(0, round(samples - rows_behind * wanted.samples_per_insert))
    buffer.limit(**options)
