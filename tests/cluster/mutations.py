"""Mutations of valid messages for the fuzz tests."""

from __future__ import annotations

import random
from collections.abc import Sequence

INTERESTING = [0, 1, 2, 0x7F, 0x80, 0x90, 0xC1, 0xC4, 0xC7, 0xDC, 0xDD, 0xDF, 0xFF]
"""Among them where msgpack says that something long follows."""


def mutated(chance: random.Random, valid: bytes, others: Sequence[bytes] = ()) -> bytes:
    """A few random changes to a valid message; sometimes only noise."""
    if chance.random() < 0.03:
        return chance.randbytes(chance.randrange(64))
    text = bytearray(valid)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        place = chance.randrange(len(text) + 1)
        match chance.randrange(7):
            case 0 if place < len(text):
                text[place] ^= 1 << chance.randrange(8)
            case 1 if place < len(text):
                text[place] = chance.choice(INTERESTING)
            case 2:
                del text[place:]
            case 3:
                text[place:place] = chance.randbytes(chance.randrange(9))
            case 4:
                text[place : place + 8] = chance.choice([b"\xff" * 8, b"\0" * 8, b"\0" * 7 + b"\x80"])
            case 5:
                text += text[place:]
            case 6 if others:
                other = chance.choice(others)
                text[place:] = other[chance.randrange(len(other) + 1) :]
    return bytes(text)
