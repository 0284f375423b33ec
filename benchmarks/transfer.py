"""Time that pipelined transfer of rollouts saves in one iteration of a learner behind a slow link.

    python benchmarks/transfer.py                       # 16 actors x 512 steps of 84x84x4 frames over 50 MB/s
    python benchmarks/transfer.py --actors 4 --steps 64 --rounds 1

Workers send their chunks over TCP through a loopback interface of 50 MB/s (in a separate network namespace, throttled
by ``tc tbf``). An iteration is: roll, transfer, compute advantages, and compute the gradient over all rows with a
convolutional network, one worker's frames at a time, with one optimizer step at the end. The contenders differ in what
overlaps:

    off            collect, then learn
    minibatches    compute a worker's gradients as soon as its chunk has arrived
    rows           send chunks while they are rolled; then as off
    dual           compute advantages while observations are transferred; then as minibatches
    in-turn        as dual, with the observations of two workers at a time
    all            all of these

All of them see the same rows and end with the same gradient. Rounds are interleaved.
"""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium
import numpy as np
import torch
import tyro
from children import run_script
from document import header, write_document
from link import BURST_S, CLONE_NEWNET, MIN_BURST_BYTES, QUEUE_MS, LinkError, tool
from rich.console import Console
from tables import table
from torch import Tensor, nn

import farstep
from farstep.batch import Part
from farstep.workflow.pipeline import minibatches

FRAME = (4, 84, 84)
PUBLISHED = 0.1176
"""Fraction of time that ARTOS reports to save."""
CONTENDERS: dict[str, farstep.TransferTrigger | None] = {
    "off": None,
    "minibatches": None,
    "rows": farstep.TransferTrigger(size=32),
    "dual": farstep.TransferTrigger.dual(),
    "in-turn": farstep.TransferTrigger.dual(max_senders=2),
    "all": farstep.TransferTrigger.dual(size=32, max_senders=2),
}
TITLES = {
    "off": "off: collect, then learn",
    "minibatches": "minibatches as chunks arrive",
    "rows": "rows sent while rolling",
    "dual": "dual stage",
    "in-turn": "dual stage, two workers' bulk at a time (`max_senders=2`)",
    "all": "all of these",
}


@dataclass(kw_only=True)
class Args:
    """Time of an iteration with parts of the pipeline on and off."""

    actors: int = 16
    steps: int = 512
    megabytes_per_second: float = 50.0
    rounds: int = 3
    step_ms: float = 2.0
    """time of an environment step, in which it sleeps, so that the learner has the cores"""
    channels: int = 4
    """channels of the network's first layer, which determine how long learning takes"""
    out: Path = Path(__file__).parent / "results" / "transfer.json"


