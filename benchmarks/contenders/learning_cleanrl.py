"""CleanRL's PPO, SAC or DQN: its own script, unchanged, stopped at the threshold.

The script reports returns to a TensorBoard writer. The benchmark replaces it by a faster one that writes no files.
"""

from __future__ import annotations

import argparse
import hashlib
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import _setup  # noqa: F401

# isort: split
import gymnasium as gym
from _learning import Curve, parse_arguments, report

NEWER = {"LunarLander-v3": "LunarLander-v2", "HalfCheetah-v5": "HalfCheetah-v4"}
"""What Gymnasium 0.29, which the script is written for, has instead."""


REPLAY_SCRIPTS = ("dqn.py", "sac_continuous_action.py")

EXPLORATION_STEPS = 12_000
"""Steps during which DQN's probability of random actions decreases: 12 % of the Zoo's 100,000 steps."""
LUNAR_LANDER_DQN = {
    "learning-rate": 6.3e-4,
    "buffer-size": 50_000,
    "learning-starts": 1000,
    "target-network-frequency": 250,
    "train-frequency": 1,
    "end-e": 0.1,
}
"""The defaults of dqn.py are for CartPole-v1 and do not learn LunarLander-v3: RL Baselines3 Zoo's numbers instead."""


class Reached(Exception):
    """Training is over."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--scripts", type=Path, required=True, help="folder `cleanrl` of CleanRL's repository")
    parser.add_argument("--script", default="ppo.py", help="name of the script")
    parser.add_argument("--contender", default="cleanrl")
    parser.add_argument("--num-envs", type=int, help="another number than the script's own")
    task, options = parse_arguments(parser)
    script = options.scripts / options.script
    env_id = task.env if task.env in gym.registry else NEWER[task.env]
    arguments = ["--env-id", env_id, "--seed", str(task.seed), "--total-timesteps", str(task.max_steps), "--no-cuda"]
    if options.script == "dqn.py" and task.env == "LunarLander-v3":
        chosen = LUNAR_LANDER_DQN | {"exploration-fraction": min(1.0, EXPLORATION_STEPS / task.max_steps)}
        arguments += [word for name, value in chosen.items() for word in (f"--{name}", str(value))]
    if options.num_envs:
        arguments += ["--num-envs", str(options.num_envs)]
    curve = Curve(task)

    class Listener:
        """Stands in for torch.utils.tensorboard.SummaryWriter."""

        def __init__(self, _: str) -> None: ...

        def add_scalar(self, name: str, value: Any, step: int) -> None:
            if name == "charts/episodic_return" and curve.episode(step, float(value)):
                raise Reached

        def add_text(self, *_: object) -> None: ...

        def close(self) -> None: ...

    reset = gym.vector.SyncVectorEnv.reset

    def first_reset(envs: gym.vector.SyncVectorEnv, **arguments: Any) -> Any:
        """The script resets all environments once, just before it begins to train."""
        curve.begin()
        return reset(envs, **arguments)

    gym.vector.SyncVectorEnv.reset = first_reset  # type: ignore[method-assign]
    tensorboard = ModuleType("torch.utils.tensorboard")
    tensorboard.SummaryWriter = Listener  # type: ignore[attr-defined]
    sys.modules[tensorboard.__name__] = tensorboard
    sys.path.insert(0, str(options.scripts.parent))  # the replay scripts import `cleanrl_utils` from there
    num_samples = count_samples() if options.script in REPLAY_SCRIPTS else lambda: None
    sys.argv = [str(script), *arguments]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Reached:
        pass
    report(
        options.contender,
        task,
        curve,
        f"its own: {script.name} {' '.join(arguments)}; sha256 {hashlib.sha256(script.read_bytes()).hexdigest()[:12]}",
        ("torch", "numpy", "gymnasium"),
        notes="" if env_id == task.env else f"learns {env_id}",
        updates=num_samples(),
    )


def count_samples() -> Callable[[], int]:
    """Count the batches that the script takes from its replay buffer, one for each update."""
    from cleanrl_utils.buffers import ReplayBuffer

    sample, count = ReplayBuffer.sample, 0

    def counting(buffer: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return sample(buffer, *arguments, **options)

    ReplayBuffer.sample = counting
    return lambda: count


if __name__ == "__main__":
    main()
