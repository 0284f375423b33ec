"""Minibatches, gradients and steps: what learners do with a loss of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

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

    Parameters, gradients and Adam's moments are views of long vectors: a step is a handful of operations, however many
    layers. The critic's own parameters (`agent.critic`) are a parameter group with a learning rate and a step count of
    its own; layers that actor and critic share belong to the policy's group.
    """

    def __init__(
        self, agent: ActorCritic, learning_rate: float, max_grad_norm: float, seed: int, value_lr: float | None = None
    ) -> None:
        flat, self._gradient = _as_one(list(agent.parameters()))
        self._learning_rates = learning_rate, learning_rate if value_lr is None else value_lr
        self._max_grad_norm = max_grad_norm
        policy, critic = _parts(agent)
        self._policy = [(nn.Parameter(flat[part]), self._gradient[part]) for part in policy]
        self._critic = nn.Parameter(flat[critic])
        self._critic.grad = self._gradient[critic]
        groups = [{"params": [parameter for parameter, _ in self._policy]}, {"params": [self._critic]}]
        self.adam = torch.optim.Adam(groups, learning_rate, eps=1e-5, fused=True)
        self._moments = {name: torch.zeros_like(flat) for name in ("exp_avg", "exp_avg_sq")}
        for parameter, part in zip([*groups[0]["params"], self._critic], [*policy, critic], strict=True):
            moments = {name: vector[part] for name, vector in self._moments.items()}
            self.adam.state[parameter] = {"step": torch.zeros((), device=flat.device), **moments}
        self.anneal(1.0)
        self.generator = torch.Generator().manual_seed(seed)
        """Of the order of rows."""

    def anneal(self, left: float) -> None:
        """Set the learning rates to this part of what they began with."""
        for group, rate in zip(self.adam.param_groups, self._learning_rates, strict=True):
            group["lr"] = rate * max(left, 0.0)

    def learn(
        self,
        rollout: Rollout,
        columns: dict[str, Tensor],
        loss: Loss,
        schedule: Schedule,
        *,
        critic_only: bool = False,
    ) -> dict[str, float]:
        """Go through the rollout as the schedule says.

        Args:
            rollout: What is learned from.
            columns: Further `[T, N]` tensors that minibatches take along.
            loss: Of a minibatch.
            schedule: How often, and in what portions.
            critic_only: Change only the critic's own parameters (critic warm-up).

        Returns:
            Means of everything that was measured, and the learning rates.
        """
        for parameter, gradient in self._policy:
            parameter.grad = None if critic_only else gradient  # Adam leaves out parameters without a gradient
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
        policy_lr, value_lr = (float(group["lr"]) for group in self.adam.param_groups)
        rates = {"actor/lr": 0.0 if critic_only else policy_lr, "critic/lr": value_lr}
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
        gradient = self._critic.grad if critic_only else self._gradient
        assert gradient is not None
        norm = gradient.norm()
        finite = torch.isfinite(norm)
        if bool(finite):
            gradient.mul_((self._max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
            self.adam.step()
        self._gradient.zero_()
        return {"actor/grad_norm": norm, "actor/skipped_steps": ~finite}

    def state(self) -> dict[str, object]:
        """The state without hyper-parameters, which come from the options of the run; moments are in the order of the
        agent's parameters."""
        policy, critic = (self.adam.state[group["params"][0]]["step"] for group in self.adam.param_groups)
        return {
            "adam": {"step": policy, "critic_step": critic, **self._moments},
            "generator": self.generator.get_state(),
        }

    def check(self, state: object) -> SavedOptimizer:
        """Check that a saved state fits this optimizer, else raise `Refused`: Adam's fused step would read past the end
        of shorter arrays."""
        saved = converted("optimizer", state, SavedOptimizer)
        if "step" in saved.adam:  # before the critic had a step count of its own, all parameters shared one
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
        """Go on with what was saved, at the learning rates of now; the agent's parameters are loaded apart."""
        for name, vector in self._moments.items():
            vector.copy_(saved.adam[name])
        for group, name in zip(self.adam.param_groups, ("step", "critic_step"), strict=True):
            for parameter in group["params"]:
                self.adam.state[parameter]["step"].copy_(saved.adam[name])
        self.generator.set_state(saved.generator)
        self.anneal(1.0)


def _as_one(parameters: list[nn.Parameter]) -> tuple[Tensor, Tensor]:
    """One long vector that all of these are parts of, from now on, and one of their gradients."""
    sizes = [parameter.numel() for parameter in parameters]
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    gradient = torch.zeros_like(flat)
    pieces = zip(parameters, torch.split(flat, sizes), torch.split(gradient, sizes), strict=True)
    for parameter, values, gradients in pieces:
        parameter.data = values.view_as(parameter)
        parameter.grad = gradients.view_as(parameter)
    return flat, gradient


def _parts(agent: ActorCritic) -> tuple[list[slice], slice]:
    """Where a vector of all parameters holds the policy's, shared layers included, and where the critic's own."""
    own = {id(parameter) for parameter in agent.critic.parameters()}
    policy, critic, start = [], slice(0), 0
    for is_own, run in groupby(agent.parameters(), lambda parameter: id(parameter) in own):
        stop = start + sum(parameter.numel() for parameter in run)
        if is_own:  # the parameters of one module follow each other
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
