"""The AAPS experiment: how often workers pull weights, and what it costs in return, for thresholds from 0 to 1.

    python benchmarks/aaps.py                                     # the small policy, all thresholds
    python benchmarks/aaps.py --hidden 912 --deltas 0 0.05 --seeds 5 --out benchmarks/results/aaps-large.json
    python benchmarks/aaps.py --show benchmarks/results/aaps.json benchmarks/results/aaps-large.json    # and plots

PPO on LunarLander-v3 with four workers and the paper's learning rate (5e-4), minibatches (8), gamma (.99) and lambda
(.95). The paper has 4 x 64 environments, rollouts of 1,024 steps, 30 epochs and 5 M steps; here, for two cores, 4 x 8
environments, rollouts of 128 steps, 10 epochs and 1 M steps. The learner evaluates values and log-probabilities
itself (a worker's critic is as old as its actor), clips around its own policy and weighs rows by how much likelier it
is to act so than the worker was, at most 2 (decoupled PPO); with the newest weights everywhere that is plain PPO, and
`--loss plain` is plain PPO in any case.
"""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import platform
import shlex
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from children import run_script
from rich.console import Console
from rich.table import Table
from tables import table as markdown_table
from torch import Tensor, nn
from torch.distributions import Categorical

import farstep

RESULTS = Path(__file__).parent / "results"


@dataclass(kw_only=True)
class Args:
    """Train with several thresholds and seeds; compare returns, pulls and bytes."""

    deltas: tuple[float, ...] = (0.0, 0.001, 0.01, 0.05, 0.1, 0.2, 0.5, 0.8, 1.0)
    """thresholds; 0 pulls every version"""
    seeds: int = 3
    """of `repeated`"""
    repeated: tuple[float, ...] | None = (0.0, 0.01, 0.05, 0.2)
    """thresholds that run with all seeds, the others with the first; None: all of them"""
    hidden: int = 64
    """width of both hidden layers of actor and critic: 64 makes 10 k parameters, 912 makes 1.7 M"""
    window: int = 4
    decay: float = 0.5
    loss: Literal["decoupled", "plain"] = "decoupled"
    workers: int = 4
    envs_per_worker: int = 8
    num_steps: int = 128
    epochs: int = 10
    minibatches: int = 8
    learning_rate: float = 5e-4
    reward_scale: float = 0.02
    """what the learner multiplies rewards with, so that its critic's targets are of the order of 1"""
    gamma: float = 0.99
    gae_lambda: float = 0.95
    total_steps: int = 1_000_000
    jobs: int = 1
    """runs at the same time"""
    out: Path = RESULTS / "aaps.json"
    show: tuple[Path, ...] = field(default=())
    """only print the table and draw the plots of these results"""


class ActorCritic(nn.Module):
    """What travels: actor and critic, two layers each."""

    def __init__(self, obs_size: int, num_actions: int, hidden: int) -> None:
        super().__init__()
        self.actor = _mlp(obs_size, hidden, num_actions, 0.01)
        self.critic = _mlp(obs_size, hidden, 1, 1.0)

    def act(self, obs: Tensor) -> dict[str, Tensor]:
        policy = self.distribution(obs)
        action = policy.sample()
        return {"action": action, "logprob": policy.log_prob(action)}

    def distribution(self, obs: Tensor) -> Categorical:
        return Categorical(logits=self.actor(obs), validate_args=False)

    def get_parameters(self) -> dict[str, Tensor]:
        return self.state_dict()


