"""Keys of one run: a CURVE pair for the head and one for every worker it admits."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import zmq


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
    def token(self) -> bytes:
        """To be shown where what is shown may be overheard."""
        return self.derived(b"token").hex().encode()

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public.decode()})"
