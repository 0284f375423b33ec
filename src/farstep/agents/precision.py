"""A copy of a torch policy whose layers compute in bfloat16 or float16, and its comparison with the float32 policy."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from farstep.agents.divergence import Comparison, comparing_method, why_incomparable
from farstep.agents.parameters import is_tensor, is_torch_module, leaves_of, parameters_of
from farstep.agents.policy import Policy
from farstep.core import Array, Nested
from farstep.errors import AgentError, described
from farstep.schema import Schema, Structure, map_leaves

MAX_DIVERGENCE = 0.01
"""Largest mean divergence between the policy of lower precision and the float32 policy. PPO often ends an update at
about this divergence (`target_kl`)."""
USE_FLOAT32 = "use dtype='float32' in inference"
"""What to do about an agent that a lower precision does not suit."""
_MAX_ROWS = 32
"""Number of observations on which the two policies are compared."""


class ReducedPolicy:
    """A copy of a policy whose layers have weights of lower precision (see `reduce_layers`).

    Args:
        full: The float32 policy, on the CPU. New weights are loaded into it.
        dtype: `bfloat16` or `float16`.
        has_gpu: Whether the copy is on the GPU.

    Raises:
        AgentError: The agent is not a torch module with such layers, or has parameters outside of the module.
    """

    def __init__(self, full: Policy, dtype: str, has_gpu: bool) -> None:
        self._full, self._dtype = full, dtype
        _check_parameters(full.agent, dtype)
        try:
            reduced = copy.deepcopy(full.agent)
        except Exception as error:
            raise AgentError(
                f"inference has dtype={dtype!r}, but {type(full.agent).__name__} cannot be copied: {described(error)}; "
                f"{USE_FLOAT32}."
            ) from error
        self.policy = Policy(reduce_layers(reduced, dtype), "eager", has_gpu, full.slots)
        self._comparisons: list[Comparison] = []

    def start(
        self, obs: Structure, action: Structure, state: Structure, outputs: Schema, example: Mapping[str, Array]
    ) -> None:
        """Compare the two policies for the first time.

        Args:
            obs: The structure of observations.
            action: The structure of actions.
            state: The structure of the recurrent state; empty if the agent has none.
            outputs: Schema of the arrays that `act` returns.
            example: Arrays of a row, with the recurrent state.

        Raises:
            AgentError: The policies differ too much, or cannot be compared.
        """
        agent = self._full.agent
        if not comparing_method(agent, outputs):
            raise AgentError(
                f"inference has dtype={self._dtype!r}, so the policy is compared with its float32 version, but "
                f"{why_incomparable(agent, outputs)}; otherwise {USE_FLOAT32}."
            )
        policies = (self._full, self.policy)
        self._comparisons = [Comparison(policy, obs, action, state or None, outputs) for policy in policies]
        self.check(example)

    def load(self) -> None:
        """Convert the current weights of the float32 policy."""
        pairs = zip(_tensors(self._full.agent), _tensors(self.policy.agent), strict=True)
        for source, target in pairs:
            target.detach().copy_(source.detach())

    def check(self, rows: Mapping[str, Array]) -> None:
        """Compare the two policies on the first of these rows.

        Raises:
            AgentError: They differ too much.
        """
        first = self._comparisons[0]
        some = {name: rows[name][:_MAX_ROWS] for name in first.names}
        full, reduced = (comparison.describe(some) for comparison in self._comparisons)
        if not all(np.isfinite(array).all() for array in full.values()):
            return  # the float32 policy could not act either
        divergence = first.compare(reduced, full)
        if not divergence <= MAX_DIVERGENCE:
            count = len(next(iter(some.values())))
            found = f": {first.note}" if first.note else f" by {divergence:.3g} (mean KL of {count} observations)"
            raise AgentError(
                f"inference has dtype={self._dtype!r}, with which the policy differs from float32{found}; at most "
                f"{MAX_DIVERGENCE:g} is accepted; {USE_FLOAT32}."
            )


def reduce_layers(agent: Any, dtype: str) -> Any:
    """Convert the float32 weights of a module's layers, and return the module.

    Layers with weight matrices, such as `torch.nn.Linear`, then compute in `dtype`, and take and return float32. All
    else stays float32: activation functions, normalization, sampling, and the log-probabilities of sampled actions.

    Raises:
        AgentError: There are no such layers.
    """
    layers = dict.fromkeys(_layers(agent)) if is_torch_module(agent) else {}
    for layer in layers:
        _reduce(layer, dtype)
    if not layers:
        raise AgentError(
            f"inference has dtype={dtype!r}, but {type(agent).__name__} is not a torch module with float32 layers, "
            f"such as torch.nn.Linear; {USE_FLOAT32}."
        )
    return agent


def _check_parameters(agent: Any, dtype: str) -> None:
    """Raise `AgentError` if loaded weights may be in other tensors than those that are converted."""
    if not is_torch_module(agent):
        return  # `reduce_layers` raises for it
    known = {_address(tensor) for tensor in _tensors(agent)}
    for path, leaf in leaves_of(parameters_of(agent)):
        if _address(leaf) not in known:
            raise AgentError(
                f"inference has dtype={dtype!r}, but get_parameters() of {type(agent).__name__} returns {path!r}, "
                "which is not a parameter or buffer of the module itself; return these tensors, e.g. with "
                f"state_dict(), or {USE_FLOAT32}."
            )


def _layers(module: Any) -> Iterator[Any]:
    """The float32 layers of a module that have weight matrices."""
    import torch
    from torch import nn

    kinds = (nn.Linear, nn.Bilinear, nn.Embedding, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
    if isinstance(module, (*kinds, nn.modules.conv._ConvNd)):
        if all(weight.dtype == torch.float32 for weight in nn.Module.parameters(module)):
            yield module
        return
    for child in nn.Module.children(module):
        yield from _layers(child)


def _reduce(layer: Any, dtype: str) -> None:
    """Convert the weights and inputs of a layer to `dtype`, and its outputs to float32."""
    import torch

    reduced = getattr(torch, dtype)

    def converted(value: Nested, to: Any) -> Nested:
        return map_leaves(lambda leaf: leaf.to(to) if is_tensor(leaf) and leaf.is_floating_point() else leaf, value)

    def before(_: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return converted(args, reduced), converted(kwargs, reduced)

    def after(_: Any, args: Any, output: Any) -> Any:
        return converted(output, torch.float32)

    torch.nn.Module.to(layer, reduced)
    torch.nn.Module.register_forward_pre_hook(layer, before, with_kwargs=True)
    torch.nn.Module.register_forward_hook(layer, after)


def _tensors(agent: Any) -> list[Any]:
    """Parameters and buffers of a module."""
    import torch

    # Call torch's own methods: the agent may override them.
    return [*torch.nn.Module.parameters(agent), *torch.nn.Module.buffers(agent)]


def _address(leaf: Any) -> int:
    """Where the memory of a leaf begins; 0 if it has none."""
    if is_tensor(leaf):
        return int(leaf.data_ptr())
    return int(leaf.ctypes.data) if isinstance(leaf, np.ndarray) else 0
