"""farstep runs Gymnasium environments on workers, local or on a cluster, for a learner in one process.

Start with `ClusterEnv` (workers act with a copy of the agent) or `make_vec` (a Gymnasium VectorEnv; you act). All
errors derive from `FarstepError`. `farstep.buffer`, `farstep.elastic`, `farstep.learners`, `farstep.sync` and
`farstep.testing` have more.

Names are imported on first use, so that a worker can set its number of threads before NumPy or torch is imported.
"""

from __future__ import annotations

import importlib

from farstep.version import VERSION

TYPE_CHECKING = False  # `from typing import` would import a typing.py in the current folder under `python -m`
if TYPE_CHECKING:
    from farstep import buffer as buffer
    from farstep import elastic as elastic
    from farstep import learners as learners
    from farstep import sync as sync
    from farstep import testing as testing
    from farstep.batch import Batch as Batch
    from farstep.batch import Part as Part
    from farstep.buffer.replay import Buffer as Buffer
    from farstep.buffer.samplers import FullBatch as FullBatch
    from farstep.cluster_env import ClusterEnv as ClusterEnv
    from farstep.config.env import EnvConfig as EnvConfig
    from farstep.config.env import Stagger as Stagger
    from farstep.config.env import WeightsConfig as WeightsConfig
    from farstep.config.kubernetes import KubernetesConfig as KubernetesConfig
    from farstep.config.launch import InProcessConfig as InProcessConfig
    from farstep.config.launch import LaunchConfig as LaunchConfig
    from farstep.config.launch import LocalConfig as LocalConfig
    from farstep.config.launch import RayConfig as RayConfig
    from farstep.config.launch import SlurmConfig as SlurmConfig
    from farstep.config.launch import SSHConfig as SSHConfig
    from farstep.config.launch import Timeouts as Timeouts
    from farstep.config.transfer import TransferTrigger as TransferTrigger
    from farstep.core import Agent as Agent
    from farstep.errors import AgentError as AgentError
    from farstep.errors import BufferTimeout as BufferTimeout
    from farstep.errors import CheckpointError as CheckpointError
    from farstep.errors import ClosedError as ClosedError
    from farstep.errors import ConfigError as ConfigError
    from farstep.errors import FarstepError as FarstepError
    from farstep.errors import LaunchError as LaunchError
    from farstep.errors import PublishTimeout as PublishTimeout
    from farstep.errors import RemoteEnvError as RemoteEnvError
    from farstep.errors import ResourceError as ResourceError
    from farstep.errors import WorkerDied as WorkerDied
    from farstep.errors import WorkerError as WorkerError
    from farstep.errors import WorkerStuck as WorkerStuck
    from farstep.event import Event as Event
    from farstep.head.stats.counters import scalars as scalars
    from farstep.observe.diagnosis import Diagnosis as Diagnosis
    from farstep.vector_env import make_vec as make_vec
    from farstep.workflow.triggers import DataKeyTrigger as DataKeyTrigger
    from farstep.workflow.triggers import ObjectKeyTrigger as ObjectKeyTrigger
    from farstep.workflow.triggers import TimeTrigger as TimeTrigger
    from farstep.workflow.workflow import Workflow as Workflow

__version__ = VERSION

_HOMES = {
    "Agent": "core",
    "Batch": "batch",
    "Buffer": "buffer.replay",
    "ClusterEnv": "cluster_env",
    "DataKeyTrigger": "workflow.triggers",
    "Diagnosis": "observe.diagnosis",
    "EnvConfig": "config.env",
    "Event": "event",
    "FullBatch": "buffer.samplers",
    "InProcessConfig": "config.launch",
    "KubernetesConfig": "config.kubernetes",
    "LaunchConfig": "config.launch",
    "LocalConfig": "config.launch",
    "ObjectKeyTrigger": "workflow.triggers",
    "Part": "batch",
    "RayConfig": "config.launch",
    "SSHConfig": "config.launch",
    "SlurmConfig": "config.launch",
    "Stagger": "config.env",
    "TimeTrigger": "workflow.triggers",
    "Timeouts": "config.launch",
    "TransferTrigger": "config.transfer",
    "WeightsConfig": "config.env",
    "Workflow": "workflow.workflow",
    "AgentError": "errors",
    "BufferTimeout": "errors",
    "CheckpointError": "errors",
    "ClosedError": "errors",
    "ConfigError": "errors",
    "FarstepError": "errors",
    "LaunchError": "errors",
    "PublishTimeout": "errors",
    "RemoteEnvError": "errors",
    "ResourceError": "errors",
    "WorkerDied": "errors",
    "WorkerError": "errors",
    "WorkerStuck": "errors",
    "make_vec": "vector_env",
    "scalars": "head.stats.counters",
}

__all__ = list(_HOMES)
_FOLDERS = ("buffer", "elastic", "learners", "sync", "testing")


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(f"farstep.{_HOMES[name]}"), name)
    if name in _FOLDERS:  # farstep.sync.EveryK(4) works after `import farstep`
        return importlib.import_module(f"farstep.{name}")
    raise AttributeError(f"module 'farstep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_FOLDERS])
