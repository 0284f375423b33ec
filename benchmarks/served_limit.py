"""Which fraction of its limit served inference on a GPU reaches, measured in alternating windows.

    python benchmarks/served_limit.py           # 4M to 269M parameters and ViT-S, each with 112 and 448 environments
    python benchmarks/served_limit.py --sizes 67M --envs 112 --rounds 10
    python benchmarks/served_limit.py --quick   # a smoke run without a GPU: two workers and a tiny policy

The limit is the smaller of two speeds: the environments with random actions, and the policy alone in the precision of
the server. On a GPU, the server's batches have at most half of the environments, so that the others step meanwhile, and
so do the batches of the policy alone.

The speed of virtual cores changes within seconds if the host has other guests, so dividing numbers of different minutes
gives wrong fractions. Here, the workers of all contenders of a case exist at the same time. Environments alone, policy
alone and served inference take turns, for `--window` seconds each. After each turn, workers finish the rollouts that
they have begun, and then sleep. Each round yields one fraction; the table has medians and ranges over the rounds.

Each case (a policy, a number of environments) is a process of its own. A repeated command measures only missing rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from children import run_script
from document import check_machine, continued, write_document
from large_policy_tables import served_fraction
from policy_models import SIZES, VISUAL_SIZES, LargePolicy, NoiseEnv, RandomPolicy, make_policy
from roster import BENCHMARKS
from runner import last_line, last_report, run_command

import farstep
from farstep.agents.gpu.graph_policy import with_graphs
from farstep.agents.policy import Policy
from farstep.agents.precision import reduce_layers

ENV, NUM_OBS, NUM_ACTIONS = "LunarLander-v3", 8, 4
STEPS = 32
"""Length of a rollout."""
WARM_UP_S = 2.0
"""Seconds for which each contender works before the first round: CUDA graphs are captured."""
SETTLE = 3
"""Rollouts at the start of a window that are not measured: some were rolled before it."""
IDLE_S = 0.25
"""Workers are idle if they make no step for this many seconds."""
PRECISIONS = ("float32", "bfloat16")

Speed = Callable[[float], float]
"""Returns the steps per second during that many seconds."""


@contextlib.contextmanager
def collecting(options: argparse.Namespace, agent: Any, inference: Any) -> Iterator[tuple[Speed, Callable[[], Any]]]:
    """Context manager: the speed of workers with this agent, and a function that returns the server's counters."""
    source = {"type": "factory", "env_name": NoiseEnv} if options.is_visual else {"env_name": ENV}
    config = {**source, "envs_per_node": options.num_envs, "seed": 1, "inference": inference}
    launch = {"workers_per_node": options.workers, "timeouts": {"act_s": 600, "load_s": 600, "connect_s": 300}}
    with farstep.ClusterEnv(config, launch) as env:
        stream = env.stream(agent, steps=STEPS)

        def speed(seconds: float) -> float:
            for _ in range(SETTLE):
                next(stream)
            began, steps = time.perf_counter(), 0
            while (elapsed := time.perf_counter() - began) < seconds:
                steps += int(np.prod(next(stream).shape))
            wait_until_idle(env)
            return steps / elapsed

        yield speed, lambda: env.stats()["acting"][0]
        stream.close()


def wait_until_idle(env: farstep.ClusterEnv) -> None:
    """Wait until all rollouts that may begin before the next one is taken are complete."""
    rolled = -1
    while (now := env.stats()["rolled"]) != rolled or env.stats()["in_flight"]:
        rolled = now
        time.sleep(IDLE_S)


