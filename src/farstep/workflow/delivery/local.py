"""Deliveries to consumers in this process: a call, or a queue for threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from farstep.errors import ClosedError, ConfigError, DeliveryError
from farstep.workflow.delivery.message_ids import id_of
from farstep.workflow.triggers.messages import Message


class Direct:
    """Calls the consumer at once, in the thread of the dispatcher.

    Args:
        call: The consumer; its return value is ignored.

    Raises:
        ConfigError: `call` is not callable.
    """

    def __init__(self, call: Callable[[Message], object]) -> None:
        if not callable(call):
            raise ConfigError(f"Direct got {call!r}; expected a function of the message.")
        self._call = call

    def __call__(self, message: Message) -> bool:
        self._call(message)
        return True


class MessageObserver(Protocol):
    """Notified when a thread starts to handle a message, and when it has finished (see `consumers.GuardedDelivery`)."""

    def begin(self, message: Message) -> None:
        """Handle the start of a message in the calling thread."""
        ...

    def end(self, message: Message, raised: bool) -> None:
        """Handle the end of a message; `raised`: whether handling it raised."""
        ...


class LocalQueue:
    """A queue of messages for consumer threads of this process. Each message goes to one thread.

    The consumer calls `take`, handles the message and calls `done`.

    Args:
        maxsize: Maximum number of queued messages that no thread has taken yet; at least 1, default 1.

    Raises:
        ConfigError: `maxsize` is not an integer of at least 1.
    """

    def __init__(self, maxsize: int = 1) -> None:
        if not isinstance(maxsize, int) or maxsize < 1:
            raise ConfigError(f"LocalQueue.maxsize is {maxsize!r}; expected a number of messages, at least 1.")
        self.maxsize = maxsize
        self._waiting: deque[Message] = deque()
        self._working = 0
        self._finished: list[str] = []
        self.failed: set[str] = set()
        """Ids of done messages that were not handled."""
        self._errors: deque[BaseException] = deque()
        self._closed = False
        self._changed = threading.Condition()
        self.observer: MessageObserver | None = None
        """Notified when a thread takes a message, and when the message is done."""

    @property
    def full(self) -> bool:
        """Whether `maxsize` messages are in the queue."""
        return len(self._waiting) >= self.maxsize

    def __call__(self, message: Message) -> bool:
        """Add a message to the queue.

        Args:
            message: The message.

        Returns:
            Always False: `finished` reports later that the message is done.

        Raises:
            DeliveryError: The queue is `full`.
            ClosedError: The queue is closed.
        """
        with self._changed:
            if self._closed:
                raise ClosedError("the queue is closed and takes no more messages.")
            if self.full:
                raise DeliveryError(
                    f"the queue already holds {self.maxsize} messages (maxsize); wait until it is not `full`, as a "
                    "Dispatcher does, or raise maxsize."
                )
            self._waiting.append(message)
            self._changed.notify_all()
        return False

    def take(self, timeout_s: float) -> Message | None:
        """Take the next message; called by the consumer.

        Args:
            timeout_s: Seconds to wait for a message.

        Returns:
            The message, or None after `timeout_s` seconds.

        Raises:
            ClosedError: The queue is closed and empty.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed, timeout_s)
            if not self._waiting:
                if self._closed:
                    raise ClosedError("the queue is closed; no more messages will arrive.")
                return None
            self._working += 1
            message = self._waiting.popleft()
        if self.observer is not None:
            self.observer.begin(message)
        return message

    def done(self, message: Message, error: BaseException | None = None) -> None:
        """Report that a message was handled; called by the consumer.

        Args:
            message: The message that `take` returned.
            error: The exception that handling the message raised; None (default) if it succeeded.
        """
        if self.observer is not None:
            self.observer.end(message, error is not None)
        with self._changed:
            self._working -= 1
            self._finished.append(id_of(message))
            if error is not None:
                self.failed.add(id_of(message))
                self._errors.append(error)
            self._changed.notify_all()

    def finished(self, timeout_s: float = 0.0) -> list[str]:
        """Return the messages that were done since the last call.

        Args:
            timeout_s: Seconds to wait if messages are outstanding and none is done; default 0.

        Returns:
            The ids of the done messages: `message_id`, or `trigger_id` for a message without an id.

        Raises:
            BaseException: The exception of a consumer, one per call.
        """

        def settled() -> bool:
            return bool(self._finished or self._errors or self._closed or not (self._waiting or self._working))

        with self._changed:
            self._changed.wait_for(settled, timeout_s)
            if self._errors:
                raise self._errors.popleft()
            done, self._finished = self._finished, []
            return done

    def close(self, drop: bool = False) -> list[Message]:
        """Accept no more messages; `take` raises `ClosedError` once the queue is empty.

        Args:
            drop: Whether to remove queued messages; they then count as done.

        Returns:
            The removed messages.
        """
        with self._changed:
            self._closed = True
            dropped = list(self._waiting) if drop else []
            if drop:
                self._waiting.clear()
                self._finished += [id_of(message) for message in dropped]
            self._changed.notify_all()
            return dropped

    def reopen(self) -> None:
        """Accept messages again after `close`."""
        with self._changed:
            self._closed = False
