"""A policy on the GPU that replays CUDA graphs of `act`, one for each of a few batch sizes.

A batch is padded to the next of these sizes. It is copied to pinned host memory, from there to the inputs of the graph,
and the outputs back in the same way; the host waits once per batch. While a batch runs, the next one may be launched:
one stream orders their copies and replays, and each has its own pinned memory. Weights are loaded in place, so graphs
stay valid.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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


def padded_size(rows: int) -> int:
    """Return the size to which a batch is padded: four sizes per power of two, so at most a quarter more rows."""
    step = 1 << max(0, rows.bit_length() - 3)
    return -(-rows // step) * step


def with_graphs(policy: Policy, max_batch: int) -> Policy:
    """Return a policy with the same agent that replays CUDA graphs; the policy itself if it is not on a GPU."""
    if policy.device is None:
        return policy
    from farstep.agents.gpu.cuda_graphs import CudaGraphs

    return GraphPolicy(policy.agent, policy.slots, CudaGraphs(), max_batch)


class GraphPolicy(Policy):
    """Captures `act` for each padded batch size when it first occurs, and compares the graph with `act`.

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
        self._graphs: dict[int, _Graph] = {}
        self._unchecked: set[int] = set()
        """Captured sizes that have not acted since the last load of weights."""
        self._addresses: list[int] = []

    def __call__(self, obs: Nested, state: Nested, episode_start: Any, rng: Sequence[Any] | None) -> dict[str, Any]:
        return self.launch(obs, state, episode_start, rng).wait()

    def launch(self, obs: Nested, state: Nested, episode_start: Any, rng: Sequence[Any] | None) -> Launched:
        rows = len(episode_start)
        if self.note == GRAPHS and rows <= self._max_batch:
            size, arguments = self._size_for(rows), self._inputs(obs, state, episode_start)
            if size not in self._graphs or size in self._unchecked:
                self._prepare(size, arguments)
            if (graph := self._graphs.get(size)) is not None:
                return graph.start(arguments, rows)
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
            self._graphs.clear()
            self._addresses, self._constants = addresses, constants
        self._unchecked = set(self._graphs)

    def _size_for(self, rows: int) -> int:
        return min(padded_size(rows), self._max_batch)

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
                if size in self._graphs and self._mismatch(self._graphs[size]) is None:
                    return
                graph = self._captured(map_leaves(lambda leaf: _padded(leaf, size), arguments))
                reason = graph if isinstance(graph, str) else self._mismatch(graph)
        except Exception as error:  # fall back to `act` itself
            self._give_up(f"a graph failed: {described(error)}")
            return
        if isinstance(graph, str) or reason is not None:
            self._give_up(str(reason))
        else:
            self._graphs[size] = graph

    def _give_up(self, reason: str) -> None:
        self._graphs.clear()
        self.note = f"eager: {reason}"
        log.warning("act is called without CUDA graphs, since %s", reason)

    def _captured(self, example: tuple[Nested, ...]) -> _Graph | str:
        """Return a graph of `act`, or the reason why there is none."""
        from farstep.agents.tape.state import difference, python_state

        torch = self._torch
        inputs = map_leaves(lambda leaf: torch.from_numpy(np.array(leaf)).to(self.device), example)
        try:
            self._call_act(inputs)  # creates lazily initialized modules and caches
            state, generators = python_state(self.agent.act), _host_generators()
            changes = [tensor._version for tensor in self._held_tensors()]
            replay, result = self._cuda.capture(lambda: self._call_act(inputs))
        except Exception as error:
            return f"act cannot be captured: {described(error)}"
        if changed := difference(state, python_state(self.agent.act)):
            return f"act changes {changed}, but a replay would not change it"
        if [tensor._version for tensor in self._held_tensors()] != changes:
            return "act changes a parameter or another tensor of the agent"
        if _host_generators() != generators:
            return "act draws from Python's or NumPy's global random generator"
        size = len(next(flat(example)))
        for leaf in flat(result):
            if not isinstance(leaf, torch.Tensor) or leaf.device.type != self.device or leaf.shape[:1] != (size,):
                return "act returns something other than tensors on the GPU with one row per environment"
        return _Graph(self._cuda, replay, example, inputs, result)

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


@dataclass
class _Staged:
    """A tensor on the GPU, and pinned host memory of the same size."""

    on_gpu: Any
    on_host: Any
    array: Array
    """The same memory as `on_host`."""

    @classmethod
    def of(cls, tensor: Any, cuda: CudaGraphs) -> _Staged:
        on_host = cuda.pinned(tensor)
        return cls(tensor.detach(), on_host, on_host.numpy())


class _Staging:
    """Pinned memory for the inputs and outputs of one batch.

    Args:
        cuda: Allocates it.
        inputs, outputs: The tensors of the graph.
        example: The first inputs.
    """

    def __init__(self, cuda: CudaGraphs, inputs: Nested, outputs: Nested, example: tuple[Nested, ...]) -> None:
        self.inputs = [_Staged.of(tensor, cuda) for tensor in flat(inputs)]
        for staged, leaf in zip(self.inputs, flat(example), strict=True):
            staged.array[...] = leaf
        self.outputs = [_Staged.of(tensor, cuda) for tensor in flat(outputs)]
        self.copied = cuda.event()
        """The end of the copy of the outputs, until which nothing here may be read or overwritten."""


class _Graph:
    """A captured call of `act` for one batch size.

    Args:
        cuda: The object that captured it.
        replay: Replays the captured operations.
        example: Arguments with this number of rows.
        inputs: The tensors that the captured call got.
        result: What it returned.
    """

    def __init__(
        self,
        cuda: CudaGraphs,
        replay: Callable[[], None],
        example: tuple[Nested, ...],
        inputs: Nested,
        result: Nested,
    ) -> None:
        self._replay, self.example, self._result = replay, example, result
        self.size = len(next(flat(example)))
        self._stagings = itertools.cycle([_Staging(cuda, inputs, result, example) for _ in range(MAX_IN_FLIGHT)])

    def start(self, arguments: tuple[Nested, ...], rows: int) -> Launched:
        """Start to compute the result for some rows.

        Batches in flight share the inputs and outputs on the GPU: the stream copies the outputs of one batch before the
        inputs of the next one.

        Returns:
            The call. Its outputs are views of memory that the start after the next one overwrites.
        """
        staging = next(self._stagings)
        for staged, leaf in zip(staging.inputs, flat(arguments), strict=True):
            staged.array[:rows] = leaf
            staged.on_gpu.copy_(staged.on_host, non_blocking=True)
        self._replay()
        for staged in staging.outputs:
            staged.on_host.copy_(staged.on_gpu, non_blocking=True)
        staging.copied.record()
        return Launched(partial(self._outputs, staging, rows), staging.copied.query)

    def _outputs(self, staging: _Staging, rows: int) -> dict[str, Any]:
        staging.copied.synchronize()
        outputs = iter(staging.outputs)
        return mapping_of(map_leaves(lambda _: next(outputs).array[:rows], self._result))


def _padded(leaf: Array, size: int) -> Array:
    """Repeat the first row until there are `size` rows."""
    return np.concatenate([leaf, np.repeat(leaf[:1], size - len(leaf), axis=0)])


def _host_generators() -> tuple[object, str]:
    return random.getstate(), str(np.random.get_state())
