"""`farstep doctor`: is everything fit for a run, and what to do where it is not."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import tyro

from farstep.cli.launchers import LAUNCHERS, check_options, chosen_launcher
from farstep.cli.options import parse
from farstep.config.launch import LaunchConfig
from farstep.doctor.engines import engine
from farstep.doctor.findings import Finding
from farstep.doctor.machine import addresses, machine
from farstep.doctor.nodes import nodes
from farstep.errors import ConfigError
from farstep.learners.loop.run_config import LauncherName, RunConfig

C = TypeVar("C", bound=LaunchConfig)
_QUIET_S = 3.0
"""What is done in less needs no word of progress."""


@dataclass(frozen=True, kw_only=True)
class Options(Generic[C]):
    """Look whether this machine, the engine and each of its nodes are fit for a run, and say what to fix.

    Starts an agent and one worker on every node, as a run would, asks them, and ends them. Exit status 1 if something
    is wrong. Options are those of the launcher: farstep doctor --launcher ssh --hosts node1 node2 --env CartPole-v1
    """

    config: tyro.conf.OmitArgPrefixes[C]
    launcher: LauncherName = "local"
    """where workers would run; other options depend on it"""
    env: str | None = None
    """an environment to make and reset on each node, as 'farstep train' takes it"""
    env_type: Literal["gymnasium", "envpool", "factory", "vector"] = "gymnasium"
    """where it comes from"""
    env_kwargs: str = "{}"
    """its arguments, as JSON"""
    wait_s: float = 120.0
    """how long to wait for nodes, in seconds; a queue may take longer"""

    def __post_init__(self) -> None:
        if not self.wait_s > 0:
            raise ConfigError(f"wait_s is {self.wait_s!r}; expected a number of seconds above 0.")


def main(arguments: Sequence[str]) -> int:
    """Look, say, count."""
    options = parsed(arguments)
    log = logging.getLogger("farstep")
    before = log.level
    log.setLevel(logging.ERROR)  # what it warns of is said here, in order
    try:
        return _look(options)
    finally:
        log.setLevel(before)


def _look(options: Any) -> int:
    env = _environment(options)
    config, launcher, progress = options.config.resolved(), options.launcher, Progress()
    found = [*_part("this machine", machine()), *_part("the network", addresses(config))]
    fit = _is_fit(found)
    found += (answers := _part(f"the engine ({launcher})", engine(options.config, progress.say)))
    # A host that does not answer says nothing about the others; any other engine gives all nodes or none.
    if fit and (_is_fit(answers) or (launcher == "ssh" and any(finding.level == "ok" for finding in answers))):
        found += _part("nodes", nodes(config, env, options.wait_s, progress.say))
    count = {level: sum(finding.level == level for finding in found) for level in ("problem", "warning")}
    sys.stdout.write(f"{_number(count['problem'], 'problem')}, {_number(count['warning'], 'warning')}\n")
    return 1 if count["problem"] else 0


def parsed(arguments: Sequence[str]) -> Options[Any]:
    """What the arguments say, with the options of the launcher that they name."""
    command, launcher = "farstep doctor", chosen_launcher(arguments)
    if launcher == "inprocess":
        raise ConfigError("--launcher inprocess has nothing to look at: all happens in one process. Use local.")
    generic: Any = Options
    kind = generic[LAUNCHERS[launcher]]
    check_options(kind, arguments, command, launcher)
    options: Options[Any] = parse(kind, arguments, command)
    return options


def _is_fit(findings: Sequence[Finding]) -> bool:
    return not any(finding.level == "problem" for finding in findings)


def _number(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'s' * (count != 1)}"


def _environment(options: Options[Any]) -> dict[str, object] | None:
    if options.env is None:
        return None
    # Its mistakes are found here, before anything is started.
    run = RunConfig(env=options.env, env_type=options.env_type, env_kwargs=options.env_kwargs).env_config()
    return {"type": run.type, "env_name": run.env_name, "env_kwargs": dict(run.env_kwargs)}


def _part(title: str, findings: Iterator[Finding]) -> list[Finding]:
    """Say each as soon as it is known."""
    found: list[Finding] = []
    for finding in findings:
        if not found:
            sys.stdout.write(f"{title}\n")
        sys.stdout.write(f"{finding}\n")
        sys.stdout.flush()
        found.append(finding)
    return found


class Progress:
    """Says on stderr what takes long, not more often than every few seconds."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def say(self, what: str) -> None:
        if time.monotonic() - self._said > _QUIET_S:
            self._said = time.monotonic()
            sys.stderr.write(f"  ...      {what}\n")
            sys.stderr.flush()
