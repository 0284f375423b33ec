"""The `farstep` command. Each subcommand is a module of this folder."""

from __future__ import annotations

import contextlib
import importlib
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from farstep.errors import ConfigError, FarstepError, LaunchError, WorkerError, unknown_name
from farstep.rollout.nested_launch import refuse_nested_launch

_HELP = """\
farstep trains reinforcement-learning agents in Gymnasium environments that run
in workers: on this machine, or on a SLURM, ssh, Ray or Kubernetes cluster.

Train (learners: ppo, async-ppo, impala, dqn, apex, sac, aride); the run is stored in runs/NAME:
  farstep train ppo --env CartPole-v1
  farstep train async-ppo --env LunarLander-v3 --workers 2 --num-envs 64
  farstep train ppo --env CartPole-v1 --launcher slurm --nodes 4 --partition gpu
  farstep train ppo --resume runs/NAME      continue from the newest checkpoint
  farstep train ppo --config run.yaml       options in a file; each run writes one

Inspect the result:
  farstep eval runs/NAME --episodes 100     mean and spread of the return
  farstep watch runs/NAME                   render episodes to a video
  farstep status runs/NAME                  show a run in the browser, live or ended
  farstep plot runs/NAME runs/OTHER         plot return, throughput and staleness
  farstep metrics lag/                      explain metrics by a part of their name

Share nodes between runs:
  farstep coordinator start --slots 8       divide 8 workers among several scripts
  farstep coordinator status                show which run holds what

Prepare a cluster:
  farstep doctor --launcher slurm --nodes 4 check nodes, network and versions
  farstep slurm --print --nodes 4           print the batch script of a run
  farstep kubernetes --print --image NAME   print the manifests of a run

Options: 'farstep COMMAND --help', for example 'farstep train ppo --help' or
'farstep train ppo --launcher slurm --help'. Version: 'farstep --version'.
"""
_COMMANDS = ("train", "eval", "watch", "plot", "status", "metrics", "doctor", "slurm", "kubernetes", "coordinator")
LEARNERS = ("ppo", "async-ppo", "impala", "dqn", "apex", "sac", "aride")
"""The keys of `ALGORITHMS`, whose module imports torch."""
_LAUNCHING = ("train", "eval", "doctor")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The arguments without the name of the program; None: the arguments of this process.

    Returns:
        The exit status: 0 on success, 1 after an error, 130 after Ctrl-C, 141 if the program that reads the output
        ended first, or the status of the command.
    """
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # otherwise Python flushes after this function, and prints a traceback if that fails
    except BrokenPipeError:
        if not _is_unread(sys.stdout):
            raise
        from farstep.observe.terminal.console import discard_output

        discard_output(sys.stdout)
        return 141  # the status of a program that SIGPIPE has ended


def _is_unread(stream: TextIO) -> bool:
    """Return whether a stream is a pipe whose reader has ended."""
    poll = select.poll()
    poll.register(stream, select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _run(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None and _imports_from_here(arguments):
        sys.path.append("")  # append, so that no file in the current folder shadows an installed module
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(_HELP)
        return 0
    if arguments[0] == "--version":
        from farstep.version import VERSION

        sys.stdout.write(f"farstep {VERSION}\n")
        return 0
    if arguments[0] in _LAUNCHING:
        refuse_nested_launch()  # outside the `try`, because the error must reach the program that imported this module
    try:
        return _command(arguments)(arguments[1:])
    except FarstepError as error:
        text: object = error
        if isinstance(error, WorkerError) and isinstance(error, (ConfigError, LaunchError)):
            text = f"{error.message} [{error.where}]"  # the user's mistake, so the remote traceback would not help
        sys.stderr.write(f"farstep: {text}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("farstep: stopped by SIGINT\n")
        return 130


def _imports_from_here(arguments: Sequence[str]) -> bool:
    """Return whether the command imports environments or wrappers. Their modules may be in the current folder."""
    has_env_option = any(argument.partition("=")[0] == "--env" for argument in arguments)
    return arguments[:1] in (["train"], ["eval"], ["watch"]) or (arguments[:1] == ["doctor"] and has_env_option)


def _command(arguments: Sequence[str]) -> Callable[[Sequence[str]], int]:
    """Return the `main` function of a command. Imports are here, where Ctrl-C is handled: torch alone takes two
    seconds."""
    name = arguments[0]
    if name == "resume":
        raise FarstepError("there is no command 'resume'; continue a run with 'farstep train --resume runs/NAME'.")
    if name not in _COMMANDS:
        raise FarstepError(unknown_name("command", name, _COMMANDS))
    if name == "train":
        _check_learner(arguments[1:])
        from farstep.cli.options.env_check import check_named_env

        check_named_env(arguments[1:])
    if name in ("train", "eval", "watch"):
        from farstep.observe.extras import require

        require("torch", "torch", f"'farstep {name}'", "nn")
        with _notice("loading PyTorch ..."):
            return _main_of(name)
    return _main_of(name)


def _main_of(name: str) -> Callable[[Sequence[str]], int]:
    main: Callable[[Sequence[str]], int] = importlib.import_module(f"farstep.cli.{name}").main
    return main


@contextlib.contextmanager
def _notice(text: str) -> Iterator[None]:
    """Show `text` on standard error during the block, if it is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    sys.stderr.write(text)
    sys.stderr.flush()
    try:
        yield
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def _check_learner(arguments: Sequence[str]) -> None:
    if not arguments:
        raise ConfigError(f"'farstep train' needs a learner: {', '.join(LEARNERS)}.")
    if not arguments[0].startswith("-") and arguments[0] not in LEARNERS:
        raise ConfigError(unknown_name("learner", arguments[0], LEARNERS))
