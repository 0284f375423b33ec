"""The table of causes: how each looks, what to do about it, and the rule that recognizes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from farstep.head.warnings.user_warnings import STALE_REMEDY
from farstep.observe.diagnosis import rules as find
from farstep.observe.diagnosis.rules import Finding
from farstep.observe.diagnosis.run_window import Window

Group = Literal["failure", "learning", "limit", "time"]
"""What a cause is about. Failures and learning are independent; of the others, which slow a run down, only the first is
reported. Those of group `time` need to know how workers spend their time."""


@dataclass(frozen=True)
class Rule:
    """One cause: how it looks, what to do, and the function that recognizes it."""

    cause: str
    group: Group
    symptom: str
    remedy: str
    find: Callable[[Window], Finding | None]
    options_remedy: str = ""
    """The remedy for a run of `farstep train`, which names options; empty: `remedy` fits, or such runs cannot have this
    cause."""


MIN_NODES_REMEDY = "Set min_nodes below nodes: then calls wait only while fewer than min_nodes are connected."
"""What to do if calls wait for missing nodes."""
MIN_NODES_OPTIONS = "Set --min-nodes below --nodes: then the run waits only while fewer than --min-nodes are connected."
"""The same for a run of `farstep train`."""
RULES: tuple[Rule, ...] = (
    Rule(
        "memory",
        "failure",
        "Less than 5 % of the memory is free, or the run's processes grow so fast that they will use it up within ten "
        "minutes",
        "Find what grows, such as a list in an environment or agent, or a buffer. Lower envs_per_node, steps or the "
        "buffer's capacity, or give the run more memory.",
        find.memory,
        "Lower --num-envs, or --buffer-size of a replay learner, or give the run more memory. If memory keeps "
        "growing, look for what grows, such as a list in the environment.",
    ),
    Rule(
        "restarting worker",
        "failure",
        "One worker was restarted three times or more within ten minutes",
        'Read the tracebacks in env.events(["lost", "stuck", "warned"]) or events.jsonl: an environment crashes again '
        "and again. More than restart_budget failures within ten minutes end the run.",
        find.restarts,
        "Read the tracebacks on the status page or in events.jsonl of the run folder: an environment crashes again "
        "and again. Too many failures within ten minutes end the run.",
    ),
    Rule(
        "trigger never fires",
        "failure",
        "A workflow's trigger has never fired, while others fired 100 times or the whole buffer was replaced 10 times",
        "If the trigger waits for a version, call publish; if it waits for an object, call put; if it waits for "
        "rows, lower its n or size. Or remove it.",
        find.silent_trigger,
    ),
    Rule(
        "gradients not finite",
        "learning",
        "More than half of the optimizer steps were skipped (train/actor/skipped_steps or train/critic/skipped_steps)",
        "Lower the learning rate, or look for infinite rewards and observations.",
        find.not_finite,
    ),
    Rule(
        "clip range",
        "learning",
        "Clipping excludes more than half of the rows (train/actor/clip_fraction). With --no-decoupled and workers "
        "that hardly ever pull: more than a quarter",
        "Lower --learning-rate or --update-epochs, or set --target-kl. If workers act with older weights, use "
        "--decoupled or a smaller --kl-threshold.",
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
        "Workers with kl_threshold have pulled none of the last 20 versions, or almost all",
        "If they pulled none, lower kl_threshold (--kl-threshold) or raise the learning rate. If they pulled almost "
        "all, raise kl_threshold above the divergence of one update (sync/divergence_mean), or do not set it.",
        find.threshold_without_effect,
    ),
    Rule(
        "waiting for slots",
        "limit",
        "The run waits for slots of its coordinator for at least 30 % of the time (slots/waited_seconds)",
        "'farstep coordinator status' shows which runs hold them. Raise priority, lower min_workers, or give the "
        "coordinator more slots. Runs with release_idle (--release-idle) return their slots during updates.",
        find.waiting_for_slots,
        "'farstep coordinator status' shows which runs hold them. Raise --priority, lower --min-workers, or give the "
        "coordinator more slots. Runs with --release-idle return their slots during updates.",
    ),
    Rule(
        "too many threads",
        "limit",
        "More than two threads per core are running or ready to run, because processes use several threads each",
        "Set cpus_per_worker=1, limit the threads of the environment's own libraries, and call torch.set_num_threads "
        "in the learner (--threads).",
        find.too_many_threads,
        "Set --threads 1, and limit the threads of the environment's own libraries; on a cluster, also set "
        "--cpus-per-worker 1.",
    ),
    Rule(
        "too few cores",
        "limit",
        "More than two processes per core are running or ready to run",
        "Use more cores or more nodes. On the same cores, fewer workers (workers_per_node) are just as fast.",
        find.too_few_cores,
        "Use more cores or more nodes. On the same cores, fewer workers (--workers, on a cluster --workers-per-node) "
        "are just as fast.",
    ),
    Rule(
        "replay ratio",
        "limit",
        "In a run of dqn, apex, sac or aride, the workers or the learner wait for at least 80 % of the time, to keep "
        "the ratio of updates to steps (limiter/blocked). farstep train does not warn",
        "If workers wait, the learner is too slow for the ratio: lower --updates-per-step (aride: --samples-per-step), "
        "or train on a GPU (--device cuda). If the learner waits, add workers, or raise the ratio to learn more from "
        "each row.",
        find.replay_ratio,
    ),
    Rule(
        "limiter blocks",
        "limit",
        "In your own workflow, the buffer's limiter makes inserting or sampling wait for at least 80 % of the time "
        "(limiter/blocked)",
        "If sampling waits, add workers; if inserting waits, make updates faster. Or change samples_per_insert, or "
        "raise error_buffer, the tolerance of the ratio.",
        find.limiter_blocks,
    ),
    Rule(
        "small buffer",
        "limit",
        "Chunks wait for room in a workflow's buffer for at least 20 % of the time (buffer/full_s), and the learner "
        "waits for rows for at least 20 %",
        "Raise the buffer's capacity to twice the largest number of rows that a trigger takes at once, so that workers "
        "can roll while the learner updates.",
        find.small_buffer,
    ),
    Rule(
        "staleness bound",
        "limit",
        "More than 10 % of the chunks are dropped as stale",
        STALE_REMEDY,
        find.dropped_as_stale,
        "Raise --staleness-threshold (async-ppo) or --max-staleness (impala), or roll shorter chunks (--num-steps).",
    ),
    Rule(
        "lost node",
        "time",
        "A node was lost or replaced, and the other workers and the learner each wait for at least 30 % of their time. "
        "farstep train does not warn",
        MIN_NODES_REMEDY,
        find.lost_node,
        MIN_NODES_OPTIONS,
    ),
    Rule(
        "replaced worker",
        "time",
        "A worker was restarted, and the other workers and the learner each wait for at least 30 % of their time. "
        "farstep train does not warn",
        'env.events(["lost", "stuck"]) or events.jsonl gives the reason. With num_chunks (an argument of stream; '
        "--num-chunks), batches do not wait for a worker that restarts.",
        find.replaced_worker,
        "The status page and events.jsonl of the run folder give the reason. With --num-chunks (async-ppo, impala), "
        "batches do not wait for a worker that restarts.",
    ),
    Rule(
        "straggler",
        "time",
        "One worker takes at least twice as long as the others. The others and the learner each wait for at least 30 % "
        "of their time",
        "Give its host fewer environments, or look for other programs there. With num_chunks (an argument of stream; "
        "--num-chunks) or a trigger with n below the number of workers, batches do not wait for this worker.",
        find.straggler,
        "Give its host fewer environments, or look for other programs there. With --num-chunks (async-ppo, impala), "
        "batches do not wait for this worker.",
    ),
    Rule(
        "slow network",
        "time",
        "Sending rollouts and weights takes at least 30 % of the workers' time, and longer than rolling. The learner "
        "waits for at least 30 % of the time",
        "Send fewer bytes: compression, kl_threshold, weights={'half': True}, smaller observations. Collect long "
        "rollouts instead of calling step, or use stream, so that workers roll while earlier chunks are sent.",
        find.slow_network,
        'Send fewer bytes: set --weights \'{"half": "bfloat16", "delta": true}\' or --kl-threshold, or use smaller '
        "observations. With async-ppo or impala instead of ppo, workers roll while earlier chunks are sent.",
    ),
    Rule(
        "waiting for each other",
        "time",
        "Workers and the learner both wait at the same time, for at least 30 % of the time. farstep knows this if "
        "their two shares of waiting add up to at least 130 %. For example, some workers have finished, and the "
        "learner waits for the others",
        "Use stream instead of collect (async-ppo instead of ppo), so that workers roll while the learner updates. If "
        "you already use stream, raise max_staleness (async-ppo: --staleness-threshold, impala: --max-staleness).",
        find.both_wait,
        "Use async-ppo or impala instead of ppo, so that workers roll while the learner updates. If you already do, "
        "raise --staleness-threshold (async-ppo) or --max-staleness (impala).",
    ),
    Rule(
        "slow learner",
        "time",
        "Workers wait for the learner for at least 80 % of their time, and the learner waits for at most 20 %. "
        "farstep train does not warn",
        "Make updates faster (fewer epochs, larger minibatches, more threads, a GPU), or use fewer workers. With "
        "stream instead of collect, both work at the same time.",
        find.slow_learner,
        "Make updates faster (fewer --update-epochs, larger minibatches, more --threads, --device cuda), or use fewer "
        "workers (--workers, on a cluster --workers-per-node). With async-ppo instead of ppo, workers roll while the "
        "learner updates.",
    ),
    Rule(
        "slow policy",
        "time",
        "The learner waits for at least 80 % of the time, and workers spend most of their time in act. farstep train "
        "warns only from 95 % on",
        "Make act faster: check that workers replay a recorded act (env.inference starts with 'fast'), use a smaller "
        "network, more environments per worker, or a GPU (gpus_per_node).",
        find.slow_policy,
        "Use a smaller network (--hidden), more environments per worker (--num-envs), --inference auto, or, on a "
        "cluster, GPUs (--gpus-per-node).",
    ),
    Rule(
        "slow environment",
        "time",
        "The learner waits for at least 80 % of the time, and workers spend most of their time in environments. "
        "farstep train warns only from 95 % on",
        "Add workers or nodes, or make the environment faster (a vectorized one, fewer or smaller observations).",
        find.slow_environment,
        "Add workers (--workers, on a cluster --workers-per-node or --nodes), or make the environment faster (a "
        "vectorized one, fewer or smaller observations).",
    ),
)
CAUSES: tuple[str, ...] = tuple(dict.fromkeys(rule.cause for rule in RULES))
"""The names of all causes."""
