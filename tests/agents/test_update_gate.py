"""Turns of publishers between the updates of consumers, without a workflow around them."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from farstep.agents import update_gate
from farstep.agents.update_gate import UpdateGate
from farstep.errors import PublishTimeout
from farstep.testing import TableAgent
from farstep.workflow.consumers import PublishDelivery

AGENT = TableAgent()


class Watched(threading.Condition):
    """Counts how often each thread waited, and how often all were woken."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: dict[int, int] = {}
        self.woken = 0
        self.waited, self.waited_often = threading.Event(), threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        me = threading.get_ident()
        self.waits[me] = self.waits.get(me, 0) + 1
        self.waited.set()
        if len(self.waits) == 2 and min(self.waits.values()) > 5:
            self.waited_often.set()
        return super().wait(timeout)

    def notify_all(self) -> None:
        self.woken += 1
        super().notify_all()


def test_threads_that_wait_do_not_keep_each_other_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_gate, "POLL_S", 0.01)
    changed, order = Watched(), list[str]()
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Condition", lambda: changed)
        gate = UpdateGate()
    gate.begin("first", "a consumer", AGENT)

    def publish() -> None:
        with gate.publishing(AGENT):
            order.append("published")

    def update() -> None:
        gate.begin("second", "another consumer", AGENT)
        order.append("updated")
        gate.end("second")

    publisher = threading.Thread(target=publish)
    publisher.start()
    assert changed.waited.wait(30)
    consumer = threading.Thread(target=update)
    consumer.start()
    try:
        assert changed.waited_often.wait(30)
        assert changed.woken == 0, "nothing has changed that a thread could wait for"
    finally:
        gate.end("first")
        publisher.join(30)
        consumer.join(30)
    assert order == ["published", "updated"]


def test_messages_that_one_publication_answers_are_all_done() -> None:
    """With `max_outstanding=2`, the second message may find the turn that the first one waits for."""
    gate, published = UpdateGate(), list[int]()
    publisher = PublishDelivery(lambda: published.append(1), AGENT, lambda: None)
    publisher.start(gate)

    def message(name: str) -> Any:
        return {"message_id": name, "trigger_id": name}

    gate.begin("update", "a consumer", AGENT)
    assert not publisher(message("first")) and not publisher.finished()
    gate.end("update")
    assert publisher(message("second"))
    assert publisher.finished() == ["first"] and published == [1]
    assert publisher.finished() == []


def test_updates_of_another_agent_do_not_delay_publishing() -> None:
    """A consumer that outlives its workflow must not block the next one, which has an agent of its own."""
    gate, begun, returns = UpdateGate(), threading.Event(), threading.Event()
    gate.limit_s = 0.0

    def consume() -> None:
        gate.begin("late", "a consumer that has not returned", AGENT)
        begun.set()
        returns.wait(30)

    consumer = threading.Thread(target=consume)
    consumer.start()
    try:
        assert begun.wait(30)
        with gate.publishing(TableAgent()):
            pass
        with pytest.raises(PublishTimeout, match="a consumer that has not returned"), gate.publishing(AGENT):
            pass
    finally:
        returns.set()
        consumer.join(30)
