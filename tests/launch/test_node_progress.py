"""Progress of workers in the heartbeat of a node daemon that relays for them."""

from __future__ import annotations

from typing import Any

from farstep.launch.nodes import Node, RemoteWorker
from farstep.rollout.progress import EPISODES, PHASE, Phase, private_words
from farstep.wire import node_messages as n
from farstep.wire.messages import decode_from_worker


class FakeHub:
    """Sends nothing."""

    def send_to(self, route: bytes, frames: Any) -> bool:
        return True


def test_silence_is_excused_up_to_the_present() -> None:
    node = Node(FakeHub(), "0" * 16, 0, "host", 1, "", "", 100.0, 0)  # type: ignore[arg-type]
    node.excuse(5.0, now=120.0)
    assert node.heard_at == 105.0
    node.excuse(30.0, now=120.0)  # otherwise a node that ended meanwhile would be found only 15 s later
    assert node.heard_at == 120.0


def test_invalid_progress_of_one_worker_is_rejected_as_its_message_and_the_others_are_stored() -> None:
    name = "0" * 16
    node = Node(FakeHub(), name, 0, "host", 1, "", "", 0.0, 0)  # type: ignore[arg-type]
    for worker in range(3):
        words = private_words(1)
        node.start(RemoteWorker(worker, 0, b"", words, lambda changed: None, lambda closed: None), 0.0)
    valid, invalid = [0] * (EPISODES + 1), [0] * (EPISODES + 1)
    valid[PHASE], invalid[PHASE] = Phase.STEP, Phase.QUEUED  # a worker cannot claim to wait for a node
    received: list[Any] = []
    beat = n.NodeBeat(name, [(0, 0), (1, 0), (2, 0), (7, 0)], [], [valid, invalid, valid, valid])
    node.store_progress(beat, lambda *message: received.append(message))
    assert [node.workers[worker].words[PHASE] for worker in range(3)] == [Phase.STEP, Phase.CONNECT, Phase.STEP]
    [(worker, message)] = received
    assert worker == 1 and message.heartbeat
    assert decode_from_worker(message.frames).words == invalid  # type: ignore[union-attr]
