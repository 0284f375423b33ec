"""The mini-batch pipeline: a learner computes gradients of the first workers' data while others still travel.

    for minibatch in minibatches(env.parts(agent, steps=128), env.num_envs, mode="accumulate"):
        (loss(minibatch.batch) * minibatch.weight).backward()
        if minibatch.step:
            optimizer.step()
            optimizer.zero_grad()

It knows no framework: gradients and the optimiser are the caller's.
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
    """All columns of one worker, and what to do with their gradient."""

    worker: int
    batch: Batch
    weight: float
    """What to multiply the loss with."""
    step: bool
    """The optimiser steps after this one."""


def minibatches(
    parts: Iterable[Part],
    num_envs: int,
    mode: PipelineMode = "accumulate",
    prepare: Callable[[Part], object] | None = None,
) -> Iterator[Minibatch]:
    """A mini-batch for each worker, in order of arrival; `prepare` is given every part first, complete or not.

    `accumulate`: one optimiser step, after the last. A mini-batch weighs its share of the `num_envs` columns, so the
    sum of the gradients is the gradient of the whole batch, whatever the order, if the loss is a mean over all rows
    (filler rows count as 0) and what it normalises with is fixed before: advantages as they are, or scaled by
    numbers of an earlier rollout. `step`: an optimiser step after every mini-batch, each of full weight; then the
    order of arrival matters.
    """
    if mode not in get_args(PipelineMode):
        raise ConfigError(unknown_name("mode of the mini-batch pipeline", mode, get_args(PipelineMode)))
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
