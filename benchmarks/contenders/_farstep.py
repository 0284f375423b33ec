"""How the farstep contenders describe the workload to farstep and read their batches."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
from workload import PIXEL_ENVS, Policy, Workload

import farstep

INFERENCES = ("auto", "eager")
PACKAGES = ("farstep", "envpool")


def gymnasium_source(env_id: str) -> dict[str, Any]:
    """What env_config and make_vec need to build the environment of ``workload.make_env``."""
    if env_id not in PIXEL_ENVS:
        return {"env_name": env_id}
    return {
        "env_name": f"ale_py:{env_id}",
        "env_kwargs": {"frameskip": 1},
        "wrappers": [
            (gym.wrappers.AtariPreprocessing, {"frame_skip": 4}),
            (gym.wrappers.FrameStackObservation, {"stack_size": 4}),
        ],
    }


def envpool_source(env_id: str) -> dict[str, Any]:
    """The same for EnvPool's environments, with the settings of the EnvPool contender."""
    if env_id not in PIXEL_ENVS:
        return {"env_name": env_id}
    return {
        "env_name": env_id.removeprefix("ALE/"),
        "env_kwargs": {"repeat_action_probability": 0.25, "use_fire_reset": False},
    }


def make_cluster(workload: Workload, *, envpool: bool = False, seed_episodes: bool = True) -> farstep.ClusterEnv:
    """A cluster of one worker per core that hosts the workload's environments."""
    source = envpool_source(workload.env) if envpool else gymnasium_source(workload.env)
    return farstep.ClusterEnv(
        env_config={
            "type": "envpool" if envpool else "gymnasium",
            "envs_per_node": workload.num_envs,
            "seed": 1,
            "seed_episodes": seed_episodes,
            "inference": workload.inference,
            **source,
        },
        config=farstep.LocalConfig(nodes=1, workers_per_node=workload.workers),
    )


def collecting(env: farstep.ClusterEnv, policy: Policy, workload: Workload) -> Callable[[], int]:
    """Rollouts one at a time, with all workers waiting for each other."""

    def collect() -> int:
        batch = env.collect(policy, steps=workload.steps)
        return int(batch["valid"].size)

    return collect


def streaming(env: farstep.ClusterEnv, policy: Policy, workload: Workload) -> Callable[[], int]:
    """Rollouts of workers that may be one batch ahead."""
    batches = iter(env.stream(policy, steps=workload.steps, max_staleness=1))

    def collect() -> int:
        return int(next(batches)["valid"].size)

    return collect


def contender_name(kind: str, workload: Workload) -> str:
    return f"farstep-{kind}-eager" if workload.inference == "eager" else f"farstep-{kind}"