def policy_alone(agent: LargePolicy, options: argparse.Namespace, dtype: Any) -> Speed:
    """The speed of the policy in this process, as the acting server calls it: with CUDA graphs if there is a GPU."""
    agent = copy.deepcopy(agent)
    if dtype != "float32":
        agent = reduce_layers(agent, dtype)
    rows = options.num_envs // 2 if options.device == "cuda" else options.num_envs
    torch.set_num_threads(1)  # on the CPU, a tiny policy does not need more
    policy = with_graphs(Policy(agent, "auto", options.device == "cuda"), rows)
    obs = np.zeros((rows, NUM_OBS), np.float32)
    if options.is_visual:
        space = NoiseEnv().observation_space
        obs = np.zeros((rows, *space.shape), space.dtype)
    starts = np.zeros(rows, bool)
    policy.accelerate(obs, None, starts)

    def speed(seconds: float) -> float:
        began, calls = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - began) < seconds:
            policy(obs, None, starts, None)
            calls += 1
        return calls * rows / elapsed

    return speed


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one case, in the process of the case: one result per round and precision."""
    options.is_visual = options.size in VISUAL_SIZES
    agent = make_policy(options.size, NUM_OBS, NUM_ACTIONS)
    precisions = PRECISIONS if options.device == "cuda" else PRECISIONS[:1]
    found: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        envs, _ = stack.enter_context(collecting(options, RandomPolicy(NUM_ACTIONS), "local"))
        speeds: dict[str, Speed] = {"environments": envs}
        counters = {}
        for dtype in precisions:
            inference = {"device": options.device, "dtype": dtype}
            speeds[f"policy {dtype}"] = policy_alone(agent, options, dtype)
            served = stack.enter_context(collecting(options, agent, inference))
            speeds[f"served {dtype}"], counters[dtype] = served
        for speed in speeds.values():
            speed(WARM_UP_S)
        for number in range(options.rounds):
            before = {dtype: read() for dtype, read in counters.items()}
            order = list(speeds) if number % 2 == 0 else list(speeds)[::-1]
            rates = {name: speeds[name](options.window) for name in order}
            for dtype, read in counters.items():
                after = read()
                rows, batches = (after[name] - before[dtype][name] for name in ("rows", "batches"))
                each = {name: round(rates[f"{name} {dtype}"]) for name in ("policy", "served")}
                each |= {"environments": round(rates["environments"]), "batch_size": round(rows / batches, 1)}
                found.append({"dtype": dtype, "round": number + 1, **each})
    return found


def settings_of(options: argparse.Namespace, size: str, num_envs: int) -> dict[str, Any]:
    names = ("workers", "window", "device")
    return {"size": size, "envs": num_envs, **{name: getattr(options, name) for name in names}}


def run_case(options: argparse.Namespace, size: str, num_envs: int, rounds: int) -> list[dict[str, Any]]:
    """Measure some rounds of a case in another process. Return an empty list if it fails."""
    words = ["--case", size, num_envs, "--workers", options.workers, "--rounds", rounds]
    words += ["--window", options.window, "--device", options.device]
    command = [sys.executable, str(Path(__file__).resolve()), *map(str, words)]
    with tempfile.TemporaryDirectory() as folder:
        status, output, errors = run_command(command, Path(folder), options.timeout)
    report = last_report(output) if status == "ok" else None
    if report is None:
        reason = f"took more than {options.timeout:g} s" if status == "timeout" else last_line(errors)
        print(f"{size} with {num_envs} environments failed: {reason}", flush=True)
        return []
    return [{**settings_of(options, size, num_envs), **run} for run in report["runs"]]


def main() -> int:
    options = parse_options()
    if options.case:
        options.size, options.num_envs = options.case[0], int(options.case[1])
        print(json.dumps({"contender": "served", "runs": measure(options)}))
        return 0
    document = continued(options.out, "served_limit.py")
    check_machine(document, options.out)
    runs, failed = document["runs"], False
    for size in options.sizes:
        for num_envs in options.envs:
            settings = settings_of(options, size, num_envs)
            done = max((run["round"] for run in runs if run.items() >= settings.items()), default=0)
            if done >= options.rounds:
                continue
            began, found = time.monotonic(), run_case(options, size, num_envs, options.rounds - done)
            failed = failed or not found
            runs += [{**run, "round": done + run["round"]} for run in found]
            write_document(options.out, document)
            for dtype in dict.fromkeys(run["dtype"] for run in found):
                share = median(served_fraction(run) for run in found if run["dtype"] == dtype)
                print(f"{size} {dtype}, {num_envs} environments: {share:.2f} of the limit", flush=True)
            print(f"  ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"written: {options.out}, {len(runs)} results")
    return int(failed)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=[*SIZES, *VISUAL_SIZES], default=["4M", "67M", "269M", "ViT-S"])
    parser.add_argument("--envs", nargs="+", type=int, default=[112, 448], help="environments on all workers")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--window", type=float, default=0.8, metavar="SECONDS", help="measured time of one window")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds after which a case is given up")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="a smoke run with two workers, on the CPU")
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results" / "served-limit.json")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.envs, options.workers, options.device = ["10k"], [8], 2, "cpu"
        options.rounds, options.window = 2, 0.2
    elif options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU; --quick measures a tiny policy on the CPU")
    return options


if __name__ == "__main__":
    run_script(main)
