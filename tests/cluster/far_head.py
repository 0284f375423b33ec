"""A head that a test runs on one host of a network: collects until it is stopped, and prints what it saw.

    python far_head.py '{"hosts": [...], "ssh": [...], "options": {...}, "steps": 16, "size": 0, "inference": "local"}'

Every line of its output is JSON: a batch each (columns, whether all rows follow the ones before), at the end the
counters. A line on its standard input ends it.
"""

from __future__ import annotations

import json
import logging
import select
import sys
import time
from typing import Any

import gymnasium
import numpy as np

import farstep
from farstep.config.launch import SSHConfig
from farstep.testing import CountingEnv, TableAgent


class WideEnv(CountingEnv):
    """Counts, and sends `size` bytes of noise with it."""

    def __init__(self, size: int) -> None:
        super().__init__(length=None)
        count = self.observation_space
        noise = gymnasium.spaces.Box(0, 255, (size,), np.uint8)
        self.observation_space = gymnasium.spaces.Dict({"count": count, "noise": noise})
        self._noise = np.random.default_rng(0).integers(0, 255, size, np.uint8)

    def reset(self, **options: Any) -> Any:
        obs, info = super().reset(**options)
        return {"count": obs, "noise": self._noise}, info

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return {"count": obs, "noise": self._noise}, *rest


class WideAgent(TableAgent):
    def act(self, obs: Any) -> Any:
        return super().act(obs["count"])


def main() -> None:
    asked = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(relativeCreated)d %(message)s")
    config = SSHConfig(hosts=asked["hosts"], ssh=asked["ssh"], **asked["options"])
    source: dict[str, Any] = {"type": "factory", "env_name": CountingEnv, "env_kwargs": {"length": None}}
    agent, key = TableAgent(), "obs"
    if size := asked["size"]:
        source |= {"env_name": WideEnv, "env_kwargs": {"size": size}}
        agent, key = WideAgent(), "obs.count"
    source |= {"envs_per_node": 2, "seed": 3, "inference": asked["inference"]}
    with farstep.ClusterEnv(source, config) as env:
        last: dict[int, float] = {}
        while not select.select([sys.stdin], [], [], 0)[0]:
            began = time.monotonic()
            batch = env.collect(agent, steps=asked["steps"])
            count = batch.arrays[key][..., 1]
            follows = bool((np.diff(count, axis=0)[~batch["episode_start"][1:]] == 1).all())
            for column, slot in enumerate(batch.slots.tolist()):
                if not batch["episode_start"][0, column]:
                    follows = follows and count[0, column] == last[slot] + 1 and bool(batch.continues[column])
                last[slot] = float(count[-1, column])
            say(columns=len(batch.slots), follows=follows, seconds=time.monotonic() - began)
            if not size:  # without large messages, collecting would use all CPU time
                time.sleep(0.02)
        say(stats=env.stats())


def say(**what: Any) -> None:
    print(json.dumps(what, default=str), flush=True)


if __name__ == "__main__":
    main()
