"""The page of a run that has failed says so above everything else."""

from __future__ import annotations

import pytest

import farstep
from farstep.cluster_env import status_page_of
from farstep.errors import FarstepError
from farstep.testing import CountingEnv, TableAgent


class FailingEnv(CountingEnv):
    def step(self, action: object) -> object:  # type: ignore[override]
        raise ValueError("no license")


def test_page_of_a_failed_run_says_why_on_top() -> None:
    described = {"type": "factory", "env_name": FailingEnv, "envs_per_node": 2}
    config = farstep.InProcessConfig(restart_budget=0)
    with farstep.ClusterEnv(described, config) as env:
        source = status_page_of(env).source
        with pytest.raises(FarstepError):
            env.collect(TableAgent(), steps=2)
    data = source.read()
    assert data["state"] == "failed"
    assert "no license" in data["diagnoses"][0]["text"] and data["diagnoses"][0]["is_problem"]
