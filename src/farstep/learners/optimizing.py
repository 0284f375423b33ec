"""Minibatches, gradients and steps: what learners do with a loss of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from farstep.checkpoint.checks import check_keys, check_torch_generator, converted
from farstep.checkpoint.files import Refused
from farstep.learners.loop.saving import check_tensor
from farstep.learners.networks.nets import ActorCritic
from farstep.learners.rollout import Minibatch, Rollout, minibatches

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


class _Group:
    """Parameters that share a learning rate and a step count, as slices of the flat vectors."""

    def __init__(self, learning_rate: float, parts: Sequence[slice], vectors: Sequence[Tensor]) -> None:
        self._learning_rate = self.lr = learning_rate
        self._tensors = [[vector[part] for part in parts] for vector in vectors]
        self.steps = [torch.zeros((), device=vectors[0].device) for _ in parts]

    def anneal(self, left: float) -> None:
        self.lr = self._learning_rate * max(left, 0.0)

    @torch.no_grad()
    def step(self) -> None:
        """Make one step of Adam. The functional form takes half the time of `torch.optim.Adam.step`."""
        parameters, gradients, exp_avgs, exp_avg_sqs = self._tensors
        adam(
            parameters,
            gradients,
            exp_avgs,
            exp_avg_sqs,
            max_exp_avg_sqs=[],
            state_steps=self.steps,
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=self.lr,
            weight_decay=0.0,
            eps=1e-5,
            maximize=False,
        )


class Optimizer:
    """Adam with clipped gradients; a step whose gradients are no numbers is left out and counted.

    Parameters, gradients and Adam's moments are flat vectors, so the cost of a step does not grow with the number of
    layers. The critic's own parameters (`agent.critic`) are a group with its own learning rate and step count; layers
    that actor and critic share belong to the policy's group.
    """

    def __init__(
        self, agent: ActorCritic, learning_rate: float, max_grad_norm: float, seed: int, value_lr: float | None = None
    ) -> None:
        flat, self._gradient = _as_one(list(agent.parameters()))
        self._max_grad_norm = max_grad_norm
        self._moments = {name: torch.zeros_like(flat) for name in ("exp_avg", "exp_avg_sq")}
        policy, critic = _parts(agent)
        vectors = (flat, self._gradient, *self._moments.values())
        self._policy = _Group(learning_rate, policy, vectors)
        self._critic = _Group(learning_rate if value_lr is None else value_lr, [critic], vectors)
        self._critic_gradient = self._gradient[critic]
        self.generator = torch.Generator().manual_seed(seed)
        """Of the order of rows."""

    def anneal(self, left: float) -> None:
        """Set the learning rates to this fraction of their initial values."""
        self._policy.anneal(left)
        self._critic.anneal(left)

    def learn(
        self,
        rollout: Rollout,
        columns: dict[str, Tensor],
        loss: Loss,
        schedule: Schedule,
        *,
        critic_only: bool = False,
    ) -> dict[str, float]:
        """Optimize the agent on a rollout.

        Args:
            rollout: The rows to learn from.
            columns: Further `[T, N]` tensors to add to each minibatch.
            loss: Loss of a minibatch.
            schedule: Epochs, minibatch sizes and early stopping.
            critic_only: Change only the critic's own parameters (critic warm-up).

        Returns:
            The mean of each metric over all minibatches, the number of epochs, and the learning rates.
        """
        measured, epochs = Means(), 0
        for _ in range(schedule.epochs):
            moved = Means()
            for part in minibatches(rollout, columns, schedule.batch_size, self.generator):
                if schedule.normalize:
                    part = part.normalized()
                metrics = self._accumulate(part, loss, schedule.micro_batch_size)
                measured.add({**metrics, **self._step(critic_only)}, len(part))
                moved.add({_KL: metrics.get(_KL, 0.0)}, len(part))
            epochs += 1
            if schedule.target_kl is not None and moved.result()[_KL] > schedule.target_kl:
                break
        rates = {"actor/lr": 0.0 if critic_only else self._policy.lr, "critic/lr": self._critic.lr}
        return measured.result() | {"actor/epochs": epochs} | rates

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

    def _step(self, critic_only: bool) -> dict[str, Tensor]:
        gradient = self._critic_gradient if critic_only else self._gradient
        norm = gradient.norm()
        finite = torch.isfinite(norm)
        if bool(finite):
            gradient.mul_((self._max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
            self._critic.step()
            if not critic_only:
                self._policy.step()
        self._gradient.zero_()
        return {"actor/grad_norm": norm, "actor/skipped_steps": ~finite}

    def state(self) -> dict[str, object]:
        """The state for a checkpoint; moments are in the order of the agent's parameters.

        It has no hyper-parameters: those come from the options of the run.
        """
        steps = {"step": self._policy.steps[0], "critic_step": self._critic.steps[0]}
        return {"adam": {**steps, **self._moments}, "generator": self.generator.get_state()}

    def check(self, state: object) -> SavedOptimizer:
        """Check that a saved state fits this optimizer, else raise `Refused`: Adam's fused step would read past the end
        of shorter arrays."""
        saved = converted("optimizer", state, SavedOptimizer)
        if not saved.adam:  # older checkpoints have nothing before the first step
            zeros = {name: torch.zeros_like(vector) for name, vector in self._moments.items()}
            saved.adam = {"step": torch.zeros(()), **zeros}
        if "step" in saved.adam:  # older checkpoints have one step count for all parameters
            saved.adam.setdefault("critic_step", saved.adam["step"])
        check_keys("optimizer.adam", saved.adam, ("step", "critic_step", *self._moments))
        for name in ("step", "critic_step"):
            step = check_tensor(f"optimizer.adam.{name}", saved.adam[name], torch.zeros(()))
            if not (0 <= step <= _MOST_STEPS and step == np.floor(step)):
                raise Refused(f"optimizer.adam.{name} is {step}, a whole number from 0 to {_MOST_STEPS} expected")
        for name, vector in self._moments.items():
            check_tensor(f"optimizer.adam.{name}", saved.adam[name], vector)
        if (saved.adam["exp_avg_sq"] < 0).any():
            raise Refused("optimizer.adam.exp_avg_sq holds negative numbers, means of squares expected")
        check_torch_generator("optimizer.generator", saved.generator.numpy(force=True))
        return saved

    def load(self, saved: SavedOptimizer) -> None:
        """Restore a checked state; learning rates stay as configured, and the agent loads its parameters itself."""
        for name, vector in self._moments.items():
            vector.copy_(saved.adam[name])
        for group, name in ((self._policy, "step"), (self._critic, "critic_step")):
            for step in group.steps:
                step.copy_(saved.adam[name])
        self.generator.set_state(saved.generator)
        self.anneal(1.0)


def _as_one(parameters: list[nn.Parameter]) -> tuple[Tensor, Tensor]:
    """Move the parameters into one flat vector and their gradients into another; return both vectors."""
    sizes = [parameter.numel() for parameter in parameters]
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    gradient = torch.zeros_like(flat)
    pieces = zip(parameters, torch.split(flat, sizes), torch.split(gradient, sizes), strict=True)
    for parameter, values, gradients in pieces:
        parameter.data = values.view_as(parameter)
        parameter.grad = gradients.view_as(parameter)
    return flat, gradient


def _parts(agent: ActorCritic) -> tuple[list[slice], slice]:
    """Slices of the flat vector that hold the policy's parameters, shared layers included, and the critic's own."""
    own = {id(parameter) for parameter in agent.critic.parameters()}
    policy, critic, start = [], slice(0), 0
    for is_own, run in groupby(agent.parameters(), lambda parameter: id(parameter) in own):
        stop = start + sum(parameter.numel() for parameter in run)
        if is_own:
            assert critic == slice(0), "the parameters of one module are contiguous"
            critic = slice(start, stop)
        else:
            policy.append(slice(start, stop))
        start = stop
    return policy, critic


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
