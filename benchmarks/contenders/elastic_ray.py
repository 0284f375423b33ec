"""PPO of elastic.py on Ray actors, which hold their CPU for the whole run.

Each actor has its environments and a copy of the agent. For each rollout it gets the newest weights through Ray's
object store, and returns its rows. The learner is the same object as farstep's.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import _setup  # noqa: F401

# isort: split
import costly
import numpy as np
import ray
import torch
from elastic_workload import NET, WARM_UP, Workload, measured_updates, report

from farstep.batch import Batch, FinalObs
from farstep.learners.networks.nets import make_agent
from farstep.learners.ppo import PPO

GIVEN = ("obs", "action", "logprob", "value", "reward", "terminated", "truncated", "episode_start")


class Actor:
    """Steps its environments with its own copy of the agent."""

    def __init__(self, workload: Workload, index: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(workload.seed + index)
        self._steps = workload.num_steps
        self._envs = [costly.make(**workload.env_kwargs) for _ in range(workload.envs_per_worker)]
        first = workload.seed + index * len(self._envs)
        self._obs = np.stack([env.reset(seed=first + k)[0] for k, env in enumerate(self._envs)])
        self._starts = np.ones(len(self._envs), bool)
        self._agent = make_agent(*self.spaces(), NET, 0.98)

    def spaces(self) -> tuple[Any, Any]:
        return self._envs[0].observation_space, self._envs[0].action_space

    def rollout(self, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Roll out with these weights; returns the rows, and what follows them."""
        self._agent.load_state_dict(weights)
        rows: dict[str, list[Any]] = {name: [] for name in GIVEN}
        finals = []
        for row in range(self._steps):
            with torch.inference_mode():
                found = {name: value.numpy() for name, value in self._agent.act(torch.from_numpy(self._obs)).items()}
            taken = zip(self._envs, found["action"], strict=True)
            stepped = [env.step(action) for env, action in taken]
            rows["obs"].append(self._obs)
            rows["episode_start"].append(self._starts)
            for name in ("action", "logprob", "value"):
                rows[name].append(found[name])
            for place, name in ((1, "reward"), (2, "terminated"), (3, "truncated")):
                rows[name].append(np.array([each[place] for each in stepped], np.float32 if place == 1 else bool))
            self._starts = rows["terminated"][-1] | rows["truncated"][-1]
            after = [each[0] for each in stepped]
            for column in np.flatnonzero(self._starts):
                finals.append((row, column, after[column]))
                after[column] = self._envs[column].reset()[0]
            self._obs = np.stack(after)
        return {"rows": {name: np.stack(found) for name, found in rows.items()}, "last": self._obs, "finals": finals}


def joined(chunks: list[dict[str, Any]], version: int) -> Batch:
    """Put the chunks of all actors side by side, in the form that the learner takes."""
    arrays = {name: np.concatenate([chunk["rows"][name] for chunk in chunks], axis=1) for name in GIVEN}
    steps, columns = arrays["reward"].shape
    arrays["valid"] = np.ones((steps, columns), bool)
    arrays["version"] = np.full((steps, columns), version)
    width = columns // len(chunks)
    finals = [(row, width * k + column, obs) for k, chunk in enumerate(chunks) for row, column, obs in chunk["finals"]]
    obs = np.stack([final[2] for final in finals]) if finals else arrays["obs"][0, :0]
    places = np.array([final[:2] for final in finals], np.int64).reshape(-1, 2)
    return Batch(
        arrays,
        {},
        np.concatenate([chunk["last"] for chunk in chunks]),
        FinalObs(places[:, 0], places[:, 1], obs),
        {},
        np.arange(columns),
        np.ones(columns, bool),
    )


class RayActors:
    """The actors of a run, each with a CPU of its own."""

    def __init__(self, workload: Workload) -> None:
        self._started = time.monotonic()
        actor = ray.remote(num_cpus=1)(Actor)
        self._actors = [actor.remote(workload, index) for index in range(workload.workers)]
        self.spaces = ray.get([each.spaces.remote() for each in self._actors])[0]
        self._version = 0

    def publish(self, learner: PPO) -> None:
        self._weights = ray.put(learner.agent.state_dict())
        self._version += 1

    def collect(self) -> Batch:
        return joined(ray.get([actor.rollout.remote(self._weights) for actor in self._actors]), self._version)

    def held_s(self) -> float:
        """Slot-seconds so far: every actor holds its CPU from its creation on."""
        return (time.monotonic() - self._started) * len(self._actors)


def main() -> None:
    case = json.loads(sys.argv[1])
    workload = Workload(**case["workload"])
    ray.init(
        num_cpus=workload.workers + 1,  # one for the learner
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        _system_config={"worker_niceness": 0},  # by default, actors have a lower priority than other processes
    )
    try:
        actors = RayActors(workload)
        learner = workload.learner(actors.spaces)
        actors.publish(learner)
        found = measured_updates(
            actors.collect, learner, lambda: actors.publish(learner), case["updates"], actors.held_s
        )
        found["whole_slot_seconds"] = round(actors.held_s(), 3)
    finally:
        ray.shutdown()
    report("ray", found | {"warm_up": WARM_UP, "ray": ray.__version__})


if __name__ == "__main__":
    main()
