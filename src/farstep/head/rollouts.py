"""The head's side of the blocks: lays them out, takes chunks in, puts batches together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from farstep.batch import ENDS, EPISODE_KEYS, RESERVED, Batch, FinalObs, is_final
from farstep.buffer.blocks import Layout
from farstep.config import check_memory
from farstep.core import Array, Buffer, Nested, Received
from farstep.errors import WireError
from farstep.head.seats import Seat
from farstep.head.tickets import Arrived
from farstep.spec import ArraySpec, Schema, Structure, leaf_names, nest
from farstep.wire.codec import unpack
from farstep.wire.memory import SharedMemory
from farstep.wire.messages import AgentReady, Chunk, Lay
from farstep.worker.rows import Rows

MAX_STEP_BYTES = 2**28
"""What an agent may return per environment and step."""


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


@dataclass(frozen=True)
class Piece:
    """A chunk that was checked: what of it is not in the blocks."""

    ends: Array
    resume: Array
    infos: list[Any] | None
    key: int
    """Consecutive for chunks of one worker process that follow each other without a gap."""
    nbytes: int
    version: int
    """The weights that acted."""


class Rollouts:
    """Blocks of one layout at a time; a new layout gets new memory, so batches of the old one stay readable."""

    def __init__(self, seats: Sequence[Seat], obs: Structure, obs_schema: Schema) -> None:
        self._seats = seats
        self._slots = seats[-1].stop
        self._obs, self._obs_schema = obs, obs_schema
        self.layout: Layout | None = None
        self.memory: SharedMemory | None = None
        self.blocks: dict[str, Array] = {}
        self.structures: dict[str, Structure] = {"obs": obs}
        self.state: Structure | None = None

    def fit(self, lanes: int, steps: int, rows: Schema, chunks: Schema) -> Lay | None:
        """Make room for what a session writes; if the layout changed, what workers must be told."""
        wanted = Layout(lanes, steps, self._slots, rows, chunks)
        if self.layout is not None and self.layout.covers(wanted):
            return None
        if self.layout is not None and (self.layout.rows, self.layout.chunks) == (rows, chunks):
            lanes, steps = max(lanes, self.layout.lanes), max(steps, self.layout.steps)
        layout = Layout(lanes, steps, self._slots, rows, chunks)
        # Room for last observations is for the worst case, an end in every row, and hardly ever touched.
        touched = {name: spec for name, spec in rows.items() if not is_final(name)}
        needed = Layout(lanes, steps, self._slots, touched, chunks).nbytes
        check_memory(needed, f"rollouts of {steps} steps of {self._slots} environments, {lanes} at a time,")
        memory = SharedMemory.create(layout.nbytes, "farstep-rollouts")
        self.close()
        self.layout, self.memory = layout, memory
        self.blocks = layout.views(memoryview(memory.map))
        return layout.message()

    def adopt(self, structures: Mapping[str, Structure], state: Structure | None) -> None:
        """From now on, batches have what this agent returns."""
        self.structures, self.state = {"obs": self._obs, **structures}, state

    def take(self, seat: Seat, lane: int, steps: int, chunk: Chunk, received: Received, version: int) -> Piece:
        """Check a chunk, and copy a remote worker's frames into its columns."""
        ends, *frames = received.frames[1:] or [b""]
        infos = _infos(frames.pop(), seat.num_envs) if chunk.infos and frames else None
        piece = Piece(
            records_of(ends, seat, steps),
            _episodes(chunk.resume, seat.num_envs),
            infos,
            seat.incarnation << 40 | chunk.order,
            self.store(seat, lane, steps, chunk.keys, frames) if chunk.keys else self._chunk_bytes(seat, steps),
            chunk.version,
        )
        if not -1 <= chunk.version <= chunk.passed <= version or not 0 <= chunk.order < 1 << 40:
            raise WireError("a chunk whose header cannot be true.")
        return piece

    def store(self, seat: Seat, lane: int, steps: int, keys: Sequence[str], frames: Sequence[Buffer]) -> int:
        """Copy a remote worker's frames into its columns; returns their bytes."""
        assert self.layout is not None
        if len(frames) != len(keys):
            raise WireError("a chunk without all of its arrays.")
        total = 0
        for name, frame in zip(keys, frames, strict=True):
            block = self.blocks.get(name)
            if block is None:
                raise WireError(f"a chunk with the unknown array {name!r}.")
            target = block[lane, :, seat.columns] if name in self.layout.rows else block[lane, seat.columns]
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

    def rows(self, seat: Seat, lane: int) -> Rows:
        """A worker's own columns of a lane."""
        assert self.layout is not None
        return Rows(self.layout, self.blocks, lane, seat.first, seat.stop)

    def _chunk_bytes(self, seat: Seat, steps: int) -> int:
        """What a chunk in shared memory amounts to."""
        assert self.layout is not None
        rows = sum(spec.nbytes for name, spec in self.layout.rows.items() if not is_final(name))
        return rows * steps * seat.num_envs

    def batch(self, arrived: Sequence[Arrived], steps: int, continues: Array) -> Batch:
        """One chunk of every worker: views of their common lane."""
        lane = arrived[0].order.lane
        arrays = {name: block[lane, :steps] for name, block in self._row_blocks()}
        last = {name: self.blocks[name][lane, steps] for name in self._obs_schema}
        state = None
        if self.state is not None:
            state = nest(self.state, {name: self.blocks[name][lane] for name in leaf_names(self.state)})
        return self._batch(arrays, last, state, arrived, np.arange(self._slots), continues)

    def copied(self, arrived: Sequence[Arrived], steps: int, continues: Array) -> Batch:
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
        return self._batch(arrays, last, state, arrived, slots, continues)

    def _row_blocks(self) -> list[tuple[str, Array]]:
        assert self.layout is not None
        return [(name, self.blocks[name]) for name in self.layout.rows if not is_final(name)]

    def _batch(
        self,
        arrays: Mapping[str, Array],
        last: Mapping[str, Array],
        state: Nested,
        arrived: Sequence[Arrived],
        slots: Array,
        continues: Array,
    ) -> Batch:
        ends, columns, finals, infos, column = [], [], [], [], 0
        for a in arrived:
            seat = self._seats[a.order.worker]
            records = a.piece.ends
            ends.append(records)
            columns.append(records["slot"] - seat.first + column)
            k = np.arange(len(records))
            place = (a.order.lane, k // seat.num_envs, seat.first + k % seat.num_envs)
            finals.append({name: self.blocks["final_" + name][place] for name in self._obs_schema})
            if a.piece.infos is not None:
                infos.append((seat.first, a.piece.infos))
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
            continues,
            state,
            infos,
        )

    def close(self) -> None:
        if self.memory is not None:
            self.memory.close()
            self.memory = None
            self.blocks = {}  # what a batch still shows stays; nothing else does


