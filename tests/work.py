"""Measure work by counting instructions and bytes instead of time."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

from tests.line_coverage import inserted


def instructions(call: Callable[[], object]) -> int:
    """Number of bytecode instructions that the call executes, except those of `make coverage`. A call into C is one."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        others = inserted(frame.f_code)

        def trace_inside(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal count
            count += event == "opcode" and frame.f_lasti not in others
            return trace_inside

        return trace_inside

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def peak_bytes(call: Callable[[], object]) -> int:
    """Peak of the bytes that the call allocates."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
