"""The layout of parameters in shared memory, and a digest to check that head and worker use the same layout."""

from __future__ import annotations

import hashlib

from farstep.agents.parameters import ParameterSchema
from farstep.errors import AgentError

# The shared memory starts with one word: the current version and the index of its buffer. The buffers follow; each
# buffer starts with its version. The version on the GPU (see `head/weights/direct.py`) may be newer.
PAGE = 4096
HEADER = 64
NEWEST = 1
"""Word: the newest version, in a buffer or on the GPU."""
ON_GPU = 2
"""Word: the version on the GPU plus 1; 0: none."""
IS_RETIRED = 3
"""Word: whether the memory on the GPU may no longer be opened."""
GPU_LOCK = 2**20
"""Byte of the file that is locked while the memory on the GPU is read or written."""
OPENED_LOCK = GPU_LOCK + 1
"""Acting server `k` locks byte `OPENED_LOCK + k` of the file while it has the memory on the GPU open."""
OPENED_BYTES = 2**20
_INDEX_BITS = 16


def stride(nbytes: int) -> int:
    """The distance in bytes between two parameter buffers."""
    return -(-(HEADER + nbytes) // PAGE) * PAGE


def pack_word(version: int, index: int) -> int:
    """Pack version and buffer index into one word, so that readers get both atomically."""
    return version << _INDEX_BITS | index


def unpack_word(word: int) -> tuple[int, int]:
    return word >> _INDEX_BITS, word & ((1 << _INDEX_BITS) - 1)


def digest(schema: ParameterSchema) -> str:
    """A hash of the names, shapes and dtypes of parameters; a buffer contains only their values."""
    return hashlib.sha256(repr((schema.names, schema.shapes, schema.sources, schema.dtypes)).encode()).hexdigest()


def check_digest(theirs: str, schema: ParameterSchema) -> None:
    """Raise `AgentError` if the worker's copy of the agent has other parameters than the learner's."""
    if theirs != digest(schema):
        raise AgentError(
            f"the worker's copy of the agent has the parameters {', '.join(schema.names[:8])} ({schema.nbytes} bytes) "
            "in another form or order than the learner's; get_parameters() must return the same arrays on both. Create "
            "all of them in __init__, always in the same order."
        )
