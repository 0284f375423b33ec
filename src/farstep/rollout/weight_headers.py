"""The layout of parameters in shared memory, and the digest by which head and worker check that they agree on it."""

from __future__ import annotations

import hashlib

from farstep.agents.parameters import ParameterSchema
from farstep.errors import AgentError

# The shared memory of parameters: one word naming version and buffer, then the buffers, each with its version.
PAGE = 4096
HEADER = 64
_INDEX_BITS = 16


def stride(nbytes: int) -> int:
    """Distance between two parameter buffers."""
    return -(-(HEADER + nbytes) // PAGE) * PAGE


def pack_word(version: int, index: int) -> int:
    """Version and buffer in one word, so that they are read together."""
    return version << _INDEX_BITS | index


def unpack_word(word: int) -> tuple[int, int]:
    return word >> _INDEX_BITS, word & ((1 << _INDEX_BITS) - 1)


def digest(schema: ParameterSchema) -> str:
    """What must be the same on both sides: a buffer says nothing of what is where in it."""
    return hashlib.sha256(repr((schema.names, schema.shapes, schema.sources, schema.dtypes)).encode()).hexdigest()


def check_digest(theirs: str, schema: ParameterSchema) -> None:
    """Refuse an agent whose copy here has other parameters than the learner's."""
    if theirs != digest(schema):
        raise AgentError(
            f"the worker's copy of the agent has the parameters {', '.join(schema.names[:8])} ({schema.nbytes} bytes) "
            "in another form or order than the learner's; get_parameters() must return the same arrays on both. Make "
            "all of them in __init__, always in the same order."
        )
