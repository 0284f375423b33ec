"""`farstep train`: parses the options, starts the environments, trains, and stores the run."""

from __future__ import annotations

import logging
import sys
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec
import numpy as np
import torch
import tyro

from farstep.checkpoint import folder as checkpoint
from farstep.cli.options.config_file import as_yaml, learner_in, read_options
from farstep.cli.options.launchers import ENGINES, SharingOptions, check_options, chosen_launcher
from farstep.cli.options.parsing import check_belonging, parse, typed
from farstep.cli.recording import check_recording, record
from farstep.cli.trust import check_trusted
from farstep.cluster_env import ClusterEnv, event_log_of, status_page_of
from farstep.config.field_docs import show_fields
from farstep.config.launch import EngineConfig
from farstep.errors import ConfigError, RunError, counted, unknown_name
from farstep.event import Event
from farstep.learners.aride import Aride, ArideConfig
from farstep.learners.async_ppo import AsyncPPO, AsyncPPOConfig
from farstep.learners.dqn import DQN, ApexConfig, DQNConfig, make_q_agent
from farstep.learners.impala import Impala, ImpalaConfig
from farstep.learners.loop.checkpoint_schedule import DEFAULT_EVERY
from farstep.learners.loop.evaluation import EVALUATION_SLOTS, Evaluator
from farstep.learners.loop.training import Learner, Limits, Progress, Stopped, Training
from farstep.learners.networks.agent import NetworkAgent
from farstep.learners.networks.encoders import VectorEncoder
from farstep.learners.networks.nets import Space, make_agent
from farstep.learners.options.run_config import RunConfig
from farstep.learners.options.sizes import Defaults, rollout_steps
from farstep.learners.ppo import PPO, PPOConfig
from farstep.learners.replay.learner import ReplayLearner
from farstep.learners.replay.start_checks import check_before_launch, check_launched
from farstep.learners.sac import SAC, SACConfig, make_soft_actor
from farstep.observe.diagnosis import Diagnosis
from farstep.observe.event_files import EventFile
from farstep.observe.files import as_run_error, replace_file
from farstep.observe.loggers import (
    JsonlLogger,
    Loggers,
    TensorBoardLogger,
    WandbLogger,
    require_tensorboard,
    require_wandb,
)
from farstep.observe.run_folder import RunFolder, run_name
from farstep.observe.status import LiveSource
from farstep.observe.terminal.console import LiveDisplay, PlainLines, console_logger
from farstep.observe.terminal.panel import SHOWN_EVENTS
from farstep.resources import usable_cpus
from farstep.version import VERSION

_FIXED = ("env", "env_type", "env_kwargs", "wrappers", "seed", "name", "folder")
"""Options that a resumed run cannot change."""
_EXIT_STATUS = {"SIGINT": 130, "SIGTERM": 143}
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
    """With --resume: execute the code that the run's config.json names, even if the file's tag does not prove that you
    wrote the file."""


@dataclass(frozen=True)
class Algorithm:
    """How the command line makes a learner and its agent."""

    config: type[Any]
    """Class of the learner's options; their field `net` has the options of the network."""
    learner: Callable[..., Learner]
    """Makes the learner of an agent, options, seed and device."""
    agent: Callable[[Space, Space, Any], NetworkAgent]
    """Makes the agent for an observation space, an action space and the learner's options."""


def _actor_critic(observation_space: Space, action_space: Space, config: Any) -> NetworkAgent:
    return make_agent(observation_space, action_space, config.net, config.gamma)


ALGORITHMS = {
    "ppo": Algorithm(PPOConfig, PPO, _actor_critic),
    "async-ppo": Algorithm(AsyncPPOConfig, AsyncPPO, _actor_critic),
    "impala": Algorithm(ImpalaConfig, Impala, _actor_critic),
    "dqn": Algorithm(DQNConfig, DQN, make_q_agent),
    "apex": Algorithm(ApexConfig, DQN, make_q_agent),
    "sac": Algorithm(SACConfig, SAC, make_soft_actor),
    "aride": Algorithm(ArideConfig, Aride, _actor_critic),
}
_RELEASING: dict[Any, str] = {PPO: "ppo", AsyncPPO: "async-ppo", Impala: "impala"}
"""Learners that can hold their device only during updates."""


def agent_for(config: Any, observation_space: Space, action_space: Space) -> NetworkAgent:
    """Make a new agent of the learner with these options, for the spaces of an environment."""
    algorithm = next(each for each in ALGORITHMS.values() if each.config is type(config))
    return algorithm.agent(observation_space, action_space, config)


