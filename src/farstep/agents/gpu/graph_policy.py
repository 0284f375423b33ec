"""A policy on the GPU that replays CUDA graphs of `act`, for a few batch sizes.

A batch is padded to one of these sizes and copied to pinned host memory. The graph copies it from there to the GPU, and
the outputs back; the host waits once per batch. While a batch runs, the next one may be launched: one stream orders
their replays, and each batch in flight has a graph and pinned memory of its own. Weights are loaded in place, so graphs
stay valid.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from farstep.agents.parameters import as_array
from farstep.agents.policy import (
    MAX_IN_FLIGHT,
    UNPICKLABLE,
    Launched,
    Policy,
    constants_of,
    log,
    mapping_of,
    same_randomness,
)
from farstep.core import Array, Nested
from farstep.errors import described
from farstep.schema import flat, map_leaves

if TYPE_CHECKING:
    from farstep.agents.gpu.cuda_graphs import CudaGraphs

GRAPHS = "CUDA graphs"
"""`Policy.note` of an agent whose `act` was captured."""
_CLEARLY_FASTER = 0.95
"""A batch is padded to a larger size if that takes less than this share of the time."""


@functools.cache
def padded_size(rows: int) -> int:
    """Return the size to which a batch is padded: a multiple of four, at least 8, and four sizes per power of two.

    Above 16 rows, these are at most a quarter more rows. Fewer rows take about as long as 8.
    """
    step = max(4, 1 << max(0, rows.bit_length() - 3))
    return max(8, -(-rows // step) * step)


def with_graphs(policy: Policy, max_batch: int) -> Policy:
    """Return a policy with the same agent that replays CUDA graphs; the policy itself if it is not on a GPU."""
    if policy.device is None:
        return policy
    from farstep.agents.gpu.cuda_graphs import CudaGraphs

    return GraphPolicy(policy.agent, policy.slots, CudaGraphs(), max_batch)


class GraphPolicy(Policy):
    """Captures `act` for each padded batch size when it first occurs, and compares the graphs with `act`.

    A batch is padded to a larger size if that is faster: libraries such as cuBLAS have slow kernels for some sizes.

    Args:
        agent: A torch module. It is moved to the GPU.
        slots: As in `Policy`.
        cuda: Captures graphs.
        max_batch: Largest batch size to capture.
    """

    def __init__(self, agent: Any, slots: Array | None, cuda: CudaGraphs, max_batch: int) -> None:
        super().__init__(agent, "eager", False, slots)
        self.device = cuda.device
        self._torch.nn.Module.to(agent, cuda.device)
        self._cuda, self._max_batch = cuda, max_batch
        self._graphs: dict[int, _SizeGraphs] = {}
        self._unchecked: set[int] = set()
        """Captured sizes that have not acted since the last load of weights."""
        self._faster: dict[int, int] = {}
        """For captured sizes, the larger size that is faster, if there is one."""
        self._addresses: list[int] = []

    def __call__(self, obs: Nested, state: Nested, episode_start: Any, rng: Sequence[Any] | None) -> dict[str, Any]:
        return self.launch(obs, state, episode_start, rng).wait()

    def launch(self, obs: Nested, state: Nested, episode_start: Any, rng: Sequence[Any] | None) -> Launched:
        rows = len(episode_start)
        if self.note == GRAPHS and rows <= self._max_batch:
            size, arguments = self._size_for(rows), self._inputs(obs, state, episode_start)
            if size not in self._graphs or size in self._unchecked:
                self._prepare(size, arguments)
            if (graphs := self._graphs.get(size)) is not None:
                return next(graphs.following).start(arguments, rows)
        out = super().__call__(obs, state, episode_start, rng)
        return Launched(lambda: out)

    @property
    def overlaps(self) -> bool:
        return self.note == GRAPHS

    def accelerate(self, obs: Nested, state: Nested, episode_start: Any) -> None:
        """Capture `act` for batches of this size. If this is not possible, log the reason and stay eager."""
        if self.wants_rng:
            self._give_up("act takes a generator per slot")
            return
        self.note, self._constants = GRAPHS, constants_of(self.agent)
        self._addresses = self._current_addresses()
        if not self._constants:
            self._give_up(UNPICKLABLE)
            return
        if len(episode_start) <= self._max_batch:
            self._prepare(self._size_for(len(episode_start)), self._inputs(obs, state, episode_start))

    def check_after_load(self) -> None:
        """Have each graph compared with `act` before its next use. Drop all graphs if tensors were replaced."""
        if self.note != GRAPHS:
            return
        addresses, constants = self._current_addresses(), constants_of(self.agent)
        if (addresses, constants) != (self._addresses, self._constants):
            self._forget_graphs()
            self._addresses, self._constants = addresses, constants
        self._unchecked = set(self._graphs)

    def _size_for(self, rows: int) -> int:
        size = min(padded_size(rows), self._max_batch)
        return self._faster.get(size, size)

    def _inputs(self, obs: Nested, state: Nested, episode_start: Any) -> tuple[Nested, ...]:
        """Return all arguments of `act`, positional ones first."""
        arguments = self._arguments(obs, state, episode_start)
        return (*arguments, self._slot_array(len(episode_start))) if self._wants_slots else arguments

    def _call_act(self, inputs: tuple[Nested, ...]) -> Nested:
        if self._wants_slots:
            return self.agent.act(*inputs[:-1], slots=inputs[-1])
        return self.agent.act(*inputs)

    def _prepare(self, size: int, arguments: tuple[Nested, ...]) -> None:
        """Make the graph of a size, or compare it with `act` after a load of weights. Stay eager if neither works."""
        self._unchecked.discard(size)
        try:
            with same_randomness(), self._torch.no_grad():
                if size in self._graphs and self._mismatch(next(self._graphs[size].following)) is None:
                    return
                graphs = self._captured(map_leaves(lambda leaf: _padded(leaf, size), arguments))
                reason = graphs if isinstance(graphs, str) else next(filter(None, map(self._mismatch, graphs)), None)
                if isinstance(graphs, str) or reason is not None:
                    self._give_up(str(reason))
                    return
                seconds = self._cuda.seconds(lambda: graphs[0].start(graphs[0].example, size).wait())
                self._graphs[size] = _SizeGraphs(itertools.cycle(graphs), seconds)
        except Exception as error:  # fall back to `act` itself
            self._give_up(f"a graph failed: {described(error)}")
            return
        self._faster = faster_sizes({size: graphs.seconds for size, graphs in self._graphs.items()})

    def _forget_graphs(self) -> None:
        self._graphs.clear()
        self._faster.clear()

    def _give_up(self, reason: str) -> None:
        self._forget_graphs()
        self.note = f"eager: {reason}"
        log.warning("act is called without CUDA graphs, since %s", reason)

    def _captured(self, example: tuple[Nested, ...]) -> list[_Graph] | str:
        """Return a graph of `act` for each batch in flight, or the reason why there are none."""
        from farstep.agents.tape.state import difference, python_state

        torch = self._torch
        inputs = map_leaves(lambda leaf: torch.from_numpy(np.array(leaf)).to(self.device), example)
        graphs = [_Graph(self._cuda, inputs, example) for _ in range(MAX_IN_FLIGHT)]
        try:
            self._call_act(inputs)  # creates lazily initialized modules and caches
            state, generators = python_state(self.agent.act), _host_generators()
            changes = [tensor._version for tensor in self._held_tensors()]
            for graph in graphs:
                graph.capture(lambda: self._call_act(inputs))
        except _NotOnGpu:
            return "act returns something other than tensors on the GPU with one row per environment"
        except Exception as error:
            return f"act cannot be captured: {described(error)}"
        if changed := difference(state, python_state(self.agent.act)):
            return f"act changes {changed}, but a replay would not change it"
        if [tensor._version for tensor in self._held_tensors()] != changes:
            return "act changes a parameter or another tensor of the agent"
        if _host_generators() != generators:
            return "act draws from Python's or NumPy's global random generator"
        return graphs

    def _mismatch(self, graph: _Graph) -> str | None:
        """Compare a graph with `act`, on the same rows and random numbers; return the difference, or None."""
        from farstep.agents.tape.nested import equal_results

        with same_randomness():
            eager = map_leaves(as_array, self._call_act(self._tensors(graph.example)))
        found = self._replayed(graph, graph.example)
        if difference := equal_results(mapping_of(eager), found):
            return f"a graph differs from act: {difference}"
        kept = graph.size // 2
        padded = map_leaves(lambda leaf: np.concatenate([leaf[:kept], np.zeros_like(leaf[kept:])]), graph.example)
        parts = [map_leaves(lambda leaf: leaf[:kept], out) for out in (found, self._replayed(graph, padded))]
        if difference := equal_results(*parts):
            return f"act's result for a row depends on other rows of the batch: {difference}"
        return None

    def _replayed(self, graph: _Graph, arguments: tuple[Nested, ...]) -> dict[str, Any]:
        with same_randomness():
            out = graph.start(arguments, graph.size).wait()
        return {name: map_leaves(np.array, value) for name, value in out.items()}

    def _current_addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._held_tensors()]

    def _held_tensors(self) -> list[Any]:
        """Parameters, buffers and other tensors that are attributes of the agent's modules."""
        module = self._torch.nn.Module  # the agent may override these methods
        attributes = [value for part in module.modules(self.agent) for value in vars(part).values()]
        others = [value for value in attributes if isinstance(value, self._torch.Tensor)]
        return [*module.parameters(self.agent), *module.buffers(self.agent), *others]


