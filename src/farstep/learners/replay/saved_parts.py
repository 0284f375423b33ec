"""Parts of a learner's state in a checkpoint, each of which checks what was saved before it restores it."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor, nn

from farstep.checkpoint.checks import Count, check_keys, converted
from farstep.checkpoint.files import Refused
from farstep.learners.loop.checkpoints.saving import check_tensor


class SavedPart(Protocol):
    """A part of a learner's state: an optimizer, a network, a number."""

    def state(self) -> object:
        """Return the state for a checkpoint: numbers, text, arrays and tensors, or mappings and lists of these."""
        ...

    def check(self, where: str, state: object) -> Any:
        """Check that a saved state fits, without changing anything.

        Args:
            where: Its name in errors.
            state: What was saved.

        Returns:
            The state to pass to `load`.

        Raises:
            Refused: It does not fit.
        """
        ...

    def load(self, saved: Any) -> None:
        """Restore a checked state."""
        ...


class SavedNetwork:
    """The parameters and buffers of a network.

    Args:
        network: The network.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network

    def state(self) -> dict[str, object]:
        """Return parameters and buffers by name."""
        return dict(self._network.state_dict())

    def check(self, where: str, state: object) -> dict[str, Tensor]:
        """Return saved parameters; raise `Refused`, naming them `where`, if they do not fit."""
        if not isinstance(state, dict):
            raise Refused(f"{where} is {type(state).__name__}; expected a mapping of parameters")
        expected = self._network.state_dict()
        check_keys(where, state, expected)
        for name, tensor in expected.items():
            check_tensor(f"{where}.{name}", state[name], tensor)
        return state

    def load(self, saved: dict[str, Tensor]) -> None:
        """Restore checked parameters."""
        self._network.load_state_dict(saved)


class SavedTensor:
    """A single tensor.

    Args:
        tensor: The tensor, which is changed in place when a state is restored.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def state(self) -> Tensor:
        """Return the tensor."""
        return self._tensor.detach()

    def check(self, where: str, state: object) -> Tensor:
        """Return a saved tensor; raise `Refused`, naming it `where`, if it does not fit."""
        if not isinstance(state, Tensor):
            raise Refused(f"{where} is {type(state).__name__}; expected a tensor")
        check_tensor(where, state, self._tensor)
        return state

    @torch.no_grad()
    def load(self, saved: Tensor) -> None:
        """Restore a checked tensor."""
        self._tensor.copy_(saved)


class _SavedCount(msgspec.Struct, forbid_unknown_fields=True):
    count: Count


class UpdateCount:
    """Number of updates so far."""

    def __init__(self) -> None:
        self.count = 0

    def state(self) -> int:
        """Return the number."""
        return self.count

    def check(self, where: str, state: object) -> int:
        """Return a saved number; raise `Refused`, naming it `where`, if it is not a count."""
        return converted(where, {"count": state}, _SavedCount).count

    def load(self, saved: int) -> None:
        """Restore a checked number."""
        self.count = saved


class UnusedPart:
    """A part that this learner's options do not need; what a checkpoint has of it is ignored."""

    def state(self) -> None:
        """Return None."""

    def check(self, where: str, state: object) -> None:
        """Raise `Refused`, naming the state `where`, if it is neither None nor a mapping."""
        if not isinstance(state, dict | None):
            raise Refused(f"{where} is {type(state).__name__}; expected a mapping, or nothing")

    def load(self, saved: None) -> None:
        """Do nothing."""
