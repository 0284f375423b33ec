"""Steps per second with policies of 10 thousand to 269 million parameters, by where actions are computed.

    python benchmarks/large_policy.py                      # all sizes and contenders on this machine
    python benchmarks/large_policy.py --quick              # a smoke run: one small policy, one second each
    python benchmarks/large_policy.py --sizes 4M --only local-cpu served-cpu --workers 2 --envs 32
    python benchmarks/large_policy.py --where head --workers 2 --envs 16      # over a link of 1 Gbit/s; needs root

Contenders: `local-cpu` and `local-cuda` (each worker has a copy of the policy), `served-cpu` and `served-cuda` (one
acting server for all workers), `vec-cpu` and `vec-cuda` (`make_vec`, this process acts). The limit is the smaller of
two numbers: environments alone, with random actions, and the policy alone with all environments in one batch, on the
best device.

With `--where head`, workers and head are on two hosts (network namespaces), and an acting server with the head chooses
random actions. Observations have `--obs-bytes` bytes. They cross the link twice: to the server and in the rollout. The
limit is the smaller one of environments alone and the link.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
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


class NoiseEnv(gymnasium.Env[Any, Any]):
    """Returns the same bytes as observation of every step, at almost no cost."""

    def __init__(self, size: int) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (size,), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(4)
        self._obs = np.random.default_rng(0).integers(0, 256, size, np.uint8)

    def reset(self, **options: Any) -> Any:
        return self._obs, {}

    def step(self, action: Any) -> Any:
        return self._obs, 0.0, False, False, {}


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


def over_a_link(options: argparse.Namespace) -> dict[str, float]:
    """Steps per second with an acting server on another host than the workers."""
    sys.path.append(str(BENCHMARKS.parent))
    from tests.engines.namespaces import Network
    from tests.engines.ssh_hosts import SshServer

    with Network(["h1", "h2"], rate_mbit=options.mbit) as net, SshServer(network=net) as server:
        asked = {"hosts": ["h2"], "ssh": ["ssh", "-T", *server.options], "head_address": net.address("h1")}
        counts = ["--workers", options.workers, "--envs", options.envs, "--steps", options.steps]
        counts += ["--seconds", options.seconds, "--obs-bytes", options.obs_bytes]
        script = [sys.executable, str(Path(__file__)), "--on-host", json.dumps(asked), *map(str, counts)]
        found: dict[str, float] = json.loads(net.run("h1", script, 300).splitlines()[-1])
    found["link"] = options.mbit * 1e6 / 8 / (2 * options.obs_bytes)
    return found


def on_host(options: argparse.Namespace) -> dict[str, float]:
    """What `over_a_link` runs on the host of the head."""
    launch = {**json.loads(options.on_host), "workers_per_node": options.workers}
    source = {"type": "factory", "env_name": NoiseEnv, "env_kwargs": {"size": options.obs_bytes}, "compression": "none"}
    source |= {"envs_per_node": options.envs, "seed": 1}
    found = {}
    for name, inference, config in (
        ("environments", "local", farstep.LocalConfig(workers_per_node=options.workers)),
        ("local", "local", farstep.SSHConfig(**launch)),
        ("served", {"where": "head"}, farstep.SSHConfig(**launch)),
    ):
        with farstep.ClusterEnv({**source, "inference": inference}, config) as env:
            stream = env.stream(RandomPolicy(4), steps=options.steps)
            found[name] = rate(lambda: int(np.prod(next(stream).shape)), options.seconds)
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
    if options.on_host:
        print(json.dumps(on_host(options)))
        return 0
    if options.where == "head":
        found = over_a_link(options)
        limit = min(found["environments"], found["link"])
        print(
            f"{found}\nserved by the head: {found['served']:,.0f} steps/s, {found['served'] / limit:.2f} of the limit"
        )
        return 0
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
    parser.add_argument("--where", choices=["node", "head"], default="node", help="where acting servers are")
    parser.add_argument("--mbit", type=float, default=1000.0, help="rate of the link with --where head")
    parser.add_argument("--obs-bytes", type=int, default=7056, help="size of an observation with --where head")
    parser.add_argument("--on-host", default="", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="a smoke run with two workers")
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results" / "large_policy.json")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.workers, options.envs, options.steps, options.seconds = ["10k"], 2, 8, 8, 0.5
    return options


if __name__ == "__main__":
    run_script(main)