class _NotOnGpu(Exception):
    """`act` returned something that a graph cannot copy to the host."""


class _Graph:
    """A captured call of `act` for one batch size, with the copies between pinned host memory and the GPU.

    Args:
        cuda: Captures it.
        inputs: The arguments of `act` on the GPU. Graphs of one size share them: the stream runs one at a time.
        example: Arguments with this number of rows.
    """

    def __init__(self, cuda: CudaGraphs, inputs: Nested, example: tuple[Nested, ...]) -> None:
        self._cuda, self.example = cuda, example
        self.size = len(next(flat(example)))
        self._inputs = [(tensor.detach(), cuda.pinned(tensor)) for tensor in flat(inputs)]
        """The inputs on the GPU and on the host."""
        self._input_arrays = [on_host.numpy() for _, on_host in self._inputs]
        for array, leaf in zip(self._input_arrays, flat(example), strict=True):
            array[...] = leaf
        self._copied = cuda.event()
        """The end of the copy of the outputs, until which nothing here may be read or overwritten."""

    def capture(self, act: Callable[[], Nested]) -> None:
        """Capture a call of `act` on the inputs. Raise `_NotOnGpu` if it returns anything else than rows on the GPU."""
        from farstep.agents.tape.unread_array import tensor_of

        outputs: list[Any] = []

        def call() -> Nested:
            for on_gpu, on_host in self._inputs:
                on_gpu.copy_(on_host, non_blocking=True)
            result = map_leaves(tensor_of, act())
            leaves = [self._checked(leaf) for leaf in flat(result)]
            if not outputs:  # in a call before the capture, during which no pinned memory can be allocated
                outputs.extend(self._cuda.pinned(leaf) for leaf in leaves)
            for on_host, leaf in zip(outputs, leaves, strict=True):
                on_host.copy_(leaf.detach(), non_blocking=True)
            return result

        self._replay, result = self._cuda.capture(call)
        arrays = iter([on_host.numpy() for on_host in outputs])
        self._outputs = map_leaves(lambda _: next(arrays), result)

    def _checked(self, leaf: Any) -> Any:
        device = getattr(getattr(leaf, "device", None), "type", None)  # arrays of NumPy have a `device`, too
        if device != self._cuda.device or leaf.shape[:1] != (self.size,):
            raise _NotOnGpu
        return leaf

    def start(self, arguments: tuple[Nested, ...], rows: int) -> Launched:
        """Start to compute the result for some rows.

        Returns:
            The call. Its outputs are views of memory that the next start of this graph overwrites.
        """
        for array, leaf in zip(self._input_arrays, flat(arguments), strict=True):
            array[:rows] = leaf
        self._replay()
        self._copied.record()
        return Launched(functools.partial(self._wait, rows), self._copied.query)

    def _wait(self, rows: int) -> dict[str, Any]:
        self._copied.synchronize()
        return mapping_of(map_leaves(lambda array: array[:rows], self._outputs))


@dataclass
class _SizeGraphs:
    """The graphs of one batch size."""

    following: Iterator[_Graph]
    """The graphs in turn, one for each batch in flight."""
    seconds: float
    """How long a replay takes."""


def faster_sizes(seconds: Mapping[int, float]) -> dict[int, int]:
    """For each batch size for which a size up to twice as large is clearly faster, the fastest such size.

    Sizes are timed only once, so the bound also limits what an unlucky measurement can cost.

    Args:
        seconds: How long a batch of each size takes.
    """
    found = {}
    for size, own in seconds.items():
        candidates = [other for other in seconds if size <= other <= 2 * size]
        fastest = min(candidates, key=lambda other: (seconds[other], other))
        if seconds[fastest] < _CLEARLY_FASTER * own:
            found[size] = fastest
    return found


def _padded(leaf: Array, size: int) -> Array:
    """Repeat the first row until there are `size` rows."""
    return np.concatenate([leaf, np.repeat(leaf[:1], size - len(leaf), axis=0)])


def _host_generators() -> tuple[object, str]:
    return random.getstate(), str(np.random.get_state())
