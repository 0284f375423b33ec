"""The keys of a run: CURVE pairs for the head and each admitted worker, and keys and tokens derived from them."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

import zmq

_DIGITS = 16


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair, Z85-encoded; `repr` does not show the secret key."""

    public: bytes
    secret: bytes

    @classmethod
    def fresh(cls) -> KeyPair:
        return cls(*zmq.curve_keypair())

    def derived(self, purpose: bytes) -> bytes:
        """A key of 32 bytes, derived from the secret key; different for each purpose."""
        return hashlib.blake2b(self.secret, digest_size=32, person=b"farstep-" + purpose).digest()

    @property
    def route(self) -> bytes:
        """The prefix of the routing ids of a worker's connections.

        It is secret, because ZeroMQ delivers messages to any connection that claims the routing id.
        """
        return self.derived(b"route").hex()[:32].encode()

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public.decode()})"


class Tokens:
    """One-time tokens for an unencrypted connection. Each token is valid once, and used tokens do not reveal the next.

    The worker makes tokens (`fresh`). The head has the same key pair and checks them (`accepts`).
    """

    def __init__(self, pair: KeyPair) -> None:
        self._key, self._last = pair.derived(b"token"), 0

    def fresh(self) -> bytes:
        self._last += 1
        return self._token(self._last)

    def accepts(self, token: bytes) -> bool:
        """Whether the token is genuine and newer than all accepted tokens. If so, it counts as used from now on."""
        try:
            number = int(token[:_DIGITS], 16)
        except ValueError:
            return False
        if number <= self._last or not hmac.compare_digest(self._token(number), token):
            return False
        self._last = number
        return True

    def _token(self, number: int) -> bytes:
        shown = f"{number:0{_DIGITS}x}".encode()
        return shown + hashlib.blake2b(shown, key=self._key, digest_size=32).hexdigest().encode()
