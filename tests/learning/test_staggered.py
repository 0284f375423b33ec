"""Every learner trains in staggered environments, also with gates; the steps before the first rollout are counted."""

from __future__ import annotations

import numpy as np
import pytest

from farstep.learners.async_ppo import AsyncPPOConfig
from farstep.learners.impala import ImpalaConfig
from farstep.learners.networks.nets import NetConfig
from farstep.learners.ppo import PPOConfig
from tests.learning.tasks import Config, Rows, make_env, make_training

CONFIGS: dict[str, Config] = {
    "ppo": PPOConfig(num_steps=10, update_epochs=1),
    "ppo-gru": PPOConfig(num_steps=10, update_epochs=1, net=NetConfig(recurrent="gru", core=8)),
    "async-ppo": AsyncPPOConfig(num_steps=10),
    "impala": ImpalaConfig(num_steps=10),
}


@pytest.mark.parametrize("early", ["partial", "gate"])
@pytest.mark.parametrize("learner", CONFIGS)
def test_every_learner_trains_in_staggered_environments(learner: str, early: str) -> None:
    seen = Rows()
    stagger = {"horizon": 40, "groups": 4, "early": early}
    with make_env("CartPole-v1", 8, launcher="in-process", stagger=stagger) as env:
        training, agent = make_training(env, CONFIGS[learner], 640, sink=seen)
        progress = training.run()
        advanced = env.stats()["stagger_steps"]
    assert advanced > 0
    assert seen.rows[0]["step"] > advanced  # the first update is charged with them
    assert progress.steps >= 640
    for metrics in seen.rows:
        assert np.isfinite([value for name, value in metrics.items() if name.startswith("train/")]).all()
    assert all(bool(parameter.isfinite().all()) for parameter in agent.parameters())
