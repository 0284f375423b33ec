"""Records a policy's `act` once as a tape of operations, and replays the tape with one generated function.

For a small network on the CPU, most of an eager call is framework overhead: the call takes 560 us, its arithmetic only
60 us. This package records one call below autograd as a list of ATen operations. It drops operations that only
validate, and writes the others as lines of a function (`Program.source`): NumPy code if `lowering` has a rule for the
operation, otherwise a call of the recorded operation.

    act ── recording: Tape of Ops ── passes ── source: lines by a Writer and lowering ── Program

The recorded tensors serve as the buffers of the replay. Views therefore need no lines, and aliasing and in-place writes
work as in the eager call. Parameters are read in place, so new weights that are loaded in place take effect without
another recording.

The eager call is the reference. Anything that could make a replay differ from it raises `Untraceable`: values read into
Python, changed inputs or parameters, Python state, Python random numbers, or two calls that run different operations. A
final check compares a replay with eager calls. This package does not detect later changes of Python attributes (a
temperature, train or eval mode), because their values are part of the recording.
"""

from __future__ import annotations

from farstep.agents.tape.errors import Untraceable
from farstep.agents.tape.nested import equal_results
from farstep.agents.tape.program import Program, compile_act

__all__ = ["Program", "Untraceable", "compile_act", "equal_results"]
