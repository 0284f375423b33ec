"""The head's side of the doorbells: `make_vec` steps local workers without messages (see `rollout/step_board.py`).

The fast path takes no lock and does not run the event loop, which its background thread serves meanwhile. The caller
sleeps until a worker rings, until other input arrives (a message, output, the end of a process) or until the next check
of all workers is due. In the last two cases it continues in the event loop, which handles lost and stuck workers.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from farstep.core import Array
from farstep.errors import WireError, typed_shortage
from farstep.head.members.worker_records import WorkerRecord
from farstep.head.server import Server
from farstep.rollout.step_board import (
    BY_MESSAGE,
    FAILED,
    INFO_BUFFER_BYTES,
    NO_INFOS,
    Polling,
    StepBoard,
    close_all,
    completion_tokens,
    doorbell,
    num_polling,
    ring,
)
from farstep.wire import messages as m
from farstep.wire.channels.memory import SharedMemory
from farstep.wire.codec import unpack

Info = tuple[int, Mapping[str, Any] | None, Mapping[str, Any]]
"""Slot, final info of an episode that ended (otherwise None), and info of the step or reset."""
_WAIT_S = 0.2
"""Seconds after which a caller that sleeps on the doorbell enters the event loop."""


class LockStepHead:
    """Requests steps of all workers, or of some environments, and waits for the results.

    Args:
        server: The workers; all are ready, and none is ever replaced.
        poll_error: Raises the error of a step that a worker has reported, if any.
        read_messages: Returns when all messages that workers have sent until now are handled.
    """

    def __init__(self, server: Server, poll_error: Callable[[], None], read_messages: Callable[[], None]) -> None:
        self._server, self._records = server, server.records
        self._poll_error, self._read_messages = poll_error, read_messages
        workers, slots = len(self._records), self._records[-1].stop
        self._closing = threading.RLock()
        """Held while doorbells are used, so that another thread does not close them meanwhile."""
        with contextlib.ExitStack() as opened, typed_shortage("the doorbells could not be made"):
            self._memory = SharedMemory.create(StepBoard.nbytes(workers, slots), "farstep-steps")
            opened.callback(self._memory.close)
            self._fds: list[int] = []
            opened.callback(lambda: close_all(self._fds))
            self._fds += [doorbell(), *os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)]
            self._fds += [doorbell() for _ in self._records]
            self._own, self._completion_pipe, self._start, *self._bells = self._fds
            self._epoll = select.epoll()
            opened.callback(self._epoll.close)
            self._epoll.register(self._own, select.EPOLLIN | select.EPOLLET)
            self._epoll.register(server.input_fd, select.EPOLLIN)
            opened.pop_all()
        self.board = StepBoard(self._memory.map, workers, slots)
        self._num_polling = num_polling(1 + workers)
        self._polling = Polling() if self._num_polling > workers else None
        self._count = 0
        self._clean = True
        """Whether all requested steps are done and their results read. Otherwise a call was interrupted or raised."""
        self._completion_tokens = completion_tokens(workers)
        self._nothing = bytes(8 * workers)
        self._info_status = self.board.infos.cast("B")
        self._done = self.board.done.cast("B")
        self._requested = self.board.requested_step.cast("B")
        self._messages: dict[int, deque[list[Info]]] = {record.worker: deque() for record in self._records}
        """For each worker, infos that it sent and that no call has read."""
        self.in_flight = np.zeros(slots, bool)
        """For each environment, whether a step of it alone is requested and no call has seen its end."""
        self.num_in_flight = 0
        self.ready: deque[int] = deque()
        """Environments that have finished such a step, in this order, and whose results were not read."""
        self._some_infos: dict[int, Info] = {}

    def announce(self) -> None:
        """Send the doorbells to all workers."""
        workers, slots = len(self._records), len(self.in_flight)
        with self._server.locked():
            for record in self._records:
                message = m.SetDoorbells(record.worker, workers, slots, polls=record.worker < self._num_polling)
                fds = [self._memory.fd, self._bells[record.worker], self._own, self._completion_pipe]
                self._server.outbox.send(record, message, fds=fds)

    # ---- steps of all environments ----

    def begin(self) -> None:
        """Request a step of all environments. The actions are in the blocks."""
        board, count = self.board, self._count + 1
        with self._closing:
            self._server.raise_failure()  # also if another thread has closed the doorbells
            self._clean, self._count = False, count
            if len(self._bells) > 1:
                os.write(self._start, self._completion_tokens)
            for worker, bell in enumerate(self._bells):
                board.requested_step[worker] = count
                os.eventfd_write(bell, 1)

    def finish(self) -> Sequence[Info]:
        """Wait for the step and return its infos."""
        if self._polling is None:
            self._sleep(self._all_done)  # the last worker's ring orders its results before the words (see `StepBoard`)
        self._wait(self._all_done)
        infos: list[Info] = []
        if self._info_status != self._nothing:
            for record in self._records:
                infos += self._infos_of(record)
        self._clean = True
        return infos

    def _all_done(self) -> bool:
        return self._done == self._requested

    def _infos_of(self, record: WorkerRecord) -> list[Info]:
        status = self.board.infos[record.worker]
        if status == NO_INFOS:
            return []
        if status in (BY_MESSAGE, FAILED):
            self._wait_in_event_loop(lambda: bool(self._messages[record.worker]))
            return self._messages[record.worker].popleft()
        try:
            if not 0 < status <= INFO_BUFFER_BYTES:
                raise WireError(f"infos of {status} bytes in a buffer of {INFO_BUFFER_BYTES}.")
            # A copy, because the worker could still change the buffer.
            return checked_infos(unpack(bytes(self.board.info_buffers[record.worker][:status])), record)
        except WireError as error:
            with self._server.locked():
                self._server.supervisor.reject(record, error)
            self._wait_in_event_loop(lambda: False)  # the loss of a worker ends the run
            return []

    # ---- steps of some environments ----

    def send(self, chosen: Array) -> None:
        """Request a step of the chosen environments. Their actions are in the blocks."""
        with self._closing:
            self._server.raise_failure()
            self._clean = False
            self.in_flight[chosen] = True
            self.num_in_flight += len(chosen)
            self.board.env_requests[chosen] += 1
            for worker in self._workers_of(chosen):
                self.board.partial_requests[worker] += 1
                ring(self._bells[worker])

    def receive(self, count: int) -> tuple[Array, list[Info]]:
        """Wait until `count` environments have finished. Return them in order, and their infos."""
        self._wait(lambda: len(self.ready) + int(np.count_nonzero(self._finished())) >= count)
        finished = np.flatnonzero(self._finished())
        self._read_some_infos(finished[self.board.env_info_status[finished] != NO_INFOS].tolist())
        self.in_flight[finished] = False
        self.num_in_flight -= len(finished)
        self._clean = not self.num_in_flight
        self.ready.extend(finished.tolist())
        chosen = [self.ready.popleft() for _ in range(count)]
        infos = [self._some_infos.pop(slot) for slot in chosen if slot in self._some_infos]
        return np.array(chosen), infos

    def reset_done(self, infos: Sequence[Info]) -> None:
        """All environments were reset: the next calls of `receive` return their first observations."""
        self.ready.extend(range(len(self.in_flight)))
        self._some_infos = {info[0]: info for info in infos}

    def _finished(self) -> Array:
        """Mask of the environments whose requested steps are done, but are not in `ready` yet."""
        return self.in_flight & (self.board.env_requests == self.board.stepped)  # type: ignore[no-any-return]

    def _read_some_infos(self, slots: Sequence[int]) -> None:
        """Wait for the infos of these environments. Their workers may have sent them in several messages."""

        def arrived() -> bool:
            for messages in self._messages.values():
                while messages:
                    self._some_infos.update({info[0]: info for info in messages.popleft()})
            return all(slot in self._some_infos for slot in slots)

        if not arrived():
            self._wait_in_event_loop(arrived)

    def _workers_of(self, slots: Array) -> list[int]:
        firsts = [record.first for record in self._records]
        return np.unique(np.searchsorted(firsts, slots, side="right") - 1).tolist() if len(slots) else []

    # ---- waiting ----

    @property
    def is_clean(self) -> bool:
        """Whether no step is unfinished, and all results were read."""
        return self._clean and not self.ready

    def settle(self) -> None:
        """Wait until no requested step is unfinished, and discard results of a call that was interrupted or raised."""
        if self._clean:
            return
        self._ring_again()
        self._wait(
            lambda: self._all_done() and bool((self.board.env_requests == self.board.stepped).all()), errors=False
        )
        with contextlib.suppress(BlockingIOError):
            os.read(self._completion_pipe, 2 * len(self._completion_tokens))
        self._read_messages()  # infos and failures of these steps must not reach a later call
        for messages in self._messages.values():
            messages.clear()
        self.in_flight[:] = False
        self.num_in_flight = 0
        self.discard()
        self._clean = True

    def _ring_again(self) -> None:
        """Wake all workers: the interrupted call may have requested a step without ringing."""
        with self._closing:
            self._server.raise_failure()
            for worker, bell in enumerate(self._bells):
                self.board.partial_requests[worker] += 1
                ring(bell)

    def discard(self) -> None:
        """Forget results of single environments that no call has read."""
        self.ready.clear()
        self._some_infos.clear()

    def _wait(self, finished: Callable[[], bool], *, errors: bool = True) -> None:
        if self._polling is not None and self._polling.succeeds(finished):
            return
        while not finished():
            self._sleep(finished, errors=errors)

    def _sleep(self, finished: Callable[[], bool], *, errors: bool = True) -> None:
        """Sleep until a worker rings. After `_WAIT_S`, or on other input, wait in the event loop instead."""
        try:
            events = self._epoll.poll(_WAIT_S)
        except (ValueError, OSError):  # closed by another thread
            events = []
        if len(events) != 1 or events[0][0] != self._own:
            self._wait_in_event_loop(finished, self._is_stepping, errors=errors)

    def _is_stepping(self, record: WorkerRecord) -> bool:
        """Whether a requested step of a worker is not done."""
        board, slots = self.board, slice(record.first, record.first + record.num_envs)
        is_whole = board.done[record.worker] == board.requested_step[record.worker]
        return not is_whole or bool((board.env_requests[slots] != board.stepped[slots]).any())

    def _wait_in_event_loop(
        self,
        finished: Callable[[], bool],
        is_awaited: Callable[[WorkerRecord], bool] = lambda record: True,
        *,
        errors: bool = True,
    ) -> None:
        """Like `_wait`, but handle messages, lost and stuck workers meanwhile. Workers that are no longer awaited may
        be idle."""

        def poll() -> bool | None:
            if errors:
                self._poll_error()
            for record in self._records:
                record.owes_reply = record.owes_reply and is_awaited(record)
            return True if finished() else None

        server = self._server
        server.raise_failure()
        server.watch(self._own, self._clear_bell)
        try:
            for record in self._records:  # a worker that does not even begin is stuck, too
                record.owes_reply = True
            server.wait(poll)
        finally:
            for record in self._records:
                record.owes_reply = False
            with contextlib.suppress(Exception):
                server.unwatch(self._own)

    def _clear_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._own)

    def take_infos(self, record: WorkerRecord, infos: object) -> None:
        """Handle a `StepInfos` message."""
        if len(self._messages[record.worker]) > record.num_envs:
            raise WireError("more infos than the head has requested.")
        self._messages[record.worker].append(checked_infos(infos, record))

    def wake(self) -> None:
        """Wake the caller, because a worker is lost."""
        with self._closing:
            if self._fds:
                ring(self._own)

    def close(self) -> None:
        with self._closing:
            fds, self._fds = self._fds, []
            if fds:
                self._epoll.close()
                close_all(fds)
                self._memory.close()


def checked_infos(infos: object, record: WorkerRecord) -> list[Info]:
    """A worker's infos with the slots of the run. Raise `WireError` if they do not have the expected form."""
    if not isinstance(infos, list):
        raise WireError(f"infos of type {type(infos).__name__}; expected a list.")
    found: list[Info] = []
    for entry in infos:
        match entry:
            case (int(i), dict() | None as final, dict(info)) if 0 <= i < record.num_envs:
                found.append((record.first + i, final, info))
            case _:
                raise WireError(f"an info that is not (environment below {record.num_envs}, final info, info).")
    return found
