"""Adam over one flat vector, its saved state, and the target network that follows the vector."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable
from typing import Generic, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from farstep.checkpoint.checks import converted
from farstep.checkpoint.files import Refused
from farstep.learners.loop.checkpoints.saving import check_tensor
from farstep.learners.optimizing import MAX_STEPS, AdamGroup, flatten_parameters
from farstep.learners.replay.saved_parts import SavedNetwork

M = TypeVar("M", bound=nn.Module)


class SavedAdam(msgspec.Struct, forbid_unknown_fields=True):
    """The state of a `FlatAdam`."""

    step: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class FlatAdam:
    """Adam with gradient clipping; a step with a gradient that is not finite is skipped.

    Args:
        parameters: The parameters to optimize, except frozen ones; they become views of one vector.
        learning_rate: Learning rate.
        max_grad_norm: Norm to which larger gradients are scaled down; None: no bound.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], learning_rate: float, max_grad_norm: float | None = None
    ) -> None:
        self.values, self._gradient = flatten_parameters(
            [parameter for parameter in parameters if parameter.requires_grad]
        )
        self._max_grad_norm = max_grad_norm
        self._moments = {name: torch.zeros_like(self.values) for name in ("exp_avg", "exp_avg_sq")}
        self._group = AdamGroup(learning_rate, [slice(0, self.values.numel())])
        self._group.use((self.values, self._gradient, *self._moments.values()))

    def minimize(self, loss: Tensor) -> dict[str, Tensor]:
        """Make one step down the gradient of a loss.

        Args:
            loss: The loss; only the gradient with respect to this optimizer's parameters is used.

        Returns:
            `grad_norm`, before clipping, and `skipped_steps`: whether the step was skipped.
        """
        self._gradient.zero_()
        torch.autograd.backward(loss)
        norm = self._gradient.norm()
        finite = torch.isfinite(norm)
        if bool(finite):
            if self._max_grad_norm is not None:
                self._gradient.mul_((self._max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
            self._group.step()
        return {"grad_norm": norm, "skipped_steps": (~finite).float()}

    def state(self) -> dict[str, object]:
        """Return the state for a checkpoint: the number of steps, and Adam's moments."""
        return {"step": self._group.steps[0], **self._moments}

    def check(self, where: str, state: object) -> SavedAdam:
        """Check that a saved state fits this optimizer; raise `Refused`, naming it `where`, if it does not."""
        saved = converted(where, state, SavedAdam)
        step = check_tensor(f"{where}.step", saved.step, torch.zeros(()))
        if not (0 <= step <= MAX_STEPS and step == np.floor(step)):
            raise Refused(f"{where}.step is {step}; expected a whole number from 0 to {MAX_STEPS}")
        for name, vector in self._moments.items():
            check_tensor(f"{where}.{name}", getattr(saved, name), vector)
        if (saved.exp_avg_sq < 0).any():
            raise Refused(f"{where}.exp_avg_sq has negative numbers; expected means of squares")
        return saved

    def load(self, saved: SavedAdam) -> None:
        """Restore a checked state."""
        self._group.steps[0].copy_(saved.step)
        for name, vector in self._moments.items():
            vector.copy_(getattr(saved, name))


class TargetNetwork(Generic[M]):
    """A copy of a network that follows it slowly.

    Args:
        network: The network.
        optimizer: Its optimizer, which has its parameters as one vector.
    """

    def __init__(self, network: M, optimizer: FlatAdam) -> None:
        device = next(network.parameters()).device
        is_trained = [parameter.requires_grad for parameter in network.parameters()]
        self.network: M = copy.deepcopy(network).to(device).requires_grad_(False)
        self.saved = SavedNetwork(self.network)
        """Its parameters in checkpoints."""
        self._source = optimizer.values
        self._values, _ = flatten_parameters(list(itertools.compress(self.network.parameters(), is_trained)))

    @torch.no_grad()
    def follow(self, tau: float) -> None:
        """Move towards the network: `target = tau * network + (1 - tau) * target`."""
        self._values.lerp_(self._source, tau)
