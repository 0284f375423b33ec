"""`farstep train`: parses the options, starts the environments, trains, and stores the run."""

from __future__ import annotations

import logging
import shlex
import shutil
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import numpy as np
import torch

from farstep.checkpoint import folder as checkpoint
from farstep.cli.options.algorithms import ALGORITHMS, RELEASING, make_learner
from farstep.cli.options.env_check import check_env
from farstep.cli.options.train_options import Options, learner_of_file, parse_options, stored_config, write_yaml
from farstep.cli.saved.recording import check_recording, record
from farstep.cluster_env import (
    ClusterEnv,
    advise_options,
    call_when_begun,
    event_log_of,
    name_run,
    status_page_of,
)
from farstep.config.launch import EngineConfig
from farstep.errors import ConfigError, RunError, counted, unknown_name
from farstep.event import Event
from farstep.learners.async_ppo import AsyncPPO
from farstep.learners.loop.checkpoints.checkpoint_schedule import DEFAULT_EVERY
from farstep.learners.loop.evaluation import EVALUATION_SLOTS, Evaluator
from farstep.learners.loop.stop_signals import hangup_ends_process, leave_terminal
from farstep.learners.loop.training import Learner, Limits, Progress, Stopped, Training
from farstep.learners.networks.agent import NetworkAgent
from farstep.learners.networks.encoders import VectorEncoder
from farstep.learners.options.run_config import RunConfig
from farstep.learners.options.task_defaults import Defaults
from farstep.learners.ppo import PPO, PPOConfig
from farstep.learners.replay.learner import ReplayLearner
from farstep.learners.replay.start_checks import check_before_launch, check_launched
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
from farstep.observe.run_status import number
from farstep.observe.status import LiveSource, StatusPage
from farstep.observe.terminal.console import LiveDisplay, PlainLines, console_logger, continue_unread
from farstep.observe.terminal.panel import SHOWN_EVENTS

_EXIT_STATUS = {"SIGHUP": 129, "SIGINT": 130, "SIGTERM": 143}


def main(arguments: Sequence[str]) -> int:
    """Parse the options, train, and print a summary. Return the exit status."""
    if arguments[0] in ("-h", "--help"):
        sys.stdout.write(f"usage: farstep train LEARNER [options]\nlearners: {', '.join(ALGORITHMS)}\n")
        sys.stdout.write("--resume and --config need no LEARNER: the run or the file names it.\n")
        sys.stdout.write("'farstep train ppo --help' lists the options of a learner.\n")
        return 0
    name, *rest = arguments if not arguments[0].startswith("-") else (learner_of_file(arguments), *arguments)
    if name not in ALGORITHMS:
        raise ConfigError(unknown_name("learner", name, list(ALGORITHMS)))
    options = parse_options(name, rest)
    run = options.run
    if run.release_device and ALGORITHMS[name].learner not in RELEASING:
        raise ConfigError(
            f"--release-device is for {', '.join(RELEASING.values())}: {name} updates all the time and would move to "
            "its device and back for each update. Leave it out."
        )
    check_env(run)
    _set_up(run)
    with ExitStack() as stack:
        try:
            with _signals_raise():
                learner, env, folder, page = _launch(name, options, stack)
        except (KeyboardInterrupt, Stopped) as stopped:
            signal_name = str(stopped) or "SIGINT"
            sys.stderr.write(f"farstep: stopped by {signal_name} before training began\n")
            return _EXIT_STATUS[signal_name]
        _print_now(f"run: {folder.path}\n{_normalized(options.learner.net, learner.agent)}")
        if surplus := _surplus_workers(options):
            _print_now(surplus)
        if isinstance(learner, PPO | AsyncPPO) and learner.agent.sees_images:
            used = _sizes_in_use(learner, env)
            _print_now(f"observations are images, with other defaults (--help): {used}")
        try:
            progress = train(learner, name, options, env, folder, page)
        except Stopped as stopped:
            _print_now(f"stopped by {stopped}; continue with: farstep train {name} --resume {_quoted(folder)}")
            return _EXIT_STATUS[str(stopped)]
    _print_now(_summary(progress, folder))
    return 0


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Context manager: SIGTERM and SIGHUP raise `Stopped`, so that the launch is cleaned up. No effect outside the main
    thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    has_hung_up = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal has_hung_up
        if number == signal.SIGHUP:
            if has_hung_up:  # both the shell and the kernel may send it
                return
            has_hung_up = True
            leave_terminal()
        raise Stopped(signal.Signals(number).name)

    numbers = [signal.SIGTERM, *([signal.SIGHUP] if hangup_ends_process() else [])]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP and has_hung_up else handler)


