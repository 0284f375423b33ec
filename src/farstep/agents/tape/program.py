"""Compiles a function into a program: record it twice, generate the source, compare with eager calls."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farstep.agents.tape.errors import Untraceable, untraceable_if_failing
from farstep.agents.tape.nested import arrays_of, equal_results, static_inputs
from farstep.agents.tape.recording import Tape
from farstep.agents.tape.source import write_source
from farstep.agents.tape.state import difference, python_state


class Program:
    """A recorded call as one function from NumPy arrays to NumPy arrays.

    Results are views of buffers that the next call overwrites. Call it from one thread at a time.
    """

    __slots__ = ("_context", "_function", "_outside", "source")

    def __init__(self, source: str, names: dict[str, Any], outside: list[Tensor]) -> None:
        exec(compile(source, "<farstep program>", "exec"), names)
        self.source = source
        self._function = names["act"]
        # Silence NumPy's floating-point warnings, because torch has none. Since NumPy 2.0 the error state is a context
        # variable, so setting it once suffices; entering errstate in each call would cost 8 us.
        self._context = copy_context()
        if np.lib.NumpyVersion(np.__version__) < "2.0.0":
            self._function = np.errstate(all="ignore")(self._function)
        else:
            self._context.run(np.seterr, all="ignore")
        self._outside = [(tensor, tensor.data_ptr()) for tensor in outside]

    def __call__(self, *args: Any) -> Any:
        return self._context.run(self._function, *args)

    def is_current(self) -> bool:
        """Return whether all parameters are still at the recorded addresses; False after `p.data = ...`."""
        return all(tensor.data_ptr() == address for tensor, address in self._outside)


def compile_act(function: Callable[..., Any], *examples: Any) -> Program:
    """Record a function and compile a program that replays it.

    The function is called four times, without grad; torch's random state is restored afterwards.

    Args:
        function: The function, e.g. `agent.act`.
        examples: Example arguments: tensors or arrays, possibly nested. The program supports only their shapes.

    Returns:
        The program.

    Raises:
        Untraceable: A replay could differ from an eager call.
    """
    start = torch.get_rng_state()
    with torch.inference_mode(False), torch.no_grad():
        try:
            function(*static_inputs(examples))  # warm-up: creates lazily initialized modules and caches
            seeds = [torch.get_rng_state()]
            expected = [arrays_of(function(*static_inputs(examples)))]
            tapes, before = [], python_state(function)
            with untraceable_if_failing("a recording"):
                for _ in range(2):
                    seeds.append(torch.get_rng_state())
                    tapes.append(Tape(function, static_inputs(examples)))
                    expected.append(tapes[-1].expected)
                if changed := difference(before, python_state(function)):
                    raise Untraceable(f"act changes {changed}, but a replay would not change it")
                tapes[0].check_same(tapes[1])
                source, names = write_source(tapes[0], function)
                outside = [tensor for tensor, _ in tapes[0].outside.values()]
                program = Program(source, names, outside)
            for seed, result in zip(seeds, expected, strict=True):
                torch.set_rng_state(seed)
                with untraceable_if_failing("a replay"):
                    replayed = program(*arrays_of(static_inputs(examples)))
                # The tolerance is loose, because densities near the edge of their support amplify rounding.
                if why := equal_results(result, replayed, tolerance=1e-3):
                    raise Untraceable(f"the result of a replay differs from that of the eager call: {why}")
        finally:
            torch.set_rng_state(start)
    return program
