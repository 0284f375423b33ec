"""The nodes that a run refuses, and node daemons' messages that cannot be accepted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from farstep.config.launch import EngineConfig
from farstep.core import BytesLike
from farstep.errors import LaunchError, WireError
from farstep.event import Emit
from farstep.wire import node_messages as n
from farstep.wire.versions import OTHER_VERSIONS, mismatches

_SAME_VERSIONS = "Install the same versions on all nodes."
_DO_NOT_PIN = "Or leave cpu_affinity='off'."
_DO_NOT_DUMP = "Or leave park_method='suspend'."
_MAX_HOSTS = 64
"""Maximum number of refused hosts that are stored and emitted, because a peer could invent any number of hosts."""


def objection_to(hello: n.NodeHello) -> tuple[str, str] | None:
    """Say why a node is refused: its versions differ from the head's, or workers cannot be pinned or written to disk.

    Args:
        hello: The first message of the node's daemon.

    Returns:
        The predicate of a sentence about the node, and what the user can do; None if the node can be used.
    """
    if different := mismatches(hello.versions):
        return _other_versions(different)
    if cannot := hello.cannot_pin or hello.cannot_park:
        return f"cannot be used: {cannot.removesuffix('.')}", _DO_NOT_PIN if hello.cannot_pin else _DO_NOT_DUMP
    return None


def _other_versions(different: Sequence[str]) -> tuple[str, str]:
    return f"{OTHER_VERSIONS}: {'; '.join(different)}", _SAME_VERSIONS


class Refusals:
    """Reports refused nodes and invalid messages, each a limited number of times.

    Args:
        config: How many nodes the run needs.
        emit: Receives the reports.
    """

    def __init__(self, config: EngineConfig, emit: Emit) -> None:
        self._needs_all, self._emit = config.fewest_nodes == config.nodes, emit
        self.hosts: dict[str, tuple[str, str]] = {}
        """Hosts whose nodes were refused: why, and what to do."""
        self.error: LaunchError | None = None
        """The error about a refused node. It ends the run unless enough other nodes are connected."""
        self._invalid: Counter[int] = Counter()
        """Number of invalid messages of each group."""

    def add(self, host: str, why: str, remedy: str, *, is_server: bool) -> None:
        """Report a refused node.

        Args:
            host: The node.
            why: The predicate of a sentence about the node.
            remedy: What the user can do.
            is_server: Whether the node would run only acting servers, without which the run cannot continue.
        """
        text = f"the node {host} {why}. {remedy}"
        if is_server or self._needs_all:
            self.error = LaunchError(text)
        if host not in self.hosts and len(self.hosts) < _MAX_HOSTS:
            self._emit("warned", text if is_server else f"{text} Continuing without it.", node=host)
            self.hosts[host] = (why, remedy)

    def add_message(self, group: int, frames: Sequence[BytesLike], error: WireError, *, is_server: bool) -> None:
        """Report a message that cannot be decoded; if it is the first one of another version, refuse the node.

        Args:
            group: The group of the node daemon.
            frames: The message.
            error: Why it is invalid.
            is_server: As in `add`.
        """
        if (versions := n.versions_in(frames)) and (different := mismatches(versions)):
            self.add("(unnamed)", *_other_versions(different), is_server=is_server)
        else:
            self.invalid(group, error)

    def invalid(self, group: int, error: WireError) -> None:
        """Emit the 1st, 2nd, 4th, 8th, ... invalid message, so that a broken peer cannot fill the log."""
        self._invalid[group] += 1
        if self._invalid[group].bit_count() == 1:
            number = self._invalid[group]
            self._emit("warned", f"a node daemon sent a message that cannot be accepted ({number}): {error}")
