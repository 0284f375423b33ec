"""The base of an agent: tensors that never change, such as the frozen weights of a model that is trained by adapters.

An agent names them with a method `base_parameters()`. Workers receive the base once and keep it; later agents with the
same base refer to it by its content hash. Checkpoints have this hash in place of the tensors.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farstep.agents.parameters import is_tensor
from farstep.core import BytesLike
from farstep.errors import AgentError, described
from farstep.wire.channels.memory import map_immutable

_ALIGN = 64
BaseBytes = bytearray | memoryview
"""The base as one writable buffer: a process's own, or a private mapping of memory that it shares with others."""
Reference = tuple[int, tuple[int, ...], Any]
"""What a pickled agent has in place of a tensor of its base: offset in the payload, shape and dtype."""


@dataclass(frozen=True)
class BaseWeights:
    """The base of an agent in the form that is sent to workers."""

    content_hash: str
    payload: bytearray
    references: dict[int, Reference]
    """References by the `id` of each tensor."""


def base_parameters_of(agent: Any) -> Mapping[str, Any]:
    """Call the agent's `base_parameters()`; return an empty mapping if the agent has no such method.

    Raises:
        AgentError: The method raised, or returned something else than torch tensors by name.
    """
    method = getattr(agent, "base_parameters", None)
    if not callable(method):
        return {}
    try:
        found = method()
    except Exception as error:
        raise AgentError(f"base_parameters() of {type(agent).__name__} raised {described(error)}.") from error
    if not isinstance(found, Mapping) or not all(is_tensor(tensor) for tensor in found.values()):
        raise AgentError(
            f"base_parameters() of {type(agent).__name__} returned {type(found).__name__}; expected a mapping of names "
            "to the module's own parameters."
        )
    return found


def base_hash(agent: Any) -> str:
    """Return the content hash of the agent's base; empty if it has none.

    The hash covers the names, shapes, dtypes and values of all tensors.
    """
    digest, parameters = hashlib.sha256(), base_parameters_of(agent)
    for name in sorted(parameters):
        _add(digest, name, parameters[name], _bytes_of(parameters[name]))
    return digest.hexdigest() if parameters else ""


def base_weights(agent: Any) -> BaseWeights | None:
    """Copy the agent's base for its workers; return None if it has none."""
    digest, payload = hashlib.sha256(), bytearray()
    parameters, references = base_parameters_of(agent), dict[int, Reference]()
    for name in sorted(parameters):
        tensor, data = parameters[name], _bytes_of(parameters[name])
        _add(digest, name, tensor, data)
        references[id(tensor)] = (len(payload), tuple(tensor.shape), tensor.dtype)
        payload += data
        payload += bytes(-len(payload) % _ALIGN)
    return BaseWeights(digest.hexdigest(), payload, references) if parameters else None


class BaseWatch:
    """Checks that an agent's base still is what its workers have.

    Args:
        agent: The agent, before its base is read.
    """

    def __init__(self, agent: Any) -> None:
        self._counters = _counters(agent)

    def check(self, agent: Any, content_hash: str) -> None:
        """Raise `AgentError` if the base has changed.

        Writing through torch's `.data` does not change the modification counters, so it is not noticed.

        Args:
            agent: The agent.
            content_hash: Hash of the base that workers have.
        """
        if (counters := _counters(agent)) == self._counters:
            return
        if base_hash(agent) != content_hash:
            raise AgentError(
                f"the base parameters of {type(agent).__name__} have changed since they were sent to workers, which "
                "would act with the old ones. Only adapters and modules in also_train may change; pass a new agent "
                "object for another base."
            )
        self._counters = counters  # for example, the agent was moved to another device


def _counters(agent: Any) -> list[tuple[str, int, int]]:
    """Return address and torch's modification counter of each tensor of the base."""
    tensors = base_parameters_of(agent).items()
    return [(name, t.data_ptr(), 0 if t.is_inference() else t._version) for name, t in tensors]


def _bytes_of(tensor: Any) -> memoryview:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()).cast("B")


def _add(digest: Any, name: str, tensor: Any, data: BytesLike) -> None:
    digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode())
    digest.update(data)


def unpickle_agent(payload: BytesLike, base: BaseBytes) -> Any:
    """Unpickle an agent. Its base parameters use the memory of `base`, so several copies of an agent share one base."""
    return _Unpickler(payload, base).load()


def received_base(nbytes: int, frames: Sequence[BytesLike], fds: Sequence[int]) -> BaseBytes:
    """Return the base that a `SendBase` message brought to a worker.

    Args:
        nbytes: Size of the base, if it is in shared memory.
        frames: The frames after the message.
        fds: Its descriptors; they are closed.
    """
    if not fds:
        return bytearray(frames[0])
    try:
        return map_immutable(fds[0], nbytes, writable=True)
    finally:
        for fd in fds:
            os.close(fd)


class _Unpickler(pickle.Unpickler):
    def __init__(self, payload: BytesLike, base: BaseBytes) -> None:
        super().__init__(io.BytesIO(payload))
        self._base = base
        self._loaded: dict[int, Any] = {}

    def persistent_load(self, pid: Reference) -> Any:
        offset, shape, dtype = pid
        if offset not in self._loaded:
            self._loaded[offset] = self._parameter(offset, shape, dtype)
        return self._loaded[offset]

    def _parameter(self, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
        import torch

        flat = torch.frombuffer(self._base, dtype=dtype, count=math.prod(shape), offset=offset)
        return torch.nn.Parameter(flat.reshape(shape), requires_grad=False)
