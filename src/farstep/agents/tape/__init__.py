"""A policy's `act`, recorded once as a tape of operations and replayed by one straight-line function.

For a small network on the CPU, most of an eager call is framework overhead: 560 us where the arithmetic takes 60. Here
one call is recorded below autograd as a list of ATen operations. Operations that are only used for validation are
dropped; the others become lines of a generated function (`Program.source`): NumPy if `lowering` has a rule for the
operation, otherwise the recorded operation itself.

    act ── recording: Tape of Ops ── passes ── source: lines by a Writer and lowering ── Program

The recorded tensors are kept and serve as buffers of the replay. A view therefore needs no line, since it still views
the same memory; aliasing and in-place writes are the same as in the eager call; and parameters are read in place, so
that new weights loaded in place take effect without another recording.

The eager call is the reference, so anything that could make a replay differ raises `Untraceable`: values read into
Python, changed inputs or parameters, Python state or Python random numbers, two calls that do not run the same
operations, and finally a replay whose result differs from the eager calls. Later changes of Python attributes (a
temperature, train or eval mode) are not detected here: their values are part of the recording.
"""

from __future__ import annotations

from farstep.agents.tape.errors import Untraceable
from farstep.agents.tape.nested import equal_results
from farstep.agents.tape.program import Program, compile_act

__all__ = ["Program", "Untraceable", "compile_act", "equal_results"]
