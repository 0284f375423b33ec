"""Steps `make_vec`'s environments whenever the head rings, without messages (see `rollout/step_board.py`)."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Sequence

import numpy as np

from farstep.rollout.progress import PHASE, Phase
from farstep.rollout.rows import Rows
from farstep.rollout.step_board import BY_MESSAGE, FAILED, LAST, MAILBOX_BYTES, NO_INFOS, StepBoard, ring, spin
from farstep.wire import messages as m
from farstep.wire.codec import pack
from farstep.worker.hosting.strict import StrictEnvs
from farstep.worker.worker_timer import WorkerTimer

_IDLE = int(Phase.IDLE)


class LockStep:
    """The worker's side of the doorbells.

    Args:
        message: The head's message; `fds` are its descriptors.
        link_fd: Descriptor that can be read when the head has sent a message.
        host: The environments.
        progress: The worker's progress words.
        timer: Its timer.
        send: Sends a message and its further frames to the head.
        fail: Reports an exception of a step to the head.
        failures: The exceptions to report.
    """

    def __init__(
        self,
        message: m.SetDoorbells,
        fds: Sequence[int],
        link_fd: int,
        host: StrictEnvs,
        progress: memoryview,
        timer: WorkerTimer,
        send: Callable[..., None],
        fail: Callable[[BaseException], None],
        failures: tuple[type[BaseException], ...],
    ) -> None:
        board, self._bell, self._head_bell, self._finishers = fds
        self._board = StepBoard.attach(board, message.workers, message.slots)
        self._me, self._alone, self._spins = message.worker, message.workers == 1, message.spins
        self._link_fd, self._host, self._progress, self._timer = link_fd, host, progress, timer
        self._send, self._fail, self._failures = send, fail, failures
        self._slots = slice(host.slots.first, host.slots.first + host.num_envs)
        self._rows: Rows | None = None
        self._last, self._last_some = 0, 0
        """The last values of `StepBoard.go` and `StepBoard.some` that were handled."""
        self._epoll = select.epoll()
        self._epoll.register(link_fd, select.EPOLLIN)
        self._epoll.register(self._bell, select.EPOLLIN | select.EPOLLET)

    def serve(self, rows: Rows) -> None:
        """Step whenever the head rings. Return when a message has arrived.

        Args:
            rows: This worker's columns of the blocks.
        """
        self._rows = None
        go, some, me, link_fd, poll = self._board.go, self._board.some, self._me, self._link_fd, self._epoll.poll
        has_message = False
        while not has_message:
            if go[me] != self._last:
                self._last = go[me]
                self._step_all(rows)
                if self._spins and spin(lambda: go[me] != self._last):
                    continue
            elif some[me] != self._last_some:
                self._last_some = some[me]
                self._step_some(rows)
            for fd, _ in poll():  # each ring is one event, so that this returns at once if the head has rung meanwhile
                has_message = has_message or fd == link_fd
        if self._rows is not None:
            self._host.keep_observations()

    def _step_all(self, rows: Rows) -> None:
        host = self._host
        self._begin(rows)
        try:
            host.step(0)
            host.slots.total_rows += 1
            told = self._put(pack(host.infos, opaque=True)) if host.infos else NO_INFOS
        except self._failures as error:
            self._fail(error)
            told = FAILED
        self._end()
        self._done(told)

    def _step_some(self, rows: Rows) -> None:
        """Step the environments that the head has requested since the last call."""
        host, board, slots = self._host, self._board, self._slots
        asked, told = board.asked[slots].copy(), board.told[slots]
        chosen = np.flatnonzero(asked != board.stepped[slots]).tolist()
        if not chosen:  # the head rings all workers after a call that was interrupted
            return
        self._begin(rows)
        try:
            host.step_some(chosen)
            if host.infos:  # not in the mailbox: the head may not have read the infos of other environments yet
                self._send(m.StepInfos(), pack(host.infos, opaque=True))
            told[chosen] = NO_INFOS
            told[[i for i, _, _ in host.infos]] = BY_MESSAGE
        except self._failures as error:
            self._fail(error)
            told[chosen] = FAILED
        self._end()
        board.stepped[slots] = asked
        ring(self._head_bell)

    def _begin(self, rows: Rows) -> None:
        self._timer.lap_into(self._board.wait_ns, self._me)
        if self._rows is None:
            self._rows = rows
            self._host.begin(rows, 1)
        self._host.infos = []

    def _end(self) -> None:
        self._progress[PHASE] = _IDLE
        self._timer.lap_into(self._board.env_ns, self._me)

    def _done(self, told: int) -> None:
        """Announce the results. Ring if this worker is the last one, or if it failed."""
        board, me = self._board, self._me
        board.infos[me] = told
        board.done[me] = self._last
        if self._alone or self._is_last() or told == FAILED:
            os.eventfd_write(self._head_bell, 1)

    def _is_last(self) -> bool:
        """Whether no other worker is still stepping."""
        try:
            return os.read(self._finishers, 1) == LAST
        except BlockingIOError:  # after an interrupted call, the head has emptied the pipe
            return True

    def _put(self, infos: bytes) -> int:
        """Write infos into the mailbox, or send them if they do not fit. Return what `StepBoard.infos` is to say."""
        if len(infos) > MAILBOX_BYTES:
            self._send(m.StepInfos(), infos)
            return BY_MESSAGE
        self._board.mailboxes[self._me][: len(infos)] = infos
        return len(infos)
