"""Minibatches, gradients and steps: what learners do with a loss of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from farstep.buffer.checking import check_keys, check_torch_generator, converted
from farstep.buffer.files import Refused
from farstep.learners.nets import ActorCritic
from farstep.learners.rollout import Minibatch, Rollout, minibatches
from farstep.learners.saving import check_tensor

_MOST_STEPS = 2**24
"""Adam counts its steps in float32, which cannot count further."""
_KL = "actor/proximal_k3"
Loss = Callable[[Minibatch], tuple[Tensor, Mapping[str, Tensor]]]
"""The loss of some rows, a mean over the valid ones, and what else is worth knowing, as tensors."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How often, and in what portions, a rollout is learned."""

    epochs: int
    batch_size: int
    """Rows per optimizer step; the last of an epoch may have fewer."""
    micro_batch_size: int | None = None
    """Rows per forward and backward, to save memory; None: all of a step's."""
    normalize: bool = False
    """Give advantages mean 0 and deviation 1 over the rows of each step, before these are portioned."""
    target_kl: float | None = None
    """No further epoch once the mean divergence from the policy that the update began with exceeds this over one."""


class SavedOptimizer(msgspec.Struct, forbid_unknown_fields=True):
    """The state of an `Optimizer`."""

    adam: dict[str, Tensor]
    generator: Tensor