def main(arguments: Sequence[str]) -> int:
    """Parse the options, train, and print a summary. Return the exit status."""
    if not arguments:
        sys.stderr.write(f"farstep: 'farstep train' needs a learner: {', '.join(ALGORITHMS)}.\n")
        return 2
    if arguments[0] in ("-h", "--help"):
        sys.stdout.write(f"usage: farstep train LEARNER [options]\nlearners: {', '.join(ALGORITHMS)}\n")
        sys.stdout.write("--resume and --config need no LEARNER: the run or the file names it.\n")
        sys.stdout.write("'farstep train ppo --help' lists the options of a learner.\n")
        return 0
    name, *rest = arguments if not arguments[0].startswith("-") else (_learner_of_file(arguments), *arguments)
    if name not in ALGORITHMS:
        raise ConfigError(unknown_name("learner", name, list(ALGORITHMS)))
    options = parse_options(name, rest)
    run = options.run
    if run.release_device and ALGORITHMS[name].learner not in _RELEASING:
        raise ConfigError(
            f"--release-device is for {', '.join(_RELEASING.values())}: {name} updates all the time and would move to "
            "its device and back for each update. Leave it out."
        )
    _set_up(run)
    with ExitStack() as stack:
        try:
            env = _cluster(options)
            replay = getattr(options.learner, "replay", None)
            resumed = options.resume is not None
            recorded = None if replay is None else check_before_launch(replay, env, resumed)
            stack.enter_context(env)
            learner = make_learner(name, run, options.learner, env)
            if isinstance(learner, ReplayLearner):
                check_launched(options.learner.replay, env, learner.names, recorded)
        except KeyboardInterrupt:
            sys.stderr.write("farstep: stopped by SIGINT before training began; no run folder was created\n")
            return _EXIT_STATUS["SIGINT"]
        folder = _folder(
            name, options
        )  # last, because a misspelled environment must not leave an empty run folder behind
        sys.stdout.write(f"run: {folder.path}\n{_normalized(options.learner.net, learner.agent)}\n")
        if isinstance(learner, PPO | AsyncPPO) and learner.agent.sees_images:
            used = _sizes_in_use(learner, env.num_envs)
            sys.stdout.write(f"observations are images, with other defaults (--help): {used}\n")
        sys.stdout.flush()
        try:
            progress = train(learner, name, options, env, folder)
        except Stopped as stopped:
            sys.stdout.write(f"stopped by {stopped}; continue with: farstep train {name} --resume {folder.path}\n")
            return _EXIT_STATUS[str(stopped)]
    sys.stdout.write(_summary(progress, folder))
    return 0


def _sizes_in_use(learner: PPO | AsyncPPO, num_envs: int) -> Defaults:
    """Return the learner's defaults, with the values that the user gave in place of theirs."""
    config, defaults = learner.config, learner.defaults
    return Defaults(
        learning_rate=defaults.learning_rate if config.learning_rate is None else config.learning_rate,
        update_epochs=config.update_epochs or defaults.update_epochs,
        rollout_rows=rollout_steps(config.num_steps, num_envs, config.net.is_recurrent, defaults) * num_envs,
    )


def parse_options(name: str, arguments: Sequence[str]) -> Options[Any, Any]:
    command, default, why_not = f"farstep train {name}", None, ""
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


def _learner_of_file(arguments: Sequence[str]) -> str:
    """Return the learner of the run or YAML file that the options name, for a command that names no learner."""
    known = ", ".join(ALGORITHMS)
    resumed, config = _path_of(arguments, "--resume"), _path_of(arguments, "--config")
    if resumed is not None:
        return str(RunFolder.open(resumed).read_signed_config()[0].get("algorithm"))
    if config is None:
        raise ConfigError(f"'farstep train' needs a learner ({known}) before its options, e.g. farstep train ppo.")
    if (name := learner_in(config)) is None:
        raise ConfigError(
            f"{config} names no learner; add 'algorithm: ppo' to it, or name one ({known}): farstep train ppo --config "
            f"{config}"
        )
    return name


def _cluster(options: Options[Any, Any]) -> ClusterEnv:
    run, nodes, info_keys = options.run, options.nodes, getattr(options.learner, "info_keys", ())
    if isinstance(nodes, EngineConfig):
        return ClusterEnv(run.env_config(envs_per_node=run.envs_per_node(nodes.nodes), info_keys=info_keys), nodes)
    return ClusterEnv(run.env_config(info_keys=info_keys), replace(run.launch_config(), **vars(nodes)))


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


