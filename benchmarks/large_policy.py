"""Steps per second with policies of 10 thousand to 269 million parameters, by where actions are computed.

    python benchmarks/large_policy.py                      # all sizes and contenders on this machine: 50 minutes
    python benchmarks/large_policy.py --quick              # a smoke run: two tiny policies, half a second each
    python benchmarks/large_policy.py --sizes 4M --only local-cpu served-cpu --workers 2 --envs 32
    python benchmarks/large_policy.py --where head --workers 2 --envs 16      # over a link of 1 Gbit/s; needs root

Contenders: `local-cpu` and `local-cuda` (each worker has a copy of the policy), `served-cpu`, `served-cuda` and
`served-bf16` (one acting server for all workers; the last one on the GPU in bfloat16), `vec-cpu` and `vec-cuda`
(`make_vec`, this process acts). The limit is the smaller of two numbers: environments alone, with random actions, and
the policy alone on the best device, in the same precision and with the same batch size: all environments or, for
`served-cuda` and `served-bf16`, half of them, because the server's batches have no more: the others step meanwhile.

A rollout has `--steps` steps, so that the start and the end of a rollout take little of its time. With policies of 67
million parameters and more and with images, contenders on the CPU collect at most 8 steps at a time, because 32 would
take up to 20 s. Each result has its number of steps.

Each case runs in a process of its own, for at most `--timeout` seconds. All cases are measured in turn, `--rounds`
times; the tables have medians. The results are written after each run, and a repeated command measures only what is
missing in them or has failed.

With `--where head`, workers and head are on two hosts (network namespaces), and an acting server with the head chooses
random actions. Observations have `--obs-bytes` bytes. They cross the link twice: to the server and in the rollout. The
limit is the smaller one of environments alone and the link. A repeated command measures only missing rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from children import run_script
from document import check_machine, continued, write_document
from large_policy_tables import (
    ENV_ALONE,
    LIMITS,
    POLICIES,
    POLICY_IN_BF16,
    POLICY_ON_CPU,
    POLICY_ON_HALF,
    described,
    env_case,
    limiting_policies,
    link_described,
)
from policy_models import SIZES, VISUAL_SIZES, LargePolicy, NoiseEnv, RandomPolicy, make_policy
from roster import BENCHMARKS
from runner import last_line, last_report, run_command

import farstep
from farstep.agents.gpu.graph_policy import with_graphs
from farstep.agents.policy import Policy
from farstep.agents.precision import reduce_layers

WARM_UP_S = 2.0
"""Seconds that are not measured, after the first rollout, for which the agent is loaded. An acting server on the GPU
captures a CUDA graph when a batch size first occurs."""


def rate(step: Callable[[], int], seconds: float) -> float:
    """Steps per second of repeated calls after some that are not measured."""
    step()
    began = time.perf_counter()
    while time.perf_counter() - began < WARM_UP_S:
        step()
    began, steps = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds:
        steps += step()
    return steps / elapsed


def collected(options: argparse.Namespace, agent: Any, inference: Any, gpus: int = 0) -> float:
    source = {"type": "factory", "env_name": NoiseEnv} if options.is_visual else {"env_name": options.env}
    config = {**source, "envs_per_node": options.envs, "seed": 1, "inference": inference}
    timeouts = {"act_s": 600, "load_s": 600, "connect_s": 300}
    launch = {"workers_per_node": options.workers, "gpus_per_node": gpus, "timeouts": timeouts}
    with farstep.ClusterEnv(config, launch) as env:
        stream = env.stream(agent, steps=options.steps)

        def step() -> int:
            return int(np.prod(next(stream).shape))

        found = rate(step, options.seconds)
        stream.close()
        print(env.inference, file=sys.stderr)
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


def measure_link(options: argparse.Namespace) -> None:
    """Measure the missing rounds with these settings, and write them down."""
    document = continued(options.out, "large_policy.py")
    check_machine(document, options.out)
    names = ("workers", "envs", "steps", "seconds", "mbit", "obs_bytes")
    settings = {name: getattr(options, name) for name in names}
    runs = document["runs"]
    for number in range(sum(run.items() >= settings.items() for run in runs), options.rounds):
        runs.append({**settings, "round": number + 1, **over_a_link(options)})
        write_document(options.out, document)
        print(f"round {number + 1}: {link_described(runs[-1])}", flush=True)
    print(f"written: {options.out}, {len(runs)} rounds")


def on_host(options: argparse.Namespace) -> dict[str, float]:
    """What `over_a_link` runs on the host of the head."""
    launch = {**json.loads(options.on_host), "workers_per_node": options.workers}
    source = {
        "type": "factory",
        "env_name": NoiseEnv,
        "env_kwargs": {"shape": (options.obs_bytes,)},
        "compression": "none",
    }
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
    env_name = NoiseEnv if options.is_visual else options.env
    vector = farstep.make_vec(env_name, options.envs, config={"workers_per_node": options.workers})
    with contextlib.closing(vector) as env:
        obs, _ = env.reset(seed=1)

        def step() -> int:
            nonlocal obs
            with torch.inference_mode():
                action = agent.act(torch.from_numpy(obs).to(device))["action"].cpu().numpy()
            obs, *_ = env.step(action)
            return options.envs

        return rate(step, options.seconds)


def alone(options: argparse.Namespace, agent: LargePolicy, name: str) -> float:
    """The policy alone: one batch or, on the CPU, one batch per worker on each core if it is faster."""
    on_gpu = name != POLICY_ON_CPU
    num_envs = options.envs // 2 if name in (POLICY_ON_HALF, POLICY_IN_BF16) else options.envs
    if name == POLICY_IN_BF16:
        agent = reduce_layers(agent, "bfloat16")
    found = []
    for is_recorded in (False, True):
        rows = num_envs if on_gpu or not is_recorded else num_envs // options.workers
        policy = Policy(agent, "auto", on_gpu)
        policy = with_graphs(policy, num_envs) if is_recorded else policy
        obs = np.zeros((rows, *options.obs_space.shape), options.obs_space.dtype)
        starts = np.zeros(rows, bool)
        threads = torch.get_num_threads()
        if is_recorded:
            policy.accelerate(obs, None, starts)
            torch.set_num_threads(1)
        copies = 1 if rows == num_envs else min(options.workers, threads)
        found.append(rate(partial(acted, policy, obs, starts), options.seconds / 2) * copies)
        torch.set_num_threads(threads)
    return max(found)


def acted(policy: Policy, obs: Any, starts: Any) -> int:
    policy(obs, None, starts, None)
    return len(starts)


def contenders(options: argparse.Namespace) -> dict[str, Callable[[LargePolicy], float]]:
    """All contenders on this machine, by name."""
    found: dict[str, Callable[[LargePolicy], float]] = {
        "local-cpu": lambda agent: collected(options, agent, "local"),
        "served-cpu": lambda agent: collected(options, agent, "served"),
        "vec-cpu": lambda agent: stepped(options, agent, "cpu"),
    }
    if torch.cuda.is_available():
        found |= {
            "local-cuda": lambda agent: collected(options, agent, "local", torch.cuda.device_count()),
            "served-cuda": lambda agent: collected(options, agent, {"device": "cuda"}),
            "served-bf16": lambda agent: collected(options, agent, {"device": "cuda", "dtype": "bfloat16"}),
            "vec-cuda": lambda agent: stepped(options, agent, "cuda"),
        }
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one case, in the process of the case."""
    size, name = options.case
    options.is_visual = size in VISUAL_SIZES
    env: gymnasium.Env[Any, Any] = NoiseEnv() if options.is_visual else gymnasium.make(options.env)
    options.obs_space, num_actions = env.observation_space, int(env.action_space.n)
    env.close()
    if name == ENV_ALONE:
        return {"contender": name, "steps_per_second": collected(options, RandomPolicy(num_actions), "local")}
    agent = make_policy(size, options.obs_space.shape[0], num_actions)
    parameters = sum(parameter.numel() for parameter in agent.parameters())
    found = alone(options, agent, name) if name in LIMITS else contenders(options)[name](agent)
    return {"contender": name, "parameters": parameters, "steps_per_second": found}


