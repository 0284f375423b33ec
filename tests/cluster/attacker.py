"""An attacker that can reach a head's sockets, as a process of its own: `python attacker.py < what-it-knows.json`.

It knows addresses, and as much as its JSON says: tokens and packets of workers, keys of a worker or node that
it holds. Prints how many messages of each kind it sent.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import random
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from tests.cluster.mutations import mutated

GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00"
MECHANISMS = [b"NULL", b"PLAIN", b"CURVE", b"GSSAPI", b"WRONG", b"\xff" * 20, b""]
HUGE = [1 << 16, 1 << 20, 1 << 33, 1 << 40, (1 << 63) - 1, (1 << 64) - 1]
sent: Counter[str] = Counter()
SEED = int(os.environ.get("FARSTEP_FUZZ_SEED", time.time()))
"""Printed: with the same one, the same is sent again."""
chance = random.Random(SEED)


def greeting(mechanism: bytes, as_server: bool = False) -> bytes:
    return GREETING + mechanism.ljust(20, b"\0") + bytes([as_server]) + b"\0" * 31


def command(name: bytes, body: bytes) -> bytes:
    content = bytes([len(name)]) + name + body
    return b"\x04" + bytes([len(content)]) + content if len(content) < 256 else long_frame(0x06, content)


def long_frame(flags: int, content: bytes, claimed: int | None = None) -> bytes:
    return bytes([flags]) + struct.pack(">Q", len(content) if claimed is None else claimed) + content


def short(text: bytes) -> bytes:
    return bytes([len(text)]) + text


def property_of(name: bytes, value: bytes) -> bytes:
    return short(name) + struct.pack(">I", len(value)) + value


def plain_hello(user: bytes, password: bytes) -> bytes:
    return command(b"HELLO", short(user) + short(password))


def dial(address: str) -> socket.socket:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=5)
    # Closed at once and for good: thousands of ports in TIME_WAIT would be in the way of other tests.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return sock


def nonsense() -> tuple[str, bytes]:
    """A random message of a peer that has just connected, with its kind."""
    mechanism = chance.choice(MECHANISMS)
    match chance.randrange(9):
        case 0:
            return "noise", chance.randbytes(chance.randrange(1, 2000))
        case 1:
            return "another protocol", b"GET / HTTP/1.1\r\nHost: head\r\n\r\n" * chance.randrange(1, 20)
        case 2:
            return "half a greeting", greeting(mechanism)[: chance.randrange(64)]
        case 3:
            return "wrong mechanism", greeting(mechanism) + command(b"READY", property_of(b"Socket-Type", b"DEALER"))
        case 4:
            return "changed greeting", mutated(chance, greeting(mechanism) + plain_hello(b"user", b"word"))
        case 5:
            return "huge claim", greeting(mechanism) + long_frame(0x06, b"\5HELLO", chance.choice(HUGE))
        case 6:
            return "message before the handshake", greeting(mechanism) + long_frame(0x00, chance.randbytes(5000))
        case 7:
            return "curve noise", greeting(b"CURVE") + command(b"HELLO", chance.randbytes(194))
        case _:
            return "old protocol", chance.choice([b"\x01\x00", b"\xff\0\0\0\0\0\0\0\1\x7f\1", b"\x05\0abcd"]) * 3


def strangers(addresses: list[str], count: int) -> None:
    for _ in range(count):
        kind, text = nonsense()
        with contextlib.suppress(OSError), dial(chance.choice(addresses)) as sock:
            sock.sendall(text)
            if chance.random() < 0.1:  # wait for what it says to that
                sock.settimeout(0.05)
                sock.recv(1000)
        sent[kind] += 1


def guessers(bulk: str, names: list[bytes], count: int) -> None:
    """Guess tokens of the bulk connection, with a known name."""
    for _ in range(count):
        with contextlib.suppress(OSError), dial(bulk) as sock:
            user = chance.choice([*names, b"", chance.randbytes(40)])
            guess = chance.choice([b"", b"\xff\0", chance.randbytes(64), chance.randbytes(32).hex().encode()])
            sock.sendall(greeting(b"PLAIN") + plain_hello(user, guess))
            sock.settimeout(0.05)
            sock.recv(1000)
        sent["guessed token"] += 1


@contextlib.contextmanager
def half_open(addresses: list[str], count: int) -> Iterator[None]:
    """Open connections that never complete their handshake."""
    with contextlib.ExitStack() as stack:
        for i in range(count):
            sock = stack.enter_context(dial(addresses[i % len(addresses)]))
            sock.sendall(greeting(chance.choice([b"CURVE", b"PLAIN"]))[: chance.choice([0, 10, 64])])
            sent["half open"] += 1
        yield


@contextlib.contextmanager
def dealer(address: str, **options: Any) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    sock = context.socket(zmq.DEALER)
    sock.linger, sock.sndtimeo, sock.sndhwm = 0, 5000, 200
    for name, value in options.items():
        setattr(sock, name, value)
    sock.connect(address)
    try:
        yield sock
    finally:
        time.sleep(0.2)  # what is on its way arrives
        context.destroy(linger=0)


def unknown_keys(address: str, server_key: bytes, count: int) -> None:
    for _ in range(count):
        public, secret = zmq.curve_keypair()
        known = {"curve_serverkey": server_key, "curve_publickey": public, "curve_secretkey": secret}
        with dealer(
            address, **chance.choice([known, {}, {"plain_username": public, "plain_password": b"word"}])
        ) as sock:
            with contextlib.suppress(zmq.Again):
                sock.send_multipart([b"let me in"], zmq.DONTWAIT)
            sent["unknown key"] += 1


def in_between(bulk: str, name: bytes, tokens: list[bytes], packets: list[list[bytes]], count: int) -> None:
    """A man in the middle: uses tokens that it kept from the head, and packets that it overheard."""
    for token in tokens:
        options = {"plain_username": name, "plain_password": token}
        with dealer(bulk, **options) as sock, contextlib.suppress(zmq.Again):
            _abuse(sock, packets, count // len(tokens))
            sock.send_multipart([*packets[0][:2], bytes(4 << 20)])  # its connection is cut
            sent["oversized"] += 1


def _abuse(sock: zmq.Socket[bytes], packets: list[list[bytes]], count: int) -> None:
    for i in range(count):
        frames, kind = list(chance.choice(packets)), "replayed segment"
        if i % 100:  # large ones now and then only
            place, kind = chance.randrange(3), "forged segment"
            frames[2] = frames[2][: chance.choice([0, 16, 100, len(frames[2])])]
            if chance.random() < 0.8:  # what comes next, or soon
                seq = int.from_bytes(frames[0][1:9], "little") + chance.randrange(1, 3000)
                frames[0] = frames[0][:1] + seq.to_bytes(8, "little") + frames[0][9:]
            frames[place] = mutated(chance, frames[place])
            if chance.random() < 0.1:
                frames, kind = frames[: chance.randrange(1, 3)], "truncated"
            if chance.random() < 0.01:
                frames, kind = [chance.randbytes(5) for _ in range(200)], "many frames"
        sock.send_multipart(frames)
        sent[kind] += 1


def mad_node(control: str, server_key: bytes, keys: list[bytes], messages: list[bytes], count: int) -> None:
    """A malicious node daemon with a key of its own."""
    public, secret = keys
    options = {"curve_serverkey": server_key, "curve_publickey": public, "curve_secretkey": secret}
    with dealer(control, routing_id=b"ffffffffffffffffnode", **options) as sock, contextlib.suppress(zmq.Again):
        for i in range(count):
            message = chance.choice(messages)
            sock.send_multipart([message if i % 2 else mutated(chance, message, messages)])
            sent["node message"] += 1


def main() -> None:
    known = json.loads(sys.stdin.read(), object_hook=_bytes)
    addresses = [address for address in (known["control"], known.get("bulk")) if address]
    server_key, scale = known["server_key"], known["scale"]
    attacks: list[Callable[[], None]] = [
        lambda: strangers(addresses, scale // 20),
        lambda: unknown_keys(known["control"], server_key, 8),
    ]
    for name, tokens, packets in known.get("overheard", []):
        attacks.append(functools.partial(in_between, addresses[1], name, tokens, packets, scale))
        attacks.append(functools.partial(guessers, addresses[1], [name], scale // 100))
    if "node" in known:
        attacks.append(lambda: mad_node(known["control"], server_key, known["node"], known["node_messages"], scale))
    with half_open(addresses, 200):
        threads = [threading.Thread(target=attack, daemon=True) for attack in attacks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(f"FARSTEP_FUZZ_SEED={SEED}", file=sys.stderr)
    print(json.dumps(sent))


def _bytes(value: dict[str, Any]) -> Any:
    return base64.b64decode(value["bytes"]) if value.keys() == {"bytes"} else value


def told(known: dict[str, Any]) -> bytes:
    """The JSON that `main` reads."""
    return json.dumps(known, default=lambda text: {"bytes": base64.b64encode(bytes(text)).decode()}).encode()


if __name__ == "__main__":
    main()
