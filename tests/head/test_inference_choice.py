"""The measurement of `inference="auto"`: the slots that it uses, and the state of environments afterwards."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farstep
from farstep.testing import CountingEnv, TableAgent
from tests.cluster.checks import arrays_of, assert_same, cluster, eventually, within
from tests.cluster.sharing import SOURCE, held, serving

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


class WatchingAgent(TableAgent):
    """Records how many slots the only run of a coordinator holds whenever the head reads the parameters."""

    def __init__(self, coordinator: str) -> None:
        super().__init__()
        self._coordinator, self._head = coordinator, os.getpid()
        self.held: list[int] = []

    def get_parameters(self) -> Any:
        if os.getpid() == self._head:
            self.held += held(self._coordinator)
        return super().get_parameters()


def test_the_measurement_waits_for_slots_only_once(tmp_path: Path) -> None:
    with serving(tmp_path / "c", slots=2) as name:
        config = farstep.LocalConfig(workers_per_node=2, coordinator=name)
        with farstep.ClusterEnv({**SOURCE, "release_idle": True, "inference": "auto"}, config) as env:
            agent = WatchingAgent(name)
            within(lambda: env.collect(agent, 4))
            assert env.chosen_inference is not None
            assert 2 in agent.held  # kept from the first way to the second
            eventually(lambda: held(name) == [0])
