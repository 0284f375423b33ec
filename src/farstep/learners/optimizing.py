"""Parts of optimization that all learners share: Adam over flat vectors, means of metrics, and settings of torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from farstep.learners.networks.agent import NetworkAgent

MAX_STEPS = 2**24
"""Maximum step count. Adam counts steps in float32, which is exact up to this number."""


class AdamGroup:
    """Parameters that share a learning rate and a step count, as slices of flat vectors.

    Args:
        learning_rate: Learning rate of Adam.
        slices: The parameters.
    """

    def __init__(self, learning_rate: float, slices: Sequence[slice]) -> None:
        self._learning_rate = self.lr = learning_rate
        self._slices = slices
        self._tensors: list[list[Tensor]] = []
        self.steps = [torch.zeros(()) for _ in slices]

    def use(self, vectors: Sequence[Tensor]) -> None:
        """Use these vectors from now on: values, gradients, and Adam's first and second moments of all parameters."""
        self._tensors = [[vector[part] for part in self._slices] for vector in vectors]
        self.steps = [step.to(vectors[0].device) for step in self.steps]

    @property
    def gradient(self) -> Tensor:
        """A copy of the gradient, as one vector."""
        return torch.cat(self._tensors[1])

    def anneal(self, left: float) -> None:
        """Set the learning rate to the fraction `left` of its initial value."""
        self.lr = self._learning_rate * max(left, 0.0)

    @torch.no_grad()
    def step(self) -> None:
        """Take one Adam step. The functional form takes half the time of `torch.optim.Adam.step`."""
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


def flatten_parameters(parameters: list[nn.Parameter]) -> tuple[Tensor, Tensor]:
    """Move the parameters into one flat vector and their gradients into another; return both vectors."""
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    gradient = torch.zeros_like(flat)
    point_at(parameters, flat, gradient)
    return flat, gradient


def point_at(parameters: list[nn.Parameter], flat: Tensor, gradient: Tensor) -> None:
    """Make the parameters and their gradients views of two flat vectors."""
    sizes = [parameter.numel() for parameter in parameters]
    pieces = zip(parameters, torch.split(flat, sizes), torch.split(gradient, sizes), strict=True)
    for parameter, values, gradients in pieces:
        parameter.grad = None  # torch refuses a gradient on another device
        parameter.data = values.view_as(parameter)
        parameter.grad = gradients.view_as(parameter)


@contextlib.contextmanager
def onednn_for_images(agent: NetworkAgent) -> Iterator[None]:
    """Context manager: disable oneDNN if the agent has no convolutions. On ARM, it costs up to 0.3 ms per small
    matrix."""
    onednn = torch.backends.mkldnn
    before = onednn.enabled
    onednn.enabled = before and agent.sees_images  # type: ignore[assignment]
    try:
        yield
    finally:
        onednn.enabled = before


class Means:
    """Weighted means of metrics. They stay tensors until `result`, because each `.item()` would wait for the GPU."""

    def __init__(self) -> None:
        self._added: list[tuple[Mapping[str, Tensor | float], float]] = []

    def add(self, metrics: Mapping[str, Tensor | float], weight: float) -> None:
        """Add one sample of each metric."""
        self._added.append((metrics, weight))

    def result(self) -> dict[str, float]:
        """Compute the means."""
        values: dict[str, list[Tensor]] = {}
        weights: dict[str, list[float]] = {}
        for metrics, weight in self._added:
            for name, value in metrics.items():
                values.setdefault(name, []).append(torch.as_tensor(value).detach())
                weights.setdefault(name, []).append(weight)
        return {n: float(np.average(torch.stack(v).numpy(force=True), weights=weights[n])) for n, v in values.items()}
