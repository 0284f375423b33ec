"""Where acting servers run, and which workers each of them serves."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from farstep.config.inference import ServedInference


@dataclass(frozen=True)
class ActingPlan:
    """The acting servers of a run. The head numbers them after all workers: `num_workers`, `num_workers + 1`, ..."""

    num_workers: int
    nodes: int
    serving: ServedInference | None
    """None: workers act themselves, and there are no servers."""
    _name: str = field(default_factory=lambda: f"farstep-acting-{os.urandom(16).hex()}")
    _secret: str = field(default_factory=lambda: os.urandom(32).hex(), repr=False)
    """With it, workers and acting servers authenticate each other: every process can list the names of sockets."""

    @property
    def copies(self) -> int:
        return 0 if self.serving is None else self.serving.copies

    @property
    def num_servers(self) -> int:
        return self.nodes * self.copies

    def node_of(self, number: int) -> int:
        """The node of a worker or an acting server."""
        if number >= self.num_workers:
            return (number - self.num_workers) // self.copies
        return number // (self.num_workers // self.nodes)

    def clients_of(self, number: int) -> list[int]:
        """The workers that an acting server acts for."""
        return [worker for worker in range(self.num_workers) if self._server_of(worker) == number]

    def _server_of(self, worker: int) -> int:
        return self.num_workers + self.node_of(worker) * self.copies + worker % self.copies

    def bootstrap(self, number: int, nodes_on_machine: int = 1) -> dict[str, object]:
        """The bootstrap entries of a worker or an acting server; they replace those of the launcher.

        Args:
            number: The worker or acting server.
            nodes_on_machine: How many nodes of the run share its machine.
        """
        if self.serving is None:
            return {}
        is_server = number >= self.num_workers
        server = number if is_server else self._server_of(number)
        copy = (server - self.num_workers) % self.copies
        entries: dict[str, object] = {"acting": f"{self._name}-{server}", "acting_secret": self._secret, "gpu": None}
        if is_server:
            entries |= {"role": "acting", "acting_servers": self.copies * nodes_on_machine}
            entries["gpu"] = copy if self.serving.device == "cuda" else None
        return entries
