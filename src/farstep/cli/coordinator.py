"""`farstep coordinator`: lets several runs share slots and devices, and shows which run holds what."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from farstep.cli.options.parsing import parse
from farstep.config.env import check_count
from farstep.config.field_docs import show_fields
from farstep.elastic.coordinator.coordinator import TURN_S
from farstep.elastic.coordinator.server import CoordinatorServer, coordinator_folder, read_status, status_text
from farstep.errors import ConfigError, counted, unknown_name

_HELP = """\
farstep coordinator lets several training scripts share one machine, or the same
ssh hosts. A slot is one running worker. Each script gets its fair share of the
slots; a script that crashes loses them within the lease.

Start one coordinator on the machine that runs the scripts, not on each host, and
leave it running (it ends with Ctrl-C):
  farstep coordinator start --slots 8
  farstep coordinator start --slots 8 --devices 1 --name lab

Let a script join, with one option of its launch configuration:
  farstep.LocalConfig(workers_per_node=8, coordinator="default")

Show which run holds what, and what the others wait for:
  farstep coordinator status
  farstep coordinator status --name lab

Options: 'farstep coordinator start --help'. Details: docs/sharing.md.
"""
_ACTIONS = ("start", "status")


@show_fields
@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """Start a coordinator for the runs of this user on this machine. It runs until Ctrl-C or SIGTERM.

    Example: farstep coordinator start --slots 8 --devices 1
    """

    slots: int
    """Largest number of workers, over all runs, that may run at the same time, e.g. the number of cores."""
    devices: int = 0
    """Number of GPUs that learners take in turn (env.device_token)."""
    lease_s: float = 10.0
    """Seconds of silence after which a run loses its slots and its device; at least 1."""
    turn_s: float = TURN_S
    """A run keeps its slots for at least this number of seconds times its priority. Then it may be paused, if a waiting
    run needs its slots."""
    name: str = "default"
    """Name of the coordinator, as in the option coordinator= of the runs; or the path of a folder, with a slash."""


@show_fields
@dataclass(frozen=True, kw_only=True)
class StatusOptions:
    """Show which run holds which slots and devices, and what the others wait for.

    Example: farstep coordinator status --name lab
    """

    name: str = "default"
    """Name of the coordinator, or the path of its folder."""


def main(arguments: Sequence[str]) -> int:
    """Start a coordinator or show its status; return the exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(_HELP)
        return 0
    action, *rest = arguments
    if action not in _ACTIONS:
        raise ConfigError(unknown_name("action of 'farstep coordinator'", action, _ACTIONS))
    if action == "start":
        return _start(parse(StartOptions, rest, "farstep coordinator start"))
    options = parse(StatusOptions, rest, "farstep coordinator status")
    for line in status_text(*read_status(options.name)):
        sys.stdout.write(f"{line}\n")
    return 0


def _start(options: StartOptions) -> int:
    check_count("slots", options.slots)
    check_count("devices", options.devices, minimum=0)
    for name, least in (("lease_s", 1.0), ("turn_s", 0.1)):
        if not least <= (got := getattr(options, name)) < 1e6:
            raise ConfigError(f"{name} is {got}; expected at least {least:g} seconds.")
    folder = coordinator_folder(options.name)
    server = CoordinatorServer(folder, options.slots, options.devices, options.lease_s, options.turn_s)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: server.stop())
    devices = f" and {counted(options.devices, 'device')}" if options.devices else ""
    restored = len(server.coordinator.workloads)
    known = f"; restored {counted(restored, 'run')}" if restored else ""
    sys.stdout.write(f"coordinator {options.name!r} shares {counted(options.slots, 'slot')}{devices}{known}\n")
    sys.stdout.write(f"runs join with coordinator={options.name!r}; state in {folder}\n")
    sys.stdout.flush()
    server.serve()
    return 0