class Optimizer:
    """Adam with clipped gradients; a step whose gradients are no numbers is left out and counted.

    Parameters and gradients become views of two long vectors: a step is a handful of operations, however many layers.
    """

    def __init__(self, agent: nn.Module, learning_rate: float, max_grad_norm: float, seed: int) -> None:
        self._flat = _as_one(list(agent.parameters()))
        self._learning_rate, self._max_grad_norm = learning_rate, max_grad_norm
        self.adam = torch.optim.Adam([self._flat], learning_rate, eps=1e-5, fused=True)
        self.generator = torch.Generator().manual_seed(seed)
        """Of the order of rows."""

    def anneal(self, left: float) -> None:
        """Set the learning rate to this part of what it began with."""
        self.adam.param_groups[0]["lr"] = self._learning_rate * max(left, 0.0)

    def learn(self, rollout: Rollout, columns: dict[str, Tensor], loss: Loss, schedule: Schedule) -> dict[str, float]:
        """Go through the rollout as the schedule says; means of all that was measured."""
        measured, epochs = Means(), 0
        for _ in range(schedule.epochs):
            moved = Means()
            for part in minibatches(rollout, columns, schedule.batch_size, self.generator):
                if schedule.normalize:
                    part = part.normalized()
                metrics = self._accumulate(part, loss, schedule.micro_batch_size)
                measured.add({**metrics, **self._step()}, len(part))
                moved.add({_KL: metrics.get(_KL, 0.0)}, len(part))
            epochs += 1
            if schedule.target_kl is not None and moved.result()[_KL] > schedule.target_kl:
                break
        return measured.result() | {"actor/epochs": epochs, "actor/lr": float(self.adam.param_groups[0]["lr"])}

    def _accumulate(self, part: Minibatch, loss: Loss, micro_batch_size: int | None) -> Mapping[str, Tensor | float]:
        """The gradient of the mean over all valid rows, whatever portions it is computed in."""
        if micro_batch_size is None or len(part) <= micro_batch_size:
            value, metrics = loss(part)
            torch.autograd.backward(value)
            return metrics
        measured, total = Means(), part.num_valid
        for micro in part.split(micro_batch_size):
            value, metrics = loss(micro)
            torch.autograd.backward(value * (micro.num_valid / total))
            measured.add(metrics, len(micro))
        return measured.result()

    def _step(self) -> dict[str, Tensor]:
        gradient = self._flat.grad
        assert gradient is not None
        norm = gradient.norm()
        finite = torch.isfinite(norm)
        if bool(finite):
            gradient.mul_((self._max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
            self.adam.step()
        gradient.zero_()
        return {"actor/grad_norm": norm, "actor/skipped_steps": ~finite}

    def state(self) -> dict[str, object]:
        """The state without hyper-parameters, which come from the options of the run."""
        return {"adam": self.adam.state_dict()["state"].get(0, {}), "generator": self.generator.get_state()}

    def check(self, state: object) -> SavedOptimizer:
        """Check that a saved state fits this optimizer, else raise `Refused`: Adam's fused step would read past the end
        of shorter arrays."""
        saved = converted("optimizer", state, SavedOptimizer)
        if saved.adam:  # empty until the first step
            check_keys("optimizer.adam", saved.adam, ("step", "exp_avg", "exp_avg_sq"))
            step = check_tensor("optimizer.adam.step", saved.adam["step"], torch.zeros(()))
            if not (0 <= step <= _MOST_STEPS and step == np.floor(step)):
                raise Refused(f"optimizer.adam.step is {step}, a whole number from 0 to {_MOST_STEPS} expected")
            check_tensor("optimizer.adam.exp_avg", saved.adam["exp_avg"], self._flat)
            if (check_tensor("optimizer.adam.exp_avg_sq", saved.adam["exp_avg_sq"], self._flat) < 0).any():
                raise Refused("optimizer.adam.exp_avg_sq holds negative numbers, means of squares expected")
        check_torch_generator("optimizer.generator", saved.generator.numpy(force=True))
        return saved

    def load(self, saved: SavedOptimizer) -> None:
        """Go on with what was saved, at the learning rate of now; the agent's parameters are loaded apart."""
        groups = self.adam.state_dict()["param_groups"]
        self.adam.load_state_dict({"state": {0: saved.adam} if saved.adam else {}, "param_groups": groups})
        self.generator.set_state(saved.generator)
        self.anneal(1.0)


def _as_one(parameters: list[nn.Parameter]) -> nn.Parameter:
    """One long parameter that all of these are parts of, from now on, and so are their gradients."""
    sizes = [parameter.numel() for parameter in parameters]
    flat = nn.Parameter(torch.cat([parameter.detach().flatten() for parameter in parameters]))
    flat.grad = torch.zeros_like(flat)
    pieces = zip(parameters, torch.split(flat.detach(), sizes), torch.split(flat.grad, sizes), strict=True)
    for parameter, values, gradient in pieces:
        parameter.data = values.view_as(parameter)
        parameter.grad = gradient.view_as(parameter)
    return flat


@contextlib.contextmanager
def lean(agent: ActorCritic) -> Iterator[None]:
    """Arithmetic for small matrices: oneDNN takes up to 0.3 ms to begin with each on ARM. Convolutions want it."""
    onednn = torch.backends.mkldnn
    before = onednn.enabled
    onednn.enabled = before and agent.sees_images  # type: ignore[assignment]
    try:
        yield
    finally:
        onednn.enabled = before


def named(actor: Mapping[str, Tensor], critic: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What was measured of both, by the names they are logged under."""
    return {f"actor/{n}": v for n, v in actor.items()} | {f"critic/{n}": v for n, v in critic.items()}


class Means:
    """Weighted means, kept as tensors until they are asked for: `.item()` would wait for a GPU each time."""

    def __init__(self) -> None:
        self._seen: list[tuple[Mapping[str, Tensor | float], float]] = []

    def add(self, metrics: Mapping[str, Tensor | float], weight: float) -> None:
        self._seen.append((metrics, weight))

    def result(self) -> dict[str, float]:
        values: dict[str, list[Tensor]] = {}
        weights: dict[str, list[float]] = {}
        for metrics, weight in self._seen:
            for name, value in metrics.items():
                values.setdefault(name, []).append(torch.as_tensor(value).detach())
                weights.setdefault(name, []).append(weight)
        return {n: float(np.average(torch.stack(v).numpy(force=True), weights=weights[n])) for n, v in values.items()}
