"""The PPO and SAC that the parts of elastic.py measure, and the loop that times PPO; for farstep and for Ray actors."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from costly import Cost
from cpu_meter import descendants_s, waited_for_s

from farstep.batch import Batch
from farstep.learners.loop.timing import Timer
from farstep.learners.networks.nets import NetConfig, make_agent
from farstep.learners.ppo import PPO, PPOConfig
from farstep.learners.replay.config import ReplayConfig
from farstep.learners.sac import SAC, SACConfig, make_soft_actor

WARM_UP = 3
"""First updates, which results do not include."""
NET = NetConfig(normalize_obs=False, normalize_reward=False)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A PPO with its environments."""

    workers: int
    envs_per_worker: int = 2
    num_steps: int = 128
    update_epochs: int = 8
    minibatch_size: int = 256
    env: str = "CartPole-v1"
    step_ms: float = 0.0
    cost: Cost = "compute"
    seed: int = 1
    hidden: tuple[int, ...] = NET.hidden
    """Hidden layers of the networks of PPO."""
    device: str = "cpu"
    """Device of PPO."""

    @property
    def num_envs(self) -> int:
        return self.workers * self.envs_per_worker

    @property
    def env_kwargs(self) -> dict[str, Any]:
        """Arguments of `costly.make`."""
        return {"env": self.env, "step_ms": self.step_ms, "cost": self.cost}

    def learner(self, spaces: tuple[Any, Any], scaling: str | None = None) -> PPO:
        """Make the learner, which has one thread."""
        torch.set_num_threads(1)
        torch.manual_seed(self.seed)
        net = replace(NET, hidden=tuple(self.hidden))
        config = PPOConfig(
            num_steps=self.num_steps,
            update_epochs=self.update_epochs,
            minibatch_size=self.minibatch_size,
            gamma=0.98,
            gae_lambda=0.8,
            learning_rate=1e-3,
            ent_coef=0.0,
            scaling=scaling,
            net=net,
        )
        return PPO(make_agent(*spaces, net, config.gamma), config, self.seed, self.device)

    def sac(self, spaces: tuple[Any, Any], learning_starts: int, updates_per_step: float) -> SAC:
        """Make a SAC learner, which has one thread."""
        torch.set_num_threads(1)
        torch.manual_seed(self.seed)
        replay = ReplayConfig(learning_starts=learning_starts, updates_per_step=updates_per_step, buffer_checkpoint_s=0)
        config = SACConfig(replay=replay)
        return SAC(make_soft_actor(*spaces, config), config, self.seed)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measured_updates(
    collect: Callable[[], Batch], learner: PPO, publish: Callable[[], object], updates: int, held_s: Callable[[], float]
) -> dict[str, Any]:
    """Collect and learn alternately; returns times, slot-seconds and CPU time of the updates after the warm-up.

    Args:
        collect: Collects a batch with the newest weights.
        learner: Learns from it.
        publish: Makes the learner's weights the newest.
        updates: Updates to measure, besides the warm-up.
        held_s: Returns the seconds so far in which slots were held, summed over slots.
    """
    timer, collect_s, learn_s, update_s = Timer(), [], [], []
    held = cpu = start = 0.0
    rows = 0
    for update in range(WARM_UP + updates):
        if update == WARM_UP:
            held, cpu, start = held_s(), tree_cpu_s(), time.monotonic()
        began = time.monotonic()
        batch = collect()
        collected = time.monotonic()
        rows = int(batch["valid"].sum())
        learner.update(batch, int(batch["version"].max()), 0.0, timer)
        learned = time.monotonic()
        publish()
        collect_s.append(collected - began)
        learn_s.append(learned - collected)
        update_s.append(time.monotonic() - began)
    return {
        "updates": updates,
        "rows_per_update": rows,
        "seconds": round(time.monotonic() - start, 4),
        "slot_seconds": round(held_s() - held, 4),
        "cpu_seconds": round(tree_cpu_s() - cpu, 3),
        "collect_s": round(float(np.mean(collect_s[WARM_UP:])), 5),
        "learn_s": round(float(np.mean(learn_s[WARM_UP:])), 5),
        "update_s": [round(value, 5) for value in update_s[WARM_UP:]],
    }


def tree_cpu_s() -> float:
    """CPU time so far of this process and of its living descendants."""
    return waited_for_s() + sum(descendants_s().values())


def report(contender: str, found: dict[str, Any]) -> None:
    """Print the result of a case; `elastic.py` reads the last line that is a report."""
    print(json.dumps({"contender": contender, **found}), flush=True)
