"""Workers with a GPU see only that one and act on it; without a visible GPU they log a warning and act on the CPU."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import farstep
from farstep.agents.policy import FAST
from farstep.testing import CountingEnv


class SeeingEnv(CountingEnv):
    """Its info has the GPUs that its process may see."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = super().reset(seed=seed, options=options)
        return obs, {**info, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", "")}


@pytest.mark.parametrize(
    ("transport", "names", "seen"), [("shm", "", ["0", "1", "0"]), ("tcp", "5,7", ["5", "7", "5"])]
)
def test_each_worker_sees_one(transport: Any, names: str, seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    source = {"type": "factory", "env_name": SeeingEnv, "envs_per_node": 3, "seed": 1}
    config = farstep.LocalConfig(workers_per_node=3, gpus_per_node=2, transport=transport)
    with farstep.ClusterEnv(source, config) as env:
        _, info = env.reset()
        assert list(info["gpus"]) == seen


@pytest.mark.usefixtures("torch_in_workers")
def test_modules_act_on_it_if_torch_can() -> None:
    # Imported here and not above: workers import this file for `SeeingEnv`.
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)

        def act(self, obs: Any) -> dict[str, Any]:
            on_gpu = torch.full((len(obs),), obs.is_cuda and self.layer.weight.is_cuda)
            return {"action": self.layer(obs).argmax(-1), "on_gpu": on_gpu}

        def get_parameters(self) -> Any:
            return self.state_dict()

    source = {"type": "factory", "env_name": CountingEnv, "envs_per_node": 4, "seed": 1}
    agent = Net()
    with farstep.ClusterEnv(source, farstep.LocalConfig(workers_per_node=2, gpus_per_node=1)) as env:
        for _ in range(2):
            batch = env.collect(agent, steps=8)
            assert batch["on_gpu"].all() == torch.cuda.is_available()
            with torch.no_grad():
                expected = agent.layer(torch.from_numpy(np.array(batch["obs"]))).argmax(-1).numpy()
            assert (batch["action"] == expected).all()
            with torch.no_grad():
                agent.layer.weight += 1.0
        assert env.inference == ("eager on cuda" if torch.cuda.is_available() else FAST)
