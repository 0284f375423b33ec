"""What every training run is told, whatever it learns with; a field's docstring is its `--help`."""

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
    """One training run: environments, workers, how long, what is kept."""

    env: str
    """Gymnasium id, or `module:Id`; with --env-type factory the dotted path of a function"""
    env_type: Literal["gymnasium", "envpool", "factory", "vector"] = "gymnasium"
    """where environments come from"""
    env_kwargs: str = "{}"
    """arguments of the environment, as JSON: '{"continuous": true}'"""
    wrappers: tuple[str, ...] = ()
    """dotted paths of wrappers, applied in order"""
    num_envs: int = 16
    """environments in all; with several nodes, as many on each"""
    workers: int | None = None
    """worker processes of this machine; none given: one per core. On a cluster: --workers-per-node"""
    launcher: LauncherName = "local"
    """where workers run: processes of this machine, inside this one (to debug), or on a cluster: --launcher NAME --help
    shows the options of its nodes, too"""
    transport: LocalTransport = "shm"
    """of --launcher local: shared memory, or ZeroMQ over a socket file (ipc) or over loopback (tcp), as remote workers
    use it; use tcp to count the bytes that a cluster would send"""
    total_steps: int = 1_000_000
    """environment steps to train for"""
    target_return: float | None = None
    """stop as soon as the mean return of the last 100 episodes reaches this"""
    seed: int = 1
    """of everything: environments, network, order of rows"""
    kl_threshold: float | None = None
    """AAPS: workers pull weights only when their policy is this far from the learner's, in nats"""
    stagger: str | None = None
    """staggered resets, as JSON: '{"horizon": 1000}'"""
    device: str = "cpu"
    """where the learner learns: cpu, cuda, cuda:1"""
    threads: int | None = None
    """threads of the learner; none given: one, or all cores for images while workers wait for it"""
    folder: Path = Path("runs")
    """where runs are kept"""
    name: str | None = None
    """of this run's folder; none given: environment, learner, seed and time"""
    checkpoint_every: int = 10
    """updates between checkpoints; one is also written at the end, on Ctrl-C and on SIGTERM"""
    eval_every: int | None = None
    """environment steps between evaluations, in environments of their own, while training goes on"""
    eval_episodes: int = 20
    """episodes of an evaluation"""
    capture_video: bool = False
    """render an episode to a video with each evaluation"""
    tensorboard: bool = False
    """log to TensorBoard, too"""
    wandb: str | None = None
    """log to this project of Weights & Biases, too"""

    def __post_init__(self) -> None:
        for name in ("num_envs", "total_steps", "checkpoint_every", "eval_episodes"):
            check_count(name, getattr(self, name))
        for name in ("workers", "threads", "eval_every"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        check_seed(self.seed)
        if self.workers is not None and self.launcher not in ("local", "in-process"):
            raise ConfigError(
                f"workers={self.workers} counts processes of this machine; with --launcher {self.launcher} say "
                "--workers-per-node instead."
            )
        if self.transport != "shm" and self.launcher != "local":
            raise ConfigError(
                f"transport={self.transport!r} is of --launcher local; --launcher {self.launcher} has one transport "
                "only: leave --transport out."
            )
        if self.capture_video and self.eval_every is None:
            raise ConfigError("capture_video renders an episode of each evaluation: give eval_every, too, e.g. 50000.")
        _json_object("env_kwargs", self.env_kwargs)
        if self.stagger is not None:
            _json_object("stagger", self.stagger)

    def env_config(self, **changes: Any) -> EnvConfig:
        """The environments of training."""
        options: dict[str, Any] = {
            "type": self.env_type,
            "env_name": self.env,
            "env_kwargs": _json_object("env_kwargs", self.env_kwargs),
            "wrappers": self.wrappers,
            "envs_per_node": self.num_envs,
            "seed": self.seed,
            "kl_threshold": self.kl_threshold,
        }
        if self.stagger is not None:
            options["stagger"] = _json_object("stagger", self.stagger)
        return EnvConfig.of({name: value for name, value in (options | changes).items() if value is not None})

    def envs_per_node(self, nodes: int) -> int:
        """How many of the environments each of several nodes has."""
        if self.num_envs % nodes:
            near = max(self.num_envs // nodes, 1) * nodes
            raise ConfigError(
                f"num_envs={self.num_envs} cannot be spread evenly over {nodes} nodes; use {near} or {near + nodes}."
            )
        return self.num_envs // nodes

    def launch_config(self, workers: int | None = None) -> LaunchConfig:
        """Workers of this machine, as many as the run has or, for others than its own, as are given."""
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
