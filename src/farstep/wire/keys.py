"""Keys of one run: a CURVE pair for the head and one for every worker it admits."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

import zmq

_DIGITS = 16


@dataclass(frozen=True)
class KeyPair:
    """A CURVE pair, Z85-encoded; the secret half never appears in a repr."""

    public: bytes
    secret: bytes

    @classmethod
    def fresh(cls) -> KeyPair:
        return cls(*zmq.curve_keypair())

    def derived(self, purpose: bytes) -> bytes:
        """32 bytes that only who has the secret half can know, others for each purpose."""
        return hashlib.blake2b(self.secret, digest_size=32, person=b"farstep-" + purpose).digest()

    @property
    def route(self) -> bytes:
        """What a worker's connections are called. Nobody else knows it: whoever connects by a name gets what is sent to
        it."""
        return self.derived(b"route").hex()[:32].encode()

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public.decode()})"


class Tokens:
    """What is shown where others may listen: each is good once, and nobody can tell the next one from those before."""

    def __init__(self, pair: KeyPair) -> None:
        self._key, self._last = pair.derived(b"token"), 0

    def fresh(self) -> bytes:
        self._last += 1
        return self._token(self._last)

    def accepts(self, token: bytes) -> bool:
        """Whether it is a token, later than all that were accepted."""
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
