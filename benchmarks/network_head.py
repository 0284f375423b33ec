"""The head of `network.py`: measures one way of transferring rollouts, and prints the rate as JSON."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from children import run_script

STEPS, ENVS = 128, 16


def main() -> None:
    asked = json.loads(sys.argv[1])
    found = {"tcp": tcp, "ray": ray_store}.get(asked["way"], farstep_run)(asked)
    print(json.dumps(found), flush=True)


def measured(take: Callable[[], int], seconds: float) -> dict[str, Any]:
    """Bytes per second, after a first batch; at least two batches are measured."""
    take()
    began, nbytes, count = time.monotonic(), 0, 0
    while count < 2 or time.monotonic() - began < seconds:
        nbytes += take()
        count += 1
    elapsed = time.monotonic() - began
    return {"megabytes_per_second": round(nbytes / elapsed / 1e6, 2), "batches": count, "seconds": round(elapsed, 2)}


def tcp(asked: dict[str, Any]) -> dict[str, Any]:
    """The limit: the bytes of a batch over a plain socket, sent by a program that does nothing else."""
    size = STEPS * ENVS * 4 * 84 * 84
    server = socket.create_server((asked["address"], asked["port"]))
    server.settimeout(60)
    connection, _ = server.accept()
    connection.settimeout(60)
    room = memoryview(bytearray(size))

    def take() -> int:
        got = 0
        while got < size:
            if not (some := connection.recv_into(room[got:])):
                raise RuntimeError("the sender has ended")
            got += some
        return size

    return measured(take, asked["seconds"])


def ray_store(asked: dict[str, Any]) -> dict[str, Any]:
    """A Ray actor on the other host makes batches, which the object store transfers, two at a time."""
    import ray
    from tape import FRAMES

    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    frames = np.load(asked["recording"])

    @ray.remote(resources={"node1": 1})
    class Roller:
        def __init__(self, frames: Any) -> None:
            self._frames, self._t = frames, 0

        def roll(self) -> Any:
            obs = np.empty((STEPS, ENVS, 4, 84, 84), np.uint8)
            for t in range(STEPS):
                for i in range(ENVS):
                    obs[t, i] = self._frames[(self._t + t + 37 * i) % FRAMES]
            self._t += STEPS
            return {"obs": obs, "reward": np.zeros((STEPS, ENVS), np.float32)}

    roller = Roller.remote(frames)
    waiting = [roller.roll.remote(), roller.roll.remote()]

    def take() -> int:
        batch = ray.get(waiting.pop(0))
        waiting.append(roller.roll.remote())
        return int(batch["obs"].nbytes)

    found = measured(take, asked["seconds"])
    ray.shutdown()
    return found


def farstep_run(asked: dict[str, Any]) -> dict[str, Any]:
    """farstep's stream; with `train`, a policy whose parameters change with every batch."""
    import torch
    from tape import PongTape

    import farstep
    from farstep.config.launch import SSHConfig

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Conv2d(4, 32, 8, 4), torch.nn.ReLU(), torch.nn.Conv2d(32, 64, 4, 2), torch.nn.ReLU(),
                torch.nn.Flatten(), torch.nn.Linear(5184, 256), torch.nn.ReLU(), torch.nn.Linear(256, 6),
            )  # fmt: skip

        def distribution(self, obs: Any) -> Any:
            return {"logits": self.layers(obs.float() / 255)}

        def act(self, obs: Any) -> Any:
            logits = self.distribution(obs)["logits"]
            return {"action": logits.argmax(-1), "logprob": logits.log_softmax(-1).max(-1).values}

        def get_parameters(self) -> Any:
            return self.state_dict()

    class Still:
        def act(self, obs: Any) -> Any:
            return np.zeros(len(obs), np.int64)

        def get_parameters(self) -> Any:
            return {}

    train = asked.get("train", False)
    agent = Net() if train else Still()
    config = SSHConfig(
        hosts=asked["hosts"],
        ssh=asked["ssh"],
        workers_per_node=1,
        head_address=asked["address"],
        encrypted=asked["encrypted"],
        timeouts={"transfer_s": 600.0},
    )
    source = {"type": "factory", "env_name": PongTape, "envs_per_node": ENVS, "seed": 1, **asked["source"]}
    with farstep.ClusterEnv(source, config) as env:
        stream = env.stream(agent, steps=STEPS, max_staleness=1)

        def take() -> int:
            batch = next(stream)
            if train:
                with torch.no_grad():
                    for parameter in agent.parameters():
                        parameter += 1e-5 * torch.randn_like(parameter)
                env.publish(agent)
            return int(batch["obs"].nbytes)

        found = measured(take, asked["seconds"])
        stats = env.stats()
        received = stats["bytes"]["rollouts_received"]
        found |= {
            "wire_share": round(received / (stats["chunks"] * STEPS * ENVS * 4 * 84 * 84), 4),
            "weight_syncs": stats["pulls"]["total"],
            "weights_megabytes": round(stats["bytes"]["weights_sent"] / 1e6, 1),
        }
        return found


if __name__ == "__main__":
    run_script(main)
