"""The header frame of a message: types of its fields, and decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec

from farstep.core import BytesLike
from farstep.errors import WireError
from farstep.wire.codec import Limits

M = TypeVar("M")
Word = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Line = Annotated[str, msgspec.Meta(max_length=1024, pattern=r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029]*\Z")]
"""Text that is safe in one line of a log: without line breaks and terminal control characters."""
Endpoint = Annotated[str, msgspec.Meta(pattern=r"\A(\d{1,5}|tcp://[0-9.]{7,15}:\d{1,5}|ipc://[-@/.\w]{1,200})\Z")]
"""A port on the machine of the head, or a whole address."""
Lines = Annotated[dict[Line, Line], msgspec.Meta(max_length=64)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


def decoded(decoder: msgspec.msgpack.Decoder[M], frames: Sequence[BytesLike]) -> M:
    """Decode the first frame with `decoder`. Raise `WireError` if it is not a valid message."""
    if not frames:
        raise WireError("a message without frames.")
    if len(frames[0]) > Limits.HEADER_BYTES:
        raise WireError(f"a header of {len(frames[0])} bytes; at most {Limits.HEADER_BYTES} are accepted.")
    try:
        return decoder.decode(frames[0])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a farstep message: {error}") from error
