"""Options of training runs that all learners share. A field's docstring is its `--help` text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from farstep.config.env import EnvConfig, check_count, check_seed
from farstep.config.field_docs import show_fields
from farstep.config.launch import InProcessConfig, LaunchConfig, LocalConfig, LocalTransport
from farstep.errors import ConfigError

LauncherName = Literal["local", "in-process", "slurm", "ssh", "ray", "kubernetes"]


@show_fields
@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Options of a training run: environments, workers, limits, checkpoints and logs.

    Raises:
        ConfigError: An option is out of range, or options contradict each other.
    """

    env: str
    """Gymnasium id, or `module:Id`; with --env-type factory, the dotted path of a function."""
    env_type: Literal["gymnasium", "envpool", "factory", "vector"] = "gymnasium"
    """What makes the environments: a library, or a function."""
    env_kwargs: str = "{}"
    """Keyword arguments of the environment, as JSON: '{"continuous": true}'."""
    wrappers: tuple[str, ...] = ()
    """Dotted paths of wrappers, applied in order."""
    num_envs: int = 16
    """Total number of environments on all workers and nodes."""
    workers: int | None = None
    """Number of worker processes on this machine; None: one per core. On a cluster, use --workers-per-node."""
    launcher: LauncherName = "local"
    """Where workers run: in processes of this machine (local), inside this process for debugging (in-process), or on a
    cluster. `--launcher NAME --help` also lists the options of this launcher."""
    transport: LocalTransport = "shm"
    """Transport of --launcher local: shared memory (shm), or ZeroMQ over a local socket (ipc) or loopback (tcp). Remote
    workers use ZeroMQ, so tcp measures the bytes that a cluster would send."""
    total_steps: int = 1_000_000
    """Environment steps to train for."""
    target_return: float | None = None
    """Stop when the mean return of the last 100 episodes reaches this; None: no target."""
    seed: int = 1
    """Seed of environments, network, sampling and the order of rows in minibatches."""
    kl_threshold: float | None = None
    """AAPS: workers load new weights only when the KL divergence between their policy and the learner's exceeds this,
    in nats. None: they load them before every rollout."""
    weights: str | None = None
    """How weights are sent to workers, as JSON. '{"half": "bfloat16", "delta": true}' sends differences of rounded
    weights, about a quarter of the bytes, for slow networks. "only" selects parameters by name. None: send all,
    unrounded."""
    stagger: str | None = None
    """Staggered resets, as JSON: '{"horizon": 1000}'; None: off."""
    release_idle: bool = False
    """Suspend workers that have nothing to do: with ppo, all of them during updates; with impala and replay learners,
    those that are as far ahead of the learner as its options allow. async-ppo suspends none, unless
    --staleness-threshold is 0 and --num-chunks is not set."""
    prewarm: bool = False
    """With --release-idle: let workers continue shortly before the update is expected to end."""
    inference: str = "local"
    """Where actions are computed: `local` (in each worker), `served` (one acting server per node acts for its workers),
    `auto` (the faster one of the two), or options of the acting server as JSON: '{"device": "cuda"}'."""
    device: str = "cpu"
    """Device of the learner: cpu, cuda, cuda:1."""
    release_device: bool = False
    """Hold the device only during updates: while the learner waits for rollouts, it is in main memory. With
    --coordinator, updates take turns on its devices. For ppo, async-ppo and impala."""
    threads: int | None = None
    """Number of threads of the learner. None: 1, or all cores if observations are images and workers wait during
    updates."""
    folder: Path = Path("runs")
    """Folder in which run folders are created."""
    name: str | None = None
    """Name of the run folder; None: environment, learner, seed and time."""
    checkpoint_every: int | None = None
    """Updates between checkpoints; None: 10, or more if writing would otherwise take over 2 % of the time. A run also
    writes a checkpoint at the end, on Ctrl-C, on SIGTERM and when its terminal is closed."""
    eval_every: int | None = None
    """Environment steps between evaluations; None: no evaluations. They run in separate environments while training
    continues."""
    eval_episodes: int = 20
    """Episodes per evaluation."""
    capture_video: bool = False
    """Record a video of one episode with each evaluation."""
    tensorboard: bool = False
    """Also log to TensorBoard."""
    wandb: str | None = None
    """Also log to this project of Weights & Biases."""
    status_page: bool = True
    """Serve a page that shows the run in a browser on this machine; its address is printed at the start, and by
    `farstep status`."""

    def __post_init__(self) -> None:
        for name in ("num_envs", "total_steps", "eval_episodes"):
            check_count(name, getattr(self, name))
        for name in ("workers", "threads", "checkpoint_every", "eval_every"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        check_seed(self.seed)
        if self.workers is not None and self.launcher not in ("local", "in-process"):
            raise ConfigError(
                f"workers={self.workers} is the number of processes on this machine; with --launcher {self.launcher} "
                "use --workers-per-node instead."
            )
        if self.transport != "shm" and self.launcher != "local":
            raise ConfigError(
                f"transport={self.transport!r} requires --launcher local; --launcher {self.launcher} has only one "
                "transport. Leave out --transport."
            )
        if self.capture_video and self.eval_every is None:
            raise ConfigError(
                "capture_video is on without eval_every, but only evaluations record videos. Also set "
                "eval_every, e.g. 50000."
            )
        _json_object("env_kwargs", self.env_kwargs)
        if self.stagger is not None:
            _json_object("stagger", self.stagger)
        EnvConfig(env_name=self.env, inference=self._inference())

    def env_config(self, **changes: Any) -> EnvConfig:
        """Return the configuration of the training environments.

        Args:
            changes: Options of `EnvConfig` that replace the options of the run; None: the default of `EnvConfig`.

        Returns:
            The configuration.

        Raises:
            ConfigError: An option is out of range.
        """
        options: dict[str, Any] = {
            "type": self.env_type,
            "env_name": self.env,
            "env_kwargs": _json_object("env_kwargs", self.env_kwargs),
            "wrappers": self.wrappers,
            "envs_per_node": self.num_envs,
            "seed": self.seed,
            "kl_threshold": self.kl_threshold,
            "release_idle": self.release_idle,
            "prewarm": self.prewarm,
            "inference": self._inference(),
        }
        for name in ("stagger", "weights"):
            if (text := getattr(self, name)) is not None:
                options[name] = _json_object(name, text)
        return EnvConfig.of({name: value for name, value in (options | changes).items() if value is not None})

    def _inference(self) -> Any:
        """The option `EnvConfig.inference`."""
        return _json_object("inference", self.inference) if self.inference.startswith("{") else self.inference

    def envs_per_node(self, nodes: int) -> int:
        """Return the number of environments per node. Raise `ConfigError` if they cannot be divided evenly."""
        if self.num_envs % nodes:
            near = max(self.num_envs // nodes, 1) * nodes
            raise ConfigError(
                f"num_envs={self.num_envs} cannot be divided evenly over {nodes} nodes; use {near} or {near + nodes}."
            )
        return self.num_envs // nodes

    def launch_config(self, workers: int | None = None) -> LaunchConfig:
        """Return the launch configuration for this machine.

        Args:
            workers: Number of workers, e.g. for an evaluation; None: as many as the run has.

        Returns:
            The configuration.
        """
        count = workers or self.workers
        if self.launcher == "in-process":
            return InProcessConfig(workers_per_node=count)
        return LocalConfig(workers_per_node=count, transport=self.transport)


def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"{name} is {text!r}, which is not JSON ({error}); expected e.g. '{{\"key\": 1}}'."
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{name} is {text!r}; expected a JSON object, e.g. '{{\"key\": 1}}'.")
    return value
