"""Handles what the head sends about weights, in a worker or an acting server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

from farstep.agents.base_weights import BaseBytes, received_base
from farstep.config.env import ALL_WEIGHTS
from farstep.core import BytesLike, Link, Received
from farstep.wire import messages as m
from farstep.worker.connection.inbox import Inbox
from farstep.worker.weights.sources import RemoteWeights, SharedWeights
from farstep.worker.weights.weight_sync import WeightSync


class WeightMessages:
    """Keeps the base of the agent, and connects a `WeightSync` to its source of weights.

    Args:
        link: Connection to the head.
        inbox: Reads the link.
        sync: The weights of the agent.
    """

    def __init__(self, link: Link, inbox: Inbox, sync: WeightSync) -> None:
        self._link, self._inbox, self._sync = link, inbox, sync
        self.base: tuple[str, BaseBytes] = ("", bytearray())
        """The base that the head sent last: content hash and bytes."""
        self.agent_id = -1
        """The agent whose weights are used; -1: none."""
        self.config = ALL_WEIGHTS
        """In what form the head sends weights."""
        self.server_number = -1
        """Number of this acting server; -1: this is a worker."""

    def handle(self, message: m.SendBase | m.Parameters | m.Newest, received: Received) -> None:
        """Handle one message from the head. `Parameters` of another agent are ignored."""
        match message:
            case m.SendBase():
                self.base = (message.content_hash, received_base(message.nbytes, received.frames[1:], received.fds))
            case m.Parameters() if message.agent != self.agent_id:
                for fd in received.fds:
                    os.close(fd)
            case m.Parameters() if received.fds:
                shared = (received.fds[0], message.nbytes, message.buffers, message.on_gpu, self.server_number)
                self._sync.weights = SharedWeights(*shared)
            case m.Parameters():
                self._sync.weights = RemoteWeights(partial(self._request, message.agent), self.config)
            case m.Newest():
                if isinstance(self._sync.weights, RemoteWeights):
                    self._sync.weights.announced = message.version

    def new_agent(self, message: m.SendAgent) -> None:
        """Discard what belongs to the last agent."""
        self._sync.close()
        if not message.base:
            self.base = ("", bytearray())

    def _request(self, agent: int, held: int) -> tuple[int, int, Sequence[BytesLike]]:
        self._link.send([m.encode(m.WeightRequest(agent, held))])
        return self._inbox.wait_for_weights(agent)