def _launch(
    name: str, options: Options[Any, Any], stack: ExitStack
) -> tuple[Learner, ClusterEnv, RunFolder, StatusPage | None]:
    """Start the environments, and create the run folder and the learner. `stack` ends what was started."""
    run, env = options.run, _cluster(options)
    replay = getattr(options.learner, "replay", None)
    resumed = options.resume is not None
    recorded = None if replay is None else check_before_launch(replay, env, resumed)
    stack.callback(env.close)
    advise_options(env)
    with ExitStack() as on_failure:  # a run that does not start must not leave an empty run folder behind
        folder = _folder(name, options, on_failure)
        stack.enter_context(folder.lock())
        name_run(env, str(folder.path))
        if resumed:
            _check_resumable(folder, run)
        with ExitStack() as starting:
            page = _status_page(name, options, env, folder, stack, starting) if run.status_page else None
            env.launch()
            learner = make_learner(name, run, options.learner, env)
            if isinstance(learner, ReplayLearner):
                check_launched(options.learner.replay, env, learner, recorded)
        on_failure.pop_all()
    return learner, env, folder, page


def _sizes_in_use(learner: PPO | AsyncPPO, env: ClusterEnv) -> Defaults:
    """Return the learner's defaults, with the values that the user gave in place of theirs."""
    config, defaults, rows = learner.config, learner.defaults, learner.rollout_steps(env) * env.num_envs
    minibatch = config.minibatch_size if isinstance(config, PPOConfig) else config.global_batch_size
    return Defaults(
        learning_rate=defaults.learning_rate if config.learning_rate is None else config.learning_rate,
        update_epochs=config.update_epochs or defaults.update_epochs,
        rollout_rows=rows,
        minibatch_rows=defaults.minibatch_size(minibatch, rows, config.net.is_recurrent),
    )


def _cluster(options: Options[Any, Any]) -> ClusterEnv:
    run, nodes, info_keys = options.run, options.nodes, getattr(options.learner, "info_keys", ())
    if isinstance(nodes, EngineConfig):
        return ClusterEnv(run.env_config(envs_per_node=run.envs_per_node(nodes.nodes), info_keys=info_keys), nodes)
    return ClusterEnv(run.env_config(info_keys=info_keys), replace(run.launch_config(), **vars(nodes)))


def _surplus_workers(options: Options[Any, Any]) -> str:
    """Return a line about workers that are not started because they would have no environment; "" if there are none."""
    run, nodes = options.run, options.nodes
    option, wanted, num_envs, where = "--workers", run.workers, run.num_envs, ""
    if isinstance(nodes, EngineConfig):
        option, wanted, where = "--workers-per-node", nodes.workers_per_node, " per node"
        num_envs = run.envs_per_node(nodes.nodes)
    if wanted is None or wanted <= num_envs:
        return ""
    return f"workers: {num_envs}{where}, not {wanted} ({option}): a worker needs an environment; raise --num-envs"


def _folder(name: str, options: Options[Any, Any], on_failure: ExitStack) -> RunFolder:
    """Open or create the run folder. `on_failure` removes what was created."""
    run = options.run
    config = stored_config(name, options)
    if options.resume is not None:
        return RunFolder.open(options.resume)
    if not (root := Path(run.folder)).exists():
        on_failure.callback(_remove_if_empty, root)
    folder = RunFolder.create(root, run.name or run_name(run.env, name, run.seed), config)
    on_failure.callback(shutil.rmtree, folder.path, ignore_errors=True)
    write_yaml(name, options, folder)
    return folder


def _check_resumable(folder: RunFolder, run: RunConfig) -> None:
    if not checkpoint.numbered(folder.checkpoints):
        raise RunError(
            f"{folder.path} ended before its first checkpoint (written after {run.checkpoint_every or DEFAULT_EVERY} "
            "updates, see --checkpoint-every), so there is nothing to resume; start a new run without --resume."
        )


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # another run has begun there
        folder.rmdir()


