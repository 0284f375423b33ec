"""Rolls one chunk for a ticket: reset if requested, then act and step row by row."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from farstep.acting.client import ServedActor
from farstep.rollout.blocks import Layout
from farstep.rollout.progress import ACT, CANCEL, CHUNK_STEP, CHUNK_STEPS, CHUNK_US, COUNT, PHASE
from farstep.rollout.rows import Rows
from farstep.schema import space_schema
from farstep.wire import messages as m
from farstep.wire.channels.memory import SharedMemory
from farstep.wire.codec import pack
from farstep.worker.acting import Actor
from farstep.worker.chunk_sender import ChunkPayload, ChunkSender
from farstep.worker.connection.inbox import TicketCancelled
from farstep.worker.hosting.base import Host, HostedEnvs
from farstep.worker.hosting.hosts import AnyHost
from farstep.worker.hosting.staggered import Staggered
from farstep.worker.worker_timer import WorkerTimer

AnyActor = Actor | ServedActor
_POLL_S = 0.2
"""Seconds between two polls of the link for a `Cancel` while rolling, in a worker without shared memory."""


class Rollout(NamedTuple):
    """A rolled chunk: what its header reports, and its frames."""

    version: int
    """The version that acted."""
    passed: int
    """The newer version that `version` counts as (see `messages.Chunk.passed`)."""
    resume: bytes
    """One int64 per slot: the episode with which a replacement worker continues."""
    clock: int
    stagger_steps: int
    payload: ChunkPayload
    infos: bytes | None
    """The encoded infos of the environments; None if the ticket did not request them."""

    @property
    def frames(self) -> list[Any]:
        """All frames after the header."""
        return self.payload.frames if self.infos is None else [*self.payload.frames, self.infos]


class Roller:
    """Rolls chunks into blocks with the head's layout, in shared memory or in private memory."""

    rows: Rows
    """The rows that the last ticket wrote."""

    def __init__(
        self, host: AnyHost, words: memoryview, poll: Callable[[], None], sender: ChunkSender, timer: WorkerTimer
    ) -> None:
        self._host, self._words, self._poll, self._sender, self._timer = host, words, poll, sender, timer
        _, self._action_schema = space_schema(host.action_space, "action")
        self._next_poll = 0.0

    def set_layout(self, message: m.SetLayout, fds: Sequence[int]) -> None:
        """Use this layout for the next chunks; `fds` has the descriptor of the shared memory, if any."""
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

    def first_lane(self) -> Rows:
        """This worker's columns of the first lane."""
        return Rows(self._layout, self._blocks, 0, *self._columns)

    def roll(self, ticket: m.Ticket, frames: Sequence[Any], actor: AnyActor | None, index: int, passed: int) -> Rollout:
        """Roll the chunk of a ticket.

        Args:
            frames: Actions, one array per leaf of the action space; empty if the worker acts itself.
            actor: The agent's copy; None if the head acts.
            index: The chunk's index (see `messages.Chunk.index`).
            passed: The newest version whose probe the current weights passed; -1 if none.

        Raises:
            TicketCancelled: The head cancelled the ticket, or the worker has to stop.
        """
        host, steps = self._host, ticket.steps
        acting = actor if isinstance(host, Host) and steps else None
        self.rows = rows = Rows(self._layout, self._blocks, ticket.lane if self._shared else 0, *self._columns)
        for name, frame in zip(self._action_schema, frames, strict=False):
            target = rows.row[name][0]
            target[...] = np.frombuffer(frame, target.dtype).reshape(target.shape)
        self._timer.begin_roll()
        self._began = time.monotonic()
        self._show_progress(0, steps)
        self._rolled, self._next_measured = 0, 0
        try:
            self._begin(ticket, rows, acting, index)
            if isinstance(acting, ServedActor):
                self._roll_served_rows(ticket, rows, acting)
            else:
                self._roll_rows(ticket, rows, acting)
            if acting is not None:
                acting.add_priorities(rows, steps)
            ends = host.finish(steps)
        finally:
            self._show_progress(0, 0)
            if isinstance(acting, ServedActor):
                acting.release()
            self._timer.end_roll(self._rolled, acting, self._next_measured)
        version = actor.version if actor else 0
        passed = acting.passed if isinstance(acting, ServedActor) else max(version, passed)
        resume = host.slots.resume.tobytes()
        clock, stagger_steps = host.report() if isinstance(host, Staggered) else (0, 0)
        payload = ChunkPayload([ends], [], [], 0) if self._shared else self._sender.finish(ends, passed)
        infos = pack(host.infos, opaque=True) if ticket.infos and host.infos else None
        return Rollout(version, passed, resume, clock, stagger_steps, payload, infos)

    def _begin(self, ticket: m.Ticket, rows: Rows, acting: AnyActor | None, index: int) -> None:
        """Bring the environments to the first row, and prepare the chunk sender."""
        host, steps = self._host, ticket.steps
        host.want_infos(ticket.infos)
        if ticket.reset is not None:
            self._reset(ticket.reset)
        host.begin(rows, steps)
        if acting is not None:
            acting.begin(rows)
            if isinstance(acting, ServedActor):
                acting.hold(ticket)
            if isinstance(host, Staggered):
                host.advance_to_phase(steps, acting, partial(self._check_cancelled, ticket))
            self._next_measured = self._timer.first_measured(acting)
            rows.row["version"][:steps] = acting.version
        whole = acting is not None and acting.has_priorities  # they are known only once the chunk is complete
        self._due = -1 if self._shared else self._sender.begin(ticket, index, rows, whole)

    def _roll_rows(self, ticket: m.Ticket, rows: Rows, acting: AnyActor | None) -> None:
        host, words, due, measured = self._host, self._words, self._due, self._next_measured
        next_poll = time.monotonic() + _POLL_S
        t = 0
        try:
            for t in range(ticket.steps):
                if not self._shared and time.monotonic() > next_poll:
                    self._poll()
                    next_poll = time.monotonic() + _POLL_S
                if words[CANCEL] >= ticket.seq:
                    host.finish(t)
                    raise TicketCancelled
                if t == due:
                    due = self._send_rows(t)
                if acting is not None:
                    if host.slots.any_fresh:
                        host.slots.mark_starts(rows.row["episode_start"][t])
                    words[PHASE] = ACT
                    words[COUNT] += 1
                    if t == measured:
                        self._show_progress(t, ticket.steps)
                        acting.timed_act(t)
                        measured = self._timer.next_measured(t)
                    else:
                        acting.act(t)
                host.step(t)
            t = ticket.steps
        finally:
            self._rolled, self._next_measured = t, measured

    def _roll_served_rows(self, ticket: m.Ticket, rows: Rows, acting: ServedActor) -> None:
        """Roll with an acting server: step one group of environments while the server acts for the others."""
        host, words, due, groups = self._host, self._words, self._due, acting.groups
        starts = rows.row["episode_start"]

        def check_cancelled() -> None:
            acting.idle()
            self._check_cancelled(ticket)

        def request(t: int, group: int) -> None:
            if host.slots.any_fresh:
                host.slots.mark_starts_in(groups[group], starts[t, groups[group]])
            acting.request(t, group, t + 1 < ticket.steps)

        t = 0
        try:
            for group in range(len(groups) if ticket.steps else 0):
                request(0, group)
            for t in range(ticket.steps):
                self._show_progress(t, ticket.steps)
                if t == due:
                    due = self._send_rows(t)
                for group, part in enumerate(groups):
                    words[PHASE] = ACT
                    words[COUNT] += 1
                    if group == 0 and words[CANCEL] >= ticket.seq:
                        raise TicketCancelled
                    # Once a group has stepped, the others must step too, so that all slots end in the same row.
                    acting.receive(t, group, check_cancelled if group == 0 else None)
                    if len(groups) == 1:
                        host.step(t)
                    else:
                        assert isinstance(host, HostedEnvs)
                        host.step(t, part)
                    if t + 1 < ticket.steps:
                        request(t + 1, group)
            t = ticket.steps
        except TicketCancelled:
            host.slots.unmark_starts(starts[t])
            host.finish(t)
            raise
        finally:
            self._rolled = t

    def _show_progress(self, step: int, steps: int) -> None:
        """Write how many steps of the chunk are done (see `ChunkProgress`)."""
        words = self._words
        words[CHUNK_STEP], words[CHUNK_STEPS] = step, steps
        words[CHUNK_US] = int((time.monotonic() - self._began) * 1e6)

    def _send_rows(self, t: int) -> int:
        self._timer.lap("env")
        due = self._sender.send_rows(t)
        self._timer.lap("send")
        return due

    def _check_cancelled(self, ticket: m.Ticket) -> None:
        """Raise `TicketCancelled` if the head cancelled the ticket. A staggered host calls this while it advances
        slots."""
        if not self._shared and time.monotonic() > self._next_poll:
            self._poll()
            self._next_poll = time.monotonic() + _POLL_S
        if self._words[CANCEL] >= ticket.seq:
            raise TicketCancelled

    def _reset(self, request: m.Reset) -> None:
        mask = None if request.mask is None else np.frombuffer(request.mask, bool)
        options = pickle.loads(request.options) if request.options else None
        if mask is None or mask.any():
            self._host.reset(mask, request.seeds, options)  # type: ignore[arg-type]
