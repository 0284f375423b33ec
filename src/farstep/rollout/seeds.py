"""Seeds derived from slot and episode; they do not depend on the number of workers or on restarts."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from farstep.core import Array

_BLOCK = 64


def episode_seed(root: int, slot: int, episode: int) -> int:
    """The seed of an episode: 31 bits, because environments written in C and `np.random.seed` accept no more."""
    return int(_seed_block(root, slot, episode // _BLOCK)[episode % _BLOCK])


@lru_cache(maxsize=65536)
def _seed_block(root: int, slot: int, block: int) -> Array:
    # Draw 64 seeds at a time, because one SeedSequence costs more than a step of CartPole.
    return np.random.SeedSequence(root, spawn_key=(slot, block)).generate_state(_BLOCK) >> 1


def episode_generator(root: int, slot: int, episode: int) -> np.random.Generator:
    """The generator that an agent gets for an episode of a slot."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(root, spawn_key=(slot, episode, 1))))


def fresh_root() -> int:
    """A root seed from the system's entropy."""
    return int(np.random.SeedSequence().generate_state(1, np.uint64)[0] >> np.uint64(1))


def resumed_root(root: int, version: int) -> int:
    """The root seed for environments that restart when a run resumes at `version`, so that no seed is reused."""
    return int(np.random.SeedSequence(root, spawn_key=(version, 0, 5)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def advance_seed(root: int, slot: int, episode: int) -> int:
    """The seed of the random actions that advance an episode of a slot to its phase in a staggered schedule."""
    return int(np.random.SeedSequence(root, spawn_key=(slot, episode, 3)).generate_state(1)[0] >> 1)


def offset_generator(root: int, slot: int) -> np.random.Generator:
    """The generator that draws a slot's random offset in a staggered schedule."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(root, spawn_key=(slot, 0, 4))))
