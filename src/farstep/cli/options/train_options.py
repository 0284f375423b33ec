"""The options of `farstep train`: on the command line, in a YAML file, and in the folder of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec
import tyro

from farstep.cli.options.algorithms import ALGORITHMS
from farstep.cli.options.config_file import as_yaml, learner_in, read_options
from farstep.cli.options.launchers import ENGINES, SharingOptions, check_options, chosen_launcher
from farstep.cli.options.parsing import check_belonging, parse, typed
from farstep.cli.saved.trust import check_trusted
from farstep.config.field_docs import show_fields
from farstep.config.launch import EngineConfig
from farstep.errors import ConfigError
from farstep.learners.options.run_config import RunConfig
from farstep.observe.files import as_run_error, replace_file
from farstep.observe.run_folder import RunFolder
from farstep.version import VERSION

_FIXED = ("env", "env_type", "env_kwargs", "wrappers", "seed", "name", "folder")
"""Options that a resumed run cannot change."""
C = TypeVar("C")
E = TypeVar("E", bound=EngineConfig | SharingOptions)


@show_fields
@dataclass(frozen=True, kw_only=True)
class Options(Generic[C, E]):
    """Train an agent and store the run in a folder.

    To list the options of a cluster, name its launcher: farstep train ppo --launcher slurm --help
    """

    run: tyro.conf.OmitArgPrefixes[RunConfig]
    learner: tyro.conf.OmitArgPrefixes[C]
    nodes: tyro.conf.OmitArgPrefixes[E]
    """Options of the cluster that --launcher names."""
    config: Path | None = None
    """YAML file with options, such as the config.yaml of a run. Options on the command line take precedence."""
    resume: Path | None = None
    """Folder of a run to continue. The options of this run become the defaults of all other options."""
    trust: bool = False
    """With --resume: execute the code that the run's config.json names, even if the file's signature is missing or
    wrong."""


def parse_options(name: str, arguments: Sequence[str]) -> Options[Any, Any]:
    command, default, why_not = f"farstep train {name}", None, ""
    if arguments and not arguments[0].startswith("-"):
        raise ConfigError(
            f"'{command}' takes only options, but got {arguments[0]!r}; did you mean --env {arguments[0]}?"
        )
    resumed, config = _path_of(arguments, "--resume"), _path_of(arguments, "--config")
    if resumed is not None and config is not None:
        raise ConfigError("--resume and --config contradict each other: a resumed run has its own options. Omit one.")
    if resumed is not None:
        default, why_not = _saved_options(name, resumed)
    elif config is not None:
        learners = {each: algorithm.config for each, algorithm in ALGORITHMS.items()}
        run, learner, engine = read_options(config, name, learners, arguments)
        default = Options(run=run, learner=learner, nodes=engine)
    launcher = chosen_launcher(arguments, "local" if default is None else default.run.launcher)
    nodes: Any = ENGINES.get(launcher, SharingOptions)
    if default is not None and type(default.nodes) is not nodes:  # resumed with another launcher
        default = replace(default, nodes=tyro.MISSING_NONPROP)
    kind: Any = Options[ALGORITHMS[name].config, nodes]  # type: ignore[misc]
    check_options(kind, arguments, command, launcher)
    owners = {f"'farstep train {other}'": algorithm.config for other, algorithm in ALGORITHMS.items()}
    check_belonging(kind, arguments, f"'{command}'", owners)
    options: Options[Any, Any] = parse(kind, arguments, command, default)
    if default is not None and resumed is not None:
        _check_same(default, options)
        check_trusted(RunFolder(resumed), default.run, why_not, options.trust, f"{command} --resume")
    elif options.trust:
        raise ConfigError("--trust applies only to a run folder: add --resume RUN, or omit --trust.")
    return options


def learner_of_file(arguments: Sequence[str]) -> str:
    """Return the learner of the run or YAML file that the options name, for a command that names no learner."""
    known = ", ".join(ALGORITHMS)
    resumed, config = _path_of(arguments, "--resume"), _path_of(arguments, "--config")
    if resumed is not None:
        folder = RunFolder.open(resumed)
        learner = str(folder.read_signed_config()[0].get("algorithm"))
        if learner not in ALGORITHMS:
            raise ConfigError(f"{folder.config_file} names no learner that farstep {VERSION} knows ({known}).")
        return learner
    if config is None:
        raise ConfigError(f"'farstep train' needs a learner ({known}) before its options, e.g. farstep train ppo.")
    if (name := learner_in(config)) is None:
        raise ConfigError(
            f"{config} names no learner; add 'algorithm: ppo' to it, or name one ({known}): farstep train ppo --config "
            f"{config}"
        )
    return name


def _check_same(saved: Options[Any, Any], now: Options[Any, Any]) -> None:
    """Raise `ConfigError` if an option that a resumed run cannot change differs from the saved option."""
    network = [(field.name, saved.learner.net, now.learner.net) for field in fields(saved.learner.net)]
    for name, *configs in [*((name, saved.run, now.run) for name in _FIXED), *network]:
        before, after = (typed(name, getattr(config, name)) for config in configs)
        if before != after:
            raise ConfigError(
                f"the run in {now.resume} was started with {before} and cannot be resumed with {after}. Omit the "
                "option, or start another run without --resume."
            )


def _path_of(arguments: Sequence[str], option: Literal["--resume", "--config"]) -> Path | None:
    """Return the path that an option names. Find it before parsing, because the file has the defaults of other
    options."""
    expected = {
        "--resume": "the folder of a run, e.g. --resume runs/NAME",
        "--config": "a YAML file, e.g. --config run.yaml",
    }[option]
    found = None
    for i, argument in enumerate(arguments):
        flag, _, value = argument.partition("=")
        if flag == option:
            if not value and i + 1 == len(arguments):
                raise ConfigError(f"{option} needs {expected}.")
            if found is not None:
                raise ConfigError(f"{option} was given twice; it takes one path.")
            found = Path(value or arguments[i + 1])
    return found


def _saved_options(name: str, path: Path) -> tuple[Options[Any, Any], str]:
    """Return the options stored in a run folder, and why another user may have written them ("" if the tag is
    valid)."""
    saved, why_not = RunFolder.open(path).read_signed_config()
    if saved.get("algorithm") != name:
        raise ConfigError(
            f"{path} is a run of {saved.get('algorithm')}, not of {name}; resume it with "
            f"'farstep train {saved.get('algorithm')} --resume {path}'."
        )
    run, learner = load_config(saved)
    return Options(run=run, learner=learner, nodes=_load_nodes(saved, run), resume=path), why_not


def _load_nodes(saved: dict[str, Any], run: RunConfig) -> EngineConfig | SharingOptions:
    if run.launcher not in ENGINES and "nodes" not in saved:
        return SharingOptions()
    kind: type[EngineConfig | SharingOptions] = ENGINES.get(run.launcher, SharingOptions)
    try:
        nodes = msgspec.convert(saved["nodes"], kind)
    except (KeyError, msgspec.ValidationError) as error:
        raise ConfigError(f"config.json does not match this version of farstep: {error}.") from error
    _check_known(saved["nodes"], vars(nodes), "nodes.")
    return nodes


def load_config(saved: dict[str, Any]) -> tuple[RunConfig, Any]:
    """Convert the contents of a run's config.json.

    Args:
        saved: The parsed JSON.

    Returns:
        The options of the run, and the options of its learner.

    Raises:
        ConfigError: An option is missing, unknown or of the wrong type.
    """
    try:
        algorithm = ALGORITHMS[saved["algorithm"]]
        run = msgspec.convert(saved["run"], RunConfig, dec_hook=_decoded)
        learner = msgspec.convert(saved["learner"], algorithm.config, dec_hook=_decoded)
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise ConfigError(f"config.json does not match this version of farstep: {error}.") from error
    _check_known(saved, {"algorithm": None, "run": run, "learner": learner, "nodes": None})
    return run, learner


def _check_known(saved: Mapping[str, object], known: Mapping[str, object], path: str = "") -> None:
    """Raise `ConfigError` if a saved option is unknown, because ignoring it would silently change the run."""
    for name, value in saved.items():
        if name not in known:
            raise ConfigError(
                f"config.json has the option {path + name!r}, which farstep {VERSION} does not know. Use the version "
                "that wrote the file, or remove this entry and pass --trust."
            )
        if isinstance(value, Mapping) and is_dataclass(part := known[name]):
            _check_known(value, vars(part), f"{path}{name}.")


def _decoded(kind: type, value: Any) -> Any:
    return kind(value)


def write_yaml(name: str, options: Options[Any, Any], folder: RunFolder) -> None:
    """Write the options as YAML, for people and for --config."""
    parts = {"run": options.run, "learner": options.learner}
    cluster = {"cluster": options.nodes} if options.nodes != SharingOptions() else {}
    with as_run_error(folder.yaml_file):
        replace_file(folder.yaml_file, as_yaml(name, parts | cluster).encode())


def stored_config(name: str, options: Options[Any, Any]) -> dict[str, Any]:
    """Return the contents of config.json."""
    config = {"algorithm": name, "run": options.run, "learner": options.learner}
    return config | ({"nodes": options.nodes} if options.nodes != SharingOptions() else {})
