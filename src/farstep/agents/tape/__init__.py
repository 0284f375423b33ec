"""A policy's `act`, recorded once as a tape of operations and replayed by one straight-line function.

For a small network on CPU an eager call is almost all framework: 560 us where the arithmetic takes 60. Here
one call is recorded below autograd as a list of ATen operations; those that only fed validation are dropped,
the rest become the lines of a generated function (`Program.source`): NumPy where `lowering` knows how, else
the recorded operation itself.

    act ── recording: Tape of Ops ── passes ── source: a Writer's lines, by lowering ── Program

The tensors that were recorded are kept, and are the buffers of the replay. So a view needs no line at all,
being a view of the same memory still; aliasing and in-place writes are those of the eager call; and a
parameter is read where it lives, so that new weights loaded in place are seen without recording again.

Eager is always right, so whatever could make a replay differ raises `Untraceable`: values that leave for
Python, inputs or parameters that are changed, state or random numbers of Python's, two calls that do not run
the same operations, and at last a replay that does not give what the eager calls gave. What cannot be seen is
a Python attribute (a temperature, train or eval) that someone changes later: it is part of the recording.
"""

from __future__ import annotations

from farstep.agents.tape.errors import Untraceable
from farstep.agents.tape.nested import equal_results
from farstep.agents.tape.program import Program, compile_act

__all__ = ["Program", "Untraceable", "compile_act", "equal_results"]
