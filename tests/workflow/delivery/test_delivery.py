"""Deliveries: a message reaches its consumer, and it is known when the consumer is done or gone."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest

from farstep.errors import ClosedError, ConfigError, DeliveryError, FarstepError, WireError
from farstep.wire.channels.dealer import DealerLink
from farstep.wire.channels.zmq import MAIN
from farstep.wire.keys import KeyPair
from farstep.workflow.delivery import Direct, LocalQueue, ZmqReceiver, ZmqSender
from farstep.workflow.triggers import DataKeyTrigger, Dispatcher, Ledger, Message

pytestmark = pytest.mark.slow  # real processes

PATIENCE_S = 60.0
T = TypeVar("T")


def message(number: int = 0, trigger_id: str = "it") -> Message:
    return {"trigger_id": trigger_id, "number": number}


def test_direct_delivery_is_done_at_once_for_any_return_value() -> None:
    taken: list[Message] = []
    delivery = Direct(lambda message: bool(taken.append(message)))  # type: ignore[func-returns-value]
    assert delivery(message()) is True
    assert taken == [message()]
    with pytest.raises(ConfigError, match="a function of the message"):
        Direct("update")  # type: ignore[arg-type]


# Threads


@contextlib.contextmanager
def consumer(queue: LocalQueue, work: Any) -> Iterator[None]:
    """A thread that works until the queue is closed."""

    def loop() -> None:
        with contextlib.suppress(ClosedError):
            while True:
                taken = queue.take(PATIENCE_S)
                assert taken is not None
                try:
                    work(taken)
                except ArithmeticError as error:
                    queue.done(taken, error)
                else:
                    queue.done(taken)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        queue.close()
        thread.join()


def test_a_thread_gets_everything_in_order() -> None:
    state, dispatcher, queue, starts = Ledger(), Dispatcher(), LocalQueue(maxsize=2), []
    name = dispatcher.add(DataKeyTrigger(n=1, size=1), queue, max_outstanding=3)
    state.wrote("a", 50, 0)
    with consumer(queue, lambda taken: starts.append(taken["start"][0])):
        dispatcher.check(state)
        while dispatcher.outstanding(name):
            for done in queue.finished(PATIENCE_S):
                dispatcher.done(done)
            dispatcher.check(state)
            assert dispatcher.outstanding(name) <= 3
    assert starts == list(range(50))


def test_exception_of_a_consumer_thread_is_raised_in_the_waiting_thread() -> None:
    queue = LocalQueue()
    with consumer(queue, lambda taken: 1 / taken["number"]):
        queue(message(0))
        with pytest.raises(ZeroDivisionError):
            queue.finished(PATIENCE_S)
        assert queue.finished() == ["it"], "the message is over"
        queue(message(1))
        assert queue.finished(PATIENCE_S) == ["it"]


def test_queue_never_blocks_its_sender() -> None:
    queue = LocalQueue(maxsize=1)
    assert queue(message()) is False
    assert queue.full
    with pytest.raises(DeliveryError, match="already holds 1 messages"):
        queue(message())
    state, dispatcher = Ledger(), Dispatcher()
    dispatcher.add(DataKeyTrigger(n=1, size=1), queue)
    state.wrote("a", 1, 0)
    assert dispatcher.check(state) == [], "it waits for room"
    queue.take(0)
    assert len(dispatcher.check(state)) == 1


def test_closed_queue_hands_out_its_messages_and_then_raises() -> None:
    queue = LocalQueue(maxsize=2)
    assert queue.take(0) is None
    assert queue.finished(PATIENCE_S) == [], "there is nothing to wait for"
    queue(message())
    queue.close()
    assert queue.take(PATIENCE_S) == message(), "what was passed is not lost"
    for act in (lambda: queue.take(PATIENCE_S), lambda: queue(message())):
        with pytest.raises(ClosedError):
            act()
    with pytest.raises(ConfigError, match="maxsize is 0"):
        LocalQueue(0)


# Processes

RECEIVER = """
import json, sys
from farstep.workflow.delivery import ZmqReceiver
from farstep.errors import ClosedError

receiver = ZmqReceiver(json.loads(sys.stdin.readline()))
try:
    while True:
        message = receiver.take(60)
        print(json.dumps(message, default=str), flush=True)
        if message["number"] == "hold":
            sys.stdin.readline()
        try:
            1 / (message["number"] != 0)
        except ZeroDivisionError as error:
            receiver.done(message, error)
        else:
            receiver.done(message)
except ClosedError:
    print("closed", flush=True)
finally:
    receiver.close()
"""


@contextlib.contextmanager
def receiving(sender: ZmqSender) -> Iterator[subprocess.Popen[str]]:
    """Another process that reports what it takes; `number` 0 makes it fail, "hold" makes it wait."""
    command = [sys.executable, "-c", RECEIVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(sender.invitation) + "\n")
        process.stdin.flush()
        try:
            yield process
        finally:
            process.kill()


def served(sender: ZmqSender, receive: Callable[[float], T | None]) -> T:
    """What `receive` returns while the sender, none of whose messages is done, serves its receiver."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := receive(0.01)) is None:
        assert sender.finished() == [] and time.monotonic() < deadline
    return found


