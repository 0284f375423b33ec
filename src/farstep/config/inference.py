"""Configuration of served inference: acting servers, on each node or on some machines, act for workers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Literal

from farstep.config.base import Options
from farstep.config.field_docs import show_fields
from farstep.errors import ConfigError

Placement = Literal["node", "head"]
ServedDtype = Literal["float32", "bfloat16", "float16"]


@show_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedInference(Options):
    """Act in a separate process, the acting server, instead of in each worker. Pass it as `EnvConfig.inference`."""

    device: str = "cpu"
    """Where the policy computes: `cpu` or `cuda`. With several copies on `cuda`, copy `k` uses GPU `k`."""
    copies: int = 1
    """Number of acting servers per node, or on the machine of the head. Each holds one copy of the policy and acts for
    its share of the workers."""
    max_batch: int = 4096
    """Largest number of environments in one call of `act`. A group of one worker's environments is never divided."""
    window_ms: float = 0.0
    """Longest time that the first request of a batch waits for others while the server is idle, in milliseconds. 0: act
    at once; requests that arrive while the server computes form the next batch."""
    dtype: ServedDtype = "float32"
    """Precision in which the layers of a torch module compute: `float32`, `bfloat16`, or `float16` with `cuda`. Weights
    are converted when they arrive. If the mean KL divergence from the float32
    policy is above 0.01, the call raises an error."""
    where: Placement | Sequence[str] = "node"
    """`node`: each node has its own acting servers, which act for its workers. `head`: all acting servers run on the
    machine of the head, and act for workers of all nodes over the network. A list of nodes: these nodes have acting
    servers, which act for workers of all nodes over the network. A node is named by its host name, or as in
    `SSHConfig.hosts`. With ssh, a host that is not in `SSHConfig.hosts` runs only acting servers."""

    def __post_init__(self) -> None:
        self._at_least("copies", 1)
        self._at_least("max_batch", 1)
        self._at_least("window_ms", 0.0)
        self._one_of("dtype", ServedDtype)
        if isinstance(self.where, str):
            self._one_of("where", Placement)
        else:
            self._check_nodes()
        if not isinstance(self.device, str) or not re.fullmatch("cpu|cuda", self.device):
            raise ConfigError(f"ServedInference.device is {self.device!r}; expected 'cpu' or 'cuda'.")
        if self.dtype == "float16" and self.device != "cuda":
            raise ConfigError("ServedInference.dtype is 'float16', which needs device='cuda'; use dtype='bfloat16'.")

    def _check_nodes(self) -> None:
        nodes = tuple(self.where) if isinstance(self.where, Sequence) else ()
        if not nodes or not all(map(_is_host, nodes)) or len(set(nodes)) < len(nodes):
            raise ConfigError(
                f"ServedInference.where is {self.where!r}; expected 'node', 'head' or a list of distinct nodes, e.g. "
                "['gpu1', 'gpu2']."
            )
        object.__setattr__(self, "where", nodes)


def _is_host(name: object) -> bool:
    """Whether `name` can be a host name. An argument of ssh must not begin with `-`."""
    return isinstance(name, str) and len(name.split()) == 1 and not name.startswith("-")
