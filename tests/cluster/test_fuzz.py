"""Fuzzed messages on the sockets of a head cause no crash, hang or memory growth, and training continues.

The first tests decode messages without sockets. The others attack a head that collects, from another process
(`attacker.py`).
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import gymnasium
import numpy as np
import pytest
import zmq

import farstep
from farstep.cluster_env import collector_for
from farstep.core import Received
from farstep.errors import WireError
from farstep.head.request import Request
from farstep.head.tickets.records import IssuedTicket
from farstep.launch.cluster import ClusterLauncher
from farstep.rollout.progress import EPISODES, Phase
from farstep.schema import ArraySpec
from farstep.testing import CountingEnv, TableAgent
from farstep.wire import messages as m
from farstep.wire import node_messages as n
from farstep.wire.channels import reliable_channel
from farstep.wire.channels.dealer import DealerLink
from farstep.wire.channels.reliable_channel import (
    ENVELOPE,
    LENGTH,
    MAX_AHEAD,
    POSITION,
    SEGMENT_BYTES,
    Kind,
    Packet,
    ReliableChannel,
)
from farstep.wire.channels.zmq import NODE as DAEMON
from farstep.wire.channels.zmq import Hub, bulk_address
from farstep.wire.codec import pack, unpack
from farstep.wire.encryption import Cipher, Side
from farstep.wire.keys import KeyPair, Tokens
from farstep.wire.versions import versions
from farstep.workflow.delivery import ZmqReceiver, ZmqSender
from tests.cluster import attacker
from tests.cluster.checks import assert_balanced, assert_sound, cluster
from tests.cluster.far_head import WideAgent, WideEnv
from tests.cluster.faulty import RogueEnv
from tests.cluster.mutations import mutated
from tests.cluster.nodes import node_config

ROOT = Path(__file__).parents[2]

CASES = 25_000
NODE = "0123456789abcdef"
SCHEMA = {"action": ArraySpec((2,), "<f4")}
TIMES = m.Times(0.5, 0.25, 0.5, 0.125, 0.5)
FROM_WORKER: list[m.FromWorker] = [
    m.Hello(0, 0, "run", "host", 1, versions()),
    m.Ready(pack(gymnasium.spaces.Box(-1, 1, (3,))), pack(gymnasium.spaces.Discrete(4))),
    m.AgentReady(1, SCHEMA, pack({"action": "action"}), SCHEMA, pack("state"), "eager", SCHEMA),
    m.Chunk(
        ticket=1,
        version=0,
        resume=b"\0" * 16,
        index=1,
        infos=True,
        inference="tape",
        passed=0,
        divergence=0.5,
        unmeasured="why",
        out_of_bounds="obs was 2",
        bad_reward="nan in environment slot 1",
        syncs=1,
        synced_bytes=100,
        times=TIMES,
        keys=["obs", "reward"],
        codecs=["", "lz4"],
        first=3,
        clock=4,
        stagger_steps=5,
    ),
    m.Part(1, 1, -1, 0, ["obs"], 0),
    m.Reply(1),
    m.ClientAdmitted(1, 0),
    m.RejectClient(1, "why"),
    m.Failure("message", "traceback", "step", "ValueError", 1, 2, 3, 4, 5, True, 6, 7, True),
    m.StepInfos(),
    m.RequestSend(1, 1),
    m.WeightRequest(1, 0),
    m.Progress([1, 2, 3, 2**62, -1]),
]
FROM_NODE: list[n.FromNode] = [
    n.NodeHello(NODE, "run", "host", 1, 4, versions(), "SLURM job 1"),
    n.NodeBeat(NODE, [(0, 0), (1, 5)]),
    n.Leaving(NODE, "SIGTERM"),
    n.Printed(NODE, 0, 0, b"Hello\n"),
    n.WorkerEnded(NODE, 0, 0, -9, "why"),
]
VALUES = [
    {"a": [1, 2.5, None, True, "text", b"bytes", 2**70], "b": (1, (2,))},
    np.arange(12, dtype=np.float32).reshape(3, 4),
    np.array([1, "two", None], dtype=object),
    np.float64(0.5),
    gymnasium.spaces.Dict(
        {"box": gymnasium.spaces.Box(0, 255, (4, 4), np.uint8), "n": gymnasium.spaces.Discrete(3, start=-1)}
    ),
    gymnasium.spaces.Tuple((gymnasium.spaces.MultiBinary(3), gymnasium.spaces.MultiDiscrete([2, 3]))),
]


def survives(read: Callable[[bytes], Any], valid: Sequence[bytes], seed: int) -> None:
    """`read` either accepts its input or raises a `WireError`."""
    chance = random.Random(seed)
    refused = 0
    for _ in range(CASES):
        text = mutated(chance, chance.choice(valid), valid)
        try:
            read(text)
        except WireError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{text!r}") from error
    assert 0.3 * CASES < refused < CASES  # neither takes everything nor nothing: the mutations are worth something


def test_messages_of_workers() -> None:
    survives(lambda text: m.decode_from_worker([text]), [m.encode(message) for message in FROM_WORKER], 1)


def test_messages_of_nodes() -> None:
    survives(lambda text: n.decode_from_node([text]), [n.encode(message) for message in FROM_NODE], 2)


@pytest.mark.filterwarnings("ignore")  # NumPy's, of dtypes that are gone
def test_plain_values() -> None:
    survives(unpack, [pack(value) for value in VALUES], 3)


# ---- sessions ----


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reliable_channel, "SMALL_BYTES", 8)
    monkeypatch.setattr(reliable_channel, "SEGMENT_BYTES", 64)


def conversation(key: bytes, messages: Sequence[bytes]) -> list[Packet]:
    worker = ReliableChannel(Cipher(key, Side.WORKER))
    packets = [packet for message in messages for packet in worker.send([message], 0.0)]
    return [*packets, worker.ack(), worker.reconnected(), worker.bulk_opened(), *worker.due(100.0)]


def test_changed_and_replayed_bulk_segments_do_not_alter_messages(small_segments: None) -> None:
    """Overheard segments that are changed, reordered and replayed do not alter the worker's messages."""
    key, chance = os.urandom(32), random.Random(4)
    sent = [bytes([i]) * (9 + 37 * i) for i in range(40)]
    packets = [packet for packet in conversation(key, sent) if packet.bulk and not packet.opens_bulk]
    known = [[bytes(frame) for frame in packet.frames] for packet in packets]
    head = ReliableChannel(Cipher(key, Side.HEAD), 1 << 20)
    refused = 0
    for case in range(CASES):
        frames = list(chance.choice(known))
        frame = chance.randrange(3)
        frames[frame] = mutated(chance, frames[frame], [other[frame] for other in known])
        if chance.random() < 0.05:
            frames = frames[: chance.randrange(4)]
        if case % 1000 == 999 and packets:  # the worker's own, and some of them twice
            frames = list(cast(Any, packets.pop(0).frames))
        try:
            assert head.receive(Packet(True, frames), 0.0) == []
        except WireError:
            refused += 1
    for packet in packets:
        head.receive(packet, 0.0)
    assert [bytes(frames[0]) for frames in head.messages()] == sent
    assert refused > CASES / 2
    assert not head.undelivered and not head.undelivered_bytes