def line(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture(params=["free", "ipc", "tcp"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    return {"free": None, "ipc": f"ipc://{tmp_path}/socket", "tcp": "tcp://127.0.0.1:*"}[request.param]


def test_another_process_takes_messages_and_says_when_it_is_done(endpoint: str | None) -> None:
    state, dispatcher = Ledger(), Dispatcher()
    started: list[Any] = []
    with contextlib.closing(ZmqSender(endpoint, connect_s=PATIENCE_S)) as sender, receiving(sender) as process:
        name = dispatcher.add(DataKeyTrigger(n=1, size=2), lambda m: sender({**m, "number": len(started) + 1}))
        state.wrote(("worker", 3), 6, (4, 5))
        while dispatcher.check(state):
            assert sender.finished(PATIENCE_S) == [name]
            started.append(json.loads(line(process)))
            dispatcher.done(name)
        sender.close()
        assert line(process) == "closed"
        assert process.wait(PATIENCE_S) == 0
    assert [taken["start"] for taken in started] == [[0], [2], [4]]
    assert started[0]["actor_ids"] == [["worker", 3]]
    assert started[0]["versions"] == [[4, 5]]


def test_dispatcher_learns_that_another_process_is_done() -> None:
    state, dispatcher = Ledger(), Dispatcher()
    with contextlib.closing(ZmqSender(connect_s=PATIENCE_S)) as sender:
        receiver = ZmqReceiver(sender.invitation)
        with contextlib.closing(receiver):
            dispatcher.add(DataKeyTrigger(n=1, size=1), sender)
            state.wrote("a", 2, 0)
            assert len(dispatcher.check(state)) == 1
            taken = served(sender, receiver.take)
            assert dispatcher.check(state) == []
            receiver.done(taken)
            assert receiver.take(0) is None
            fired: list[Message] = []
            deadline = time.monotonic() + PATIENCE_S
            while not fired:
                assert receiver.take(0.01) is None and time.monotonic() < deadline
                fired = dispatcher.check(state)
            assert receiver.take(PATIENCE_S) == fired[0]
            receiver.done(fired[0])
            assert sender.finished(PATIENCE_S) == [fired[0]["trigger_id"]]


def test_failure_in_another_process_is_raised_by_the_sender() -> None:
    with contextlib.closing(ZmqSender(connect_s=PATIENCE_S)) as sender, receiving(sender):
        sender(message(0, "update"))
        with pytest.raises(DeliveryError, match=r"(?s)trigger 'update' in another process raised.*ZeroDivisionError"):
            sender.finished(PATIENCE_S)
        assert sender.finished() == ["update"], "the message is over"
        sender(message(1))
        assert sender.finished(PATIENCE_S) == ["it"]


def test_killed_receiver_raises_instead_of_hanging() -> None:
    with contextlib.closing(ZmqSender(connect_s=PATIENCE_S)) as sender:
        with receiving(sender) as process:
            sender({**message(), "number": "hold"})
            stdout: Any = process.stdout
            served(sender, lambda timeout_s: select.select([stdout], [], [], timeout_s)[0] or None)
            assert json.loads(line(process))["number"] == "hold"
            assert sender.finished() == [], "it may take as long as it needs"
            process.kill()
            process.wait()
            with pytest.raises(DeliveryError, match="has ended before it was done with messages of it"):
                sender.finished(PATIENCE_S)
        assert sender.finished() == ["it"] and sender.failed == {"it"}
        sender.connect_s = 0.01
        sender(message())
        with pytest.raises(DeliveryError, match="the receiver has ended, and no other one has connected"):
            sender.finished(PATIENCE_S)
        assert sender.finished() == ["it"]
        sender.connect_s = PATIENCE_S
        with receiving(sender):  # another one may take its place
            sender(message(1))
            assert sender.finished(PATIENCE_S) == ["it"]


def test_missing_receiver_raises_instead_of_hanging() -> None:
    with contextlib.closing(ZmqSender(connect_s=0.01)) as sender:
        assert sender(message()) is False, "the sender does not wait"
        with pytest.raises(DeliveryError, match=r"trigger 'it' .* no receiver has connected within"):
            sender.finished(PATIENCE_S)
        assert sender.finished(PATIENCE_S) == ["it"] and sender.failed == {"it"}


def test_messages_sent_before_the_receiver_connects_arrive_in_order() -> None:
    with contextlib.closing(ZmqSender(connect_s=PATIENCE_S)) as sender:
        sender(message(1, "one"))
        sender(message(2, "two"))
        with contextlib.closing(ZmqReceiver(sender.invitation)) as receiver:
            for name in ("one", "two"):
                taken = served(sender, receiver.take)
                assert taken["trigger_id"] == name
                receiver.done(taken)
                assert sender.finished(PATIENCE_S) == [name]
            assert not sender.failed


def test_closed_sender_raises() -> None:
    sender = ZmqSender()
    sender.close()
    act: Callable[[], object]
    for act in (lambda: sender(message()), sender.finished):
        with pytest.raises(ClosedError, match="sender is closed"):
            act()
    with contextlib.closing(ZmqSender()) as another:
        receiver = ZmqReceiver(another.invitation)
        receiver.close()
        for act in (lambda: receiver.take(0), lambda: receiver.done(message())):
            with pytest.raises(ClosedError, match="receiver is closed"):
                act()


def test_closed_receiver_leaves_no_message_pending() -> None:
    with contextlib.closing(ZmqSender(connect_s=PATIENCE_S)) as sender:
        with contextlib.closing(ZmqReceiver(sender.invitation)) as receiver:
            sender(message())
            assert served(sender, receiver.take) == message()
        with pytest.raises(DeliveryError, match="has closed before it was done"):
            sender.finished(PATIENCE_S)
        assert sender.finished(PATIENCE_S) == ["it"]


def test_only_data_can_be_sent() -> None:
    with contextlib.closing(ZmqSender()) as sender:
        with pytest.raises(WireError, match="cannot be sent"):
            sender({"trigger_id": "it", "call": print})
        with contextlib.closing(ZmqReceiver(sender.invitation)) as receiver:
            sent: Any = {"trigger_id": "it", "array": np.arange(3), "versions": ((1, 2),), 5: None}
            sender(sent)
            taken: Any = served(sender, receiver.take)
            np.testing.assert_array_equal(taken.pop("array"), sent.pop("array"))
            assert taken == sent


def guest(sender: ZmqSender) -> DealerLink:
    told = sender.invitation
    pair = KeyPair(told["public"].encode(), told["secret"].encode())
    return DealerLink(told["address"], told["server_key"].encode(), pair, MAIN)


@pytest.mark.parametrize(
    "said", [b"", b"\xc1", msgspec.msgpack.encode(["s", "dance"]), msgspec.msgpack.encode(["s", "done", ["x"]])]
)
def test_invalid_reports_are_refused(said: bytes) -> None:
    with contextlib.closing(ZmqSender(connect_s=PATIENCE_S)) as sender, contextlib.closing(guest(sender)) as link:
        link.send([said])
        sender(message())
        with pytest.raises(WireError, match="an invalid report"):
            sender.finished(PATIENCE_S)


def test_replaced_receiver_leaves_no_message_pending() -> None:
    with contextlib.closing(ZmqSender(connect_s=PATIENCE_S)) as sender, contextlib.closing(guest(sender)) as link:
        link.send([msgspec.msgpack.encode(["s", "hello"])])
        sender(message())
        assert served(sender, link.receive)
        link.send([msgspec.msgpack.encode(["t", "hello"])])
        with pytest.raises(DeliveryError, match="was replaced by another one before it was done"):
            sender.finished(PATIENCE_S)
        assert sender.finished(PATIENCE_S) == ["it"]
        sender(message(1, "next"))
        link.send([msgspec.msgpack.encode(["t", "done", "next"])])
        assert sender.finished(PATIENCE_S) == ["next"]


def test_report_of_an_unknown_message_is_ignored() -> None:
    with contextlib.closing(ZmqSender(connect_s=PATIENCE_S)) as sender, contextlib.closing(guest(sender)) as link:
        link.send([msgspec.msgpack.encode(["s", "hello"])])
        sender(message())
        assert served(sender, link.receive)
        for report in (["s", "done", "other"], ["another", "done", "it"], ["s", "done", "it"]):
            link.send([msgspec.msgpack.encode(report)])
        assert sender.finished(PATIENCE_S) == ["it"]
        assert sender.finished(PATIENCE_S) == []


def test_receiver_without_an_invitation_is_not_admitted() -> None:
    with contextlib.closing(ZmqSender(connect_s=0.1)) as sender:
        fresh = KeyPair.fresh()
        stranger = {**sender.invitation, "public": fresh.public.decode(), "secret": fresh.secret.decode()}
        receiver = ZmqReceiver(stranger)
        with contextlib.closing(receiver), pytest.raises(DeliveryError, match="does not admit this invitation"):
            while True:  # until it was refused; nothing that it says arrives, before or after
                sender(message())
                with pytest.raises(DeliveryError, match="no receiver has connected"):
                    sender.finished(PATIENCE_S)
                assert sender.finished() == ["it"]
                receiver.done(message())


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:5000", "tcp://*:*", "inproc://x", "", 5])
def test_sender_listens_on_loopback_only(endpoint: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected ipc://\.\.\., tcp://127\.0\.0\.1:\* or None"):
        ZmqSender(endpoint)


def test_an_endpoint_that_is_taken_is_named() -> None:
    sender = ZmqSender("tcp://127.0.0.1:*")
    with contextlib.closing(sender), pytest.raises(ConfigError, match="cannot listen at tcp://"):
        ZmqSender(sender.invitation["address"])


def test_closing_twice_has_no_effect() -> None:
    sender = ZmqSender()
    receiver = ZmqReceiver(sender.invitation)
    for end in (receiver, sender, receiver, sender):
        end.close()
    assert issubclass(DeliveryError, FarstepError)
