"""The head's side of the blocks: lays them out, takes chunks in, puts batches together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from farstep.batch import ENDS, EPISODE_KEYS, Batch, FinalObs
from farstep.buffer.blocks import Layout
from farstep.core import Array, Nested, Received
from farstep.errors import WireError
from farstep.head.seats import Seat
from farstep.head.tickets import Arrived
from farstep.spec import ArraySpec, Schema, Structure, leaf_names, nest
from farstep.wire.codec import unpack
from farstep.wire.memory import SharedMemory
from farstep.wire.messages import Chunk


def base_rows(obs: Schema, reward_dtype: str = "<f4") -> Schema:
    """The arrays that every rollout has, before an agent adds its own."""
    flag = ArraySpec((), "|b1")
    return {
        **obs,
        "reward": ArraySpec((), reward_dtype),
        "terminated": flag,
        "truncated": flag,
        "valid": flag,
        "episode_start": flag,
        "version": ArraySpec((), "<i8"),
        **{"final_" + name: spec for name, spec in obs.items()},
    }


class Rollouts:
    """Blocks of one layout at a time; a new layout gets new memory, so batches of the old one stay readable."""

    def __init__(self, seats: Sequence[Seat], obs: Structure, obs_schema: Schema) -> None:
        self._seats = seats
        self._slots = seats[-1].stop
        self._obs, self._obs_schema = obs, obs_schema
        self.layout: Layout | None = None
        self.memory: SharedMemory | None = None
        self.generation = 0
        self.blocks: dict[str, Array] = {}
        self.structures: dict[str, Structure] = {"obs": obs}
        self.state: Structure | None = None

    def fit(self, lanes: int, steps: int, rows: Schema, chunks: Schema) -> bool:
        """Make room for what a session writes; True if the layout changed and workers must be told."""
        wanted = Layout(lanes, steps, self._slots, rows, chunks)
        if self.layout is not None and self.layout.covers(wanted):
            return False
        if self.layout is not None and (self.layout.rows, self.layout.chunks) == (rows, chunks):
            lanes, steps = max(lanes, self.layout.lanes), max(steps, self.layout.steps)
        self.close()
        self.layout = Layout(lanes, steps, self._slots, rows, chunks)
        self.memory = SharedMemory.create(self.layout.nbytes, "farstep-rollouts")
        self.blocks = self.layout.views(memoryview(self.memory.map))
        self.generation += 1
        return True

    def check(self, seat: Seat, chunk: Chunk, steps: int, version: int) -> None:
        """A worker is believed only what can be true."""
        ends = np.frombuffer(chunk.ends, ENDS) if len(chunk.ends) % ENDS.itemsize == 0 else None
        if ends is None or len(chunk.resume) != 8 * seat.num_envs or not -1 <= chunk.version <= version:
            raise WireError("a chunk whose header cannot be true.")
        if len(ends):
            rows_fit = ends["row"].min() >= 0 and ends["row"].max() < max(steps, 1)
            if not rows_fit or ends["slot"].min() < seat.first or ends["slot"].max() >= seat.stop:
                raise WireError("a chunk with episode ends outside its rows or columns.")

    def store(self, seat: Seat, lane: int, steps: int, chunk: Chunk, received: Received) -> int:
        """Copy a remote worker's frames into its columns; returns their bytes."""
        assert self.layout is not None
        if len(received.frames) != len(chunk.keys) + 1:
            raise WireError("a chunk without all of its arrays.")
        total = 0
        for name, frame in zip(chunk.keys, received.frames[1:], strict=True):
            block = self.blocks.get(name)
            if block is None:
                raise WireError(f"a chunk with the unknown array {name!r}.")
            columns = slice(seat.first, seat.stop)
            target = block[lane, :, columns] if name in self.layout.rows else block[lane, columns]
            row_bytes = math.prod(target.shape[1:]) * block.dtype.itemsize
            if name in self.layout.rows:
                count = len(frame) // row_bytes if row_bytes else 0
                if count > steps + 1 or (row_bytes and len(frame) % row_bytes):
                    raise WireError(f"a chunk whose {name!r} has {len(frame)} bytes.")
                target = target[:count]
            elif len(frame) != target.nbytes:
                raise WireError(f"a chunk whose {name!r} has {len(frame)} bytes, not {target.nbytes}.")
            if target.size:
                target[...] = np.frombuffer(frame, block.dtype).reshape(target.shape)
            total += len(frame)
        return total

    def chunk_bytes(self, seat: Seat, steps: int) -> int:
        """What a chunk in shared memory amounts to."""
        assert self.layout is not None
        rows = sum(spec.nbytes for name, spec in self.layout.rows.items() if not name.startswith("final_obs"))
        return rows * steps * seat.num_envs

    def batch(self, arrived: Sequence[Arrived], steps: int) -> Batch:
        """One chunk of every worker: views of their common lane."""
        lane = arrived[0].order.lane
        arrays = {name: block[lane, :steps] for name, block in self._row_blocks()}
        last = {name: self.blocks[name][lane, steps] for name in self._obs_schema}
        state = None
        if self.state is not None:
            state = nest(self.state, {name: self.blocks[name][lane] for name in leaf_names(self.state)})
        return self._batch(arrays, last, state, arrived, np.arange(self._slots))

    def copied(self, arrived: Sequence[Arrived], steps: int) -> Batch:
        """Chunks of any workers, copied side by side."""
        parts = [(a.order.lane, self._seats[a.order.worker]) for a in arrived]

        def joined(name: str, start: int, stop: int) -> Array:
            return np.concatenate([self.blocks[name][lane, start:stop, s.first : s.stop] for lane, s in parts], axis=1)

        arrays = {name: joined(name, 0, steps) for name, _ in self._row_blocks()}
        last = {name: joined(name, steps, steps + 1)[0] for name in self._obs_schema}
        state = None
        if self.state is not None:
            names = leaf_names(self.state)
            pieces = {n: np.concatenate([self.blocks[n][lane, s.first : s.stop] for lane, s in parts]) for n in names}
            state = nest(self.state, pieces)
        slots = np.concatenate([np.arange(s.first, s.stop) for _, s in parts])
        return self._batch(arrays, last, state, arrived, slots)

    def _row_blocks(self) -> list[tuple[str, Array]]:
        assert self.layout is not None
        return [(name, self.blocks[name]) for name in self.layout.rows if not name.startswith("final_obs")]

    def _batch(
        self,
        arrays: Mapping[str, Array],
        last: Mapping[str, Array],
        state: Nested,
        arrived: Sequence[Arrived],
        slots: Array,
    ) -> Batch:
        ends, columns, finals, infos, column = [], [], [], [], 0
        for a in arrived:
            seat = self._seats[a.order.worker]
            records = np.frombuffer(a.chunk.ends, ENDS)
            ends.append(records)
            columns.append(records["slot"] - seat.first + column)
            k = np.arange(len(records))
            place = (a.order.lane, k // seat.num_envs, seat.first + k % seat.num_envs)
            finals.append({name: self.blocks["final_" + name][place] for name in self._obs_schema})
            if a.chunk.infos:
                infos.append((seat.first, unpack(a.chunk.infos)))
            column += seat.num_envs
        record = np.concatenate(ends)
        final = nest(self._obs, {n: np.concatenate([part[n] for part in finals]) for n in self._obs_schema})
        return Batch(
            arrays,
            self.structures,
            nest(self._obs, last),
            FinalObs(record["row"].astype(np.int64), np.concatenate(columns).astype(np.int64), final),
            {key: record[key].copy() for key in EPISODE_KEYS},
            slots,
            state,
            infos,
        )

    def close(self) -> None:
        if self.memory is not None:
            self.memory.close()
            self.memory = None
            self.blocks = {}  # what a batch still shows stays; nothing else does
