"""An acting server that listens on the network: which workers may connect and what they may send."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from farstep.acting import messages as am
from farstep.acting.mailbox import CONTINUES, EPISODES, HELD, ROOTS, STARTS, USED, WORKER_WORDS, Mailbox, MailboxLayout
from farstep.acting.serving.network import NetworkListener
from farstep.acting.serving.requests import (
    answer_frames,
    check_arrays,
    check_rows,
    check_saved,
    take_request,
    take_update,
)
from farstep.core import Received
from farstep.errors import WireError
from farstep.schema import ArraySpec
from farstep.testing import CountingEnv, TableAgent
from farstep.wire import messages as m
from farstep.wire.channels.dealer import DealerLink
from farstep.wire.channels.zmq import MAIN, bulk_address
from farstep.wire.codec import pack
from farstep.wire.keys import KeyPair
from tests.cluster.checks import assert_balanced, assert_sound, cluster, eventually, within
from tests.cluster.faulty import once
from tests.cluster.mutations import mutated
from tests.cluster.served.test_served import OVER_THE_NETWORK

OBS, OUTPUTS, STATE = (
    {"obs": ArraySpec((3,), "<f4")},
    {"action": ArraySpec((), "<i8")},
    {"state": ArraySpec((2,), "<f4")},
)
LAYOUT = MailboxLayout([2, 1], OBS, OUTPUTS, STATE)
JOIN = am.Join(1, 0, 3, [7, 7, 7], [0, 0, 0], pack("obs"), OBS, OUTPUTS, [2, 1], b"")
WORDS = WORKER_WORDS.stop - WORKER_WORDS.start


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    found = Mailbox.create(LAYOUT)
    yield found
    found.close()


def admission(pair: KeyPair, worker: int = 1) -> m.AdmitClient:
    return m.AdmitClient(worker, 0, 3, 3, pack("obs"), OBS, OUTPUTS, pair.public, pair.secret)


@contextlib.contextmanager
def connected(listener: NetworkListener, pair: KeyPair) -> Iterator[DealerLink]:
    listening = listener.listening
    address = bulk_address("tcp://127.0.0.1:1", listening.endpoint)
    link = DealerLink(address, listening.key, pair, MAIN, bulk=listening.bulk_port)
    try:
        yield link
    finally:
        link.close(linger_ms=0)


def test_only_workers_with_a_key_of_the_head_are_accepted() -> None:
    known, unknown = KeyPair.fresh(), KeyPair.fresh()
    listener = NetworkListener(["tcp://127.0.0.1:*"], 10.0, encrypted=True)
    with contextlib.closing(listener), connected(listener, unknown) as stranger, connected(listener, known) as worker:
        listener.admit(admission(known))
        stranger.send([am.encode(am.Save())])
        worker.send([am.encode(am.Explain())])
        heard = eventually(lambda: list(listener.messages()))
        assert [(number, am.decode_from_client(received.frames)) for number, received in heard] == [(1, am.Explain())]
        replacement = KeyPair.fresh()
        listener.admit(admission(replacement))
        worker.send([am.encode(am.Explain())])
        with connected(listener, replacement) as other:
            other.send([am.encode(am.Save())])
            heard = eventually(lambda: list(listener.messages()))
        assert [am.decode_from_client(received.frames) for _, received in heard] == [am.Save()]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"worker": 2}, "other environments"),
        ({"first": 0}, "other environments"),
        ({"obs_schema": {"obs": ArraySpec((1 << 40,), "<f4")}}, "other environments"),
        ({"groups": [2, 2]}, "environments, seeds and episodes"),
        ({"groups": [4, -1]}, "environments, seeds and episodes"),
        ({"roots": [7]}, "environments, seeds and episodes"),
        ({"episodes": [0, 0, -1]}, "negative"),
    ],
    ids=str,
)
def test_a_worker_joins_only_with_its_own_environments(change: dict[str, Any], reason: str) -> None:
    listener = NetworkListener(["tcp://127.0.0.1:*"], 10.0, encrypted=True)
    with contextlib.closing(listener):
        listener.admit(admission(KeyPair.fresh()))
        listener.check(1, JOIN, Received([b"", b""]))
        fields = {name: getattr(JOIN, name) for name in JOIN.__struct_fields__}
        with pytest.raises(WireError, match=reason):
            listener.check(1, am.Join(**{**fields, **change}), Received([b"", b""]))
        for received in (Received([b""]), Received([b"", b""], heartbeat=True)):
            with pytest.raises(WireError):
                listener.check(1, JOIN, received)


def request(any_starts: bool) -> bytes:
    seeds = np.arange(4, dtype=np.int64).tobytes() if any_starts else b""
    return bytes([any_starts, 0]) + np.arange(6, dtype=np.float32).tobytes() + seeds


@pytest.mark.parametrize("any_starts", [False, True])
def test_request_and_answer_arrive_unchanged(mailbox: Mailbox, any_starts: bool) -> None:
    take_request(mailbox, am.Act(0, [1, 9, 0, any_starts, 0, 4, 1], 9), request(any_starts))
    np.testing.assert_array_equal(mailbox.arrays["obs"][:2], np.arange(6).reshape(2, 3))
    assert mailbox.arrays[STARTS].tolist() == [any_starts, False, False]
    assert mailbox.arrays[ROOTS].tolist() == ([0, 1, 0] if any_starts else [0, 0, 0])
    assert mailbox.arrays[EPISODES].tolist() == ([2, 3, 0] if any_starts else [0, 0, 0])
    assert mailbox.group_words[0][WORKER_WORDS].tolist() == [1, 9, 0, any_starts, 0, 4, 1] and mailbox.words[HELD] == 9
    _, payload = answer_frames(mailbox, 0)
    assert len(payload) == 2 * 8 + any_starts * 2 * 8  # actions, and the recurrent state of a chunk's first row
    take_update(mailbox, am.Update(0, [5, 6]))
    assert [(words[USED], words[CONTINUES]) for words in mailbox.group_words] == [(5, 0), (6, 0)]
    assert mailbox.words[HELD] == 0


@pytest.mark.parametrize(
    "refused",
    [
        lambda box: take_request(box, am.Act(2, [0] * WORDS, 0), request(False)),
        lambda box: take_request(box, am.Act(0, [0] * (WORDS + 1), 0), request(False)),
        lambda box: take_request(box, am.Act(0, [0] * WORDS, 0), request(False) + b"\0"),
        lambda box: take_request(box, am.Act(0, [0] * WORDS, 0), request(True)[:-1]),
        lambda box: take_request(box, am.Act(0, [0] * WORDS, 0), b""),
        lambda box: take_request(box, am.Act(0, [0] * WORDS, 0), request(True)[:-1] + b"\xff"),
        lambda box: take_update(box, am.Update(0, [1])),
        lambda box: check_arrays({"obs": np.zeros((3, 4), np.float32)}, OBS, 3),
        lambda box: check_arrays({"obs": np.array([None] * 3)}, OBS, 3),
        lambda box: check_arrays(["obs"], OBS, 3),
        lambda box: check_saved({"state": [np.zeros((2, 2), np.float32)], "generators": []}, STATE, 3),
        lambda box: check_saved({"state": [], "generators": [{}] * 4}, STATE, 3),
        lambda box: check_saved([], STATE, 3),
        lambda box: check_rows({"obs": np.zeros((4, 2))}, 3),
        lambda box: check_rows({"obs": "text"}, 3),
    ],
)
def test_messages_that_do_not_fit_are_refused(mailbox: Mailbox, refused: Callable[[Mailbox], None]) -> None:
    with pytest.raises(WireError):
        refused(mailbox)


def test_changed_messages_are_taken_or_refused_and_nothing_else(mailbox: Mailbox) -> None:
    chance, taken, refused = random.Random(4), 0, 0
    messages: list[am.FromClient] = [JOIN, am.Act(0, [1, 9, 0, 1, 0, 4, 1], 9), am.Update(1, [1, 1]), am.Save()]
    valid = [am.encode(message) for message in messages]
    for _ in range(5000):
        header, payload = mutated(chance, chance.choice(valid), valid), mutated(chance, request(True))
        try:
            message = am.decode_from_client([header])
            if isinstance(message, am.Act):
                take_request(mailbox, message, payload)
            elif isinstance(message, am.Update):
                take_update(mailbox, message)
            taken += 1
        except WireError:
            refused += 1
    assert taken > 100 and refused > 1000


class RogueEnv(CountingEnv):
    """Once, its worker sends its acting server a request that is too large."""

    def __init__(self, marker: str) -> None:
        super().__init__(length=4)
        self._marker, send = marker, DealerLink.send
        if send.__name__ == "rogue":
            return  # another environment of this worker has done it

        def rogue(link: Any, frames: Any, fds: Any = ()) -> None:
            with contextlib.suppress(WireError):
                if isinstance(am.decode_from_client(frames[:1]), am.Act) and once(marker):
                    frames = [frames[0], bytes(frames[1]) + bytes(1 << 20)]
            send(link, frames, fds)

        DealerLink.send = rogue  # type: ignore[method-assign, assignment]


@pytest.mark.slow
def test_a_worker_that_sends_an_invalid_request_is_replaced_and_the_others_continue(tmp_path: Any) -> None:
    kwargs = {"marker": str(tmp_path / "rogue")}
    with cluster(RogueEnv, envs=4, workers=2, env_kwargs=kwargs, **OVER_THE_NETWORK) as env:
        for _ in range(3):
            assert_sound(within(lambda: env.collect(TableAgent(), 10)))
        stats = env.stats()
        assert_balanced(stats)
        assert (stats["workers"]["restarts"], stats["acting"][0]["restarts"]) == (1, 0)
        assert any("to its acting server: arrays of" in event.text for event in env.events("lost"))
