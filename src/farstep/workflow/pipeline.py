"""The minibatch pipeline: a learner computes gradients for the first chunks while other chunks still arrive.

    for minibatch in minibatches(env.parts(agent, steps=128), env.num_envs, mode="accumulate"):
        (loss(minibatch.batch) * minibatch.weight).backward()
        if minibatch.step:
            optimizer.step()
            optimizer.zero_grad()

It is independent of the framework: the caller computes gradients and steps the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from farstep.batch import Batch, Part
from farstep.errors import ConfigError, unknown_name

PipelineMode = Literal["accumulate", "step"]


@dataclass(frozen=True)
class Minibatch:
    """The chunk of one worker, and what to do with its gradient."""

    worker: int
    """Number of the worker."""
    batch: Batch
    """Its chunk."""
    weight: float
    """Factor for the loss of this minibatch."""
    step: bool
    """Whether the optimizer steps after this minibatch."""


def minibatches(
    parts: Iterable[Part],
    num_envs: int,
    mode: PipelineMode = "accumulate",
    prepare: Callable[[Part], object] | None = None,
) -> Iterator[Minibatch]:
    """Turn the parts of a rollout into one minibatch per worker, in order of arrival.

    `"accumulate"` takes one optimizer step, after the last minibatch:

        weight = envs of the worker / num_envs,   sum_w weight_w * grad(loss_w) = grad(loss of the whole batch)

    This holds for any order of arrival, under two conditions: the loss is a mean over all rows (filler rows count as
    0), and its normalization uses constants, e.g. statistics of an earlier rollout to scale advantages.

    `"step"` takes an optimizer step after every minibatch, with weight 1. The order of arrival then affects the
    result.

    Args:
        parts: The parts of one rollout, as `env.parts` yields them.
        num_envs: Number of environments of the whole rollout.
        mode: `"accumulate"` (default) or `"step"`.
        prepare: Called with every part when it arrives, before the minibatch of its chunk is yielded.

    Yields:
        A minibatch for each worker whose chunk is complete.

    Raises:
        ConfigError: `mode` is unknown.
    """
    if mode not in get_args(PipelineMode):
        raise ConfigError(unknown_name("mode of the minibatch pipeline", mode, get_args(PipelineMode)))
    done = 0
    for part in parts:
        if prepare is not None:
            prepare(part)
        if part.complete:
            done += len(part.slots)
            if mode == "step":
                yield Minibatch(part.worker, part.so_far, 1.0, True)
            else:
                yield Minibatch(part.worker, part.so_far, len(part.slots) / num_envs, done == num_envs)