def _folder(name: str, options: Options[Any, Any]) -> RunFolder:
    run = options.run
    config = _config(name, options)
    if options.resume is not None:
        return RunFolder.open(options.resume)
    folder = RunFolder.create(run.folder, run.name or run_name(run.env, name, run.seed), config)
    _write_yaml(name, options, folder)
    return folder


def _write_yaml(name: str, options: Options[Any, Any], folder: RunFolder) -> None:
    """Write the options as YAML, for people and for --config."""
    parts = {"run": options.run, "learner": options.learner}
    cluster = {"cluster": options.nodes} if options.nodes != SharingOptions() else {}
    with as_run_error(folder.yaml_file):
        replace_file(folder.yaml_file, as_yaml(name, parts | cluster).encode())


def _config(name: str, options: Options[Any, Any]) -> dict[str, Any]:
    """Return the contents of config.json."""
    config = {"algorithm": name, "run": options.run, "learner": options.learner}
    return config | ({"nodes": options.nodes} if options.nodes != SharingOptions() else {})


def make_learner(name: str, run: RunConfig, config: Any, env: ClusterEnv) -> Learner:
    """Create the agent for the environments of a run, and its learner.

    Args:
        name: A key of `ALGORITHMS`.
        run: Seed, device and threads.
        config: The learner's configuration.
        env: The environments; launched if they are not running.

    Returns:
        The learner.
    """
    torch.manual_seed(run.seed)
    agent = agent_for(config, *env.launch())
    learner = ALGORITHMS[name].learner(agent, config, run.seed, run.device)
    if run.release_device:
        assert isinstance(learner, PPO | AsyncPPO | Impala)
        learner.release_device()
    # For small matrices, more threads do not help; if workers need the cores, they even slow them down.
    torch.set_num_threads(run.threads or (usable_cpus() if agent.sees_images and learner.synchronous else 1))
    return learner


def train(learner: Learner, name: str, options: Options[Any, Any], env: ClusterEnv, folder: RunFolder) -> Progress:
    """Train until the run is done.

    Args:
        learner: The learner, with its agent.
        name: A key of `ALGORITHMS`.
        options: Options of the command line.
        env: The environments to train in.
        folder: Where checkpoints, metrics, events and videos are written; it is locked until training ends.

    Returns:
        Steps, seconds and last returns of the run.

    Raises:
        Stopped: A signal arrived; a checkpoint has been written.
        RunError: The run cannot be resumed, because it has no checkpoint.
    """
    run, resume = options.run, options.resume is not None
    with ExitStack() as stack:
        stack.enter_context(folder.lock())
        events = EventFile(folder.events_file)
        stack.callback(events.close)
        event_log = event_log_of(env)
        stack.callback(event_log.subscribe(events.write).close)
        stack.enter_context(event_log.emitting_failure())
        evaluator = None
        if run.eval_every is not None:
            evaluator = _evaluator(run, folder)
            stack.callback(evaluator.close)
        limits = Limits(
            total_steps=run.total_steps,
            target_return=run.target_return,
            checkpoint_every=run.checkpoint_every,
            eval_every=run.eval_every,
        )
        training = Training(learner, env, limits, checkpoints=folder.checkpoints, evaluator=evaluator)
        if resume:
            if not checkpoint.numbered(folder.checkpoints):
                raise RunError(
                    f"{folder.path} ended before its first checkpoint (written after "
                    f"{run.checkpoint_every or DEFAULT_EVERY} updates, see --checkpoint-every), so there is nothing to "
                    "resume; start a new run without --resume."
                )
            training.resume()
            folder.write_config(_config(name, options))
            _write_yaml(name, options, folder)
        display = console_logger(run.total_steps, f"{name} on {run.env}")
        page = _status_page(name, run, env, folder, stack) if run.status_page else None
        sink = _loggers(name, options, folder, training.progress.steps if resume else None, env, display, page)
        stack.callback(sink.close)
        training.sink = sink
        remarks = _Remarks(display, page)
        training.diagnosis.on_diagnosis = remarks.diagnosed
        stack.callback(event_log_of(env).subscribe(remarks.happened).close)
        return training.run()


