"""Where acting servers run, and which workers each of them serves."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from farstep.acting.connections import OWN_ADDRESS
from farstep.config.inference import ServedInference
from farstep.event import Emit


@dataclass(frozen=True)
class ActingPlan:
    """The acting servers of a run. The head numbers them after all workers: `num_workers`, `num_workers + 1`, ..."""

    num_workers: int
    nodes: int
    serving: ServedInference | None
    """None: workers act themselves, and there are no servers."""
    is_optional: bool = False
    """Whether workers may act themselves although there are servers (`inference="auto"`)."""
    _name: str = field(default_factory=lambda: f"farstep-acting-{os.urandom(16).hex()}")
    _secret: str = field(default_factory=lambda: os.urandom(32).hex(), repr=False)
    """With it, workers and acting servers authenticate each other: every process can list the names of sockets."""

    @property
    def copies(self) -> int:
        return 0 if self.serving is None else self.serving.copies

    @property
    def is_on_head(self) -> bool:
        """Whether the acting servers run on the machine of the head, for workers of all nodes."""
        return self.serving is not None and self.serving.where == "head"

    @property
    def named_nodes(self) -> Sequence[str]:
        """The nodes on which the acting servers run, for workers of all nodes; empty: they run elsewhere."""
        return () if self.serving is None or isinstance(self.serving.where, str) else self.serving.where

    @property
    def is_remote(self) -> bool:
        """Whether acting servers act for workers of all nodes, over the network."""
        return self.is_on_head or bool(self.named_nodes)

    @property
    def num_servers(self) -> int:
        return self.copies if self.is_on_head else self.copies * (len(self.named_nodes) or self.nodes)

    def is_server(self, number: int) -> bool:
        return number >= self.num_workers

    def node_of(self, number: int) -> int:
        """The number of the node of a worker, or of its acting server if each node has servers."""
        if number >= self.num_workers:
            return (number - self.num_workers) // self.copies
        return number // (self.num_workers // self.nodes)

    def node_name_of(self, number: int) -> str:
        """The name of the node on which an acting server must run; empty: `node_of` has its number."""
        if not self.named_nodes or number < self.num_workers:
            return ""
        return self.named_nodes[(number - self.num_workers) // self.copies]

    def clients_of(self, number: int) -> list[int]:
        """The workers that an acting server acts for."""
        return [worker for worker in range(self.num_workers) if self.server_of(worker) == number]

    def server_of(self, worker: int) -> int:
        """The acting server that acts for a worker."""
        if self.is_remote:
            return self.num_workers + worker % self.num_servers
        return self.num_workers + self.node_of(worker) * self.copies + worker % self.copies

    def warn_of_idle_servers(self, emit: Emit) -> None:
        """Emit a warning if acting servers have no worker to act for."""
        numbers = range(self.num_workers, self.num_workers + self.num_servers)
        if idle := sum(not self.clients_of(number) for number in numbers):
            emit(
                "warned",
                f"{idle} of {self.num_servers} acting servers have no worker to act for; lower copies in inference, "
                "name fewer nodes in where, or start more workers",
            )

    def bootstrap(
        self, number: int, nodes_on_machine: int = 1, listen: Sequence[str] = (), has_workers: bool = True
    ) -> dict[str, object]:
        """The bootstrap entries of a worker or an acting server; they replace those of the launcher.

        Args:
            number: The worker or acting server.
            nodes_on_machine: How many nodes of the run share its machine.
            listen: Where acting servers on the machine of the head listen; empty: workers share their memory.
            has_workers: Whether there are workers on its machine, which then use half of the cores.
        """
        if self.serving is None:
            return {}
        is_server = self.is_server(number)
        server = number if is_server else self.server_of(number)
        copy = (server - self.num_workers) % self.copies
        entries: dict[str, object] = {"acting": f"{self._name}-{server}", "acting_secret": self._secret}
        if not self.is_optional:
            entries["gpu"] = None
        if self.is_remote:
            entries["acting_listen"] = list(listen) if self.is_on_head else [OWN_ADDRESS]
        if is_server:
            on_machine = self.num_servers if self.is_on_head else self.copies * nodes_on_machine
            entries |= {"role": "acting", "cores_divisor": (2 if has_workers else 1) * on_machine}
            entries["gpu"] = copy if self.serving.device == "cuda" else None
        return entries
