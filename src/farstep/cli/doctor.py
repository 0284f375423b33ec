"""`farstep doctor`: checks whether a run can work here, and says what to fix."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import tyro

from farstep.cli.options.launchers import LAUNCHERS, check_options, chosen_launcher
from farstep.cli.options.parsing import parse
from farstep.config.launch import LaunchConfig
from farstep.doctor.engines import engine
from farstep.doctor.findings import Finding
from farstep.doctor.machine import addresses, machine
from farstep.doctor.nodes import nodes
from farstep.errors import ConfigError
from farstep.learners.options.run_config import LauncherName, RunConfig

C = TypeVar("C", bound=LaunchConfig)
_QUIET_S = 3.0
"""Minimum seconds between two progress messages."""


@dataclass(frozen=True, kw_only=True)
class Options(Generic[C]):
    """Check that this machine, the engine and each node are ready for a run, and say what to fix.

    The command starts a node daemon and one worker on every node, as a run would. It collects their reports and stops
    them. The exit status is 1 if there is a problem. Further options depend on the launcher: farstep doctor --launcher
    ssh --hosts node1 node2 --env CartPole-v1
    """

    config: tyro.conf.OmitArgPrefixes[C]
    launcher: LauncherName = "local"
    """Where workers would run. 'farstep doctor --launcher NAME --help' lists the options of a launcher."""
    env: str | None = None
    """Environment to build and reset on each node, as for 'farstep train'. None: no environment is built."""
    env_type: Literal["gymnasium", "envpool", "factory", "vector"] = "gymnasium"
    """What makes the environment (a library or a function), as for 'farstep train'."""
    env_kwargs: str = "{}"
    """Arguments of the environment, as JSON."""
    wait_s: float = 120.0
    """Seconds to wait for nodes. Raise it if the cluster has a long queue."""

    def __post_init__(self) -> None:
        if not self.wait_s > 0:
            raise ConfigError(f"wait_s is {self.wait_s!r}; expected a number of seconds above 0.")


def main(arguments: Sequence[str]) -> int:
    """Run all checks and print their findings. Return 1 if there is a problem, otherwise 0."""
    options = parsed(arguments)
    log = logging.getLogger("farstep")
    before = log.level
    log.setLevel(logging.ERROR)  # the findings already contain the warnings of the log
    try:
        return _check(options)
    finally:
        log.setLevel(before)


def _check(options: Any) -> int:
    env = _environment(options)
    config, launcher, progress = options.config.resolved(), options.launcher, Progress()
    found = [*_section("this machine", machine()), *_section("the network", addresses(config))]
    head_works = _has_no_problem(found)
    found += (answers := _section(f"the engine ({launcher})", engine(options.config, progress.report)))
    # With ssh, one unreachable host says nothing about the other hosts. Any other engine provides all nodes or none.
    engine_works = _has_no_problem(answers) or (launcher == "ssh" and any(finding.level == "ok" for finding in answers))
    if head_works and engine_works:
        found += _section("nodes", nodes(config, env, options.wait_s, progress.report))
    count = {level: sum(finding.level == level for finding in found) for level in ("problem", "warning")}
    sys.stdout.write(f"{_number(count['problem'], 'problem')}, {_number(count['warning'], 'warning')}\n")
    return 1 if count["problem"] else 0


def parsed(arguments: Sequence[str]) -> Options[Any]:
    """Parse the arguments, with the options of the launcher that they name."""
    command, launcher = "farstep doctor", chosen_launcher(arguments)
    if launcher == "in-process":
        raise ConfigError(
            "--launcher in-process starts no processes, so there is nothing to check. Use --launcher local."
        )
    generic: Any = Options
    kind = generic[LAUNCHERS[launcher]]
    check_options(kind, arguments, command, launcher)
    options: Options[Any] = parse(kind, arguments, command)
    return options


def _has_no_problem(findings: Sequence[Finding]) -> bool:
    return not any(finding.level == "problem" for finding in findings)


def _number(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'s' * (count != 1)}"


def _environment(options: Options[Any]) -> dict[str, object] | None:
    if options.env is None:
        return None
    # Validate the options before anything starts.
    run = RunConfig(env=options.env, env_type=options.env_type, env_kwargs=options.env_kwargs).env_config()
    return {"type": run.type, "env_name": run.env_name, "env_kwargs": dict(run.env_kwargs)}


def _section(title: str, findings: Iterator[Finding]) -> list[Finding]:
    """Print each finding as soon as it is known, and return all findings."""
    found: list[Finding] = []
    for finding in findings:
        if not found:
            sys.stdout.write(f"{title}\n")
        sys.stdout.write(f"{finding}\n")
        sys.stdout.flush()
        found.append(finding)
    return found


class Progress:
    """Prints progress messages to stderr, at most one every `_QUIET_S` seconds."""

    def __init__(self) -> None:
        self._reported_at = time.monotonic()

    def report(self, text: str) -> None:
        if time.monotonic() - self._reported_at > _QUIET_S:
            self._reported_at = time.monotonic()
            sys.stderr.write(f"  ...      {text}\n")
            sys.stderr.flush()