def _status_page(name: str, run: RunConfig, env: ClusterEnv, folder: RunFolder, stack: ExitStack) -> LiveSource:
    """Start the status page, print its address, and store the address in the run folder until the run ends."""
    page = status_page_of(env)
    page.source.describe(f"{name} on {run.env}", vars(run), run.total_steps)
    with as_run_error(folder.status_file):
        replace_file(folder.status_file, page.url.encode(), private=True)
    stack.callback(folder.status_file.unlink, missing_ok=True)
    sys.stdout.write(f"status: {page.url}\n")
    sys.stdout.flush()
    return page.source


class _Remarks:
    """Shows the latest diagnosis in the terminal and on the status page, and the latest events and all announcements in
    the terminal."""

    def __init__(self, display: LiveDisplay | PlainLines, page: LiveSource | None) -> None:
        self._display, self._page = display, page
        self._diagnosis: Diagnosis | None = None
        self._events: deque[Event] = deque(maxlen=SHOWN_EVENTS)

    def diagnosed(self, diagnosis: Diagnosis) -> None:
        self._diagnosis = diagnosis
        if self._page is not None:
            self._page.diagnosed(diagnosis)
        self._display.show(self._diagnosis, tuple(self._events))

    def happened(self, event: Event) -> None:
        if event.kind == "announced":
            sys.stdout.write(f"{event.text}\n")
            sys.stdout.flush()
        self._events.append(event)
        self._display.show(self._diagnosis, tuple(self._events))


def _set_up(run: RunConfig) -> None:
    if run.device not in (known := _devices()):
        raise ConfigError(f"device is {run.device!r}, which torch does not find here; use {' or '.join(known)}.")
    if run.capture_video:
        check_recording(run)
    if run.tensorboard:
        require_tensorboard()
    if run.wandb is not None:
        require_wandb()
    logging.getLogger("farstep").setLevel(logging.WARNING)
    # Ignore overflow: `RewardError` and the warning about updates without effect already report too large rewards.
    warnings.filterwarnings("ignore", "overflow encountered", RuntimeWarning, "farstep")


def _devices() -> list[str]:
    count = torch.cuda.device_count()
    return ["cpu", *["cuda"] * bool(count), *(f"cuda:{i}" for i in range(count))]


def _evaluator(run: RunConfig, folder: RunFolder) -> Evaluator:
    slots = min(run.eval_episodes, EVALUATION_SLOTS)
    env_config = run.env_config(envs_per_node=slots, stagger=None, kl_threshold=None, inference=None)

    def video(agent: NetworkAgent, step: int) -> None:
        record(agent, run, folder.videos / f"step-{step:09d}.mp4", seed=run.seed)

    after = video if run.capture_video else None
    return Evaluator(env_config, run.eval_episodes, run.seed + 1, after, run.launch_config(workers=1))


def _loggers(
    name: str,
    options: Options[Any, Any],
    folder: RunFolder,
    resume_step: int | None,
    env: ClusterEnv,
    display: LiveDisplay | PlainLines,
    page: LiveSource | None,
) -> Loggers:
    run = options.run
    loggers: list[Any] = [JsonlLogger(folder.metrics_file, resume_step)]
    if run.tensorboard:
        loggers.append(TensorBoardLogger(folder.tensorboard, resume_step))
    if run.wandb is not None:
        plain = msgspec.to_builtins(_config(name, options), enc_hook=str)
        loggers.append(WandbLogger(run.wandb, folder.path.name, folder.path, plain, folder.path.name))
    loggers += [display, *([page] if page is not None else [])]
    return Loggers(*loggers, emit=env.emit_event)


def _normalized(net: object, agent: NetworkAgent) -> str:
    """Return a line that says what the learner normalizes, and how to disable this."""
    words = {"normalize_obs": "observations", "normalize_reward": "rewards"}
    found = {option: what for option, what in words.items() if getattr(net, option, False)}
    encoders = (module for module in agent.modules() if isinstance(module, VectorEncoder))
    if all(encoder.moments is None for encoder in encoders):  # e.g. only images
        found.pop("normalize_obs", None)
    if not found:
        return "normalized: nothing"
    flags = " ".join(f"--no-{option.replace('_', '-')}" for option in found)
    return f"normalized: {' and '.join(found.values())} ({flags} to turn off)"


def _summary(progress: Progress, folder: RunFolder) -> str:
    last = progress.returns
    mean = f"; mean return of the last {counted(len(last), 'episode')} {np.mean(last):.1f}" if last else ""
    return (
        f"{progress.steps:,} steps in {progress.seconds:.0f} s{mean}\n"
        f"watch: farstep watch {folder.path}\nplot:  farstep plot {folder.path}\n"
    )
