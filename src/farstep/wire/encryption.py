"""Bulk data under a key that both sides got over the authenticated channel: AES-GCM, which CPUs do in hardware."""

from __future__ import annotations

import struct
from enum import IntEnum

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from farstep.core import BytesLike
from farstep.errors import WireError

TAG_BYTES = 16
SEGMENTS = 1 << 20
"""Of one message, at most."""


class Side(IntEnum):
    """Who sealed it: each side counts its own messages, under one key."""

    HEAD = 1
    WORKER = 2


class Cipher:
    """Seals what one side sends, opens what the other sent.

    A nonce is the sender, the number of its message and the segment's place in that: never the same for two different
    texts, since a key belongs to one incarnation of one worker and a message that is sent again is the same text.
    """

    def __init__(self, key: bytes, side: Side) -> None:
        self._cipher = AESGCM(key)
        self._own, self._other = side, Side.HEAD if side is Side.WORKER else Side.WORKER

    def seal(self, seq: int, index: int, header: bytes, text: BytesLike, into: memoryview) -> None:
        """Write it to `into`, which is longer by `TAG_BYTES`."""
        self._cipher.encrypt_into(_nonce(self._own, seq, index), text, header, into)

    def open(self, seq: int, index: int, header: bytes, sealed: BytesLike, into: memoryview) -> None:
        """Write what was sealed to `into`, which has its length."""
        try:
            self._cipher.decrypt_into(_nonce(self._other, seq, index), sealed, header, into)
        except (InvalidTag, ValueError) as error:
            raise WireError("a segment that was not sealed by its sender, or was changed on the way.") from error


def _nonce(side: Side, seq: int, index: int) -> bytes:
    if not 0 <= index < SEGMENTS or not 0 <= seq < 1 << 44:
        raise WireError("a segment with an impossible number.")
    return struct.pack(">IQ", side, seq * SEGMENTS + index)
