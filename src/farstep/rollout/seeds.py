"""Seeds keyed by slot and episode, the same however many workers there are and whoever restarts."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from farstep.core import Array

_BLOCK = 64


def episode_seed(root: int, slot: int, episode: int) -> int:
    """The seed of an episode: 31 bits, since environments in C and `np.random.seed` take no more."""
    return int(_seed_block(root, slot, episode // _BLOCK)[episode % _BLOCK])


@lru_cache(maxsize=65536)
def _seed_block(root: int, slot: int, block: int) -> Array:
    # Drawn 64 at a time: one SeedSequence costs more than a CartPole step.
    return np.random.SeedSequence(root, spawn_key=(slot, block)).generate_state(_BLOCK) >> 1


def episode_generator(root: int, slot: int, episode: int) -> np.random.Generator:
    """The generator an agent gets for an episode of a slot."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(root, spawn_key=(slot, episode, 1))))


def fresh_root() -> int:
    """A root seed from the system's entropy."""
    return int(np.random.SeedSequence().generate_state(1, np.uint64)[0] >> np.uint64(1))


def resumed_root(root: int, version: int) -> int:
    """The root of environments that begin anew when a run goes on from a version: no seed comes a second time."""
    return int(np.random.SeedSequence(root, spawn_key=(version, 0, 5)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def advance_seed(root: int, slot: int, episode: int) -> int:
    """The seed of the random actions that bring an episode of a slot to its place in a staggered schedule."""
    return int(np.random.SeedSequence(root, spawn_key=(slot, episode, 3)).generate_state(1)[0] >> 1)


def offset_generator(root: int, slot: int) -> np.random.Generator:
    """The generator that a slot's random place in a staggered schedule is drawn from."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(root, spawn_key=(slot, 0, 4))))