def test_random_packets_with_a_valid_key_take_bounded_memory(small_segments: None) -> None:
    """It has the key: it can only send garbage, of which the head keeps a bounded amount."""
    key, chance = os.urandom(32), random.Random(5)
    most = 100_000
    for _ in range(10):
        head = ReliableChannel(Cipher(key, Side.HEAD), most)
        packets = conversation(key, [chance.randbytes(chance.randrange(200)) for _ in range(50)])
        known = [[bytes(frame) for frame in packet.frames] for packet in packets]
        for _ in range(CASES // 10):
            if chance.random() < 0.01:
                list(head.send([chance.randbytes(20)], 0.0))  # something that could be confirmed
            frames = list(chance.choice(known))
            place = chance.randrange(len(frames))
            frames[place] = mutated(chance, frames[place], [other[0] for other in known])
            try:
                answers = head.receive(Packet(chance.random() < 0.5, frames), 0.0)
            except WireError:
                continue
            assert len(answers) <= head.unacknowledged + 1
            list(head.messages())
            assert head.undelivered_bytes <= most
            assert head.undelivered <= MAX_AHEAD


def envelope(kind: Kind, seq: int) -> bytes:
    return ENVELOPE.pack(kind, seq, 0, 0)


def test_a_worker_cannot_fill_the_heads_memory_with_unread_data() -> None:
    head = ReliableChannel(None, most := 1 << 20)
    refused = 0
    for seq in range(2, MAX_AHEAD):  # the first never comes
        try:
            head.receive(Packet(False, [envelope(Kind.WHOLE, seq), bytes(1000), b"", b""]), 0.0)
        except WireError:
            refused += 1
    assert refused and head.undelivered * 1000 <= head.undelivered_bytes <= most
    with pytest.raises(WireError, match="frames"):
        ReliableChannel(None).receive(Packet(False, [envelope(Kind.WHOLE, 1), *[b""] * 5000]), 0.0)


def test_announcing_gigabytes_allocates_no_memory() -> None:
    before = resident_bytes()
    key = os.urandom(32)
    head = ReliableChannel(Cipher(key, Side.HEAD), 1 << 34)
    size, sealed = 8 << 30, bytearray(SEGMENT_BYTES + 16)
    about = POSITION.pack(0, size // SEGMENT_BYTES) + LENGTH.pack(size)
    Cipher(key, Side.WORKER).seal(1, 0, about, bytes(SEGMENT_BYTES), memoryview(sealed))
    head.receive(Packet(True, [envelope(Kind.SEGMENT, 1), about, sealed]), 0.0)
    assert head.undelivered == 1
    assert resident_bytes() - before < 64 << 20


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- what a head makes of its workers' messages ----


@pytest.mark.filterwarnings("ignore")
def test_messages_of_an_admitted_worker_raise_nothing_but_wire_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A running head gets every message of a run and many mutations; their effects are not checked here."""
    with cluster(CountingEnv, workers=2, transport="tcp") as env:
        server, chance = collector_for(env, TableAgent()).server, random.Random(6)
        heard: list[list[bytes]] = []
        receive = server.receive

        def listen(worker: int, received: Received) -> None:
            heard.append([bytes(frame) for frame in received.frames])
            receive(worker, received)

        monkeypatch.setattr(server, "receive", listen)
        for _ in range(5):
            env.collect(TableAgent(), steps=4)
            env.step(TableAgent())  # with infos
        heard += [[m.encode(message)] for message in FROM_WORKER]
        for owner, name in ((server, "fail"), (server.outbox, "send"), (server, "grant")):
            monkeypatch.setattr(owner, name, lambda *_: 0)
        monkeypatch.setattr(server.supervisor, "act_on", lambda event: None)
        monkeypatch.setattr(server.supervisor, "reject", lambda record, error: None)
        with server.locked():
            for case in range(CASES):
                frames = list(chance.choice(heard))
                place = chance.randrange(len(frames))
                frames[place] = mutated(chance, frames[place], [other[0] for other in heard])
                if case % 100 == 0:  # tickets to be answered
                    server.tickets.outstanding.clear()
                    for seq in range(50):
                        server.tickets.outstanding.add(IssuedTicket(seq, seq % 2, 0, 0, 0))
                try:
                    receive(chance.randrange(2), Received(frames))
                except Exception as error:
                    raise AssertionError(f"{frames!r}") from error
            server.tickets.outstanding.clear()
            server.tickets.unread.clear()
        monkeypatch.undo()


MISDEEDS = {
    "holes": "were written",
    "progress": "Progress from a worker with shared memory",
    "hello_again": "Hello from a worker that is alive",
    "descriptor": "with 1 descriptors; workers send none",
    "endless_phase": "the phase 8",
}


@pytest.mark.timeout(300)
def test_stream_survives_arbitrary_messages_of_a_local_worker(tmp_path: Path, caplog: Any) -> None:
    """A worker on this host is replaced at its first invalid message, and never stalls the head."""
    kwargs = {"misdeeds": list(MISDEEDS), "folder": str(tmp_path)}
    options: Any = {"env_kwargs": kwargs, "restart_budget": len(MISDEEDS)}
    before, peak = resident_bytes(), 0
    with cluster(RogueEnv, envs=3, workers=3, **options) as env:
        deadline = time.monotonic() + 90
        for batch in env.stream(TableAgent(), steps=4, max_staleness=1):
            assert_sound(batch)
            peak = max(peak, resident_bytes())
            if env.stats()["workers"]["restarts"] == len(MISDEEDS):
                break
            assert time.monotonic() < deadline
        assert_balanced(env.stats())
    assert peak - before < 64 << 20
    refusals = [record.getMessage() for record in caplog.records if "cannot be accepted" in record.message]
    assert all(any(said in refusal for refusal in refusals) for said in MISDEEDS.values()), refusals
    assert len(refusals) == len(MISDEEDS)


def test_make_vec_describes_an_invalid_message_of_a_worker(tmp_path: Path) -> None:
    kwargs = {"misdeeds": ["progress"], "folder": str(tmp_path)}
    vector = farstep.make_vec(RogueEnv, 1, env_kwargs=kwargs)
    with contextlib.closing(vector), pytest.raises(farstep.WorkerError, match="cannot be accepted: Progress from a"):
        vector.reset()
        while True:
            vector.step(np.zeros(1, np.int64))


@pytest.mark.filterwarnings("ignore")
def test_a_worker_without_shared_memory_is_held_to_its_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(CountingEnv, workers=1, transport="tcp") as env:
        env.collect(agent := TableAgent(), steps=4)
        collector = collector_for(env, agent)
        server, refused = collector.server, []
        monkeypatch.setattr(server.supervisor, "reject", lambda record, error: refused.append(str(error)))
        version, words = collector.publisher.agent_id, EPISODES + 2
        cases: list[tuple[Any, list[bytes], bool, str]] = [
            (m.Progress([0] * words), [], False, "Progress outside of the heartbeat connection"),
            (m.Progress([0] * 9), [], True, f"9 progress words; expected {words}"),
            (m.Progress([int(Phase.QUEUED)] + [0] * (words - 1)), [], True, "the phase 8"),
            (m.Reply(0), [b""], True, "Reply on the heartbeat connection"),
            (m.Reply(99), [b""], False, "a reply to call 99"),
            (m.RequestSend(1, 1), [], False, "max_senders"),
            (m.WeightRequest(version, 0), [], False, "a second request for version 0"),
            (m.AgentReady(99, {}, b""), [], False, "agent 99 is ready"),
            (m.Ready(b"", b""), [], False, "Ready from a worker that is alive"),
        ]
        with server.locked():
            for message, frames, heartbeat, said in cases:
                server.receive(0, Received([m.encode(message), *frames], heartbeat=heartbeat))
                assert len(refused) == 1 and said in refused.pop(), (message, said)
            order: Any = collector.open(Request(4), None, 1) and server.tickets.grant([0], 0)[0]
            part = m.Part(order.seq, 9, -1, 0, ["reward"])
            server.receive(0, Received([m.encode(part), b"", bytes(8)]))
            assert "which EnvConfig.transfer does not send ahead" in refused.pop()
            chunk = m.Chunk(order.seq, 0, bytes(16), infos=True, passed=0)
            server.receive(0, Received([m.encode(chunk), b"", pack([{}, {}])]))
            assert "infos that its ticket does not request" in refused.pop()
            server.cancel()
        monkeypatch.undo()
        assert_sound(env.collect(TableAgent(), steps=4))


# ---- sockets, during a run ----


class Attack:
    """Another process, which finally prints how much it sent."""

    def __init__(self, known: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", attacker.__name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
        )
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(attacker.told(known))

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    def sent(self) -> Counter[str]:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            return Counter(json.loads(stdout.read()))

    def __enter__(self) -> Attack:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class Run:
    """Collects, and checks that each row follows the one before."""

    def __init__(self, env: farstep.ClusterEnv) -> None:
        self._env, self._last = env, {}  # type: ignore[var-annotated]
        self.batches = 0

    def collect(self) -> None:
        batch = self._env.collect(WideAgent(), steps=16)
        count = batch.arrays["obs.count"][..., 1]
        assert (np.diff(count, axis=0) == 1).all()
        for column, slot in enumerate(batch.slots.tolist()):
            if self.batches:
                assert count[0, column] == self._last[slot] + 1 and batch.continues[column]
            self._last[slot] = float(count[-1, column])
        self.batches += 1


def wide(config: Any) -> farstep.ClusterEnv:
    """Rollouts of 20 KB a row: they take the bulk connection."""
    return cluster(WideEnv, env_kwargs={"size": 20_000}, config=config)


def hub_of(env: farstep.ClusterEnv) -> Hub:
    launcher: Any = collector_for(env, WideAgent()).server.supervisor.launcher
    assert isinstance(launcher.hub, Hub)
    return launcher.hub


def overhear(hub: Hub, run: Run) -> list[tuple[bytes, list[bytes], list[Sequence[Any]]]]:
    """Of each worker what can be read on the bulk connection: its name, sealed segments, and tokens to come."""
    heard: dict[bytes, list[Sequence[Any]]] = {key: [] for key, peer in hub.peers.items() if peer.channel}
    peers, receive = {id(peer.channel): key for key, peer in hub.peers.items()}, ReliableChannel.receive
    with pytest.MonkeyPatch.context() as patch:

        def listening(self: ReliableChannel, packet: Packet, now: float) -> list[Packet]:
            if packet.bulk:
                heard[peers[id(self)]].append([bytes(frame) for frame in packet.frames])
            return receive(self, packet, now)

        patch.setattr(ReliableChannel, "receive", listening)
        while not all(heard.values()):
            run.collect()
    tokens = {key: copy.copy(hub.peers[key].tokens) for key in heard}
    return [(key, [tokens[key].fresh() for _ in range(8)], packets[:5]) for key, packets in heard.items()]  # type: ignore[union-attr]


def withstand(env: farstep.ClusterEnv, known: dict[str, Any]) -> Counter[str]:
    """Collect during an attack and some time after; memory does not grow and no worker is replaced."""
    run, hub = Run(env), hub_of(env)
    for _ in range(20):
        run.collect()
    known |= {"control": hub.address, "bulk": bulk_address(hub.address, hub.bulk_port), "server_key": hub.keys.public}
    known["overheard"] = overhear(hub, run)
    before, refused = resident_bytes(), hub.refused
    with Attack(known) as attack:
        first = run.batches
        while not attack.is_over:
            run.collect()
        under_attack = run.batches - first
        sent = attack.sent()
    for _ in range(10):
        run.collect()
    stats = env.stats()
    assert under_attack > 10
    assert resident_bytes() - before < 64 << 20
    assert stats["workers"]["restarts"] == 0 and stats["workers"]["alive"] == 2
    assert not stats["dropped"]
    assert_balanced(stats)
    assert hub.refused - refused > sent["forged segment"] / 4  # others repeat what was there, and are not looked at
    return sent


@pytest.mark.timeout(300)
def test_a_run_survives_strangers_and_eavesdroppers() -> None:
    with wide(farstep.LocalConfig(workers_per_node=2, transport="tcp")) as env:
        env.launch()
        sent = withstand(env, {"scale": 25_000})
    assert sent.total() > 50_000, sent


def answer_to_hello(env: farstep.ClusterEnv, launcher: ClusterLauncher, pair: KeyPair) -> n.ToNode:
    """The head's answer to a node daemon that has this key."""
    hub, deadline = launcher.hub, time.monotonic() + 60
    link = DealerLink(hub.address, hub.keys.public, pair, DAEMON, route=NODE.encode() + DAEMON)
    with contextlib.closing(link):
        link.send([n.encode(n.NodeHello(NODE, launcher.run, "host", 1, 4, versions()))])
        while (received := link.receive(0.01)) is None:
            env.collect(WideAgent(), steps=16)
            assert time.monotonic() < deadline
        return n.decode_to_node(received.frames)


@pytest.mark.timeout(300)
def test_a_run_on_nodes_survives_strangers_and_a_malicious_daemon(
    tmp_path: Path, caplog: Any, issued: dict[tuple[int, int], KeyPair]
) -> None:
    config = node_config(tmp_path, nodes=2, workers_per_node=1, head_address="127.0.0.1")
    with wide(config) as env:
        server = collector_for(env, WideAgent()).server
        launcher = server.supervisor.launcher
        assert isinstance(launcher, ClusterLauncher)
        launcher.groups.request(1)
        mad = issued[-2, 0]  # a node daemon of that group, which is the second
        with server.locked():
            unrequested = launcher.hub.admit(-8, 0)
        assert isinstance(answer_to_hello(env, launcher, unrequested), n.Leave)
        names = list(launcher.connected)
        misfits = [n.NodeHello(NODE, launcher.run, f"host{i}", 1, 4, {"farstep": "0.0"}) for i in range(500)]
        strays = n.NodeBeat(NODE, [(worker, 0) for worker in range(2000)])
        messages: list[n.FromNode] = [*FROM_NODE, *misfits, *[strays] * 20]
        for name in names:
            lies: list[n.FromNode] = [n.Leaving(name, "so I say"), n.NodeBeat(name), n.Printed(name, 0, 0, b"forged")]
            messages += 20 * lies
            messages += [n.WorkerEnded(name, worker, 0, 0, "") for worker in (0, 1)]
            messages += [n.NodeHello(name, launcher.run, "liar", 1, 4, versions())]
        node = {"node": [mad.public, mad.secret], "node_messages": [n.encode(message) for message in messages]}
        sent = withstand(env, {"scale": 20_000, **node})
        assert list(launcher.connected) == names
        assert not any(node.leaving for node in launcher.connected.values())
    assert sent["node message"] == 20_000 and sent.total() > 60_000, sent
    assert len([record for record in caplog.records if "cannot be accepted" in record.message]) < 20
    assert len([record for record in caplog.records if "has different versions" in record.message]) <= 64
    assert len(caplog.records) < 100


@pytest.mark.timeout(300)
def test_a_malicious_worker_is_replaced_and_the_others_continue(issued: dict[tuple[int, int], KeyPair]) -> None:
    """With its key it can send any message, but only for itself and only once."""
    chance = random.Random(7)
    with wide(farstep.LocalConfig(workers_per_node=2, transport="tcp")) as env:
        env.launch()
        env.collect(WideAgent(), steps=16)
        hub = hub_of(env)
        before = resident_bytes()
        options = {"curve_serverkey": hub.keys.public, "routing_id": b"not its ownmain"}
        pair = issued[0, 0]
        keys = {"curve_publickey": pair.public, "curve_secretkey": pair.secret}
        with attacker.dealer(hub.address, **options, **keys) as mad:
            for _ in range(5000):
                packet = [envelope(chance.choice(list(Kind)), chance.randrange(5000)), chance.randbytes(500)]
                with contextlib.suppress(zmq.Again):
                    mad.send_multipart([mutated(chance, frame) for frame in packet], zmq.DONTWAIT)
        deadline = time.monotonic() + 60
        while env.stats()["workers"]["restarts"] == 0 or env.stats()["workers"]["alive"] < 2:
            env.collect(WideAgent(), steps=16)
            assert time.monotonic() < deadline
        env.collect(WideAgent(), steps=16)
        stats = env.stats()
        assert stats["workers"]["restarts"] == 1
        assert (1, 1) not in issued  # the other one never noticed
        assert resident_bytes() - before < 64 << 20
        assert_balanced(stats)


@pytest.mark.timeout(300)
def test_a_delivery_survives_strangers() -> None:
    sender = ZmqSender("tcp://127.0.0.1:*")
    with contextlib.closing(sender), contextlib.closing(ZmqReceiver(sender.invitation)) as receiver:
        known = {"control": sender.invitation["address"], "server_key": sender.invitation["server_key"].encode()}
        before, passed = resident_bytes(), 0
        with Attack({**known, "scale": 20_000}) as attack:
            while not attack.is_over or passed < 20:
                sender({"trigger_id": "a", "number": passed})
                deadline = time.monotonic() + 30
                while (message := receiver.take(0.01)) is None:
                    assert sender.finished() == [] and time.monotonic() < deadline
                assert message["number"] == passed
                receiver.done(message)
                assert sender.finished(30.0) == ["a"]
                passed += 1
            assert attack.sent().total() > 1000
        assert resident_bytes() - before < 32 << 20


def test_peer_cannot_claim_another_workers_identity() -> None:
    """On the bulk connection, metadata is a client's own."""
    hub = Hub("tcp://127.0.0.1:*", reliable=True)
    victim, liar = hub.admit(1, 0), hub.admit(2, 0)
    taken: list[int] = []
    for peer in hub.peers.values():
        peer.channel = None  # so that `drain` yields what is no packet of a channel, too
    with contextlib.closing(hub), attacker.dial(f"tcp://127.0.0.1:{hub.bulk_port}") as raw:
        claims = [(b"Socket-Type", b"DEALER"), (b"User-Id", victim.public), (b"Identity", victim.public[:16] + b"bulk")]
        raw.sendall(attacker.greeting(b"PLAIN") + attacker.plain_hello(liar.public, Tokens(liar).fresh()))
        deadline = time.monotonic() + 30
        answer = b""
        raw.settimeout(0.02)
        while b"WELCOME" not in answer:
            list(hub.drain())
            with contextlib.suppress(TimeoutError):
                answer += raw.recv(1000)
            assert time.monotonic() < deadline
        metadata = b"".join(attacker.property_of(*claim) for claim in claims)
        raw.sendall(attacker.command(b"INITIATE", metadata) + b"\x00\x05hello")
        while not taken:
            taken += [peer.worker for peer, _ in hub.drain()]
            assert time.monotonic() < deadline
    assert taken == [2]