def _mlp(inputs: int, hidden: int, outputs: int, gain: float) -> nn.Sequential:
    layers = [nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, outputs)]
    for layer, scale in zip(layers, (2**0.5, 2**0.5, gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class Learner:
    """PPO as in CleanRL, but for rows of older policies."""

    def __init__(self, agent: ActorCritic, args: Args) -> None:
        self._agent, self._args = agent, args
        self._device = next(agent.parameters()).device
        self._optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    def update(self, batch: farstep.Batch, done: float) -> float:
        """One update, `done` of the way; returns how far the rows' policy was from ours, in nats."""
        args, agent = self._args, self._agent
        self._optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - done)
        obs, action, behaviour = (self._tensor(batch[key]).flatten(0, 1) for key in ("obs", "action", "logprob"))
        with torch.no_grad():
            values = agent.critic(self._tensor(np.concatenate([batch["obs"], batch.last_obs[None]]))).squeeze(-1)
            finals = agent.critic(self._tensor(batch.final_obs.obs)).squeeze(-1)
            own = agent.distribution(obs).log_prob(action)
        advantage, returns = (self._tensor(part).flatten() for part in self._advantages(batch, values, finals))
        lag = float((torch.expm1(own - behaviour) - (own - behaviour)).mean())
        near, weight = (own, (own - behaviour).exp().clamp(max=2.0)) if args.loss == "decoupled" else (behaviour, None)
        for _ in range(args.epochs):
            for rows in torch.randperm(len(obs), device=self._device).chunk(args.minibatches):
                policy = agent.distribution(obs[rows])
                ratio = (policy.log_prob(action[rows]) - near[rows]).exp()
                scaled = (advantage[rows] - advantage[rows].mean()) / (advantage[rows].std() + 1e-8)
                gain = torch.min(ratio * scaled, ratio.clamp(0.8, 1.2) * scaled)
                policy_loss = -(gain if weight is None else gain * weight[rows]).mean()
                value_loss = (agent.critic(obs[rows]).squeeze(-1) - returns[rows]).pow(2).mean()
                loss = policy_loss - 0.01 * policy.entropy().mean() + 0.25 * value_loss
                self._optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                self._optimizer.step()
        return lag

    def _advantages(self, batch: farstep.Batch, values: Tensor, finals: Tensor) -> tuple[Any, Any]:
        args, value = self._args, values.cpu().numpy()
        following = value[1:].copy()
        following[batch.final_obs.row, batch.final_obs.slot] = finals.cpu().numpy()
        ended = batch["terminated"] | batch["truncated"]
        delta = batch["reward"] * args.reward_scale + args.gamma * following * ~batch["terminated"] - value[:-1]
        advantage, running = np.zeros_like(delta), np.zeros(delta.shape[1], np.float32)
        for t in reversed(range(len(delta))):
            running = delta[t] + args.gamma * args.gae_lambda * ~ended[t] * running
            advantage[t] = running
        return advantage, advantage + value[:-1]

    def _tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def train(args: Args, delta: float, seed: int) -> dict[str, Any]:
    """One run: its curves and counters."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_envs = args.workers * args.envs_per_worker
    rule = farstep.sync.AAPS(delta, args.window, args.decay)
    env_config = {"env_name": "LunarLander-v3", "envs_per_node": num_envs, "seed": seed, "sync": rule}
    curve: list[tuple[int, float, float, float]] = []
    returns: list[tuple[int, float]] = []
    spent = {"collect": 0.0, "update": 0.0, "publish": 0.0}
    with farstep.ClusterEnv(env_config, farstep.LocalConfig(workers_per_node=args.workers)) as env:
        observation_space, action_space = env.launch()
        agent = ActorCritic(observation_space.shape[0], int(action_space.n), args.hidden).to(device)
        learner, steps, began = Learner(agent, args), 0, time.monotonic()
        while steps < args.total_steps:
            marks = [time.monotonic()]
            batch = env.collect(agent, steps=args.num_steps)
            marks.append(time.monotonic())
            steps += args.num_steps * num_envs
            returns += [(steps, float(value)) for value in batch.episodes["return"]]
            lag = learner.update(batch, (steps - args.num_steps * num_envs) / args.total_steps)
            marks.append(time.monotonic())
            env.publish(agent)
            marks.append(time.monotonic())
            for name, (a, b) in zip(spent, pairwise(marks), strict=True):
                spent[name] += b - a
            stats = env.stats()
            syncs = stats["weight_syncs"]["total"] / args.workers
            curve.append((steps, stats["episodes"]["return_mean"] or 0.0, syncs, lag))
        elapsed = time.monotonic() - began
    last = [value for at, value in returns if at > 0.9 * args.total_steps]
    return {
        "delta": delta,
        "seed": seed,
        "final_return": float(np.mean(last)),
        "syncs_per_worker": stats["weight_syncs"]["total"] / args.workers,
        "versions": stats["versions"]["current"] + 1,
        "lag_mean": stats["versions"]["lag_mean"],
        "bytes": stats["bytes"],
        "parameters": sum(parameter.numel() for parameter in agent.parameters()),
        "seconds": elapsed,
        "seconds_in": spent,
        "curve": curve[:: max(1, len(curve) // 200)],
    }


def main(args: Args) -> None:
    console = Console()
    if args.show:
        show([json.loads(path.read_text()) for path in args.show], args.show[0].parent, console)
        return
    repeated = args.deltas if args.repeated is None else args.repeated
    cases = [(d, seed) for seed in range(args.seeds) for d in args.deltas if seed == 0 or d in repeated]
    console.print(f"{len(cases)} runs of {args.total_steps:,} steps, {args.jobs} at a time")
    document = {
        "command": shlex.join(["python", "benchmarks/aaps.py", *_without_folder(sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"cpu": platform.machine(), "gpu": torch.cuda.is_available(), "python": platform.python_version()},
        "settings": {k: v for k, v in vars(args).items() if k not in ("out", "show")},
        "runs": [],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        for done in concurrent.futures.as_completed([pool.submit(train, args, *case) for case in cases]):
            run = done.result()
            document["runs"].append(run)
            args.out.write_text(json.dumps(document) + "\n")
            console.print(
                f"[{len(document['runs'])}/{len(cases)}] delta {run['delta']:g}, seed {run['seed']}: return "
                f"{run['final_return']:.0f}, {run['syncs_per_worker']:.0f} of {run['versions']} versions pulled, "
                f"{run['seconds']:.0f} s"
            )
    console.print(table(document))


def _without_folder(words: list[str]) -> list[str]:
    """A command line that does not say where on this machine results went."""
    return [Path(word).name if "/" in word else word for word in words]


def table(document: dict[str, Any]) -> Table:
    """What each threshold came to, means over seeds."""
    runs = document["runs"]
    shown = Table(
        "delta", "seeds", "final return", "syncs/worker", "weight bytes", "probe bytes", "of always", "probes"
    )
    shown.title = f"{runs[0]['parameters']:,} parameters, {document['settings']['total_steps']:,} steps"
    full = _mean(runs, 0.0, lambda run: run["bytes"]["weights_sent"])
    for delta in sorted({run["delta"] for run in runs}):
        returns = [run["final_return"] for run in runs if run["delta"] == delta]
        weights = _mean(runs, delta, lambda run: run["bytes"]["weights_sent"])
        probes = _mean(runs, delta, lambda run: run["bytes"]["probes_sent"])
        shown.add_row(
            f"{delta:g}",
            str(len(returns)),
            f"{np.mean(returns):.0f} ± {np.std(returns):.0f}",
            f"{_mean(runs, delta, lambda run: run['syncs_per_worker']):.0f}",
            f"{weights:,.0f}",
            f"{probes:,.0f}",
            f"{(weights + probes) / full:.3f}" if full else "",
            f"{probes / full:.4f}" if full else "",
        )
    return shown


def summary(document: dict[str, Any]) -> str:
    """The same in Markdown."""
    runs = document["runs"]
    full = _mean(runs, 0.0, lambda run: run["bytes"]["weights_sent"])
    rows = []
    for delta in sorted({run["delta"] for run in runs}):
        returns = [run["final_return"] for run in runs if run["delta"] == delta]
        weights = _mean(runs, delta, lambda run: run["bytes"]["weights_sent"])
        probes = _mean(runs, delta, lambda run: run["bytes"]["probes_sent"])
        rows.append(
            [
                f"{delta:g}" if delta else "0 (always)",
                str(len(returns)),
                f"{np.mean(returns):.0f}" + (f" ± {np.std(returns):.0f}" if len(returns) > 1 else ""),
                f"{_mean(runs, delta, lambda run: run['syncs_per_worker']):.0f}",
                f"{weights / 1e6:,.1f}",
                f"{probes / 1e6:.2f}",
                f"{(weights + probes) / full:.3f}",
                f"{probes / full:.4f}",
            ]
        )
    return markdown_table(
        [
            *("δ", "seeds", "final return", "pulls per worker", "weights, MB", "probes, MB"),
            *("bytes as a share of `always`", "of which probes"),
        ],
        rows,
    )


def _mean(runs: list[dict[str, Any]], delta: float, value: Any) -> float:
    found = [value(run) for run in runs if run["delta"] == delta]
    return float(np.mean(found)) if found else 0.0


def show(documents: list[dict[str, Any]], folder: Path, console: Console) -> None:
    """Tables, and the plots that mirror the paper's figures, one set per result."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    for document in documents:
        console.print(table(document))
        share = _probe_share(document["runs"])
        console.print(f"publishing took {share:.2%} of the learner's time with probes, all thresholds above 0")
    for document in documents:
        _draw(plt, document, folder)
    _draw_bytes(plt, documents, folder)
    console.print(f"plots are in {folder}")


def _probe_share(runs: list[dict[str, Any]]) -> float:
    probed = [run["seconds_in"] for run in runs if run["delta"] > 0]
    return sum(s["publish"] for s in probed) / max(1e-9, sum(s["publish"] + s["update"] for s in probed))


def _draw(plt: Any, document: dict[str, Any], folder: Path) -> None:
    runs = document["runs"]
    size = runs[0]["parameters"]
    deltas = sorted({run["delta"] for run in runs})
    colors = plt.get_cmap("viridis")(np.linspace(0, 0.95, len(deltas)))
    for column, what, name in ((1, "return, last 100 episodes", "returns"), (2, "pulls per worker, so far", "syncs")):
        figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
        for delta, color in zip(deltas, colors, strict=True):
            curves = [np.array(run["curve"]) for run in runs if run["delta"] == delta]
            steps = curves[0][:, 0]
            values = np.stack([np.interp(steps, curve[:, 0], curve[:, column]) for curve in curves])
            label = f"δ = {delta:g}" + (f" ({len(curves)} seeds)" if len(curves) > 1 else "")
            axes.plot(steps, values.mean(axis=0), color=color, label=label)
            if len(curves) > 1:
                axes.fill_between(steps, values.min(axis=0), values.max(axis=0), color=color, alpha=0.15)
        axes.set(xlabel="environment steps", ylabel=what, title=f"LunarLander-v3, {size:,} parameters")
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
        figure.savefig(folder / f"aaps-{name}-{size}.png", dpi=110)
        plt.close(figure)


def _draw_bytes(plt: Any, documents: list[dict[str, Any]], folder: Path) -> None:
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for document in documents:
        runs = document["runs"]
        full = _mean(runs, 0.0, lambda run: run["bytes"]["weights_sent"])
        deltas = sorted({run["delta"] for run in runs})
        total = [_mean(runs, d, lambda run: run["bytes"]["weights_sent"] + run["bytes"]["probes_sent"]) for d in deltas]
        returns = [_mean(runs, d, lambda run: run["final_return"]) for d in deltas]
        share = np.array(total) / full
        of_delta = [[run["final_return"] for run in runs if run["delta"] == d] for d in deltas]
        spread = np.array([[r - min(of), max(of) - r] for r, of in zip(returns, of_delta, strict=True)]).T
        axes.errorbar(share, returns, spread, fmt="o-", capsize=3, label=f"{runs[0]['parameters']:,} parameters")
        for delta, x, y in zip(deltas, share, returns, strict=True):
            axes.annotate(f"{delta:g}", (x, y), textcoords="offset points", xytext=(4, 4), fontsize=8)
    axes.set(xscale="log", xlabel="bytes (weights and probes) as a share of pulling always", ylabel="final return")
    axes.set_title("What AAPS saves, and what it costs (numbers: δ; bars: from the worst to the best seed)")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(folder / "aaps-bytes.png", dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    run_script(lambda: main(tyro.cli(Args)))
