"""The nodes that `ServedInference.where` names: they run acting servers for the workers of all nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from farstep.config.launch import EngineConfig, SSHConfig
from farstep.errors import LaunchError, counted
from farstep.launch.groups import Groups
from farstep.launch.nodes import NO_BLOCK, Node


class ServerNodes:
    """Finds, requests and describes the named nodes.

    Args:
        names: All named nodes; empty if acting servers run elsewhere.
        hosts: Those of them that run no workers.
        groups: Requests the nodes in `hosts`.
        connected: All connected nodes of the run. The launcher changes it.
        config: Describes the nodes of workers.
    """

    def __init__(
        self,
        names: Sequence[str],
        hosts: Sequence[str],
        groups: Groups,
        connected: Mapping[str, Node],
        config: EngineConfig,
    ) -> None:
        self.hosts, self.groups = hosts, groups
        self._names, self._connected, self._config = names, connected, config
        self._was_complete = False
        """Whether all named nodes have ever been connected."""

    def without_workers(self) -> list[Node]:
        """The connected nodes that run only acting servers."""
        return [node for node in self._connected.values() if node.block == NO_BLOCK]

    def find(self, name: str) -> Node | None:
        """A connected node of this name that is not about to leave."""
        found = (node for node in self._connected.values() if (node.block == NO_BLOCK) == (name in self.hosts))
        return next((node for node in found if node.is_named(name) and not node.leaving), None)

    def is_shared(self, node: Node) -> bool:
        """Whether a node of workers also runs acting servers."""
        return any(node.is_named(name) for name in self._names if name not in self.hosts)

    def request(self) -> None:
        """Request the nodes that run only acting servers."""
        if self.hosts:
            self.groups.request(len(self.hosts))

    def request_missing(self, now: float) -> None:
        """Request replacements for lost nodes that run only acting servers.

        Raises:
            LaunchError: No replacement is possible (see `Groups.request_missing`).
        """
        try:
            self.groups.request_missing(len(self.hosts), now)
        except LaunchError as error:
            names = " and ".join(name for name in self._missing() if name in self.hosts)
            raise LaunchError(f"workers cannot act without the acting servers on {names}: {error}") from error

    def check_names(self, *, others_connected: bool) -> bool:
        """Return whether all named nodes are connected.

        Args:
            others_connected: Whether the run has as many nodes with workers as it needs.

        Raises:
            LaunchError: A named node has never connected, and is not expected any more.
        """
        is_complete = not self._missing()
        self._was_complete = self._was_complete or is_complete
        if others_connected and not self._was_complete and (text := self.wrong_names()):
            raise LaunchError(f"{text}.")
        return is_complete

    def _missing(self) -> list[str]:
        return [name for name in self._names if self.find(name) is None]

    def wrong_names(self) -> str:
        """Which named nodes are not among the nodes of workers, and what to do; empty if there are none."""
        if not (names := " and ".join(name for name in self._missing() if name not in self.hosts)):
            return ""
        connected = ", ".join(sorted(node.host for node in self._connected.values()))
        text = (
            f"acting servers are to run on {names}, but the connected nodes are {connected}; name some of these in "
            "where of ServedInference"
        )
        if isinstance(self._config, SSHConfig):
            return text
        return (
            f"{text}. All nodes of {type(self._config).__name__} run workers; for acting servers on a node without "
            "workers, start this program on that node and use where='head', or use SSHConfig"
        )

    def waiting(self) -> str:
        """The engine's report on nodes that run only acting servers and are not connected; empty if there are none."""
        if not (names := [name for name in self._missing() if name in self.hosts]):
            return ""
        return not_connected(f"{counted(len(names), 'node')} for acting servers ({', '.join(names)})", self.groups)


def not_connected(nodes: str, groups: Groups) -> str:
    """A report on nodes that are not connected."""
    status = groups.status()
    return f"{nodes} not connected yet{f': {status}' if status else ''}"
