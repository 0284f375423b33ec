"""What the measurement of `inference="auto"` leaves behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from farstep.testing import CountingEnv, TableAgent
from tests.cluster.checks import arrays_of, assert_same, cluster, within

pytestmark = pytest.mark.slow  # real processes

MASK = np.array([True, False, True])


class OptionEnv(CountingEnv):
    """Its option `episode` replaces the episode id."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = super().reset(seed=seed)
        obs[0] = self.episode = (options or {}).get("episode", self.episode)
        return obs, info


def first_batch(inference: str, resets: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """The first batch after some resets."""
    with cluster(OptionEnv, envs=3, workers=2, inference=inference) as env:
        for arguments in resets:
            within(partial(env.reset, **arguments))
        return arrays_of(within(lambda: env.collect(TableAgent(), 8)).copy())


@pytest.mark.parametrize(
    "resets",
    [
        [{}],
        [{}, {}],
        [{"options": {"reset_mask": MASK}}, {}],
        [{"options": {"reset_mask": MASK, "episode": 7}}],
        [{"seed": 7}, {"options": {"reset_mask": MASK}}, {"options": {"reset_mask": ~MASK, "episode": 7}}],
        [{"seed": 8, "options": {"reset_mask": MASK}}],
    ],
    ids=str,
)
def test_the_measurement_ends_where_the_resets_before_it_ended(resets: Sequence[Mapping[str, Any]]) -> None:
    assert_same(first_batch("auto", resets), first_batch("local", resets))