def train(
    learner: Learner,
    name: str,
    options: Options[Any, Any],
    env: ClusterEnv,
    folder: RunFolder,
    page: StatusPage | None = None,
) -> Progress:
    """Train until the run is done.

    Args:
        learner: The learner, with its agent.
        name: A key of `ALGORITHMS`.
        options: Options of the command line.
        env: The environments to train in.
        folder: Where checkpoints, metrics, events and videos are written; the caller holds its lock.
        page: The status page of the run; None: the run has none.

    Returns:
        Steps, seconds and last returns of the run.

    Raises:
        Stopped: A signal arrived; a checkpoint has been written.
    """
    run, resume = options.run, options.resume is not None
    with ExitStack() as stack:
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
            training.resume()
            found = training.newest_checkpoint
            assert found is not None
            _print_now(f"resumed from checkpoint {found.number} at step {found.step:,}")
            folder.write_config(stored_config(name, options))
            write_yaml(name, options, folder)
            if page is not None:
                page.source.resumed(training.progress.steps)
        display = console_logger(run.total_steps, f"{name} on {run.env}", target_return=run.target_return)
        shown = None if page is None else page.source
        sink = _loggers(name, options, folder, training.progress.steps if resume else None, env, display, shown)
        training.sink = stack.enter_context(sink)
        remarks = _Remarks(display, shown)
        training.diagnosis.on_diagnosis = remarks.diagnosed
        stack.callback(event_log_of(env).subscribe(remarks.happened).close)
        return training.run()


def _status_page(
    name: str, options: Options[Any, Any], env: ClusterEnv, folder: RunFolder, stack: ExitStack, starting: ExitStack
) -> StatusPage | None:
    """Start the status page, and store its address in the run folder until the run ends.

    Print the address when the run has started, at the end of `starting`. Nodes may start late, so with nodes, print it
    when the launch begins to wait for workers, or at the first event.
    """
    run = options.run
    try:
        page = status_page_of(env)
    except RunError as error:
        env.emit_event("warned", f"training without a status page: {error}")
        return None
    page.source.describe(f"{name} on {run.env}", vars(run), run.total_steps)
    with as_run_error(folder.status_file):
        replace_file(folder.status_file, page.url.encode(), private=True)
    stack.callback(folder.status_file.unlink, missing_ok=True)
    # Other users may be able to read the output if it is no terminal; then print the command that reads the address.
    line = f"status: {page.url if sys.stdout.isatty() else f'farstep status {_quoted(folder)}'}"
    lock, is_announced = threading.Lock(), False

    def announce() -> None:
        nonlocal is_announced
        with lock:  # events are read in another thread
            if not is_announced:
                _print_now(line)
            is_announced = True

    def end(failure: type[BaseException] | None, *_: object) -> None:
        if failure is None:
            announce()
        elif is_announced and options.resume is None:
            _print_now(f"{_quoted(folder)} is removed, because the run did not start")

    starting.push(end)
    if isinstance(options.nodes, EngineConfig):
        call_when_begun(env, announce)
        starting.callback(event_log_of(env).subscribe(lambda _: announce()).close)
    return page


def _quoted(folder: RunFolder) -> str:
    """Return the path of a run folder as a user would type it."""
    return shlex.quote(str(folder.path))


def _print_now(text: str) -> None:
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        continue_unread(sys.stdout)


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
            _print_now(event.text)
        if event.kind == "lost" and event.worker is None:
            self._diagnosis = None  # that of the time before a node was lost
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
    env_config = run.env_config(envs_per_node=slots, stagger=None, kl_threshold=None, weights=None, inference=None)

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
        plain = msgspec.to_builtins(stored_config(name, options), enc_hook=str)
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
    mean = f"; mean return of the last {counted(len(last), 'episode')} {number(float(np.mean(last)))}" if last else ""
    run = _quoted(folder)
    return (
        f"{progress.steps:,} steps in {progress.seconds:.0f} s{mean}\n"
        f"eval:  farstep eval {run}\nwatch: farstep watch {run}\nplot:  farstep plot {run}"
    )
