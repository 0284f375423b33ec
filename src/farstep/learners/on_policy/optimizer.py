"""Minibatch optimization with Adam: epochs, gradient accumulation, clipping and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from farstep.checkpoint.checks import check_keys, check_torch_generator, converted
from farstep.checkpoint.files import Refused
from farstep.elastic.noise_scale import GradientNoise
from farstep.learners.loop.checkpoints.saving import check_tensor
from farstep.learners.networks.nets import ActorCritic
from farstep.learners.on_policy.rollout import Minibatch, Rollout, minibatches
from farstep.learners.optimizing import MAX_STEPS, AdamGroup, Means, point_at

_KL = "actor/proximal_k3"
Loss = Callable[[Minibatch], tuple[Tensor, Mapping[str, Tensor]]]
"""Returns the loss of a minibatch (a mean over its valid rows), and metrics as tensors."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Epochs and minibatch sizes of one update."""

    epochs: int
    """Passes over the rows."""
    batch_size: int
    """Rows per optimizer step; the last step of an epoch may have fewer rows."""
    micro_batch_size: int | None = None
    """Rows per forward and backward pass, to save memory; None: all rows of an optimizer step."""
    normalize: bool = False
    """Normalize advantages to mean 0 and standard deviation 1 over the rows of each optimizer step."""
    target_kl: float | None = None
    """Stop after the epoch in which the mean KL divergence from the policy at the start of the update exceeds this, in
    nats. None: run all epochs."""


class SavedOptimizer(msgspec.Struct, forbid_unknown_fields=True):
    """The state of an `Optimizer`."""

    adam: dict[str, Tensor]
    generator: Tensor


