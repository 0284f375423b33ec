"""The head's side of the blocks: allocates them, stores incoming chunks, and assembles batches."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from farstep.batch import EPISODE_KEYS, RESERVED, Batch, FinalObs, Part, info_array, is_final, side_by_side
from farstep.config.transfer import ALL_AT_ONCE, TransferTrigger
from farstep.core import Array, BytesLike, Nested, Received
from farstep.errors import WireError
from farstep.head.chunks.incoming_chunks import IncomingChunk, decode_ends
from farstep.head.members.worker_records import WorkerRecord
from farstep.head.tickets.records import AcceptedChunk, IssuedTicket
from farstep.resources import check_memory
from farstep.rollout.blocks import Layout
from farstep.rollout.rows import Rows
from farstep.schema import ArraySpec, Schema, Structure, leaf_names, nest
from farstep.wire import messages as m
from farstep.wire.channels.memory import SharedMemory
from farstep.wire.codec import unpack

MAX_STEP_BYTES = 2**28
"""Maximum number of bytes that an agent may return per environment and step."""


def base_rows(obs: Schema, reward_dtype: str = "<f4", info_keys: Sequence[str] = ()) -> Schema:
    """The arrays of a row, without the outputs of an agent."""
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
        **{info_array(key): ArraySpec((), "<f4") for key in info_keys},
    }


@dataclass(frozen=True)
class ChunkInfo:
    """Metadata of a chunk, whose arrays are in the blocks."""

    ends: Array
    """Episodes that ended in the chunk, as `ENDS` records."""
    resume: Array
    """For each environment, the episode with which a restarted worker would begin."""
    infos: list[Any] | None
    """One info per environment; None if the ticket did not request infos."""
    key: int
    """Successive chunks of one worker process without a gap have consecutive keys."""
    nbytes: int
    version: int
    """The version that acted."""
    stage: int = 0
    """The first stage in the `Chunk` message; earlier stages arrived as parts."""
    rows: Batch | None = None
    """A copy of its arrays if its lane was freed for another chunk; otherwise None."""


class Rollouts:
    """The blocks of the current layout. A new layout gets new memory, so batches of the old layout stay readable.

    A chunk of a remote worker is complete when all of its parts have arrived. A worker rolls one ticket at a time, so
    at most one chunk per worker is incomplete. When data of another chunk arrives, the incomplete chunk is discarded.

    Args:
        records: All workers.
        obs: How observations are nested.
        obs_schema: Arrays of an observation.
        remote: Whether workers send arrays instead of writing into shared memory.
        transfer: How chunks are divided into stages.
    """

    def __init__(
        self,
        records: Sequence[WorkerRecord],
        obs: Structure,
        obs_schema: Schema,
        remote: bool = False,
        transfer: TransferTrigger = ALL_AT_ONCE,
    ) -> None:
        self._records = records
        self._remote, self._transfer = remote, transfer
        self._incoming: dict[int, IncomingChunk] = {}
        self._stages: list[list[str]] = []
        self._slots = records[-1].stop
        self._obs, self._obs_schema = obs, obs_schema
        self.layout: Layout | None = None
        self.memory: SharedMemory | None = None
        self.blocks: dict[str, Array] = {}
        self.structures: dict[str, Structure] = {"obs": obs}
        self.state: Structure | None = None

    def fit(self, lanes: int, steps: int, rows: Schema, chunks: Schema) -> m.SetLayout | None:
        """Allocate new blocks if the current blocks do not fit. Return the message to announce a changed layout.

        Args:
            lanes: Number of chunks per worker that are stored at the same time.
            steps: Rows per chunk.
            rows: Arrays per row.
            chunks: Arrays per chunk.
        """
        wanted = Layout(lanes, steps, self._slots, rows, chunks)
        if self.layout is not None and self.layout.covers(wanted):
            return None
        if self.layout is not None and (self.layout.rows, self.layout.chunks) == (rows, chunks):
            lanes, steps = max(lanes, self.layout.lanes), max(steps, self.layout.steps)
        layout = Layout(lanes, steps, self._slots, rows, chunks)
        # The blocks of final observations have room for an episode end in every row. The kernel does not allocate
        # untouched pages.
        touched = {name: spec for name, spec in rows.items() if not is_final(name)}
        needed = Layout(lanes, steps, self._slots, touched, chunks).nbytes
        check_memory(needed, f"rollouts of {steps} steps of {self._slots} environments, {lanes} at a time,")
        memory = SharedMemory.create(layout.nbytes, "farstep-rollouts")
        self.close()
        self.layout, self.memory = layout, memory
        self.blocks = layout.views(memory.map)
        self._stages = self._transfer.split(layout.names())
        return layout.message()

    def adopt(self, structures: Mapping[str, Structure], state: Structure | None) -> None:
        """Set how outputs and state of the agent are nested in batches."""
        self.structures, self.state = {"obs": self._obs, **structures}, state

    def take(
        self, record: WorkerRecord, issued: IssuedTicket, steps: int, chunk: m.Chunk, received: Received, version: int
    ) -> ChunkInfo:
        """Check a chunk. Copy the arrays in the message of a remote worker into the worker's columns.

        Args:
            record: The sender.
            issued: The ticket of the chunk.
            steps: Rows that the ticket requests.
            chunk: The header.
            received: The whole message.
            version: The newest version.
        """
        if not -1 <= chunk.version <= chunk.passed <= version:
            raise WireError(
                f"a chunk of version {chunk.version} that counts as version {chunk.passed}; the newest is {version}."
            )
        ends, *frames = received.frames[1:] or [b""]
        if len(frames) != len(chunk.keys) + chunk.infos or (chunk.keys and not self._remote):
            raise WireError(f"a chunk of {len(chunk.keys)} arrays and infos={chunk.infos} with {len(frames)} frames.")
        infos = _infos(frames.pop(), record.num_envs) if chunk.infos else None
        resume, key = _episodes(chunk.resume, record.num_envs), key_of(record, chunk.index)
        if not self._remote:
            records, nbytes = decode_ends(ends, record, steps), self._chunk_bytes(record, steps)
            return ChunkInfo(records, resume, infos, key, nbytes, chunk.version)
        incoming = self._incoming_chunk(record, issued, steps, chunk)
        stage = incoming.stages
        if not stage:
            incoming.ends = decode_ends(ends, record, steps)
        elif len(ends):
            raise WireError("episode ends in another stage than the first one.")
        incoming.add(chunk.keys, frames, chunk.first, chunk.codecs)
        incoming.complete(self._stages)
        del self._incoming[record.worker]
        assert incoming.ends is not None
        return ChunkInfo(incoming.ends, resume, infos, key, incoming.nbytes, chunk.version, stage)

    def take_part(
        self, record: WorkerRecord, issued: IssuedTicket, steps: int, part: m.Part, received: Received
    ) -> Array | None:
        """Copy the arrays of a part into the columns of its remote worker.

        Return the chunk's episode ends if a stage is complete, otherwise None.
        """
        key_of(record, part.index)  # raises if the index is out of range
        early = self._remote and (part.stage >= 0 or self._transfer.sends_early)
        if not early or not -1 <= part.stage < len(self._stages) - 1:
            raise WireError(f"a part of stage {part.stage}, which EnvConfig.transfer does not send ahead.")
        incoming = self._incoming_chunk(record, issued, steps, part)
        if part.stage not in (-1, incoming.stages):
            raise WireError(f"a part of stage {part.stage}; expected stage {incoming.stages}.")
        ends, *frames = received.frames[1:] or [b""]
        if part.stage == 0:
            incoming.ends = decode_ends(ends, record, steps)
        elif len(ends):
            raise WireError("episode ends in another stage than the first one.")
        incoming.add(part.keys, frames, part.first, part.codecs)
        if part.stage < 0:
            return None
        incoming.complete(self._stages[: part.stage + 1])
        return incoming.ends

    def _incoming_chunk(
        self, record: WorkerRecord, issued: IssuedTicket, steps: int, message: m.Part | m.Chunk
    ) -> IncomingChunk:
        """The chunk that the message belongs to. A retry of the ticket starts with an empty chunk."""
        incoming = self._incoming.get(record.worker)
        if incoming is None or incoming.id != (issued.seq, message.index):
            incoming = IncomingChunk(self.rows(record, issued.lane), steps, issued.seq, message.index)
            self._incoming[record.worker] = incoming
        return incoming

    def rows(self, record: WorkerRecord, lane: int) -> Rows:
        """A worker's columns of a lane."""
        assert self.layout is not None
        return Rows(self.layout, self.blocks, lane, record.first, record.stop)

    def _chunk_bytes(self, record: WorkerRecord, steps: int) -> int:
        """Size of a chunk in shared memory."""
        assert self.layout is not None
        rows = sum(spec.nbytes for name, spec in self.layout.rows.items() if not is_final(name))
        return rows * steps * record.num_envs

    def batch(self, accepted: Sequence[AcceptedChunk], steps: int, continues: Array) -> Batch:
        """A batch of one chunk of every worker, as views of their common lane."""
        return self._views(accepted, slice(0, self._slots), steps, continues)

    def part(
        self, issued: IssuedTicket, steps: int, stage: int, stop: int | None, ends: Array, continues: Array
    ) -> Part:
        """The stages of a worker's chunk from `stage` to `stop` (exclusive; None: the end), as views of its columns."""
        record, stop = self._records[issued.worker], stop or len(self._stages)
        accepted = AcceptedChunk(issued, -1, ChunkInfo(ends, record.resume, None, 0, 0, -1))
        whole = self._views([accepted], record.columns, steps, continues)
        names = [{name for names in self._stages[first:stop] for name in names} for first in (stage, 0)]
        new, so_far = (self._only(whole, arrived) for arrived in names)
        return Part(record.worker, whole.slots, stop - 1, stop == len(self._stages), new, so_far)

    def chunk(self, accepted: AcceptedChunk, steps: int, continues: Array) -> Batch:
        """One worker's chunk, as views of its columns."""
        return self._views([accepted], self._records[accepted.ticket.worker].columns, steps, continues)

    def _only(self, batch: Batch, names: Container[str]) -> Batch:
        """The arrays of a batch with these names."""
        arrays = {name: array for name, array in batch.arrays.items() if name in names}
        structures = {key: s for key, s in self.structures.items() if all(name in names for name in leaf_names(s))}
        has_last, has_final = (all(kind + name in names for name in self._obs_schema) for kind in ("last_", "final_"))
        has_state = self.state is not None and all(name in names for name in leaf_names(self.state))
        return replace(
            batch,
            arrays=arrays,
            structures=structures,
            last_obs=batch.last_obs if has_last else None,
            final_obs=batch.final_obs if has_final else replace(batch.final_obs, obs=None),
            initial_state=batch.initial_state if has_state else None,
        )

    def _views(self, accepted: Sequence[AcceptedChunk], columns: slice, steps: int, continues: Array) -> Batch:
        lane = accepted[0].ticket.lane
        arrays = {name: block[lane, :steps, columns] for name, block in self._row_blocks()}
        last = {name: self.blocks[name][lane, steps, columns] for name in self._obs_schema}
        state = None
        if self.state is not None:
            state = nest(self.state, {name: self.blocks[name][lane, columns] for name in leaf_names(self.state)})
        return self._batch(arrays, last, state, accepted, np.arange(columns.start, columns.stop), continues)

    def copied(self, accepted: Sequence[AcceptedChunk], steps: int, continues: Array) -> Batch:
        """A batch of chunks of any workers, copied side by side."""
        if any(a.info.rows is not None for a in accepted):
            own = [a.info.rows for a in accepted]
            found = [rows or self.chunk(a, steps, continues[:0]) for a, rows in zip(accepted, own, strict=True)]
            return replace(side_by_side(found), continues=continues)
        parts = [(a.ticket.lane, self._records[a.ticket.worker]) for a in accepted]

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
        return self._batch(arrays, last, state, accepted, slots, continues)

    def _row_blocks(self) -> list[tuple[str, Array]]:
        assert self.layout is not None
        return [(name, self.blocks[name]) for name in self.layout.rows if not is_final(name)]

    def _batch(
        self,
        arrays: Mapping[str, Array],
        last: Mapping[str, Array],
        state: Nested,
        accepted: Sequence[AcceptedChunk],
        slots: Array,
        continues: Array,
    ) -> Batch:
        ends, columns, finals, infos, column = [], [], [], [], 0
        for a in accepted:
            record = self._records[a.ticket.worker]
            ends.append(a.info.ends)
            columns.append(a.info.ends["slot"] - record.first + column)
            k = np.arange(len(a.info.ends))
            place = (a.ticket.lane, k // record.num_envs, record.first + k % record.num_envs)
            finals.append({name: self.blocks["final_" + name][place] for name in self._obs_schema})
            if a.info.infos is not None:
                infos.append((record.first, a.info.infos))
            column += record.num_envs
        episodes = np.concatenate(ends)
        final = nest(self._obs, {n: np.concatenate([part[n] for part in finals]) for n in self._obs_schema})
        return Batch(
            arrays,
            self.structures,
            nest(self._obs, last),
            FinalObs(episodes["row"].astype(np.int64), np.concatenate(columns).astype(np.int64), final),
            {key: episodes[key].copy() for key in EPISODE_KEYS},
            slots,
            continues,
            state,
            infos,
        )

    def close(self) -> None:
        if self.memory is not None:
            self.memory.close()
            self.memory = None
            self.blocks = {}  # batches are views, which keep the memory alive
            self._incoming.clear()


def key_of(record: WorkerRecord, index: int) -> int:
    """The key of a worker's chunk (see `ChunkInfo.key`)."""
    if not 0 <= index < 1 << 40:
        raise WireError(f"a chunk with the index {index}.")
    return record.incarnation << 40 | index


def _episodes(resume: bytes, num_envs: int) -> Array:
    if len(resume) != 8 * num_envs or (np.frombuffer(resume, np.int64) < 0).any():
        raise WireError("a chunk without a valid next episode for each of its slots.")
    return np.frombuffer(resume, np.int64)


def _infos(frame: BytesLike, num_envs: int) -> list[Any]:
    infos = unpack(frame)
    if not isinstance(infos, list) or len(infos) != num_envs or not all(isinstance(info, dict) for info in infos):
        raise WireError("a chunk whose infos are not one mapping per environment.")
    return infos


def agent_structures(answer: m.AgentReady, actions: Schema) -> tuple[dict[str, Structure], Structure | None]:
    """How an agent's outputs and state are nested. Raise `WireError` if they cannot be stored."""
    structure, state = unpack(answer.structure), unpack(answer.state_structure) or None
    if not isinstance(structure, dict) or not _is_structure(structure) or not _is_structure(state or ""):
        raise WireError("an agent whose outputs are not nested mappings and tuples.")
    if sorted(leaf_names(structure)) != sorted(answer.schema):
        raise WireError("an agent whose outputs are not the arrays that it declares.")
    if sorted(leaf_names(state) if state else []) != sorted(answer.state):
        raise WireError("an agent whose state is not the arrays that it declares.")
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