class Frames(gymnasium.Env[Any, Any]):
    """Returns pre-generated frames at a constant rate."""

    observation_space = gymnasium.spaces.Box(0, 255, FRAME, np.uint8)
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, step_ms: float) -> None:
        self._step_s, self._at = step_ms / 1000, 0
        self._frames = np.random.default_rng(0).integers(0, 256, (64, *FRAME), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self._frames[0], {}

    def step(self, action: Any) -> Any:
        time.sleep(self._step_s)
        self._at += 1
        return self._frames[self._at % 64], float(action), False, self._at % 400 == 0, {}


class Policy(nn.Module):
    """A small convolutional actor-critic; workers act at random, so that they cost nothing."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, channels, 8, 4), nn.ReLU(), nn.Conv2d(channels, 16, 4, 2), nn.ReLU(), nn.Flatten()
        )
        self.heads = nn.Linear(16 * 9 * 9, 5)

    def act(self, obs: Tensor) -> dict[str, Tensor]:
        action = torch.randint(4, (len(obs),))
        return {"action": action, "logprob": torch.full((len(obs),), -1.386), "value": torch.zeros(len(obs))}

    def get_parameters(self) -> dict[str, Tensor]:
        return {"bias": self.heads.bias}

    def loss(self, batch: farstep.Batch, advantage: np.ndarray) -> Tensor:
        """A policy gradient and a value loss, each a mean over rows."""
        obs = torch.from_numpy(np.ascontiguousarray(batch["obs"]).reshape(-1, *FRAME)).float().div_(255)
        out = self.heads(self.body(obs))
        action, scale = torch.from_numpy(batch["action"].reshape(-1)), torch.from_numpy(advantage.reshape(-1)).float()
        chosen = torch.log_softmax(out[:, :4], -1).gather(1, action[:, None])[:, 0]
        return (0.5 * (out[:, 4] - scale) ** 2 - chosen * scale).mean()


def advantages(batch: farstep.Batch) -> np.ndarray:
    """GAE over a worker's columns."""
    value = np.concatenate([batch["value"], np.zeros_like(batch["value"][:1])])
    ended = batch["terminated"] | batch["truncated"]
    delta = batch["reward"] + 0.99 * value[1:] * ~ended - value[:-1]
    found, running = np.zeros_like(delta), np.zeros(delta.shape[1], np.float32)
    for t in reversed(range(len(delta))):
        running = delta[t] + 0.99 * 0.95 * ~ended[t] * running
        found[t] = running
    return found


def iteration(name: str, env: farstep.ClusterEnv, policy: Policy, optimizer: Any, args: Args) -> dict[str, float]:
    """Run one iteration; returns the seconds until the first gradient and in total."""
    began, first = time.perf_counter(), 0.0
    if name in ("off", "rows"):
        batch = env.collect(policy, steps=args.steps)
        for column in range(args.actors):
            part = _columns(batch, column)
            (policy.loss(part, advantages(part)) / args.actors).backward()
            first = first or time.perf_counter() - began
        optimizer.step()
    else:
        ready: dict[int, np.ndarray] = {}

        def prepare(part: Part) -> None:
            if part.worker not in ready or part.complete:
                ready.setdefault(part.worker, advantages(part.so_far))

        parts = env.parts(policy, steps=args.steps)
        for minibatch in minibatches(parts, args.actors, "accumulate", prepare):
            (policy.loss(minibatch.batch, ready[minibatch.worker]) * minibatch.weight).backward()
            first = first or time.perf_counter() - began
            if minibatch.step:
                optimizer.step()
    gradient = torch.cat([p.grad.reshape(-1) for p in policy.parameters() if p.grad is not None])
    optimizer.zero_grad()
    return {"seconds": time.perf_counter() - began, "first": first, "gradient": float(gradient.norm())}


def _columns(batch: farstep.Batch, column: int) -> Any:
    return {name: batch[name][:, column : column + 1] for name in batch}


def slow_loopback(bytes_per_second: float) -> None:
    """Move this process and its children behind a loopback interface of that rate."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        raise LinkError(f"no network namespace: {os.strerror(ctypes.get_errno())}; run as root")
    tool("ip", "link", "set", "lo", "up")
    burst = str(int(max(bytes_per_second * BURST_S, MIN_BURST_BYTES)))
    rate = f"{bytes_per_second * 8:.0f}bit"
    tool("tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", rate, "burst", burst, "latency", f"{QUEUE_MS}ms")


def main(args: Args) -> None:
    console = Console()
    slow_loopback(args.megabytes_per_second * 1e6)
    torch.set_num_threads(1)
    megabytes = args.actors * args.steps * np.prod(FRAME) / 1e6
    console.print(
        f"{args.actors} actors x {args.steps} steps: {megabytes:.0f} MB, at least "
        f"{megabytes / args.megabytes_per_second:.1f} s to transfer, {args.steps * args.step_ms / 1000:.1f} s to roll"
    )
    document: dict[str, Any] = header("transfer.py") | {
        "settings": {k: v for k, v in vars(args).items() if k != "out"},
        "runs": [],
    }
    for round_number in range(args.rounds):
        for name, transfer in CONTENDERS.items():
            torch.manual_seed(0)
            policy = Policy(args.channels)
            optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)  # so that all iterations do the same work
            env_config: dict[str, Any] = {
                "type": "factory", "env_name": Frames, "env_kwargs": {"step_ms": args.step_ms},
                "envs_per_node": args.actors, "seed": 1, "inference": "eager",
            }  # fmt: skip
            if transfer is not None:
                env_config["transfer"] = transfer
            config = {"workers_per_node": args.actors, "transport": "tcp"}
            with farstep.ClusterEnv(env_config, config) as env:
                env.collect(policy, steps=4)
                run = iteration(name, env, policy, optimizer, args)
            document["runs"].append({"round": round_number, "contender": name, **run})
            console.print(f"round {round_number}, {name}: {run['seconds']:.2f} s, first gradient {run['first']:.2f} s")
            write_document(args.out, document)
    print(summary(document))


def summary(document: dict[str, Any]) -> str:
    """A Markdown table of medians over rounds."""
    of = {name: [run for run in document["runs"] if run["contender"] == name] for name in CONTENDERS}
    off = median(run["seconds"] for run in of["off"])
    rows = []
    for name, runs in of.items():
        seconds = median(run["seconds"] for run in runs)
        first = median(run["first"] for run in runs)
        less = "" if name == "off" else f"{1 - seconds / off:.1%}"
        rows.append([TITLES[name], f"{seconds:.2f}", less, f"{first:.2f}"])
    return table(["", "iteration, s", "less than off", "first gradient, s"], rows)


if __name__ == "__main__":
    run_script(lambda: main(tyro.cli(Args)))