class Optimizer:
    """Adam with gradient clipping. Steps with a non-finite gradient are skipped and counted.

    Parameters, gradients and Adam's moments are flat vectors, so the cost of a step does not grow with the number of
    layers. The critic's own parameters (`agent.critic`) form a group with its own learning rate and step count. Layers
    that actor and critic share belong to the policy's group.

    Args:
        agent: The agent to optimize; its parameters, except frozen ones, become views of one vector.
        learning_rate: Learning rate of the policy's group.
        max_grad_norm: Maximum norm of the gradient; a larger gradient is scaled down to this norm.
        seed: Seed for the order of rows in minibatches.
        value_lr: Learning rate of the critic's group; None: `learning_rate`.
    """

    def __init__(
        self, agent: ActorCritic, learning_rate: float, max_grad_norm: float, seed: int, value_lr: float | None = None
    ) -> None:
        self._parameters = _trained(agent)
        self._max_grad_norm = max_grad_norm
        policy, self._critic_slice = _parameter_slices(agent)
        self._policy = AdamGroup(learning_rate, policy)
        self._critic = AdamGroup(learning_rate if value_lr is None else value_lr, [self._critic_slice])
        flat = torch.cat([parameter.detach().flatten() for parameter in self._parameters])
        self._use(flat, {name: torch.zeros_like(flat) for name in ("exp_avg", "exp_avg_sq")})
        self._cpu_vectors: tuple[Tensor, ...] | None = None
        """Pinned copies of parameters and moments, kept while these are on a GPU; None before the first `move`."""
        self.generator = torch.Generator().manual_seed(seed)
        """Random generator for the order of rows in minibatches."""

    def _use(self, flat: Tensor, moments: dict[str, Tensor]) -> None:
        """Use these vectors from now on, with a gradient of 0."""
        self._flat, self._moments, self._gradient = flat, moments, torch.zeros_like(flat)
        point_at(self._parameters, flat, self._gradient)
        self._critic_gradient = self._gradient[self._critic_slice]
        for group in (self._policy, self._critic):
            group.use((flat, self._gradient, *moments.values()))

    def move(self, device: torch.device) -> None:
        """Move parameters, moments and step counts to a device. Gradients are 0 between updates and are not copied.

        Copies between pinned memory and a GPU are asynchronous; the caller synchronizes before it uses those on the
        CPU. If a move to a GPU raised, a move to the CPU undoes it.
        """
        vectors = (self._flat, *self._moments.values())
        if self._flat.device.type == "cpu":
            if self._cpu_vectors is None and device.type != "cpu":
                self._cpu_vectors = tuple(pinned(vector) for vector in vectors)
            moved = tuple(vector.to(device, non_blocking=True) for vector in self._cpu_vectors or vectors)
        else:
            assert device.type == "cpu"
            if self._cpu_vectors is None:
                self._cpu_vectors = tuple(pinned(torch.empty_like(vector, device=device)) for vector in vectors)
            for kept, vector in zip(self._cpu_vectors, vectors, strict=True):
                kept.copy_(vector, non_blocking=True)
            moved = self._cpu_vectors
        self._use(moved[0], dict(zip(self._moments, moved[1:], strict=True)))

    def anneal(self, left: float) -> None:
        """Set the learning rates to the fraction `left` of their initial values."""
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
        noise: GradientNoise | None = None,
    ) -> dict[str, float]:
        """Optimize the agent on a rollout.

        Args:
            rollout: The rows to learn from.
            columns: Further `[T, N]` tensors to add to each minibatch.
            loss: Loss of a minibatch.
            schedule: Epochs, minibatch sizes and early stopping.
            critic_only: Whether to change only the critic's own parameters (critic warm-up).
            noise: Receives the policy's gradients of the first epoch, before clipping: of each minibatch or, if there
                is only one, of its halves. The critic's own gradient would hide them: early in training it is larger
                and much less noisy. None: no noise scale is estimated.

        Returns:
            The mean of each metric over all minibatches, the number of epochs, and the learning rates.
        """
        means, epochs = Means(), 0
        for _ in range(schedule.epochs):
            epoch_kl = Means()
            for minibatch in minibatches(rollout, columns, schedule.batch_size, self.generator):
                if schedule.normalize:
                    minibatch = minibatch.normalized()
                if noise is not None and epochs == 0 and len(minibatch) == rollout.valid.numel():
                    self._measure_halves(minibatch, loss, schedule.micro_batch_size, noise)
                metrics = self._accumulate(minibatch, loss, schedule.micro_batch_size)
                if noise is not None and epochs == 0 and len(minibatch) < rollout.valid.numel():
                    noise.add(self._policy.gradient, int(minibatch.num_valid))
                means.add({**metrics, **self.step(critic_only)}, len(minibatch))
                epoch_kl.add({_KL: metrics.get(_KL, 0.0)}, len(minibatch))
            epochs += 1
            if schedule.target_kl is not None and epoch_kl.result()[_KL] > schedule.target_kl:
                break
        rates = {"actor/lr": 0.0 if critic_only else self._policy.lr, "critic/lr": self._critic.lr}
        return means.result() | {"actor/epochs": epochs} | rates

    def _accumulate(self, minibatch: Minibatch, loss: Loss, micro_size: int | None) -> Mapping[str, Tensor | float]:
        """Accumulate the gradient of the minibatch's loss, in micro-batches. The result is the same as without them."""
        if micro_size is None or len(minibatch) <= micro_size:
            value, metrics = loss(minibatch)
            torch.autograd.backward(value)
            return metrics
        means, total = Means(), minibatch.num_valid
        for micro_batch in minibatch.split(micro_size):
            value, metrics = loss(micro_batch)
            torch.autograd.backward(value * (micro_batch.num_valid / total))
            means.add(metrics, len(micro_batch))
        return means.result()

    def _measure_halves(self, minibatch: Minibatch, loss: Loss, micro_size: int | None, noise: GradientNoise) -> None:
        """Give `noise` the policy's gradients of both halves of a minibatch, and leave the gradient 0."""
        for half in minibatch.split(-(-len(minibatch) // 2)):
            self._accumulate(half, loss, micro_size)
            noise.add(self._policy.gradient, int(half.num_valid))
            self._gradient.zero_()

    def step(self, critic_only: bool = False) -> dict[str, Tensor]:
        """Take one step with the accumulated gradient, and set the gradient to 0. Return metrics."""
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
        """Return the state for a checkpoint: step counts, moments in the order of the parameters, random generator.

        The state has no hyper-parameters; a resumed run takes them from its options.
        """
        steps = {"step": self._policy.steps[0], "critic_step": self._critic.steps[0]}
        return {"adam": {**steps, **self._moments}, "generator": self.generator.get_state()}

    def check(self, state: object) -> SavedOptimizer:
        """Check that a saved state fits this optimizer. Adam's fused step would read past the end of shorter arrays.

        Args:
            state: The result of `state`.

        Returns:
            The state, to pass to `load`.

        Raises:
            Refused: The state does not fit.
        """
        saved = converted("optimizer", state, SavedOptimizer)
        if not saved.adam:  # older checkpoints have no moments before the first step
            zeros = {name: torch.zeros_like(vector) for name, vector in self._moments.items()}
            saved.adam = {"step": torch.zeros(()), **zeros}
        if "step" in saved.adam:  # older checkpoints have one step count for all parameters
            saved.adam.setdefault("critic_step", saved.adam["step"])
        check_keys("optimizer.adam", saved.adam, ("step", "critic_step", *self._moments))
        for name in ("step", "critic_step"):
            step = check_tensor(f"optimizer.adam.{name}", saved.adam[name], torch.zeros(()))
            if not (0 <= step <= MAX_STEPS and step == np.floor(step)):
                raise Refused(f"optimizer.adam.{name} is {step}; expected a whole number from 0 to {MAX_STEPS}")
        for name, vector in self._moments.items():
            check_tensor(f"optimizer.adam.{name}", saved.adam[name], vector)
        if (saved.adam["exp_avg_sq"] < 0).any():
            raise Refused("optimizer.adam.exp_avg_sq has negative numbers; expected means of squares")
        check_torch_generator("optimizer.generator", saved.generator.numpy(force=True))
        return saved

    def load(self, saved: SavedOptimizer) -> None:
        """Restore a checked state. It has neither learning rates nor parameters."""
        for name, vector in self._moments.items():
            vector.copy_(saved.adam[name])
        for group, name in ((self._policy, "step"), (self._critic, "critic_step")):
            for step in group.steps:
                step.copy_(saved.adam[name])
        self.generator.set_state(saved.generator)
        self.anneal(1.0)


def pinned(tensor: Tensor) -> Tensor:
    """Return a copy in pinned memory, which a GPU reads and writes without the CPU; without CUDA, the tensor itself."""
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


def _trained(agent: ActorCritic) -> list[nn.Parameter]:
    """Return the parameters that are not frozen."""
    return [parameter for parameter in agent.parameters() if parameter.requires_grad]


def _parameter_slices(agent: ActorCritic) -> tuple[list[slice], slice]:
    """Return slices of the flat vector: the policy's parameters (including shared layers), and the critic's own."""
    own = {id(parameter) for parameter in agent.critic.parameters()}
    policy, critic, start = [], slice(0), 0
    for is_own, run in groupby(_trained(agent), lambda parameter: id(parameter) in own):
        stop = start + sum(parameter.numel() for parameter in run)
        if is_own:
            assert critic == slice(0), "the parameters of one module are contiguous"
            critic = slice(start, stop)
        else:
            policy.append(slice(start, stop))
        start = stop
    return policy, critic


def prefixed(actor: Mapping[str, Tensor], critic: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Merge metrics of actor and critic, with the prefixes `actor/` and `critic/`."""
    return {f"actor/{n}": v for n, v in actor.items()} | {f"critic/{n}": v for n, v in critic.items()}
