"""Shared by all contenders of the throughput benchmark: environments, policy, arrays and clock.

A contender collects whole rollouts of ``steps`` times ``num_envs`` transitions (obs, action, logprob, value,
reward and both kinds of episode end) into arrays that it owns:

    workload = parse_arguments()
    policy = make_policy(workload)
    rollout = Rollout.empty(workload)
    ...                                     # def collect() -> int: fill the rollout, return its transitions
    report("gymnasium-sync", workload, measure(collect, workload.seconds))

This file runs in the virtual environments of all peers, so it uses only what Gymnasium 0.29 to 1.4 have in
common and knows nothing of farstep.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias, cast

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from versions import versions_of

torch.set_num_threads(1)

Sampler: TypeAlias = Literal["eager", "lean"]
Array: TypeAlias = npt.NDArray[Any]

PIXEL_ENVS = ("ALE/Pong-v5",)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The rollouts to collect, from the command line."""

    env: str
    num_envs: int
    steps: int
    seconds: float
    sampler: Sampler
    mode: str | None = None
    """The contender's way of collecting; None if it has only one."""
    inference: str | None = None
    """The contender's way of calling the policy; None if it has only one."""
    workers: int = 2
    """Processes (EnvPool, ale-py: threads) that step environments, in contenders that let one choose their number."""

    @property
    def transitions(self) -> int:
        """Transitions in one rollout."""
        return self.steps * self.num_envs

    @property
    def envs_per_process(self) -> int:
        return self.num_envs // self.workers


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Full rollouts collected within the time budget, after one warm-up rollout."""

    transitions: int
    rollouts: int
    seconds: float
    startup_s: float = 0.0
    """Seconds from the import of this module to the end of the first rollout."""

    @property
    def steps_per_second(self) -> float:
        return self.transitions / self.seconds


def parse_arguments(*, modes: tuple[str, ...] = (), inferences: tuple[str, ...] = ()) -> Workload:
    """Parse the command line.

    ``modes`` and ``inferences`` are the contender's ways of collecting and of calling the policy, the
    default first.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--sampler", choices=("eager", "lean"), default="eager")
    parser.add_argument("--workers", type=int, default=2)
    if modes:
        parser.add_argument("--mode", choices=modes, default=modes[0])
    if inferences:
        parser.add_argument("--inference", choices=inferences, default=inferences[0])
    workload = Workload(**vars(parser.parse_args()))
    if workload.num_envs % workload.workers:
        parser.error(f"got --num-envs {workload.num_envs}, expected a multiple of {workload.workers}")
    return workload


def make_env(env_id: str) -> gym.Env[Any, Any]:
    """Make one environment, the same for every Python contender; Pong has four stacked frames of 84x84."""
    if env_id not in PIXEL_ENVS:
        # Gymnasium 0.29 has LunarLander up to v2, which differs from v3 in a wind that is off by default.
        known = env_id in gym.registry or env_id != "LunarLander-v3"
        return gym.make(env_id if known else "LunarLander-v2", disable_env_checker=True)
    import ale_py.registration

    if env_id not in gym.registry:
        # Importing ale_py registers its environments, but stops half-way under Gymnasium 0.29.
        ale_py.registration.register_v5_envs()
    env = gym.make(env_id, frameskip=1, disable_env_checker=True)
    env = gym.wrappers.AtariPreprocessing(env, frame_skip=4)
    if hasattr(gym.wrappers, "FrameStackObservation"):
        return gym.wrappers.FrameStackObservation(env, 4)
    return PlainFrames(gym.wrappers.FrameStack(env, 4))


class PlainFrames(gym.ObservationWrapper):
    """Converts Gymnasium 0.29's lazily stacked frames to the array that later versions return."""

    def observation(self, observation: object) -> Array:
        return np.asarray(observation)


def spaces_of(env_id: str) -> tuple[gym.spaces.Box, gym.spaces.Discrete]:
    """Observation and action space of one environment."""
    env = make_env(env_id)
    spaces = env.observation_space, env.action_space
    env.close()
    return cast(tuple[gym.spaces.Box, gym.spaces.Discrete], spaces)


class Policy(nn.Module):
    """An actor-critic with the two methods that farstep requires of an agent."""

    def __init__(self, observation_shape: tuple[int, ...], num_actions: int, sampler: Sampler) -> None:
        super().__init__()
        self.trunk: nn.Module
        self.actor: nn.Module
        self.critic: nn.Module
        if len(observation_shape) == 3:
            self.trunk = nature_cnn(observation_shape[0])
            self.actor = nn.Linear(512, num_actions)
            self.critic = nn.Linear(512, 1)
        else:
            self.trunk = nn.Identity()
            self.actor = mlp(observation_shape[0], num_actions)
            self.critic = mlp(observation_shape[0], 1)
        self.sampler = sampler

    def act(self, obs: Array | Tensor) -> dict[str, Tensor]:
        """Sample actions, with log-probabilities and values, for a batch of observations."""
        with torch.no_grad():
            features = self.trunk(torch.as_tensor(obs))
            logits = self.actor(features)
            value = self.critic(features).squeeze(-1)
            sample = sample_lean if self.sampler == "lean" else sample_eager
            action, logprob = sample(logits)
        return {"action": action, "logprob": logprob, "value": value}

    def get_parameters(self) -> dict[str, Tensor]:
        return dict(self.state_dict())