def cases_of(options: argparse.Namespace) -> list[tuple[str, str]]:
    """The size and the contender of every case, limits first."""
    names = [name for name in contenders(options) if not options.only or name in options.only]
    limits = {policy for name in names for policy in limiting_policies(name)}
    possible = POLICIES if torch.cuda.is_available() else [POLICY_ON_CPU]
    names = [*(name for name in possible if name in limits), *names]
    alone = dict.fromkeys(env_case(size) for size in options.sizes)
    return [*alone, *((size, name) for size in options.sizes for name in names)]


def settings_of(options: argparse.Namespace, size: str, name: str) -> dict[str, Any]:
    """The settings of a case; results with other settings are other cases."""
    settings = {key: getattr(options, key) for key in ("env", "workers", "envs", "seconds")}
    is_slow = name.endswith("-cpu") and size not in ("10k", "4M")
    settings["steps"] = min(options.steps, 8) if is_slow else options.steps
    return settings


def recorded_settings(options: argparse.Namespace, size: str, name: str) -> dict[str, Any]:
    """The settings of a case as the results have them: with the environment that was stepped."""
    return settings_of(options, size, name) | ({"env": NoiseEnv.__name__} if size in VISUAL_SIZES else {})


def measured_in(runs: list[dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The results with the settings of this command."""
    return [run for run in runs if run.items() >= recorded_settings(options, run["size"], run["contender"]).items()]


def run_case(options: argparse.Namespace, size: str, name: str) -> dict[str, Any]:
    """Measure one case in another process."""
    settings = settings_of(options, size, name)
    words = [str(word) for key, value in settings.items() for word in (f"--{key}", value)]
    command = [sys.executable, str(Path(__file__).resolve()), "--case", size, name, *words]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        status, output, errors = run_command(command, Path(folder), options.timeout)
    report = last_report(output) if status == "ok" else None
    found = {"size": size, "contender": name, **recorded_settings(options, size, name)}
    found |= {"wall_s": round(time.monotonic() - began, 1)}
    if report is None:
        reason = f"took more than {options.timeout:g} s" if status == "timeout" else last_line(errors)
        return {**found, "steps_per_second": None, "reason": reason}
    note = next((line for line in errors.splitlines()[::-1] if line.startswith(("fast", "served", "eager"))), "")
    return {**found, **report, "inference": note}


def main() -> int:
    options = parse_options()
    if options.on_host:
        print(json.dumps(on_host(options)))
        return 0
    if options.case:
        print(json.dumps(measure(options)))
        return 0
    if options.where == "head":
        measure_link(options)
        return 0
    document = continued(options.out, "large_policy.py")
    check_machine(document, options.out)
    runs = document["runs"]
    for run in measured_in(runs, options):
        if run["steps_per_second"] is None:
            runs.remove(run)
    for number, (size, name) in itertools.product(range(options.rounds), cases_of(options)):
        known = [run for run in measured_in(runs, options) if (run["size"], run["contender"]) == (size, name)]
        if len(known) > number:
            continue
        runs.append(run_case(options, size, name))
        write_document(options.out, document)
        print(described(measured_in(runs, options), runs[-1]), flush=True)
    print(f"written: {options.out}, {len(runs)} runs")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="LunarLander-v3", metavar="ID")
    parser.add_argument("--sizes", nargs="+", choices=[*SIZES, *VISUAL_SIZES], default=[*SIZES, "ViT-S"])
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--envs", type=int, default=112, help="environments on all workers")
    parser.add_argument("--steps", type=int, default=32, help="length of a rollout; on the CPU at most 8 if it is slow")
    parser.add_argument("--seconds", type=float, default=3.0, help="measured time of one case")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds after which a case is given up")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="contenders")
    parser.add_argument("--where", choices=["node", "head"], default="node", help="where acting servers are")
    parser.add_argument("--mbit", type=float, default=1000.0, help="rate of the link with --where head")
    parser.add_argument("--obs-bytes", type=int, default=7056, help="size of an observation with --where head")
    parser.add_argument("--on-host", default="", help=argparse.SUPPRESS)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="a smoke run with two workers")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each case")
    parser.add_argument("--out", type=Path, help="default: results/large_policy.json or results/served-link.json")
    options = parser.parse_args()
    name = "served-link.json" if options.where == "head" else "large_policy.json"
    options.out = options.out or BENCHMARKS / "results" / name
    if options.quick:
        options.sizes, options.workers, options.envs = ["10k", "ViT-tiny"], 2, 8
        options.steps, options.seconds, options.rounds = 8, 0.5, 1
    return options


if __name__ == "__main__":
    run_script(main)
