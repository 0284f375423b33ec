"""The gradient noise scale of a quadratic with known noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import farstep
from farstep.elastic import GradientNoise

SIZE, SIGMA = 50, 2.0
GRADIENT = np.linspace(-0.2, 0.2, SIZE)
"""The gradient of the quadratic at the point where all minibatches are evaluated."""
NOISE_SCALE = SIZE * SIGMA**2 / float(GRADIENT @ GRADIENT)


def minibatch(generator: np.random.Generator, rows: int) -> np.ndarray:
    """The mean gradient of rows whose gradients have independent noise with standard deviation SIGMA."""
    return GRADIENT + generator.normal(scale=SIGMA / math.sqrt(rows), size=SIZE)


@pytest.mark.parametrize("rows", [[64] * 8, [64, 64, 64, 64, 10], [500, 12]])
def test_estimate_equals_the_known_noise_scale(rows: list[int]) -> None:
    noise, generator = GradientNoise(decay=0.999), np.random.default_rng(1)
    for _ in range(4000):
        for each in rows:
            noise.add(minibatch(generator, each), each)
        noise.end_update()
    assert noise.value == pytest.approx(NOISE_SCALE, rel=0.15)


def test_torch_and_numpy_give_the_same_estimate() -> None:
    generator, ours, theirs = np.random.default_rng(1), GradientNoise(), GradientNoise()
    for rows in (5000, 5000, 2000):
        gradient = minibatch(generator, rows)
        ours.add(gradient, rows)
        theirs.add(torch.from_numpy(gradient), rows)
    assert ours.end_update() == pytest.approx(theirs.end_update())


def test_one_minibatch_gives_no_estimate_and_keeps_an_earlier_one() -> None:
    noise = GradientNoise()
    noise.add(GRADIENT, 64)
    assert noise.end_update() is None
    for sign in (1, 3):
        noise.add(sign * GRADIENT, 64)
    before = noise.end_update()
    assert before is not None
    noise.add(GRADIENT, 64)
    noise.add(GRADIENT * np.nan, 64)  # ignored, so only one minibatch counts
    assert noise.end_update() == before


def test_noise_scale_is_infinite_if_noise_hides_the_gradient() -> None:
    noise = GradientNoise()
    noise.add(GRADIENT, 64)
    noise.add(-GRADIENT, 64)
    assert noise.end_update() == math.inf


def test_decay_must_be_below_one() -> None:
    with pytest.raises(farstep.ConfigError, match=r"decay is 1.0; expected a number from 0 to below 1"):
        GradientNoise(1.0)