def sample_eager(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Sampling as most learners write it."""
    distribution = Categorical(logits=logits)
    action = distribution.sample()
    return action, distribution.log_prob(action)


def sample_lean(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The same distribution without a distribution object: the first of competing exponential clocks."""
    logprobs = torch.log_softmax(logits, dim=-1)
    clocks = torch.empty_like(logprobs).exponential_()
    action = (logprobs - clocks.log_()).argmax(dim=-1)
    return action, logprobs.gather(-1, action.unsqueeze(-1)).squeeze(-1)


def mlp(num_inputs: int, num_outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_outputs))


class Scale(nn.Module):
    """Converts bytes to numbers between 0 and 1."""

    def forward(self, pixels: Tensor) -> Tensor:
        return pixels.float() / 255.0


def nature_cnn(num_frames: int) -> nn.Sequential:
    """The network of Mnih et al. (2015), without its head."""
    return nn.Sequential(
        Scale(),
        nn.Conv2d(num_frames, 32, 8, stride=4),
        nn.ReLU(),
        nn.Conv2d(32, 64, 4, stride=2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, stride=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 512),
        nn.ReLU(),
    )


def make_policy(workload: Workload) -> Policy:
    """The policy of a workload, with the same weights in every process."""
    observation_space, action_space = spaces_of(workload.env)
    torch.manual_seed(1)
    policy = Policy(observation_space.shape, int(action_space.n), workload.sampler)
    return policy.requires_grad_(False).eval()


@dataclass(frozen=True)
class Rollout:
    """The arrays ``[steps, num_envs, ...]`` that a contender fills and owns."""

    obs: Array
    action: Array
    logprob: Array
    value: Array
    reward: Array
    terminated: Array
    truncated: Array

    @classmethod
    def empty(cls, workload: Workload, num_envs: int | None = None, steps: int | None = None) -> Rollout:
        """Allocate arrays for ``workload``; ``num_envs`` and ``steps`` are given if one process has a part of it."""
        space, _ = spaces_of(workload.env)
        shape = (steps or workload.steps, num_envs or workload.num_envs)
        return cls(
            obs=np.zeros((*shape, *space.shape), space.dtype),
            action=np.zeros(shape, np.int64),
            logprob=np.zeros(shape, np.float32),
            value=np.zeros(shape, np.float32),
            reward=np.zeros(shape, np.float32),
            terminated=np.zeros(shape, np.bool_),
            truncated=np.zeros(shape, np.bool_),
        )

    def write_action(self, t: int, obs: Array, output: Mapping[str, Tensor]) -> Array:
        """Store observations and outputs of the policy at ``t``; returns the actions as NumPy arrays."""
        self.obs[t] = obs
        self.action[t] = action = output["action"].numpy()
        self.logprob[t] = output["logprob"].numpy()
        self.value[t] = output["value"].numpy()
        return action

    def write_outcome(self, t: int, reward: Array, terminated: Array, truncated: Array) -> None:
        """Store rewards and ends of episodes at ``t``."""
        self.reward[t] = reward
        self.terminated[t] = terminated
        self.truncated[t] = truncated


_STARTED = time.perf_counter()


def measure(collect: Callable[[], int], seconds: float, warm: Callable[[], object] | None = None) -> Measurement:
    """Call ``collect`` for ``seconds``, after one warm-up call.

    ``collect`` collects one full rollout and returns its number of transitions; ``warm`` is called
    between the warm-up and the start of the clock.
    """
    collect()
    if warm is not None:
        warm()
    started = time.perf_counter()
    transitions = rollouts = 0
    while True:
        transitions += collect()
        rollouts += 1
        elapsed = time.perf_counter() - started
        if elapsed >= seconds:
            return Measurement(
                transitions=transitions, rollouts=rollouts, seconds=elapsed, startup_s=started - _STARTED
            )


@dataclass(frozen=True, kw_only=True)
class Report:
    """The one line that a contender prints."""

    contender: str
    env: str
    num_envs: int
    steps: int
    sampler: str
    steps_per_second: float
    rollouts: int
    seconds: float
    startup_s: float
    notes: str = ""
    versions: dict[str, str] = field(default_factory=dict)


def report(
    contender: str,
    workload: Workload,
    measurement: Measurement,
    *,
    notes: str = "",
    sampler: str | None = None,
    packages: tuple[str, ...] = (),
) -> None:
    """Print the result as one line of JSON; ``sampler`` is given if the contender used its own."""
    line = Report(
        contender=contender,
        env=workload.env,
        num_envs=workload.num_envs,
        steps=workload.steps,
        sampler=sampler or workload.sampler,
        steps_per_second=round(measurement.steps_per_second, 1),
        rollouts=measurement.rollouts,
        seconds=round(measurement.seconds, 3),
        startup_s=round(measurement.startup_s, 2),
        notes=notes,
        versions=versions_of("gymnasium", "numpy", "torch", *packages),
    )
    sys.stdout.write(json.dumps(asdict(line)) + "\n")
    sys.stdout.flush()
