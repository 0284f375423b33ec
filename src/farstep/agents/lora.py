"""Agents that are trained by LoRA adapters (Hu et al. 2021): only the adapters are trained, published and saved.

An adapted linear layer computes `W x + (alpha / r) * B A x`. `W`, `[out, in]`, belongs to the frozen base; `A`,
`[r, in]`, and `B`, `[out, r]`, are the adapter. peft adds the adapters; it is needed only where the agent is made, not
on workers.
"""

from __future__ import annotations

import copy
import copyreg
import sys
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from farstep.errors import AgentError, ConfigError, install_extra

_ADAPTER = "default"


class LoraAgent(nn.Module):
    """A torch agent with adapters; base class of your own agent.

    Before `add_adapters` it is an ordinary agent, so that its weights can be loaded or trained first. For farstep's
    learners, derive from this class and from an agent of theirs: `class Policy(LoraAgent, ActorCritic)`.

    Example:
        >>> policy = Policy()
        >>> policy.load_state_dict(torch.load("base.pt"))
        >>> policy.add_adapters(targets=("q", "k", "v", "o"), also_train=("critic",))
    """

    _base_names: tuple[str, ...] = ()

    def add_adapters(
        self,
        *,
        r: int = 16,
        alpha: int = 32,
        targets: Sequence[str] = ("q", "k", "v", "o"),
        also_train: Sequence[str] = (),
    ) -> None:
        """Add an adapter to linear layers, and freeze all other parameters. The policy does not change: `B` is 0.

        Args:
            r: Rank of the adapters.
            alpha: Scale of the adapters; they are multiplied by `alpha / r`.
            targets: Last parts of the names of the layers, such as `q` for `blocks.0.attention.q`.
            also_train: Names of submodules that are trained, published and saved as a whole, such as a new critic.

        Raises:
            ConfigError: An option is out of range, a name matches nothing, or peft is not installed.
            AgentError: The agent has adapters, or a target is not a linear layer.
        """
        if self._base_names:
            raise AgentError(f"{type(self).__name__} already has adapters; call add_adapters once per agent.")
        trained = self._submodules(also_train)
        self._check_targets(targets)
        _inject(self, r, alpha, targets)
        for module in trained:
            module.requires_grad_(True)
        self._base_names = tuple(name for name, p in self.named_parameters() if not p.requires_grad)

    def _submodules(self, names: Sequence[str]) -> list[nn.Module]:
        modules = dict(self.named_modules())
        for name in names:
            if name not in modules:
                raise ConfigError(
                    f"also_train has {name!r}; expected names of submodules of {type(self).__name__}, such as "
                    f"{', '.join(child for child, _ in self.named_children())}."
                )
        return [modules[name] for name in names]

    def _check_targets(self, targets: Sequence[str]) -> None:
        for target in targets:
            found = {name: m for name, m in self.named_modules() if f".{name}".endswith(f".{target}")}
            if not found:
                linear = [name for name, module in self.named_modules() if isinstance(module, nn.Linear)]
                raise ConfigError(
                    f"no layer's name ends with the target {target!r}; {type(self).__name__} has the linear layers "
                    f"{', '.join(linear[:8])}."
                )
            for name, module in found.items():
                if not isinstance(module, nn.Linear):
                    raise AgentError(
                        f"the target {name} is a {type(module).__name__}; farstep adapts layers of torch.nn.Linear. "
                        "Choose other targets."
                    )

    def get_parameters(self) -> dict[str, Any]:
        """Return what is published: adapters, modules that are trained as a whole, and buffers."""
        base = set(self._base_names)
        return {name: tensor for name, tensor in self.state_dict().items() if name not in base}

    def base_parameters(self) -> dict[str, Tensor]:
        """Return the frozen parameters, by their names before `add_adapters`; empty without adapters.

        Workers get them once. A checkpoint has only their content hash.
        """
        base = set(self._base_names)
        own = self.named_parameters()
        return {name.replace(".base_layer.", "."): parameter for name, parameter in own if name in base}

    def merged(self) -> Self:
        """Return a copy without adapters, whose weights include them: `W + (alpha / r) * B A`.

        Its outputs agree with those of this agent up to rounding. Use it to export the policy, or where inference must
        not cost more than that of the base.
        """
        agent = copy.deepcopy(self)
        for name, layer in list(agent.named_modules()):
            if isinstance(layer, LoraLinear) or _is_peft_layer(layer):
                down, up, scaling = _parts(layer)
                with torch.no_grad():
                    layer.base_layer.weight += scaling * (up.weight @ down.weight)
                parent, _, leaf = name.rpartition(".")
                setattr(agent.get_submodule(parent), leaf, layer.base_layer)
        agent._base_names = ()
        return agent.requires_grad_(True)

    def __reduce__(self) -> tuple[Any, ...]:
        # As torch.nn.Module does, without rebuilding: the base must stay the same tensors, to be sent once.
        state = {name: value for name, value in vars(self).items() if name != "peft_config"}
        return copyreg.__newobj__, (type(self),), state  # type: ignore[attr-defined]


class LoraLinear(nn.Module):
    """An adapted linear layer on a worker: computes what peft's layer computes, and has the same parameter names.

    Importing peft would take each worker several seconds.

    Args:
        base_layer: The frozen layer.
        down: The layer `A`, by the name of the adapter.
        up: The layer `B`, by the name of the adapter.
        scaling: `alpha / r`, by the name of the adapter.
    """

    def __init__(
        self, base_layer: nn.Linear, down: nn.ModuleDict, up: nn.ModuleDict, scaling: dict[str, float]
    ) -> None:
        super().__init__()
        self.base_layer, self.lora_A, self.lora_B, self.scaling = base_layer, down, up, scaling

    def forward(self, x: Tensor) -> Tensor:
        """Compute `W x + b + (alpha / r) * B A x`."""
        down, up, scaling = _parts(self)
        base: Tensor = self.base_layer(x)
        result: Tensor = base + up(down(x.to(down.weight.dtype))) * scaling
        return result.to(base.dtype)


def reduce_without_peft(obj: Any) -> tuple[Any, ...] | None:
    """Return how to pickle one of peft's adapted layers as a `LoraLinear`; None for any other object."""
    if not _is_peft_layer(obj):
        return None
    return LoraLinear, (obj.base_layer, obj.lora_A, obj.lora_B, dict(obj.scaling))


def _is_peft_layer(obj: object) -> bool:
    layers = sys.modules.get("peft.tuners.lora.layer")
    return layers is not None and type(obj) is layers.Linear


def _parts(layer: Any) -> tuple[nn.Linear, nn.Linear, float]:
    return layer.lora_A[_ADAPTER], layer.lora_B[_ADAPTER], layer.scaling[_ADAPTER]


def _inject(agent: nn.Module, r: int, alpha: int, targets: Sequence[str]) -> None:
    try:
        import peft
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        raise ConfigError(f"add_adapters needs peft; install it with: {install_extra('peft')}") from error
    try:
        # No dropout: the probabilities of the policy that acted and of the policy that learns must be comparable.
        config = peft.LoraConfig(r=r, lora_alpha=alpha, target_modules=list(targets), lora_dropout=0.0, bias="none")
        peft.inject_adapter_in_model(config, agent, _ADAPTER)
    except ValueError as error:
        raise ConfigError(f"adapters of rank r={r} cannot be added to {type(agent).__name__}: {error}") from error
