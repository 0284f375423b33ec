"""Authenticated encryption of bulk data with AES-GCM, which most CPUs accelerate in hardware.

Both sides derive the key from the worker's key pair.
"""

from __future__ import annotations

import struct
from enum import IntEnum

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from farstep.core import BytesLike
from farstep.errors import WireError

TAG_BYTES = 16
SEGMENTS = 1 << 20
"""Maximum number of segments per message."""


class Side(IntEnum):
    """The sender of a segment. Both sides share a key, and each side counts its own messages."""

    HEAD = 1
    WORKER = 2


class Cipher:
    """Encrypts the segments that one side sends (`seal`); decrypts and verifies the other side's segments (`open`).

    A nonce consists of the sender, the sequence number of the message and the index of the segment. A nonce is never
    used for two different plaintexts, because a key belongs to one incarnation of one worker, and a resent message is
    unchanged.
    """

    def __init__(self, key: bytes, side: Side) -> None:
        self._cipher = AESGCM(key)
        self._own, self._other = side, Side.HEAD if side is Side.WORKER else Side.WORKER

    def seal(self, seq: int, index: int, header: bytes, text: BytesLike, into: memoryview) -> None:
        """Encrypt `text` into `into`, which must be longer by `TAG_BYTES`. The tag also authenticates `header`."""
        self._cipher.encrypt_into(_nonce(self._own, seq, index), text, header, into)

    def open(self, seq: int, index: int, header: bytes, sealed: BytesLike, into: memoryview) -> None:
        """Decrypt into `into`, which must have the length of the plaintext.

        Raises:
            WireError: The peer did not encrypt this segment, or it was modified.
        """
        try:
            self._cipher.decrypt_into(_nonce(self._other, seq, index), sealed, header, into)
        except (InvalidTag, ValueError) as error:
            raise WireError("a segment that the peer did not encrypt, or that was modified in transit.") from error


def _nonce(side: Side, seq: int, index: int) -> bytes:
    if not 0 <= index < SEGMENTS or not 0 <= seq < 1 << 44:
        raise WireError(f"a segment with index {index} of message {seq}, beyond the largest possible numbers.")
    return struct.pack(">IQ", side, seq * SEGMENTS + index)
