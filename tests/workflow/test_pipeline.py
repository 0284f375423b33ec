"""The minibatch pipeline: gradients of parts, in any order of arrival, add up to that of the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from farstep.batch import Batch, FinalObs, Part
from farstep.errors import ConfigError
from farstep.workflow.pipeline import minibatches

STEPS, WIDTHS = 16, (3, 1, 4, 2)
NUM_ENVS = sum(WIDTHS)


def rollout(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    arrays = {
        "obs": rng.normal(size=(STEPS, NUM_ENVS, 5)),
        "action": rng.integers(0, 3, (STEPS, NUM_ENVS)),
        "logprob": rng.normal(-1.1, 0.2, (STEPS, NUM_ENVS)),
        "advantage": rng.normal(size=(STEPS, NUM_ENVS)),
        "target": rng.normal(size=(STEPS, NUM_ENVS)),
    }
    none = np.zeros(0, np.int64)
    slots = np.arange(NUM_ENVS)
    return Batch(arrays, {}, None, FinalObs(none, none, None), {"return": none}, slots, np.zeros(NUM_ENVS, bool))


def parts_of(batch: Batch, order: list[int], dual: bool) -> list[Part]:
    """The batch as workers of these widths would send it: the small arrays first, perhaps, and obs and action last."""
    found = []
    ends = np.cumsum(WIDTHS)
    for worker in order:
        columns = slice(int(ends[worker]) - WIDTHS[worker], int(ends[worker]))
        so_far = replace(batch, arrays={n: a[:, columns] for n, a in batch.items()}, slots=batch.slots[columns])
        small = replace(so_far, arrays={n: a for n, a in so_far.items() if n not in ("obs", "action")})
        if dual:
            found.append(Part(worker, so_far.slots, 0, False, small, small))
        found.append(Part(worker, so_far.slots, int(dual), True, so_far, so_far))
    return found


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).double()


def loss(net: torch.nn.Module, batch: Any) -> torch.Tensor:
    """PPO's: clipped surrogate, value loss, entropy; a mean over all rows, advantages as they are."""
    data = {name: torch.as_tensor(np.ascontiguousarray(array)) for name, array in batch.items()}
    out = net(data["obs"])
    policy = torch.distributions.Categorical(logits=out[..., :3])
    ratio = (policy.log_prob(data["action"]) - data["logprob"]).exp()
    clipped = torch.min(ratio * data["advantage"], ratio.clamp(0.8, 1.2) * data["advantage"])
    return (-clipped + 0.5 * (out[..., 3] - data["target"]) ** 2 - 0.01 * policy.entropy()).mean()


def gradient(net: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dual", [False, True], ids=["whole", "dual"])
def test_accumulated_gradients_are_those_of_the_whole_batch(seed: int, dual: bool) -> None:
    batch, net, whole = rollout(seed), model(), model()
    loss(whole, batch).backward()
    order = np.random.default_rng(seed).permutation(len(WIDTHS)).tolist()
    steps = []
    for minibatch in minibatches(parts_of(batch, order, dual), NUM_ENVS):
        (loss(net, minibatch.batch) * minibatch.weight).backward()
        steps.append(minibatch.step)
    assert steps == [False] * (len(WIDTHS) - 1) + [True]
    torch.testing.assert_close(gradient(net), gradient(whole), rtol=0, atol=1e-6)
    assert gradient(whole).abs().max() > 1e-3  # it could have been otherwise


def test_an_unweighted_sum_would_not_be_equal() -> None:
    batch, net, whole = rollout(0), model(), model()
    loss(whole, batch).backward()
    for minibatch in minibatches(parts_of(batch, [0, 1, 2, 3], False), NUM_ENVS, mode="step"):
        assert (minibatch.weight, minibatch.step) == (1.0, True)
        loss(net, minibatch.batch).backward()
    assert (gradient(net) / len(WIDTHS) - gradient(whole)).abs().max() > 1e-6


def test_stepping_after_each_is_as_many_updates_in_order_of_arrival() -> None:
    batch, net, other = rollout(1), model(), model()
    order = [2, 0, 3, 1]
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for minibatch in minibatches(parts_of(batch, order, True), NUM_ENVS, mode="step"):
        loss(net, minibatch.batch).backward()
        if minibatch.step:
            optimizer.step()
            optimizer.zero_grad()
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    for part in parts_of(batch, order, False):
        optimizer.zero_grad()
        loss(other, part.batch).backward()
        optimizer.step()
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_every_part_can_be_prepared_before_its_minibatch() -> None:
    seen: list[tuple[int, int]] = []
    for minibatch in minibatches(
        parts_of(rollout(0), [1, 0, 2, 3], True), NUM_ENVS, prepare=lambda part: seen.append((part.worker, part.stage))
    ):
        assert seen[-2:] == [(minibatch.worker, 0), (minibatch.worker, 1)]


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="accumulate"):
        next(minibatches([], 1, mode="sum"))  # type: ignore[arg-type]
