"""Chooses the launcher and the engine for a configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial

from farstep.config.kubernetes import KubernetesConfig
from farstep.config.launch import (
    EngineConfig,
    InProcessConfig,
    LaunchConfig,
    LocalConfig,
    RayConfig,
    SlurmConfig,
    SSHConfig,
)
from farstep.core import Launcher
from farstep.errors import ConfigError, counted
from farstep.event import Emit
from farstep.launch.acting_plan import ActingPlan
from farstep.launch.cluster import ClusterLauncher
from farstep.launch.daemon.affinity import assign_cores
from farstep.launch.daemon.process import ProcessStarter
from farstep.launch.engines.engine import Engine
from farstep.launch.engines.kubernetes.engine import KubernetesEngine
from farstep.launch.engines.ray.engine import RayEngine
from farstep.launch.engines.slurm import SlurmEngine
from farstep.launch.engines.ssh import SSHEngine
from farstep.launch.in_process import InProcessLauncher
from farstep.launch.local import LocalLauncher
from farstep.launch.network import NetworkLauncher


def launcher_for(config: LaunchConfig, plan: ActingPlan, envs: int, modules: Sequence[str], emit: Emit) -> Launcher:
    """Create the launcher for a configuration. This starts nothing yet.

    Args:
        config: Where workers run.
        plan: Maximum number of workers, and the acting servers.
        envs: Maximum number of environments per worker.
        modules: Modules that workers need, for zygotes.
        emit: Receives events about nodes.

    Raises:
        ConfigError: This version has no launcher for the configuration, or an option excludes acting servers.
    """
    if isinstance(config, InProcessConfig):
        if plan.num_servers:
            raise ConfigError(
                "inference is 'served', but InProcessConfig starts no processes; use LocalConfig, or inference='local'."
            )
        return InProcessLauncher(plan.num_workers, envs)
    if plan.named_nodes:
        _check_named_nodes(config, plan.named_nodes)
    if isinstance(config, LocalConfig):
        return _local_launcher(config, plan, envs, modules, emit)
    if isinstance(config, EngineConfig):
        return _cluster_launcher(config, plan, envs, modules, emit)
    raise ConfigError(f"{type(config).__name__} is not a launch configuration that this version can start.")


def _local_launcher(config: LocalConfig, plan: ActingPlan, envs: int, modules: Sequence[str], emit: Emit) -> Launcher:
    workers = plan.num_workers
    gpus = [config.gpu_of(worker) for worker in range(workers + plan.num_servers)]
    with contextlib.ExitStack() as on_failure:
        warn = partial(emit, "warned")
        connect_s = config.timeouts.connect_s
        cores = assign_cores(config.cpu_affinity, config.cpus_per_worker, workers)
        if cores is not None and workers > len(cores):
            warn(
                f"cpu_affinity: {workers} workers, but cores for only {len(cores)} "
                f"(cpus_per_worker={config.cpus_per_worker}); some workers share cores. Run at most {len(cores)} "
                "at a time."
            )
        starter = ProcessStarter(config.cpus_per_worker, config.start_method, modules, connect_s, warn, cores)
        on_failure.callback(starter.close)
        launcher = (
            LocalLauncher(plan, envs, starter, gpus)
            if config.transport == "shm"
            else NetworkLauncher(plan, envs, starter, config.transport, gpus)
        )
        on_failure.pop_all()  # the launcher owns it now
    return launcher


def _cluster_launcher(
    config: EngineConfig, plan: ActingPlan, envs: int, modules: Sequence[str], emit: Emit
) -> Launcher:
    if plan.num_servers and config.park_method == "criu":
        raise ConfigError(
            "inference is 'served' and park_method is 'criu', but a worker that shares memory with an acting "
            "server cannot be written to disk; leave park_method 'suspend', or use inference='local'."
        )
    if config.relay and plan.is_remote:
        where = list(plan.named_nodes) or "head"
        raise ConfigError(
            f"inference has where={where!r}, with which every worker connects to an acting server elsewhere, and "
            f"{type(config).__name__} has relay=True, with which workers exchange messages only with their node "
            "daemon; use relay=False, or where='node'."
        )
    engine = engine_for(config, plan.num_workers // config.most_nodes, emit)
    if isinstance(config, SSHConfig) and (others := [name for name in plan.named_nodes if name not in config.hosts]):
        server_engine = SSHEngine(config, others)
        return ClusterLauncher(
            config, plan, envs, modules, engine, emit, server_hosts=others, server_engine=server_engine
        )
    return ClusterLauncher(config, plan, envs, modules, engine, emit)


def _check_named_nodes(config: LaunchConfig, names: Sequence[str]) -> None:
    """Raise `ConfigError` if acting servers are to run on nodes that the run does not have."""
    if not isinstance(config, EngineConfig):
        raise ConfigError(
            f"inference has where={list(names)!r}, which names nodes of a cluster, but {type(config).__name__} has "
            "only this machine; use where='node'."
        )
    for name in names:
        if isinstance(config, SSHConfig) and name in config.hosts[config.nodes :]:
            raise ConfigError(
                f"inference has where={list(names)!r}, but {name} is a spare host: it is not among the first "
                f"{counted(config.nodes, 'host')} (SSHConfig.nodes). Move it up in hosts, or remove it from hosts, "
                "so that it runs only acting servers."
            )


def engine_for(config: EngineConfig, workers_per_node: int, emit: Emit) -> Engine:
    """Create the engine that provides the nodes of a configuration. This requests nothing yet."""
    match config:
        case SSHConfig():
            return SSHEngine(config)
        case RayConfig():
            return RayEngine(config, workers_per_node)
        case SlurmConfig():
            return SlurmEngine(config, workers_per_node, emit)
        case KubernetesConfig():
            return KubernetesEngine(config, emit)
    raise ConfigError(f"{type(config).__name__} is not an engine that this version can start.")
