"""The table of causes: how each looks, what to do about it, and the rule that recognizes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from farstep.head.user_warnings import STALE_REMEDY
from farstep.observe.diagnosis import rules as find
from farstep.observe.diagnosis.rules import Finding
from farstep.observe.diagnosis.run_window import Window

Group = Literal["failure", "learning", "limit", "time"]
"""What a cause is about. Failures and learning are independent; of the others, which slow a run down, the first counts.
Those of group `time` need to know how workers spend their time."""


@dataclass(frozen=True)
class Rule:
    """One cause: how it looks, what to do, and the function that recognizes it."""

    cause: str
    group: Group
    symptom: str
    remedy: str
    find: Callable[[Window], Finding | None]


RULES: tuple[Rule, ...] = (
    Rule(
        "memory",
        "failure",
        "Less than 5 % of the memory is left, or it will be used up within ten minutes as the run's processes grow",
        "Find what grows: an environment or agent that keeps what it has seen, or a buffer. Lower envs_per_node, steps "
        "or the buffer's capacity, or give the run more memory.",
        find.memory,
    ),
    Rule(
        "restarting worker",
        "failure",
        "One worker was restarted three times or more within ten minutes",
        'Read the tracebacks in env.events(["lost", "stuck", "warned"]) or events.jsonl: an environment crashes again '
        "and again. More than restart_budget failures within ten minutes end the run.",
        find.restarts,
    ),
    Rule(
        "trigger never fires",
        "failure",
        "A trigger of a workflow has not fired once, while others fired 100 times or the buffer's rows were replaced "
        "10 times",
        "Publish the object that it waits for, or lower its n or size; remove the trigger if it is not needed.",
        find.silent_trigger,
    ),
    Rule(
        "gradients not finite",
        "learning",
        "More than half of the optimizer steps were skipped (train/actor/skipped_steps or train/critic/skipped_steps)",
        "Lower --learning-rate, or look for infinite rewards and observations.",
        find.not_finite,
    ),
    Rule(
        "clip range",
        "learning",
        "Clipping excludes more than half of the rows (train/actor/clip_fraction). With --no-decoupled and workers "
        "that hardly ever pull weights, a quarter is enough",
        "Lower --learning-rate or --update-epochs, or set --target-kl. If workers act with older weights: --decoupled, "
        "or a smaller --kl-threshold.",
        find.clip_range,
    ),
    Rule(
        "off-policy rows",
        "learning",
        "The effective sample size is below 30 % of the rows (train/actor/ess), or the divergence from the policy that "
        "acted is above 0.5 nats (train/actor/behave_k3)",
        "Lower --kl-threshold, the staleness bound (--staleness-threshold, --max-staleness) or --learning-rate.",
        find.off_policy,
    ),
    Rule(
        "kl_threshold without effect",
        "learning",
        "During 20 versions, workers with kl_threshold have pulled none of them, or almost all",
        "If they pulled none, lower kl_threshold (--kl-threshold) or raise the learning rate. If they pulled almost "
        "all, raise kl_threshold above the divergence of one update (sync/divergence_mean), or leave it out.",
        find.threshold_without_effect,
    ),
    Rule(
        "too many threads",
        "limit",
        "More than two threads per core want to run, because processes run several threads at a time",
        "Set cpus_per_worker=1, limit the threads of the environment's own libraries, and call torch.set_num_threads "
        "in the learner (--threads).",
        find.too_many_threads,
    ),
    Rule(
        "too few cores",
        "limit",
        "More than two processes per core want to run",
        "Use more cores or more nodes; on these cores, fewer workers (workers_per_node) do the same work.",
        find.too_few_cores,
    ),
    Rule(
        "replay ratio",
        "limit",
        "In a run of dqn, apex, sac or aride, workers or learner wait for at least 80 % of the time, to keep the ratio "
        "of updates to steps (limiter/blocked); never a problem",
        "If workers wait, the learner is too slow for the ratio: lower --updates-per-step (aride: --samples-per-step), "
        "or train on a GPU (--device cuda). If the learner waits, add workers, or raise this option to learn more from "
        "each row.",
        find.replay_ratio,
    ),
    Rule(
        "limiter blocks",
        "limit",
        "In a workflow of your own, the buffer's limiter makes inserting or sampling wait for at least 80 % of the "
        "time (limiter/blocked)",
        "Change samples_per_insert, or set min_diff and max_diff further apart (error_buffer). If sampling waits, add "
        "workers; if inserting waits, make updates faster.",
        find.limiter_blocks,
    ),
    Rule(
        "small buffer",
        "limit",
        "Chunks wait for room in a workflow's buffer for at least 20 % of the time (buffer/full_s), and the learner "
        "waits for rows for at least 20 %",
        "Raise the buffer's capacity to twice the rows that its triggers take at once, so that workers roll while the "
        "learner updates.",
        find.small_buffer,
    ),
    Rule(
        "staleness bound",
        "limit",
        "More than 10 % of the chunks are dropped as stale",
        STALE_REMEDY,
        find.dropped_as_stale,
    ),
    Rule(
        "replaced worker",
        "time",
        "A worker was restarted, and the other workers and the learner each wait for at least 30 % of their time; "
        "never a problem",
        'Read why it was lost in env.events(["lost", "stuck"]) or events.jsonl; with num_chunks (stream, --num-chunks) '
        "batches do not wait for a worker that starts.",
        find.replaced_worker,
    ),
    Rule(
        "straggler",
        "time",
        "One worker takes at least twice as long as the others. The others and the learner each wait for at least 30 % "
        "of their time",
        "Give its host fewer environments or look for what else runs there; with num_chunks (stream, --num-chunks) or "
        "a trigger with n below the number of workers, batches do not wait for it.",
        find.straggler,
    ),
    Rule(
        "slow network",
        "time",
        "Rollouts and weights travel for at least 30 % of the workers' time and for longer than rolling takes. The "
        "learner waits for at least 30 % of the time",
        "Send fewer bytes: compression, kl_threshold, weights={'half': True}, smaller observations. Collect long "
        "rollouts instead of calling step; or use stream, so that chunks travel while the next ones are rolled.",
        find.slow_network,
    ),
    Rule(
        "taking turns",
        "time",
        "Workers and learner take turns: the share of time that workers wait for the learner plus the share that the "
        "learner waits for workers is at least 1.3",
        "Use stream instead of collect (async-ppo instead of ppo), so that workers roll while the learner updates; "
        "with stream, raise max_staleness (async-ppo: --staleness-threshold, impala: --max-staleness).",
        find.both_wait,
    ),
    Rule(
        "slow learner",
        "time",
        "Workers wait for the learner for at least 80 % of their time, and the learner waits for at most 20 %; "
        "never a problem",
        "Make updates faster (fewer epochs, larger minibatches, more threads, a GPU), or use fewer workers; stream "
        "instead of collect lets both work at the same time.",
        find.slow_learner,
    ),
    Rule(
        "slow policy",
        "time",
        "The learner waits for at least 80 % of the time, and workers spend most of theirs in act; a problem only from "
        "95 % on",
        "Make act faster: check that workers replay a recorded act (env.inference is 'fast'), use a smaller network, "
        "more environments per worker, or a GPU (gpus_per_node).",
        find.slow_policy,
    ),
    Rule(
        "slow environment",
        "time",
        "The learner waits for at least 80 % of the time, and workers spend most of theirs in environments; a problem "
        "only from 95 % on",
        "Add workers or nodes, or make the environment faster (a vectorized one, fewer or smaller observations).",
        find.slow_environment,
    ),
)
CAUSES: tuple[str, ...] = tuple(dict.fromkeys(rule.cause for rule in RULES))
"""The names of all causes."""
