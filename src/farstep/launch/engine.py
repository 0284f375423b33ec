"""The interface of an engine (SLURM, Ray, Kubernetes, ssh), which starts and ends node daemons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from farstep.errors import LaunchError

RECLAIMED = 75
"""Exit status of a node daemon whose engine reclaimed the node (`EX_TEMPFAIL`: it may be restarted)."""

SETUP_FAILED = "FARSTEP_SETUP_FAILED"
"""Environment variable: the command of the setup that failed last."""
RESTARTS = "FARSTEP_RESTARTS"
"""Environment variable: maximum number of restarts of a killed node daemon within ten minutes."""


def setup_lines(setup: Sequence[str]) -> list[str]:
    """Lines of a shell script that run the user's setup.

    As in any script, a failing line does not stop the following ones. In bash, the last command that failed is passed
    to the node daemon in an environment variable.
    """
    if not setup:
        return []
    in_bash, at_top_level = '[ -z "${BASH_VERSION-}" ] ||', '[ "${BASH_SOURCE-$0}" != "$0" ] ||'
    record = f"{in_bash} trap '{at_top_level} export {SETUP_FAILED}=\"$BASH_COMMAND\"' ERR"
    return [record, *setup, f"{in_bash} trap - ERR", "set +e"]  # the lines after the setup report their own failures


class EngineLost(LaunchError):
    """The engine itself is lost: it cannot provide replacements."""


@dataclass(frozen=True)
class RequestStatus:
    """The state of a group: nodes that were requested together.

    A place is the engine's name of a node, e.g. `SLURM job 12, node n3`; engines report it up to the first comma.
    """

    text: str
    """The state in words, e.g. `SLURM job 12 is PENDING (Resources)`."""
    nodes: int
    """Number of nodes that have a node daemon, or will get one without another request."""
    pending: int = 0
    """Of these nodes, the number that has certainly not started yet, if the engine does not name them."""
    ended: Sequence[str] | None = None
    """Places whose node daemons have ended; None: the engine does not name them."""
    restarting: Sequence[str] = ()
    """Places whose node daemons have not started yet, or will be restarted."""
    engine_lost: bool = False
    """Whether the engine is lost (`EngineLost`): then only nodes that are connected to the head count."""

    def has_ended(self, place: str) -> bool:
        """Whether the node daemon at this place has ended, according to the engine."""
        return not self.nodes or place.partition(",")[0] in (self.ended or ())


class Group(Protocol):
    """Nodes that were requested together: a job, a deployment, some ssh sessions.

    Methods may block; each group has a thread that calls them, except `logs`.
    """

    def status(self) -> RequestStatus: ...

    def set_connected(self, places: Sequence[str]) -> None:
        """Receive the places of the nodes that are connected to the head; called before each `status`."""
        return

    def logs(self) -> str:
        """The paths of the node daemons' logs, and the last lines of each."""
        ...

    def cancel(self) -> None:
        """End all node daemons of the group, or initiate their end; does nothing if they have ended."""
        ...


class Engine(Protocol):
    """Starts node daemons on nodes."""

    grace_s: float
    """Seconds that a node has to send its chunks when the engine reclaims it."""

    def listen_on(self) -> Sequence[str]:
        """The addresses of this machine that nodes may reach, best first."""
        ...

    def request(self, nodes: int, bootstrap: bytes) -> Group:
        """Request node daemons on `nodes` nodes, without waiting for them.

        Args:
            nodes: Number of nodes.
            bootstrap: What each daemon reads from its standard input: addresses and keys, as JSON.

        Raises:
            LaunchError: The engine cannot be used; one sentence says what to install or start.
        """
        ...

    def close(self) -> None:
        """Release resources that outlive the groups."""
        ...
