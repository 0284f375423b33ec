"""A simulated run for tests and pictures of the status page."""

from __future__ import annotations

from typing import Any

import numpy as np


class SimulatedRun:
    """The data of a run without processes.

    Of every ten workers, seven roll; the others are starting, parked and lost. There are two acting servers: one on a
    host with workers, one on the host `gpu`. The host `second-gpu` has neither workers nor servers.

    Args:
        workers: Number of workers.
        hosts: Number of hosts with workers.
    """

    is_live = True
    reads = 0

    def __init__(self, workers: int, hosts: int) -> None:
        states = np.array(["alive"] * 7 + ["starting", "parked", "lost"])[np.arange(workers) % 10].tolist()
        self.data: dict[str, Any] = {
            "live": True,
            "state": "running",
            "time": 0.0,
            "run": {"title": "ppo on Far-v0", "options": [["num envs", str(workers)]]},
            "progress": {"steps": 5_000, "total_steps": 10_000, "seconds_left": 61.0},
            "diagnoses": [
                {
                    "cause": "x",
                    "text": "Worker 3 is slow.",
                    "remedy": "Look at it, or use fewer workers (--workers, on a cluster --workers-per-node).",
                    "is_problem": True,
                    "numbers": {"a": 0.5},
                }
            ],
            "workers": {
                "state": states,
                "host": [f"node-{k * hosts // workers}" for k in range(workers)],
                "unconnected_nodes": "no node",
                "rate": [100.0] * workers,
                "lag": [0.5] * workers,
                "divergence": [0.02] * workers,
                "restarts": 3,
            },
            "acting": [
                {
                    "number": workers,
                    "host": "node-0",
                    "rate": 1_200.0,
                    "batch_size": 8.0,
                    "wait_ms": 0.25,
                    "restarts": 0,
                },
                {"number": workers + 1, "host": "gpu", "rate": 800.0, "batch_size": 4.5, "wait_ms": 2.0, "restarts": 1},
            ],
            "hosts": [*(f"node-{k}" for k in range(hosts)), "gpu", "second-gpu"],
            "slots": {
                "held": 2,
                "released": 1,
                "parked": 3,
                "held_seconds": 400.0,
                "used_seconds": 100.0,
                "gpu_seconds": 40.0,
                "coordinator": {"name": "default", "granted": 3, "wanted": 6},
            },
            "rate": 100_000.0,
            "kl_threshold": 0.05,
            "lags": [[0, 50], [1, 40], [16, 10]],
            "weights": {"version": 7, "pulls": 3, "possible": 7, "bytes_sent": 3_000, "bytes_saved": 4_000},
            "buffer": {"fill": 10, "capacity": 100, "bytes": 4_000, "ratio": 2.0},
            "times": {"workers": [["env", 0.9], ["tickets", 0.1]], "learner": [["update", 1.0]]},
            "series": {
                "return": [[0, 1.0], [1, 2.0]],
                "evaluation": [[0, 2.0], [1, 3.0]],
                "rate": [[0, 1.0], [1, 2.0]],
            },
            "events": [
                {
                    "time": float(number),
                    "kind": "lost",
                    "text": f"worker {number}",
                    "worker": number,
                    "node": "",
                    "traceback": "Traceback: <b>" + 50 * " in a long line",
                }
                for number in range(60, 0, -1)
            ],
            "metrics": {"env/return_mean": 2.0},
        }

    def read(self) -> dict[str, Any]:
        self.reads += 1
        return dict(self.data)

    def metrics(self) -> str:
        return ""
