"""PPO and SAC of elastic.py on Ray actors, which hold their CPU for the whole run.

Each actor has its environments and a copy of the agent. For each rollout it gets the newest weights through Ray's
object store, and returns its rows. The learner is the same object as farstep's. SAC learns while actors roll; an actor
gets no new rollout while actors are as far ahead of the learner as farstep's limiter allows.
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
from elastic_workload import NET, WARM_UP, Workload, measured_updates, report, tree_cpu_s

from farstep.batch import Batch, FinalObs
from farstep.learners.networks.nets import make_agent
from farstep.learners.ppo import PPO
from farstep.learners.replay.batches import ReplayBatch
from farstep.learners.sac import SACConfig, make_soft_actor

GIVEN = ("obs", "action", "logprob", "value", "reward", "terminated", "truncated", "episode_start")
TRANSITION = ("obs", "action", "reward", "terminated", "next_obs")


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


# ---- SAC ----


class SoftActorOnRay:
    """Steps one environment with its own copy of SAC's policy."""

    def __init__(self, workload: Workload, index: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(workload.seed + index)
        self._env = costly.make(**workload.env_kwargs)
        self._obs = self._env.reset(seed=workload.seed + index)[0]
        self._agent = make_soft_actor(*self.spaces(), SACConfig())

    def spaces(self) -> tuple[Any, Any]:
        return self._env.observation_space, self._env.action_space

    def rollout(self, weights: dict[str, torch.Tensor], steps: int) -> tuple[dict[str, Any], float]:
        """Roll out with these weights; returns the transitions, and the seconds that they took."""
        began = time.monotonic()
        self._agent.load_state_dict(weights)
        rows: dict[str, list[Any]] = {name: [] for name in TRANSITION}
        for _ in range(steps):
            with torch.inference_mode():
                action = self._agent.act(torch.from_numpy(self._obs[None]))["action"][0].numpy()
            after, reward, terminated, truncated, _ = self._env.step(action)
            for name, value in zip(TRANSITION, (self._obs, action, reward, terminated, after), strict=True):
                rows[name].append(value)
            self._obs = self._env.reset()[0] if terminated or truncated else after
        return {name: np.stack(found) for name, found in rows.items()}, time.monotonic() - began


class Transitions:
    """The newest transitions, in arrays; uniform samples."""

    def __init__(self, size: int, gamma: float, seed: int) -> None:
        self._size, self._gamma, self._rng = size, gamma, np.random.default_rng(seed)
        self._arrays: dict[str, Any] = {}
        self.rows = 0
        """Transitions so far."""

    def insert(self, chunk: dict[str, Any]) -> None:
        steps = len(chunk["reward"])
        for name, values in chunk.items():
            kept = self._arrays.setdefault(name, np.zeros((self._size, *values.shape[1:]), values.dtype))
            kept[(self.rows + np.arange(steps)) % self._size] = values
        self.rows += steps

    def sample(self, number: int) -> ReplayBatch:
        keys = self._rng.integers(min(self.rows, self._size), size=number)
        rows = {name: torch.from_numpy(values[keys]) for name, values in self._arrays.items()}
        rows["reward"] = rows["reward"].float()
        rows["discount"] = self._gamma * (~rows.pop("terminated")).float()
        return ReplayBatch(rows, torch.ones(number), keys)


def sac(case: dict[str, Any]) -> dict[str, Any]:
    """Measure SAC, which updates whenever its ratio of updates to steps allows it."""
    workload = Workload(**case["workload"])
    made = ray.remote(num_cpus=1)(SoftActorOnRay)
    actors = [made.remote(workload, index) for index in range(workload.workers)]
    spaces = ray.get([actor.spaces.remote() for actor in actors])[0]
    learner = workload.sac(spaces, case["learning_starts"], case["updates_per_step"])
    replay = learner.config.replay
    steps, ratio = replay.chunk_steps(len(actors)), case["updates_per_step"]
    ahead = 1 / ratio + 2 * steps * len(actors)
    kept = Transitions(replay.buffer_size, learner.config.gamma, workload.seed)
    weights = ray.put(learner.agent.state_dict())
    idle, rolling = list(actors), {}
    updates, asked, used_s = 0, 0, 0.0
    cpu_s, began = tree_cpu_s(), time.monotonic()
    while time.monotonic() - began < case["seconds_limit"]:
        while idle and asked < min(case["total_steps"], replay.learning_starts + updates / ratio + ahead):
            actor = idle.pop()
            rolling[actor.rollout.remote(weights, steps)] = actor
            asked += steps
        may_update = updates < ratio * (kept.rows - replay.learning_starts)
        if not may_update and not rolling:
            break
        number, timeout = (len(rolling), 0) if may_update else (1, 60)
        for done in ray.wait([*rolling], num_returns=number, timeout=timeout)[0] if rolling else ():
            chunk, seconds = ray.get(done)
            kept.insert(chunk)
            used_s += seconds
            idle.append(rolling.pop(done))
        if may_update:
            learner.step(kept.sample(replay.batch_size))
            updates += 1
            if updates % replay.publish_every == 0:
                weights = ray.put(learner.agent.state_dict())
    seconds = time.monotonic() - began
    return {
        "seconds": round(seconds, 3),
        "updates": updates,
        "steps": kept.rows,
        "slot_seconds": round(seconds * len(actors), 3),
        "used_seconds": round(used_s, 3),
        "cpu_seconds": round(tree_cpu_s() - cpu_s, 3),
    }


def ppo(case: dict[str, Any]) -> dict[str, Any]:
    """Time updates of PPO."""
    workload = Workload(**case["workload"])
    actors = RayActors(workload)
    learner = workload.learner(actors.spaces)
    actors.publish(learner)
    found = measured_updates(actors.collect, learner, lambda: actors.publish(learner), case["updates"], actors.held_s)
    return found | {"whole_slot_seconds": round(actors.held_s(), 3), "warm_up": WARM_UP}


def main() -> None:
    case = json.loads(sys.argv[1])
    ray.init(
        num_cpus=case["workload"]["workers"] + 1,  # one for the learner
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        _system_config={"worker_niceness": 0},  # by default, actors have a lower priority than other processes
    )
    try:
        found = {"ppo": ppo, "sac": sac}[case["kind"]](case)
    finally:
        ray.shutdown()
    report("ray", found | {"ray": ray.__version__})


if __name__ == "__main__":
    main()
