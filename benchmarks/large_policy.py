"""Steps per second with policies of 10 thousand to 269 million parameters, by where actions are computed.

    python benchmarks/large_policy.py                      # all sizes and contenders on this machine
    python benchmarks/large_policy.py --quick              # a smoke run: one small policy, one second each
    python benchmarks/large_policy.py --sizes 4M --only local-cpu served-cpu --workers 2 --envs 32

Contenders: `local-cpu` and `local-cuda` (each worker has a copy of the policy), `served-cpu` and `served-cuda` (one
acting server for all workers), `vec-cpu` and `vec-cuda` (`make_vec`, this process acts). The limit is the smaller of
two numbers: environments alone, with random actions, and the policy alone with all environments in one batch, on the
best device.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from children import run_script
from document import header, write_document
from roster import BENCHMARKS

import farstep

SIZES = {"10k": (64, 2), "4M": (1408, 3), "67M": (4096, 5), "269M": (8192, 5)}
"""Width and number of hidden layers. A policy of 8 observations and 4 actions then has this many parameters."""


class LargePolicy(torch.nn.Module):
    """A multi-layer perceptron that samples its actions."""

    def __init__(self, num_inputs: int, num_actions: int, width: int, depth: int) -> None:
        super().__init__()
        sizes = [num_inputs, *[width] * depth]
        pairs = itertools.pairwise(sizes)
        layers = [layer for a, b in pairs for layer in (torch.nn.Linear(a, b), torch.nn.ReLU())]
        self.net = torch.nn.Sequential(*layers, torch.nn.Linear(width, num_actions))

    def act(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(obs)
        noise = -torch.log(-torch.log(torch.rand_like(logits)))
        action = torch.argmax(logits + noise, -1)
        return {"action": action, "logprob": torch.log_softmax(logits, -1).gather(-1, action[:, None])[:, 0]}

    def get_parameters(self) -> dict[str, torch.Tensor]:
        return dict(self.named_parameters())


class RandomPolicy:
    """Chooses random actions at almost no cost: environments alone."""

    def __init__(self, num_actions: int) -> None:
        self._num_actions, self._rng = num_actions, np.random.default_rng(0)

    def act(self, obs: Any) -> Any:
        return self._rng.integers(self._num_actions, size=len(obs))

    def get_parameters(self) -> dict[str, Any]:
        return {}


def rate(step: Callable[[], int], seconds: float) -> float:
    """Steps per second of repeated calls; the first is not measured."""
    step()
    began, steps = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds:
        steps += step()
    return steps / elapsed


def collected(options: argparse.Namespace, agent: Any, inference: Any, gpus: int = 0) -> float:
    config = {"env_name": options.env, "envs_per_node": options.envs, "seed": 1, "inference": inference}
    timeouts = {"act_s": 600, "load_s": 600, "connect_s": 300}
    launch = {"workers_per_node": options.workers, "gpus_per_node": gpus, "timeouts": timeouts}
    with farstep.ClusterEnv(config, launch) as env:
        stream = env.stream(agent, steps=options.steps)

        def step() -> int:
            return int(np.prod(next(stream).shape))

        found = rate(step, options.seconds)
        stream.close()
        return found


def stepped(options: argparse.Namespace, agent: LargePolicy, device: str) -> float:
    agent = agent.to(device)
    vector = farstep.make_vec(options.env, options.envs, config={"workers_per_node": options.workers})
    with contextlib.closing(vector) as env:
        obs, _ = env.reset(seed=1)

        def step() -> int:
            nonlocal obs
            with torch.inference_mode():
                action = agent.act(torch.from_numpy(obs).to(device))["action"].cpu().numpy()
            obs, *_ = env.step(action)
            return options.envs

        found = rate(step, options.seconds)
    agent.to("cpu")
    return found


def alone(options: argparse.Namespace, agent: LargePolicy, device: str) -> float:
    """The policy alone, with all environments in one batch."""
    agent = agent.to(device)
    obs = torch.zeros(options.envs, options.num_inputs)

    def step() -> int:
        with torch.inference_mode():
            agent.act(obs.to(device))["action"].cpu()
        return options.envs

    found = rate(step, options.seconds)
    agent.to("cpu")
    return found


def contenders(options: argparse.Namespace) -> dict[str, Callable[[LargePolicy], float]]:
    found: dict[str, Callable[[LargePolicy], float]] = {
        "local-cpu": lambda agent: collected(options, agent, "local"),
        "served-cpu": lambda agent: collected(options, agent, "served"),
        "vec-cpu": lambda agent: stepped(options, agent, "cpu"),
    }
    if torch.cuda.is_available():
        found |= {
            "local-cuda": lambda agent: collected(options, agent, "local", torch.cuda.device_count()),
            "served-cuda": lambda agent: collected(options, agent, {"device": "cuda"}),
            "vec-cuda": lambda agent: stepped(options, agent, "cuda"),
        }
    return {name: run for name, run in found.items() if not options.only or name in options.only}


def main() -> int:
    options = parse_options()
    with farstep.ClusterEnv({"env_name": options.env}, farstep.InProcessConfig()) as env:
        observations, actions = env.launch()
    options.num_inputs, num_actions = observations.shape[0], int(actions.n)
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    environments = collected(options, RandomPolicy(num_actions), "local")
    print(f"environments alone: {environments:,.0f} steps/s")
    rows = []
    for size in options.sizes:
        agent = LargePolicy(options.num_inputs, num_actions, *SIZES[size])
        policy = {device: alone(options, agent, device) for device in devices}
        limit = min(environments, max(policy.values()))
        count = sum(parameter.numel() for parameter in agent.parameters())
        print(f"{size} ({count:,} parameters): policy alone {policy}, limit {limit:,.0f} steps/s")
        for name, run in contenders(options).items():
            found = run(agent)
            rows.append(
                {"size": size, "parameters": count, "contender": name, "steps_per_second": found, "limit": limit}
            )
            print(f"  {name:12} {found:10,.0f} steps/s, {found / limit:.2f} of the limit", flush=True)
    settings = {name: getattr(options, name) for name in ("env", "envs", "workers", "steps", "seconds")}
    write_document(options.out, {**header("large_policy.py"), **settings, "environments": environments, "rows": rows})
    print(f"written: {options.out}")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="LunarLander-v3", metavar="ID")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--envs", type=int, default=112, help="environments on all workers")
    parser.add_argument("--steps", type=int, default=32, help="length of a rollout")
    parser.add_argument("--seconds", type=float, default=10.0, help="measured time of one run")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="contenders")
    parser.add_argument("--quick", action="store_true", help="a smoke run with two workers")
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results" / "large_policy.json")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.workers, options.envs, options.steps, options.seconds = ["10k"], 2, 8, 8, 0.5
    return options


if __name__ == "__main__":
    run_script(main)
