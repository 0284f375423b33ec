"""Checks of the arguments of `ClusterEnv` and its methods. Each raises `ConfigError` with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cloudpickle
import numpy as np

from farstep.config.env import EnvConfig, check_count
from farstep.config.launch import InProcessConfig, LaunchConfig, LocalConfig
from farstep.core import Array
from farstep.errors import ConfigError, counted
from farstep.head.members.worker_records import ResetRequest

_MAX_STALENESS = 1000


def reset_request(
    env_config: EnvConfig, num_envs: int, seed: int | None, options: Mapping[str, Any] | None
) -> ResetRequest:
    """Return the request for the arguments of `ClusterEnv.reset`."""
    rest, mask = _split_reset_options(options, num_envs)
    root = env_config.check_reset(seed, mask is not None)
    roots = None if root is None else [root] * num_envs
    return ResetRequest(roots, mask, cloudpickle.dumps(rest) if rest else None, rest or None)


def _split_reset_options(options: Mapping[str, Any] | None, num_envs: int) -> tuple[dict[str, Any], Array | None]:
    """Return the options for the environments' own `reset`, and the mask of the environments to reset."""
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(f"reset got options={options!r}; expected a mapping, e.g. {{'reset_mask': ...}}.")
    rest = dict(options or {})
    mask = rest.pop("reset_mask", None)
    if mask is not None:
        mask = np.asarray(mask)
        if mask.shape != (num_envs,) or mask.dtype != bool:
            raise ConfigError(
                f"reset_mask has shape {list(mask.shape)} and dtype {mask.dtype}; expected [{num_envs}] and bool."
            )
    return rest, mask


def check_min_workers(config: LaunchConfig, num_workers: int) -> None:
    """Check that the run has as many workers as it wants from its coordinator at least."""
    if config.coordinator is not None and config.min_workers > num_workers:
        raise ConfigError(f"min_workers is {config.min_workers}, but this run has {counted(num_workers, 'worker')}.")


def check_staleness(max_staleness: int) -> int:
    """Return `max_staleness`."""
    if check_count("max_staleness", max_staleness, minimum=0) > _MAX_STALENESS:
        raise ConfigError(
            f"max_staleness is {max_staleness}; at most {_MAX_STALENESS} batches may be in progress at a time."
        )
    return int(max_staleness)


def check_rollouts(rollout_epochs: int, batches: int = 1) -> int:
    """Return `rollout_epochs`, or raise if `batches` batches of this many rollouts exceed the limit."""
    most = max(1, (_MAX_STALENESS + 1) // batches)
    if check_count("rollout_epochs", rollout_epochs) > most:
        raise ConfigError(
            f"rollout_epochs is {rollout_epochs}; expected 1 to {most}, since at most {_MAX_STALENESS + 1} rollouts "
            "may be in progress. Use fewer rollouts with more steps each."
        )
    return int(rollout_epochs)


def check_scale(config: LaunchConfig, num_workers: int, nodes: int | None, workers: int | None) -> None:
    """Check the arguments `nodes` and `workers` of `scale`."""
    if (nodes is None) == (workers is None):
        raise ConfigError(f"scale got nodes={nodes} and workers={workers}; expected one of them.")
    if workers is not None:
        if not 1 <= check_count("workers", workers) <= num_workers:
            raise ConfigError(
                f"scale got {counted(workers, 'worker')}; expected 1 to {num_workers} (workers_per_node for each of "
                "max_nodes nodes, at most one per environment)."
            )
        return
    assert nodes is not None
    if config.coordinator is not None:
        raise ConfigError(
            f"scale got nodes={nodes}, but the coordinator decides how many workers of this run may run; use "
            "scale(workers=...) to request more or fewer."
        )
    if isinstance(config, (LocalConfig, InProcessConfig)):
        raise ConfigError(
            f"scale got nodes={nodes}, but {type(config).__name__} has no nodes to add or release. Use "
            f"scale(workers={nodes}) to choose the number of workers."
        )
    low, high = config.fewest_nodes, config.most_nodes
    if not low <= check_count("nodes", nodes) <= high:
        raise ConfigError(
            f"scale got {nodes} nodes; {type(config).__name__} allows {low} to {high} (min_nodes, max_nodes)."
        )
