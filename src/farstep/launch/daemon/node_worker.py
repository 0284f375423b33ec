"""A worker process as the node daemon of its node sees it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from farstep.core import BytesLike, Ended
from farstep.launch.daemon.process import WorkerProcess
from farstep.rollout.progress import ProgressBoard
from farstep.wire.channels.local import LocalLink
from farstep.wire.node_messages import OUTPUT_BYTES

log = logging.getLogger("farstep.node")


@dataclass
class NodeWorker:
    """A worker process on this node."""

    number: int
    """The worker's number in the run."""
    process: WorkerProcess
    board: ProgressBoard
    """The worker's progress; sent to the head when the worker ends."""
    printed: bytearray = field(default_factory=bytearray)
    closed_output: bool = False
    suspended: bool = False
    killed: bool = False
    """Whether the head has killed the worker; it then ignores messages of this worker."""
    link: LocalLink | None = None
    """The daemon's end of its link, if the daemon relays for it; None after its end."""
    ended: Ended | None = None
    """How the process ended, if this was not reported yet."""
    report_at: float = 0.0
    """When to report the end at the latest."""
    disk_bytes: int = 0
    """Size of the files that the worker is in, while it is on disk."""
    problem: str = ""
    """Why the worker stays in memory although it is parked, if this was not reported yet."""
    blameless: bool = False
    """Whether the worker has ended because it could not be restored from disk."""

    def set_suspended(self, suspended: bool, parked: bool = False) -> None:
        """Suspend the process, or let it continue.

        Args:
            suspended: Whether to suspend it.
            parked: Whether it may be suspended for long.
        """
        self.suspended = suspended
        (self.process.suspend if suspended else self.process.resume)()

    @property
    def is_returning(self) -> bool:
        """Whether the worker is no longer parked, but not connected yet."""
        return False

    def advance(self) -> bool:
        """Take the steps that are due. Return whether this ended the worker."""
        return False

    def poll(self) -> Ended | None:
        """Return how the worker ended; None if it may still run, or can be restored."""
        return self.process.poll()

    def kill(self) -> None:
        self.process.kill()

    def read(self) -> None:
        """Read what the process printed."""
        new = self.process.read_output()
        self.closed_output = new is None
        self.printed += new or b""
        del self.printed[:-OUTPUT_BYTES]  # if a worker prints too much at a time, send only the end

    def fds(self) -> list[int]:
        """Descriptors to wait for, except the link. A closed output would always be readable, and an end is known."""
        return [
            *([] if self.ended else [self.process.exit_fd]),
            *([] if self.closed_output else [self.process.output_fd]),
        ]

    def pass_on(self, frames: Sequence[BytesLike] | None = None) -> None:
        """Send the worker a message of the head; None: those that are queued.

        If this is impossible, kill the worker, which would miss a message.
        """
        if self.link is None:
            return
        try:
            if frames is None:
                self.link.flush()
            else:
                self.link.send(frames)
        except OSError as error:
            log.warning(
                "killed worker %d, because a message of the head could not be sent to it: %s", self.number, error
            )
            self.kill()
            self.link_ended()

    def link_ended(self) -> None:
        """Close the link, whose other end the worker has closed."""
        self.close_link()

    def close_link(self) -> None:
        if self.link is not None:
            self.link.close()
            self.link = None

    def close(self) -> None:
        """Free the descriptors of the ended worker."""
        self.process.close()
        self.board.close()
        self.close_link()
