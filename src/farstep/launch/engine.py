"""What an engine (SLURM, Ray, Kubernetes, ssh) does for farstep: start an agent on each of some nodes, and end it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from farstep.errors import LaunchError

TAKEN_BACK = 75
"""The status of an agent that left because its engine said so (`EX_TEMPFAIL`: it would come again)."""

SETUP_FAILED = "FARSTEP_SETUP_FAILED"
RESTARTS = "FARSTEP_RESTARTS"
"""Environment variable: how many times in ten minutes a killed node daemon is restarted."""


def setup_lines(setup: Sequence[str]) -> list[str]:
    """For a shell. As in any script, what follows a line that fails is run; in bash, the agent learns which it was."""
    if not setup:
        return []
    in_bash, at_the_top = '[ -z "${BASH_VERSION-}" ] ||', '[ "${BASH_SOURCE-$0}" != "$0" ] ||'
    note = f"{in_bash} trap '{at_the_top} export {SETUP_FAILED}=\"$BASH_COMMAND\"' ERR"
    return [note, *setup, f"{in_bash} trap - ERR", "set +e"]  # what comes after it has its own ways to fail


class EngineLost(LaunchError):
    """The engine itself is lost, so that replacements cannot be requested from it."""


@dataclass(frozen=True)
class RequestStatus:
    """How it is with nodes that were asked for together."""

    text: str
    """In a few words, e.g. `SLURM job 12 is PENDING (Resources)`."""
    nodes: int
    """How many of them have an agent, or will have one without being asked for again."""
    coming: int = 0
    """Of these, those that have certainly not begun yet, where the engine does not tell which."""
    over: Sequence[str] | None = None
    """Places, up to their first comma, whose agents have ended; None: the engine does not tell which of them have."""
    anew: Sequence[str] = ()
    """Such places whose agents have not begun, or are to begin once more."""
    lost: bool = False
    """Whether the engine is lost (`EngineLost`): then only nodes that are connected to the head count."""

    def is_over(self, place: str) -> bool:
        """Whether the agent that called its node so has ended, as far as the engine tells."""
        return not self.nodes or place.partition(",")[0] in (self.over or ())


class Group(Protocol):
    """Nodes that were asked for together: a job, a deployment, some sessions."""

    def standing(self) -> RequestStatus:
        """May take a while: all but `logs` is called in a thread of the group's own."""
        ...

    def there(self, places: Sequence[str]) -> None:
        """What the agents that the head hears of call their nodes; said before it is asked how it stands."""
        return

    def logs(self) -> str:
        """Where they are, and the end of each."""
        ...

    def cancel(self) -> None:
        """Nothing of it is left, or will be soon; not an error if it is over."""
        ...


class Engine(Protocol):
    """How agents get to nodes."""

    grace_s: float
    """How long a node that is taken back has to hand over what it has."""

    def listen_on(self) -> Sequence[str]:
        """The addresses of this machine that nodes may reach, best first."""
        ...

    def ask(self, nodes: int, bootstrap: bytes) -> Group:
        """Ask for agents on so many nodes, each started with `bootstrap`; does not wait for them.

        Raises `LaunchError` with one sentence that says what to install or start if the engine cannot be used.
        """
        ...

    def close(self) -> None:
        """Free what outlives the groups."""
        ...
