"""Messages of replay triggers list the steps as of their firing, however late they are read."""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
import threading
from typing import Any

import pytest

from farstep.wire.codec import pack, unpack
from farstep.workflow.consumers import ConsumerThread, GuardedDelivery
from farstep.workflow.delivery import LocalQueue
from farstep.workflow.triggers import DataKeyTrigger, Dispatcher, Ledger, Message, TimeTrigger
from tests.workflow.triggers.naive_trigger import NaiveDataKeyTrigger
from tests.workflow.triggers.trigger_world import KEYS


@pytest.mark.parametrize("seed", range(40))
def test_message_lists_the_steps_as_of_its_firing_however_late_it_is_read(seed: int) -> None:
    rng = random.Random(seed)
    actors, size, min_new = rng.randint(1, 12), rng.randint(1, 5), rng.randint(1, 6)
    trigger = DataKeyTrigger(rng.randint(1, actors), size, consume=False, min_new=min_new)
    naive = NaiveDataKeyTrigger(trigger.n, size, None, min_new)
    state, unread, expected = Ledger(KEYS), list[Message](), list[Message]()
    for _ in range(300):
        actor = rng.randrange(actors)
        state.wrote(actor, rng.randint(1, 4), rng.randint(0, 9), rng.choice([None, KEYS]))
        while (message := trigger.ready(state)) is not None:
            simple = naive.ready(state)
            assert simple is not None
            trigger.consume(state, message)
            naive.consume(state, simple)
            unread.append(message)
            expected.append(simple)
        assert naive.ready(state) is None
    assert expected and unread == expected


def fired() -> Message:
    state, dispatcher, queue = Ledger(KEYS), Dispatcher(), LocalQueue()
    trigger = DataKeyTrigger(2, 4, consume=False, min_new=4)
    dispatcher.add(trigger | TimeTrigger(10**9, unit="env_steps"), queue, trigger_id="replay")
    for actor in ("b", "a"):
        state.wrote(actor, 6, 3)
    dispatcher.check(state)
    message = queue.take(10.0)
    assert message is not None
    state.wrote("b", 4, 4)
    return message


EXPECTED = {
    "actor_ids": ("b", "a"),
    "start": (2, 2),
    "versions": ((3, 3), (3, 3)),
    "size": 4,
    "keys": KEYS,
    "any": 0,
    "trigger_id": "replay",
}


def test_replay_message_behaves_like_a_dictionary() -> None:
    message = fired()
    assert message == EXPECTED == {**message} == dict(message) and len(message) == len(EXPECTED)
    assert type(message["actor_ids"]) is type(message["start"]) is type(message["versions"]) is tuple
    assert "start" in message and "stage" not in message and message.get("stage") is None
    with pytest.raises(KeyError):
        message["stage"]
    assert eval(repr(message)) == EXPECTED


def test_replay_message_can_be_copied_and_serialized() -> None:
    assert pickle.loads(pickle.dumps(fired())) == copy.deepcopy(fired()) == unpack(pack(fired())) == EXPECTED


class StaleFlow:
    """A workflow whose rows are all too old to learn from."""

    stopped = False
    agent: Any = None
    buffer: Any = None
    retention: Any = None
    ledger = Ledger(KEYS)

    def is_stale(self, message: Message) -> bool:
        return True

    def wake(self) -> None:
        pass

    def handling(self) -> Any:
        return contextlib.nullcontext()


def test_sampling_consumer_in_a_thread_is_never_skipped_as_stale() -> None:
    """A replay trigger takes no rows, so `max_staleness` does not apply to its consumer, with or without a thread."""
    flow, queue, called = StaleFlow(), LocalQueue(), threading.Event()
    thread = ConsumerThread(flow, lambda message: called.set(), queue)
    thread.guard = GuardedDelivery(
        flow, queue, [DataKeyTrigger(2, 4, consume=False, min_new=4)], thread, None, "a consumer"
    )
    thread.start()
    try:
        thread.guard(fired())
        assert called.wait(30)
    finally:
        thread.close(drop=True)
        assert thread.join(float("inf"))
