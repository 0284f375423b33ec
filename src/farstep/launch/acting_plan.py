"""Where acting servers run, and which workers each of them serves."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from farstep.config.inference import ServedInference


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
    def num_servers(self) -> int:
        return self.copies if self.is_on_head else self.nodes * self.copies

    def is_server(self, number: int) -> bool:
        return number >= self.num_workers

    def node_of(self, number: int) -> int:
        """The node of a worker, or of an acting server that runs on a node."""
        if number >= self.num_workers:
            return (number - self.num_workers) // self.copies
        return number // (self.num_workers // self.nodes)

    def clients_of(self, number: int) -> list[int]:
        """The workers that an acting server acts for."""
        return [worker for worker in range(self.num_workers) if self.server_of(worker) == number]

    def server_of(self, worker: int) -> int:
        """The acting server that acts for a worker."""
        first = 0 if self.is_on_head else self.node_of(worker) * self.copies
        return self.num_workers + first + worker % self.copies

    def bootstrap(self, number: int, nodes_on_machine: int = 1, listen: Sequence[str] = ()) -> dict[str, object]:
        """The bootstrap entries of a worker or an acting server; they replace those of the launcher.

        Args:
            number: The worker or acting server.
            nodes_on_machine: How many nodes of the run share its machine.
            listen: Where acting servers on the machine of the head listen; empty: workers share their memory.
        """
        if self.serving is None:
            return {}
        is_server = self.is_server(number)
        server = number if is_server else self.server_of(number)
        copy = (server - self.num_workers) % self.copies
        entries: dict[str, object] = {"acting": f"{self._name}-{server}", "acting_secret": self._secret}
        if not self.is_optional:
            entries["gpu"] = None
        if self.is_on_head:
            entries["acting_listen"] = list(listen)
        if is_server:
            on_machine = self.num_servers if self.is_on_head else self.copies * nodes_on_machine
            entries |= {"role": "acting", "acting_servers": on_machine}
            entries["gpu"] = copy if self.serving.device == "cuda" else None
        return entries
