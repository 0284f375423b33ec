"""The interface of engines (SLURM, Ray, Kubernetes, ssh). An engine starts and ends node daemons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from farstep.errors import LaunchError

RECLAIMED = 75
"""Exit status of a node daemon if the engine reclaimed the node (`EX_TEMPFAIL`: it may be restarted)."""

SETUP_FAILED = "FARSTEP_SETUP_FAILED"
"""Environment variable with the last setup command that failed."""
RESTARTS = "FARSTEP_RESTARTS"
"""Environment variable with the maximum number of restarts of a killed node daemon within ten minutes."""


def setup_lines(setup: Sequence[str]) -> list[str]:
    """Lines of a shell script that run the user's setup.

    As in any script, a failing line does not stop the following lines. In bash, an environment variable passes the last
    command that failed to the node daemon.
    """
    if not setup:
        return []
    in_bash, at_top_level = '[ -z "${BASH_VERSION-}" ] ||', '[ "${BASH_SOURCE-$0}" != "$0" ] ||'
    record = f"{in_bash} trap '{at_top_level} export {SETUP_FAILED}=\"$BASH_COMMAND\"' ERR"
    return [record, *setup, f"{in_bash} trap - ERR", "set +e"]  # the lines after the setup report their own failures


class EngineLost(LaunchError):
    """The engine itself is lost, so it cannot provide replacements."""


@dataclass(frozen=True)
class RequestStatus:
    """The state of a group of nodes that were requested together.

    A place is the name of a node in the engine, e.g. `SLURM job 12, node n3`. Engines report only the part before the
    first comma.
    """

    text: str
    """The state in words, e.g. `SLURM job 12 is PENDING (Resources)`."""
    nodes: int
    """Number of nodes that have a node daemon, or will get a daemon without another request."""
    pending: int = 0
    """How many of these nodes have certainly not started yet; used if the engine does not name nodes."""
    ended: Mapping[str, str] | None = None
    """Places whose node daemons have ended, each with its state in words; None if the engine does not name nodes."""
    restarting: Sequence[str] = ()
    """Places whose node daemons have not started yet, or will be restarted."""
    hopeless: int = 0
    """How many of these nodes the engine can never provide, e.g. because they exceed a limit."""
    engine_lost: bool = False
    """Whether the engine is lost (`EngineLost`). Then only nodes that are connected to the head count."""

    def has_ended(self, place: str) -> bool:
        """Whether the node daemon at this place has ended, according to the engine."""
        return not self.nodes or place.partition(",")[0] in (self.ended or ())


class Group(Protocol):
    """Nodes that were requested together: a job, a deployment, some ssh sessions.

    Methods may block. Each group has its own thread, which calls all methods except `logs`.
    """

    def status(self) -> RequestStatus: ...

    def set_connected(self, places: Sequence[str]) -> None:
        """Receive the places of the nodes that are connected to the head; called before each `status`."""
        return

    def logs(self) -> str:
        """The paths of the node daemons' logs, and the last lines of each."""
        ...

    def cancel(self) -> None:
        """End all node daemons of the group, or initiate their end. Do nothing if they have ended."""
        ...


class Engine(Protocol):
    """Starts node daemons on nodes."""

    grace_s: float
    """Seconds for a node to send its chunks after the engine has reclaimed it."""

    def listen_on(self) -> Sequence[str]:
        """The addresses of this machine that nodes may reach, best first."""
        ...

    def request(self, nodes: int, bootstrap: bytes) -> Group:
        """Request node daemons on `nodes` nodes, without waiting for them.

        Args:
            nodes: Number of nodes.
            bootstrap: The standard input of each daemon: addresses and keys, as JSON.

        Raises:
            LaunchError: The engine cannot be used; the message says what to install or start.
        """
        ...

    def close(self) -> None:
        """Release resources that outlive the groups."""
        ...
