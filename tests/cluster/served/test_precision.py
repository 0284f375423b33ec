"""Acting servers with bfloat16: with synchronization rules, recurrent agents, streams, faults and checkpoints."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
import torch

import farstep
from farstep.errors import RemoteEnvError
from farstep.learners.networks.nets import NetConfig, make_agent
from farstep.sync import AAPS
from tests.cluster.checks import assert_balanced, assert_sound, cluster, within
from tests.cluster.served.test_served import actions_in_progress

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("torch_in_workers")]  # real processes, or learning

PLAIN, RECURRENT = NetConfig(), NetConfig(recurrent="gru")


def served(**options: Any) -> farstep.ClusterEnv:
    return cluster(envs=4, workers=2, inference={"dtype": "bfloat16"}, **options)


def agent_for(env: farstep.ClusterEnv, config: NetConfig) -> Any:
    torch.manual_seed(0)
    return make_agent(*env.launch(), config, 0.99)


def change(agent: Any) -> None:
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter += 0.01 * torch.randn_like(parameter)


def assert_recorded(agent: Any, batch: farstep.Batch) -> None:
    """The log-probabilities are float32 and near those of the float32 policy, but not equal."""
    assert batch["logprob"].dtype == np.float32
    obs, action = (torch.from_numpy(batch[name].reshape(-1, *batch[name].shape[2:])) for name in ("obs", "action"))
    with torch.no_grad():
        difference = agent.evaluate(obs, action).logprob.numpy() - batch["logprob"].ravel()
    assert 0 < np.abs(difference).max() < 0.05


def test_log_probabilities_are_float32_and_near_those_of_float32() -> None:
    with served() as env:
        agent = agent_for(env, PLAIN)
        for _ in range(3):
            batch = within(lambda: env.collect(agent, 10))
            assert_sound(batch)
            assert_recorded(agent, batch)
            change(agent)
        assert env.inference == "served on cpu, bfloat16, eager"


@pytest.mark.parametrize("config", [PLAIN, RECURRENT], ids=["plain", "recurrent"])
def test_a_stream_with_aaps_continues_after_the_server_was_killed(config: NetConfig) -> None:
    with served(sync=AAPS(0.001)) as env:
        agent = agent_for(env, config)
        stream = env.stream(agent, steps=5, max_staleness=4)
        for k in range(10):
            if k == 5:
                os.kill(env.stats()["acting"][0]["pid"], signal.SIGKILL)
            batch = within(lambda: next(stream))
            assert batch["logprob"].dtype == np.float32
            change(agent)
            within(lambda: env.publish(agent))
        stream.close()
        stats = env.stats()
        assert_balanced(stats)
        assert stats["acting"][0]["restarts"] == 1 and stats["pulls"]["total"] >= 2
        assert all(0 <= value < 1 for value in stats["divergence"].values())


def test_a_saved_recurrent_run_continues() -> None:
    with served() as env:
        agent = agent_for(env, RECURRENT)
        actions = actions_in_progress(within(lambda: env.collect(agent, 30)))
        saved = within(env.save)
        expected = within(lambda: env.collect(agent, 1)).copy()
    with served() as env:
        env.launch()
        within(lambda: env.resume(agent, saved, actions))
        found = within(lambda: env.collect(agent, 1))
        np.testing.assert_array_equal(found["obs"], expected["obs"])
        np.testing.assert_allclose(found["value"], expected["value"], rtol=0.01, atol=0.01)


def test_weights_that_differ_too_much_in_bfloat16_end_the_run() -> None:
    with served() as env:
        agent = agent_for(env, PLAIN)
        within(lambda: env.collect(agent, 5))
        with torch.no_grad():
            for parameter in agent.heads.parameters():
                if parameter.ndim == 1:
                    parameter.copy_(1001 + torch.arange(len(parameter)))  # rounded to multiples of 4
        with pytest.raises(RemoteEnvError, match="differs from float32 by"):
            within(lambda: env.collect(agent, 5))
