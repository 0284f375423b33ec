"""Keys of one run: a CURVE pair for the head and one for every worker it admits."""

from __future__ import annotations

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

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public.decode()})"
