"""`farstep eval`: measures the return of a trained policy."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro

from farstep.cli.options.algorithms import agent_for
from farstep.cli.options.parsing import parse
from farstep.cli.saved.saved_run import SavedPolicy, SavedRun
from farstep.cluster_env import ClusterEnv
from farstep.config.env import check_count, check_seed
from farstep.errors import ConfigError, RunError, counted
from farstep.learners.loop.evaluation import EVALUATION_SLOTS, MAX_STEPS, episode_quotas, run_episodes
from farstep.learners.replay.recorded_episodes import EpisodeRecorder, check_replaceable
from farstep.observe.run_status import number
from farstep.observe.terminal.episode_progress import EpisodeProgress


@dataclass(frozen=True, kw_only=True)
class Options:
    """Evaluate the policy of a run in new environments on this machine; training is not affected.

    Examples: farstep eval runs/NAME --episodes 100; farstep eval runs/NAME --sample --json > result.json
    """

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of the run."""
    checkpoint: int | None = None
    """Number of the checkpoint, e.g. 12 for checkpoints/000012. None: the newest intact checkpoint."""
    episodes: int = 20
    """Number of episodes."""
    seed: int | None = None
    """Seed of episodes and of sampling. None: the seed of the run's own evaluations, which gives the same results."""
    greedy: bool = False
    """Take the most likely actions. This is the default."""
    sample: bool = False
    """Sample actions as in training, instead of taking the most likely actions."""
    num_envs: int | None = None
    """Number of environments that run in parallel. None: 8, or the number of episodes if this is lower."""
    workers: int | None = None
    """Number of worker processes. None: as many as in training if it ran on this machine, otherwise one per core."""
    max_steps: int = MAX_STEPS
    """Maximum number of steps of each environment; then unfinished episodes are abandoned."""
    record: Path | None = None
    """With --sample: also write the episodes to this file, e.g. episodes.npz, for 'farstep train aride --warmup'."""
    json: bool = False
    """Write the result as JSON to standard output: statistics, and return and length of every episode."""
    trust: bool = False
    """Execute the code that the run's config.json names, even if the file's signature is missing or wrong."""


def main(arguments: Sequence[str]) -> int:
    """Load a checkpoint, run episodes and print statistics. Return the exit status."""
    if not arguments:
        raise ConfigError("'farstep eval' needs the folder of a run, e.g. farstep eval runs/NAME.")
    options = parse(Options, arguments, "farstep eval")
    for name in ("episodes", "num_envs", "workers", "max_steps"):
        if getattr(options, name) is not None:
            check_count(name, getattr(options, name))
    if options.seed is not None:
        check_seed(options.seed)
    if options.greedy and options.sample:
        raise ConfigError("--greedy and --sample contradict each other; pass one of them.")
    if options.record is not None and not options.sample:
        raise ConfigError(
            "--record needs --sample: the log-probabilities that are recorded must be those with which actions were "
            "chosen."
        )
    if options.record is not None:
        check_replaceable(options.record)
    saved = SavedRun.open(options.run, options.trust, "farstep eval")
    result = _evaluate(saved, options)
    sys.stdout.write(json.dumps(result, indent=2) + "\n" if options.json else _text(result))
    return 0


def _evaluate(saved: SavedRun, options: Options) -> dict[str, Any]:
    run = saved.run
    seed = run.seed + 1 if options.seed is None else options.seed
    slots = min(options.num_envs or EVALUATION_SLOTS, options.episodes)
    infos = getattr(saved.learner, "info_keys", ())
    config = run.env_config(
        envs_per_node=slots, stagger=None, kl_threshold=None, weights=None, seed=seed, info_keys=infos, inference=None
    )
    recorder = None if options.record is None else EpisodeRecorder(episode_quotas(options.episodes, slots))
    torch.set_num_threads(1)  # this process acts only with --launcher in-process
    with ClusterEnv(config, run.launch_config(options.workers)) as env:
        agent = agent_for(saved.learner, *env.launch())
        policy = saved.restore(agent, options.checkpoint)
        agent.greedy = not options.sample
        torch.manual_seed(seed)  # for --launcher in-process; worker processes have their own seeds
        progress = EpisodeProgress(options.episodes)
        try:
            returns, lengths = run_episodes(
                env,
                agent,
                options.episodes,
                seed,
                max_steps=options.max_steps,
                emit=env.emit_event,
                on_progress=progress.update,
                on_batch=None if recorder is None else recorder.add,
            )
        finally:
            progress.close()
    if not len(returns):
        raise RunError(
            f"no episode ended within {options.max_steps:,} steps, so there is no return. Raise --max-steps, or give "
            "the environment a time limit (gymnasium.wrappers:TimeLimit)."
        )
    if options.record is not None and recorder is not None:
        recorded = recorder.result()
        recorded.save(options.record)
        sys.stderr.write(f"recorded {counted(recorder.count, 'episode')} in {options.record}\n")
        if "logprob" not in recorded.rows:
            sys.stderr.write(
                f"warning: {options.record} has no log-probabilities of actions ('logprob'), because act() of "
                f"{type(agent).__name__} does not return them. 'farstep train aride --warmup' needs them and "
                "will refuse this file; record a run of aride or ppo instead.\n"
            )
    return _result(saved, policy, seed, agent.greedy, returns, lengths)


def _result(
    saved: SavedRun, policy: SavedPolicy, seed: int, greedy: bool, returns: np.ndarray, lengths: np.ndarray
) -> dict[str, Any]:
    """Return the result that --json writes."""
    return {
        "run": str(saved.folder.path),
        "checkpoint": int(policy.checkpoint.name),
        "version": policy.version,
        "step": policy.steps,
        "seed": seed,
        "greedy": greedy,
        "episodes": len(returns),
        "return": _statistics(returns),
        "length": _statistics(lengths),
        "returns": returns.tolist(),
        "lengths": lengths.tolist(),
    }


def _statistics(values: np.ndarray) -> dict[str, float]:
    return {name: float(getattr(values, name)()) for name in ("mean", "std", "min", "max")}


def _text(result: dict[str, Any]) -> str:
    actions = "most likely" if result["greedy"] else "sampled"
    lines = [
        f"{result['run']}: checkpoint {result['checkpoint']}, version {result['version']:,}, after "
        f"{result['step']:,} steps; {counted(result['episodes'], 'episode')} with {actions} actions, seed "
        f"{result['seed']}"
    ]
    for name in ("return", "length"):
        mean, std, low, high = (number(result[name][key]) for key in ("mean", "std", "min", "max"))
        lines.append(f"{name}  mean {mean}, standard deviation {std}, from {low} to {high}")
    return "\n".join(lines) + "\n"
