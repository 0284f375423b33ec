"""The `farstep` command: a module of this folder for each of its commands."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

from farstep.errors import ConfigError, FarstepError, LaunchError, WorkerError, unknown_name
from farstep.observe.extras import require
from farstep.rollout.nested_launch import refuse_nested_launch

_HELP = """\
farstep trains Gymnasium environments on workers, and shows what came of it.

  farstep train ppo --env CartPole-v1                 learn; the run is kept under runs/
  farstep train async-ppo --env LunarLander-v3 --workers 2 --num-envs 64
  farstep train impala --env CartPole-v1
  farstep train ppo --resume runs/NAME                go on where a run stopped
  farstep watch runs/NAME                             render episodes of what it learned to a video
  farstep plot runs/NAME runs/OTHER                   draw return, throughput and staleness to a PNG
  farstep doctor --launcher slurm --nodes 4           look whether nodes, network and versions are fit for a run
  farstep slurm --print --nodes 4 --partition gpu     show the job that SLURM would be given
  farstep kubernetes --print --image NAME             show what Kubernetes would be asked for

'farstep train ppo --help' lists every option with what it does.
"""
_COMMANDS = ("train", "watch", "plot", "doctor", "slurm", "kubernetes")
_LAUNCHING = ("train", "doctor")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None and _imports_from_here(arguments):
        sys.path.append("")  # last, so that no file here replaces an installed module
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(_HELP)
        return 0
    if arguments[0] == "--version":
        from farstep.version import VERSION

        sys.stdout.write(f"farstep {VERSION}\n")
        return 0
    if arguments[0] in _LAUNCHING:
        refuse_nested_launch()  # raised, not printed, so that the learner's program reports it
    try:
        return _command(arguments[0])(arguments[1:])
    except FarstepError as error:
        said: object = error
        if isinstance(error, WorkerError) and isinstance(error, (ConfigError, LaunchError)):
            said = f"{error.message} [{error.where}]"  # a sentence says it, and no traceback helps
        sys.stderr.write(f"farstep: {said}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("farstep: stopped by SIGINT\n")
        return 130


def _imports_from_here(arguments: Sequence[str]) -> bool:
    """Whether a command imports environments and wrappers, which may be modules of the current folder."""
    is_given_env = any(argument.partition("=")[0] == "--env" for argument in arguments)
    return arguments[:1] in (["train"], ["watch"]) or (arguments[:1] == ["doctor"] and is_given_env)


def _command(name: str) -> Callable[[Sequence[str]], int]:
    """Imported when it is wanted: torch alone takes two seconds."""
    if name not in _COMMANDS:
        raise FarstepError(unknown_name("command", name, _COMMANDS))
    if name in ("train", "watch"):
        require("torch", "torch", f"'farstep {name}'", "nn")
    command: Callable[[Sequence[str]], int] = importlib.import_module(f"farstep.cli.{name}").main
    return command
