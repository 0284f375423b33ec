"""A worker's connection to the acting server that acts for it."""

from __future__ import annotations

from farstep.acting.client import ServedActor, group_sizes
from farstep.acting.connections import LocalServer, RemoteServer, ServerAddress
from farstep.config.inference import ServedInference
from farstep.rollout.progress import CANCEL, COUNT, PHASE, Phase
from farstep.schema import Schema, Structure
from farstep.wire import messages as m
from farstep.worker.connection.inbox import Inbox, TicketCancelled
from farstep.worker.hosting.base import Host, HostedEnvs


class ActingConnection:
    """Joins the acting server, and its replacements.

    Args:
        worker: Number of the worker.
        address: How to reach the server; None if the worker has none.
        inbox: Polled while the worker waits for the server.
        words: The worker's progress.
    """

    def __init__(self, worker: int, address: ServerAddress | None, inbox: Inbox, words: memoryview) -> None:
        self._worker, self._inbox, self._words = worker, inbox, words
        self._address = address or LocalServer("", "")
        inbox.on_server = self.set_server

    def set_server(self, message: m.UseServer | m.ForgetServer) -> None:
        """Use another remote acting server from now on, or none."""
        if not isinstance(self._address, RemoteServer):
            return
        if isinstance(message, m.UseServer):
            self._address.use(message)
        else:
            self._address.forget()

    def join(
        self,
        agent: int,
        host: Host,
        obs: Structure,
        schemas: tuple[Schema, Schema],
        serving: ServedInference,
    ) -> tuple[ServedActor, m.AgentReady] | None:
        """Have the server act for these environments, with the agent that the head has sent to it.

        Args:
            agent: Id of the agent.
            host: The environments; they have observations.
            obs: How observations are nested.
            schemas: The arrays of observations and of actions.
            serving: Where the server acts.

        Returns:
            The actor, and the answer for the head; None if the run has ended.
        """
        self._words[PHASE] = Phase.LOAD
        groups = group_sizes(host.num_envs, serving) if type(host) is HostedEnvs else [host.num_envs]
        around = (obs, schemas, groups, self._wait, self._words)
        actor = ServedActor(self._worker, self._address, agent, host.slots, *around)
        try:
            joined = actor.join(host.current)
        except TicketCancelled:
            actor.close()
            return None
        except BaseException:
            actor.close()
            raise
        arrays = (joined.schema, joined.recorded, joined.state, joined.state_structure)
        return actor, m.AgentReady(agent, *arrays, joined.note, joined.description)

    def _wait(self) -> None:
        """Called while this worker waits for the server. The head watches the server itself."""
        self._words[COUNT] += 1  # shows the head that this worker is not stuck
        self._inbox.poll()
        if self._words[CANCEL] >= 2**62:
            raise TicketCancelled