def records_of(ends: Buffer, seat: Seat, steps: int) -> Array:
    """Episode ends, believed only where they can be true."""
    if len(ends) % ENDS.itemsize or len(ends) // ENDS.itemsize > steps * seat.num_envs:
        raise WireError("a chunk with more episode ends than steps.")
    records = np.frombuffer(ends, ENDS)
    if len(records):
        rows_fit = records["row"].min() >= 0 and records["row"].max() < steps
        if not rows_fit or records["slot"].min() < seat.first or records["slot"].max() >= seat.stop:
            raise WireError("a chunk with episode ends outside its rows or columns.")
    return records


def _episodes(resume: bytes, num_envs: int) -> Array:
    if len(resume) != 8 * num_envs or (np.frombuffer(resume, np.int64) < 0).any():
        raise WireError("a chunk that does not say where its slots would go on.")
    return np.frombuffer(resume, np.int64)


def _infos(frame: Buffer, num_envs: int) -> list[Any]:
    infos = unpack(frame)
    if not isinstance(infos, list) or len(infos) != num_envs or not all(isinstance(info, dict) for info in infos):
        raise WireError("a chunk whose infos are not one mapping per environment.")
    return infos


def agent_structures(answer: AgentReady, actions: Schema) -> tuple[dict[str, Structure], Structure | None]:
    """How an agent's outputs and its state nest, believed only where they can be stored."""
    structure, state = unpack(answer.structure), unpack(answer.state_structure) or None
    if not isinstance(structure, dict) or not _is_structure(structure) or not _is_structure(state or ""):
        raise WireError("an agent whose outputs do not nest as mappings and tuples.")
    if sorted(leaf_names(structure)) != sorted(answer.schema):
        raise WireError("an agent whose outputs are not the arrays it names.")
    if sorted(leaf_names(state) if state else []) != sorted(answer.state):
        raise WireError("an agent whose state is not the arrays it names.")
    clash = sorted(RESERVED & structure.keys())
    shapes = {name: spec.shape for name, spec in answer.schema.items()}
    unfit = [name for name, spec in actions.items() if shapes.get(name) != spec.shape]
    if clash or unfit or any(name in answer.schema for name in answer.state):
        raise WireError(f"an agent whose outputs {clash or unfit} cannot be stored.")
    size = sum(spec.nbytes for spec in [*answer.schema.values(), *answer.state.values()])
    if size > MAX_STEP_BYTES:
        raise WireError(f"an agent that returns {size} bytes per step; at most {MAX_STEP_BYTES} are accepted.")
    return structure, state


def _is_structure(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_structure(sub) for key, sub in value.items())
    return isinstance(value, str) or (isinstance(value, tuple) and all(_is_structure(sub) for sub in value))
