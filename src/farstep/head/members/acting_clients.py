"""Connects workers with acting servers that they reach over the network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from farstep.errors import WireError
from farstep.head.members.outbox import Outbox
from farstep.head.members.worker_records import WorkerRecord
from farstep.launch.acting_plan import ActingPlan
from farstep.schema import space_schema
from farstep.wire import messages as m
from farstep.wire.codec import pack


class ActingClients:
    """Issues a new key pair for each process of a worker and each process of its server, and sends it to both.

    Callers must hold the event loop's lock.

    Args:
        plan: Which server acts for which workers.
        records: All workers, then all acting servers.
        outbox: Sends messages to both.
        spaces: Returns the spaces of one environment.
        connect_s: Seconds that a worker has to connect to its server.
    """

    def __init__(
        self,
        plan: ActingPlan,
        records: Sequence[WorkerRecord],
        outbox: Outbox,
        spaces: Callable[[], tuple[Any, Any] | None],
        connect_s: float,
    ) -> None:
        self._plan, self._records, self._outbox, self._spaces = plan, records, outbox, spaces
        self._connect_s = connect_s
        self._listening: dict[int, m.Listening] = {}
        """Where servers listen that are ready."""
        self._connected: dict[int, tuple[int, int]] = {}
        """For each worker, its incarnation and that of its server when they were connected."""
        self._use: dict[int, m.UseServer] = {}
        """What to send to workers as soon as their servers have admitted them."""

    def server_ready(self, record: WorkerRecord, listening: m.Listening | None) -> None:
        """Connect all ready workers with a server that is ready."""
        if listening is not None:
            self._listening[record.worker] = listening
            for worker in self._plan.clients_of(record.worker):
                self.worker_ready(self._records[worker])

    def worker_ready(self, record: WorkerRecord) -> None:
        """Connect a worker with its server, if both are ready and not connected yet."""
        if not self._listening or not record.ready:
            return
        server = self._records[self._plan.server_of(record.worker)]
        listening, spaces = self._listening.get(server.worker), self._spaces()
        current = (record.incarnation, server.incarnation)
        if listening is None or spaces is None or self._connected.get(record.worker) == current:
            return
        self._connected[record.worker] = current
        from farstep.wire.keys import KeyPair

        pair = KeyPair.fresh()
        obs, obs_schema = space_schema(spaces[0], "obs")
        _, action_schema = space_schema(spaces[1], "action")
        admit = m.AdmitClient(
            worker=record.worker,
            incarnation=record.incarnation,
            first=record.first,
            num_envs=record.num_envs,
            obs=pack(obs),
            obs_schema=obs_schema,
            action_schema=action_schema,
            public=pair.public,
            secret=pair.secret,
        )
        self._outbox.send(server, admit)
        ports = (listening.endpoint, listening.bulk_port)
        self._use[record.worker] = m.UseServer(*ports, listening.key, pair.public, pair.secret, self._connect_s)

    def admitted(self, server: WorkerRecord, message: m.ClientAdmitted) -> None:
        """Tell a worker that its server has admitted it."""
        self.check(server, message.worker)
        record = self._records[message.worker]
        if (message.incarnation, server.incarnation) == self._connected.get(message.worker):
            use = self._use.pop(message.worker, None)
            if use is not None:
                self._outbox.send(record, use)

    def expected(self, server: WorkerRecord) -> str:
        """What an acting server still owes: it must answer as long as a worker that has a node may need it."""
        clients = (self._records[worker] for worker in self._plan.clients_of(server.worker))
        running = (each for each in clients if each.handle is not None and each.handle.poll() is None)
        return "idle" if any(each.phase != "queued" for each in running) else ""

    def check(self, server: WorkerRecord, worker: int) -> None:
        """Raise `WireError` unless a message about a worker comes from its acting server."""
        if not server.is_server or worker not in self._plan.clients_of(server.worker):
            raise WireError(f"a message about worker {worker} from a process that is not its acting server.")

    def lost(self, record: WorkerRecord) -> None:
        """Forget a worker or a server whose process is lost."""
        if record.is_server:
            self._listening.pop(record.worker, None)
            for worker in self._plan.clients_of(record.worker):
                if self._connected.pop(worker, None) is not None and self._records[worker].ready:
                    self._outbox.send(self._records[worker], m.ForgetServer())
            return
        self._use.pop(record.worker, None)
        if self._connected.pop(record.worker, None) is not None:
            self._outbox.send(self._records[self._plan.server_of(record.worker)], m.DropClient(record.worker))
