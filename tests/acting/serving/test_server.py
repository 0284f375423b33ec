"""An acting server with a head and workers that the test plays."""

from __future__ import annotations

import contextlib
import os
import threading
from array import array
from collections.abc import Iterator
from typing import Any

import cloudpickle
import numpy as np

from farstep.acting import messages as am
from farstep.acting.connections import LocalServer
from farstep.acting.serving.server import ActingServer
from farstep.config.inference import ServedInference
from farstep.core import Received
from farstep.rollout.program import Program
from farstep.rollout.progress import EPISODES
from farstep.schema import space_schema
from farstep.sync.rules import Always
from farstep.testing import CountingEnv, TableAgent
from farstep.wire import messages as m
from farstep.wire.channels.local import LocalLink, local_pair
from farstep.wire.codec import pack
from tests.cluster.checks import DEADLINE_S

SECRET = "secret"


@contextlib.contextmanager
def running_server() -> Iterator[tuple[LocalLink, str]]:
    """Context manager: the head's connection to a server that runs in a thread, and the server's address."""
    head, theirs = local_pair()
    address = f"farstep-test-{os.urandom(8).hex()}"
    link = LocalLink(theirs)
    server = ActingServer(link, (0, 0, "run"), memoryview(array("q", [0] * EPISODES)), address, SECRET, False)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        source: Any = None
        program = Program(source, Always(), serving=ServedInference()).pickled()
        head.send([m.encode(m.Welcome(0, [], [], [], [])), program])
        yield head, address
    finally:
        head.send([m.encode(m.Stop())])
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        server.close()
        link.close()
        head.close()


def send_agent(head: LocalLink, number: int) -> None:
    head.send([m.encode(m.SendAgent(number)), cloudpickle.dumps(TableAgent())])


class JoiningWorker:
    """A worker of one environment that only joins."""

    def __init__(self, number: int, address: str) -> None:
        self._number = number
        link = LocalServer(address, SECRET).connect()
        assert link is not None
        self.link = link

    def join(self, agent: int) -> None:
        env = CountingEnv()
        obs, obs_schema = space_schema(env.observation_space, "obs")
        actions = space_schema(env.action_space, "action")[1]
        proof = am.proof(SECRET, "worker")
        join = am.Join(self._number, agent, self._number, [7], [0], pack(obs), obs_schema, actions, [1], proof)
        current = {name: np.zeros((1, *spec.shape), spec.dtype) for name, spec in obs_schema.items()}
        self.link.send([am.encode(join), pack(current)])

    def receive(self) -> tuple[am.FromServer, Received]:
        received = self.link.receive(DEADLINE_S)
        assert received is not None
        return am.decode_from_server(received.frames), received

    def joined(self) -> int:
        """Wait for `Joined`. Return the descriptor of the memory with the mailbox."""
        message, received = self.receive()
        assert isinstance(message, am.Joined)
        memory, *doorbells = received.fds
        for fd in doorbells:
            os.close(fd)
        return memory


def test_a_worker_that_waits_for_a_new_agent_gets_no_memory_of_the_last_one() -> None:
    """Other workers may still write to that memory."""
    with running_server() as (head, address), contextlib.ExitStack() as stack:
        workers = [JoiningWorker(number, address) for number in range(2)]
        for worker in workers:
            stack.callback(worker.link.close)
        send_agent(head, 1)
        memories = []
        for worker in workers:
            worker.join(agent=1)
            memories.append(worker.joined())
            stack.callback(os.close, memories[-1])
        assert os.path.sameopenfile(*memories)
        first, second = workers
        first.join(agent=2)
        second.link.send([am.encode(am.Save())])
        assert isinstance(second.receive()[0], am.Done)  # so the server has the first worker's Join, too
        send_agent(head, 2)
        memory = first.joined()
        stack.callback(os.close, memory)
        assert not os.path.sameopenfile(memory, memories[0])
