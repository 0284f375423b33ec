"""Steps `make_vec`'s environments whenever the head rings, without messages (see `rollout/step_board.py`)."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Sequence

import numpy as np

from farstep.rollout.progress import PHASE, Phase
from farstep.rollout.rows import Rows
from farstep.rollout.step_board import (
    BY_MESSAGE,
    FAILED,
    INFO_BUFFER_BYTES,
    LAST_TOKEN,
    NO_INFOS,
    Polling,
    StepBoard,
    ring,
)
from farstep.wire import messages as m
from farstep.wire.codec import pack
from farstep.worker.hosting.strict import StrictEnvs
from farstep.worker.worker_timer import WorkerTimer

_IDLE = int(Phase.IDLE)


class LockStepWorker:
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
        board, self._bell, self._head_bell, self._completion_pipe = fds
        self._board = StepBoard.attach(board, message.workers, message.slots)
        self._me, self._alone = message.worker, message.workers == 1
        self._polling = Polling() if message.polls else None
        self._link_fd, self._host, self._progress, self._timer = link_fd, host, progress, timer
        self._send, self._fail, self._failures = send, fail, failures
        self._slots = slice(host.slots.first, host.slots.first + host.num_envs)
        self._rows: Rows | None = None
        self._last, self._last_partial = 0, 0
        """The last values of `StepBoard.requested_step` and `StepBoard.partial_requests` that were handled."""
        self._epoll = select.epoll()
        self._epoll.register(link_fd, select.EPOLLIN)
        self._epoll.register(self._bell, select.EPOLLIN | select.EPOLLET)

    def serve(self, rows: Rows) -> None:
        """Step whenever the head rings. Return when a message has arrived.

        Args:
            rows: This worker's columns of the blocks.
        """
        self._rows = None
        requested, partial = self._board.requested_step, self._board.partial_requests
        me, link_fd, poll, polling = self._me, self._link_fd, self._epoll.poll, self._polling

        def is_requested() -> bool:
            return requested[me] != self._last or partial[me] != self._last_partial

        has_message = False
        while not has_message:
            if requested[me] != self._last:
                self._last = requested[me]
                self._step_all(rows)
            elif partial[me] != self._last_partial:
                self._last_partial = partial[me]
                self._step_some(rows)
            if polling is not None and polling.succeeds(is_requested):
                continue
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
            status = self._put(pack(host.infos, opaque=True)) if host.infos else NO_INFOS
        except self._failures as error:
            self._fail(error)
            status = FAILED
        self._end()
        self._done(status)

    def _step_some(self, rows: Rows) -> None:
        """Step the environments that the head has requested since the last call."""
        host, board, slots = self._host, self._board, self._slots
        requests, status = board.env_requests[slots].copy(), board.env_info_status[slots]
        chosen = np.flatnonzero(requests != board.stepped[slots]).tolist()
        if not chosen:  # the head rings all workers after a call that was interrupted
            return
        self._begin(rows)
        try:
            host.step_some(chosen)
            if host.infos:  # not in the info buffer: the head may not have read the infos of other environments yet
                self._send(m.StepInfos(), pack(host.infos, opaque=True))
            status[chosen] = NO_INFOS
            status[[i for i, _, _ in host.infos]] = BY_MESSAGE
        except self._failures as error:
            self._fail(error)
            status[chosen] = FAILED
        self._end()
        board.stepped[slots] = requests
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

    def _done(self, status: int) -> None:
        """Announce the results. Ring if this worker is the last one, or if it failed."""
        board, me = self._board, self._me
        board.infos[me] = status
        board.done[me] = self._last
        if self._alone or self._is_last() or status == FAILED:
            os.eventfd_write(self._head_bell, 1)

    def _is_last(self) -> bool:
        """Whether no other worker is still stepping."""
        try:
            return os.read(self._completion_pipe, 1) == LAST_TOKEN
        except BlockingIOError:  # after an interrupted call, the head has emptied the pipe
            return True

    def _put(self, infos: bytes) -> int:
        """Write infos into the info buffer, or send them if they do not fit. Return the value of `StepBoard.infos`."""
        if len(infos) > INFO_BUFFER_BYTES:
            self._send(m.StepInfos(), infos)
            return BY_MESSAGE
        self._board.info_buffers[self._me][: len(infos)] = infos
        return len(infos)
