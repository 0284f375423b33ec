"""One ticket: reset if asked, then act and step row by row into the columns that will be read."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from farstep.rollout.blocks import Layout
from farstep.rollout.progress import ACT, CANCEL, COUNT, PHASE
from farstep.rollout.rows import Rows
from farstep.schema import space_schema
from farstep.wire import messages as m
from farstep.wire.channels.memory import SharedMemory
from farstep.wire.codec import pack
from farstep.worker.acting import Actor
from farstep.worker.chunk_sender import ChunkSender
from farstep.worker.hosting.base import Host, HostedEnvs
from farstep.worker.hosting.staggered import Staggered
from farstep.worker.hosting.strict import StrictEnvs
from farstep.worker.hosting.vector import HostedVector

AnyHost = HostedEnvs | HostedVector | StrictEnvs
_LOOK_S = 0.2
"""How often a worker that shares no memory looks, while it rolls, whether its ticket was taken back."""


class NotWanted(Exception):
    """The ticket in hand was taken back, or its agent replaced."""


class Roller:
    """Rolls chunks into blocks that the head laid out, in shared memory or in our own."""

    rows: Rows
    """Where the last ticket wrote."""

    def __init__(self, host: AnyHost, words: memoryview, look: Callable[[], None], shipping: ChunkSender) -> None:
        self._host, self._words, self._look, self._sender = host, words, look, shipping
        _, self._action_schema = space_schema(host.action_space, "action")
        self._next_look = 0.0

    def lay(self, message: m.SetLayout, fds: Sequence[int]) -> None:
        """From now on, write there."""
        layout = Layout.of(message)
        first, count = self._host.slots.first, self._host.num_envs
        if fds:
            memory = SharedMemory(fds[0], layout.nbytes)
            self._blocks = layout.views(memory.map)
            memory.close()
            self._columns = (first, first + count)
        else:
            layout = Layout(1, layout.steps, count, layout.rows, layout.chunks)
            self._blocks = layout.views(memoryview(bytearray(layout.nbytes)))
            self._columns = (0, count)
        self._layout, self._shared = layout, bool(fds)

    def roll(
        self, ticket: m.Ticket, frames: Sequence[Any], actor: Actor | None, index: int, passed: int
    ) -> tuple[m.Chunk, list[Any]]:
        """Do the ticket; the chunk's header and the frames that go with it. `index` counts chunks that were begun; the
        weights passed the probe of version `passed`."""
        host, words, steps = self._host, self._words, ticket.steps
        acting = actor if isinstance(host, Host) else None
        self.rows = rows = Rows(self._layout, self._blocks, ticket.lane if self._shared else 0, *self._columns)
        for name, frame in zip(self._action_schema, frames, strict=False):
            target = rows.row[name][0]
            target[...] = np.frombuffer(frame, target.dtype).reshape(target.shape)
        host.want_infos(ticket.infos)
        if ticket.reset is not None:
            self._reset(ticket.reset)
        host.begin(rows, steps)
        if acting is not None and steps:
            acting.begin(rows)
            if isinstance(host, Staggered):
                host.place(steps, acting, partial(self._check_wanted, ticket))
            rows.row["version"][:steps] = acting.version
        due = -1 if self._shared else self._sender.begin(ticket, index, rows)
        next_look = time.monotonic() + _LOOK_S
        for t in range(steps):
            if not self._shared and time.monotonic() > next_look:
                self._look()
                next_look = time.monotonic() + _LOOK_S
            if words[CANCEL] >= ticket.seq:
                host.finish(t)
                raise NotWanted
            if t == due:
                due = self._sender.ship(t)
            if acting is not None:
                if host.slots.any_fresh:
                    host.slots.mark_starts(rows.row["episode_start"][t])
                words[PHASE] = ACT
                words[COUNT] += 1
                acting.act(t)
            host.step(t)
        ends = host.finish(steps)
        version = actor.version if actor else 0
        chunk = m.Chunk(ticket.seq, version, host.slots.resume.tobytes(), passed=max(version, passed))
        if isinstance(host, Staggered):
            chunk.clock, chunk.stagger_steps = host.report()
        arrays: list[Any] = [ends] if self._shared else self._sender.finish(chunk, ends)
        if ticket.infos and host.infos:
            chunk.infos = True
            arrays.append(pack(host.infos, opaque=True))
        return chunk, arrays

    def _check_wanted(self, ticket: m.Ticket) -> None:
        """While no rows are rolled yet: raise if the ticket was taken back."""
        if not self._shared and time.monotonic() > self._next_look:
            self._look()
            self._next_look = time.monotonic() + _LOOK_S
        if self._words[CANCEL] >= ticket.seq:
            raise NotWanted

    def _reset(self, request: m.Reset) -> None:
        mask = None if request.mask is None else np.frombuffer(request.mask, bool)
        options = pickle.loads(request.options) if request.options else None
        if mask is None or mask.any():
            self._host.reset(mask, request.seeds, options)  # type: ignore[arg-type]
