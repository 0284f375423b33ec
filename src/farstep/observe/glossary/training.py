"""The metrics of `farstep train`: what every logger receives with each update."""

from __future__ import annotations

from functools import partial

from farstep.observe.glossary.metric import Metric, Namespace
from farstep.observe.glossary.updates import ON_POLICY, Q_VALUES, UPDATES

_KL, _EVAL = "with `--kl-threshold`", "with `--eval-every`"
_ENDED = "once an episode has ended"
_REPLAY = f"{Q_VALUES}, aride"
_loop, _learner = partial(Metric, source="training loop"), partial(Metric, source="learner")
_evaluation, _workers = partial(Metric, source="evaluation"), partial(Metric, source="workers")
_head = partial(Metric, source="head")

NAMESPACES = (
    Namespace(
        "",
        "How far the run has come. A resumed run continues these numbers.",
        (
            _loop(
                "step",
                "environment steps so far, the x axis of plots; with [staggered resets](stagger.md), includes the "
                "steps that only move environments to their first positions",
                kind="counter",
                unit="steps",
                label="steps",
            ),
            _loop("update", "updates so far", kind="counter", unit="updates"),
            _loop(
                "seconds",
                "training time so far, including earlier parts of a resumed run. The start of workers and the "
                "evaluation at the end are not included",
                kind="counter",
                unit="seconds",
            ),
        ),
    ),
    Namespace(
        "env/",
        "Episodes that ended during training. Returns are sums of raw rewards, also with `--normalize-reward`.",
        (
            _loop("env/return_mean", "mean return of the last 100 episodes", when=_ENDED, label="return"),
            _loop("env/length_mean", "mean length of the last 100 episodes", unit="steps", when=_ENDED, label="length"),
            _loop("env/episodes", "episodes that have ended so far", kind="counter", unit="episodes"),
        ),
    ),
    Namespace(
        "eval/",
        "Results of an evaluation, in the first line of metrics that is logged after the evaluation ended.",
        (
            _evaluation(
                "eval/return_mean",
                "mean return of the evaluation's episodes",
                when=_EVAL,
                healthy="at least `env/return_mean`",
                label="evaluation",
            ),
            _evaluation("eval/return_std", "standard deviation of the evaluation's returns", when=_EVAL),
            _evaluation("eval/length_mean", "mean length of the evaluation's episodes", unit="steps", when=_EVAL),
            _evaluation("eval/version", "version of the evaluated weights", unit="versions", when=_EVAL),
            _evaluation(
                "eval/step", "environment steps of training when the evaluation started", unit="steps", when=_EVAL
            ),
        ),
    ),
    Namespace(
        "rate/",
        "Speed of the run.",
        (
            _loop(
                "rate/steps_per_second",
                "`step` divided by `seconds`: the mean since the start, updates included. `farstep plot` shows the "
                "speed over windows instead",
                unit="steps/s",
                label="mean speed",
            ),
        ),
    ),
    Namespace(
        "lag/",
        "Staleness of the rows that the learner got since the previous line of metrics. The staleness of a row is the "
        "newest version when the learner got the row (replay learners: when the row entered the buffer), minus the "
        "version that chose its action.",
        (
            _loop(
                "lag/versions_mean",
                "mean staleness of these rows",
                unit="versions",
                healthy="without [AAPS](aaps.md): 0 with ppo, up to the staleness bound with async-ppo and impala",
                label="staleness",
            ),
            _loop("lag/versions_max", "staleness of the oldest of these rows", unit="versions", label="oldest row"),
        ),
    ),
    *UPDATES,
    Namespace(
        "replay/",
        "The replay buffer, and the ratio of updates to steps that its limiter keeps.",
        (
            _learner("replay/rows", "rows in the buffer", unit="rows", when=_REPLAY),
            _learner(
                "replay/updates_per_step",
                "updates per environment step since `--learning-starts` rows were in the buffer",
                unit="updates/step",
                when=Q_VALUES,
                healthy="`--updates-per-step`, from the first thousand updates on",
            ),
            _learner(
                "replay/samples_per_step",
                "rows sampled per environment step since learning began, that is, how often each row is used on "
                "average",
                unit="samples/step",
                when="aride",
                healthy="close to `--samples-per-step` after the first updates",
            ),
            _learner("replay/episodes", "complete episodes in the buffer", unit="episodes", when="aride"),
        ),
    ),
    Namespace(
        "time/",
        "Time that each phase of the learner took since the previous line. The sum of the phases is at most "
        "`time/step`. An evaluation at the end of a run has a line of its own, without `time/step`. "
        "Brackets give the name of the same phase in the framework RLinf.",
        (
            _loop("time/step", "time since the previous line", unit="seconds"),
            _loop(
                "time/collect",
                "waiting for the batch of this update (RLinf: `recv_rollout_trajectories`)",
                unit="seconds",
                when=ON_POLICY,
            ),
            _learner(
                "time/sample",
                "taking batches from the replay buffer, and waiting for rows",
                unit="seconds",
                when=_REPLAY,
            ),
            _learner(
                "time/refresh",
                "recomputing the priorities of all episodes in the buffer",
                unit="seconds",
                when="aride with `--refresh-every`",
            ),
            _learner(
                "time/recompute_logprobs",
                "forward pass over the batch that computes proximal log-probabilities and values",
                unit="seconds",
                when="async-ppo",
                label="recompute",
            ),
            _learner(
                "time/advantages",
                "values of last observations, and advantages or V-trace (RLinf: `cal_adv_and_returns`)",
                unit="seconds",
                when=ON_POLICY,
            ),
            _learner(
                "time/actor_training", "forward and backward passes, and optimizer steps", unit="seconds", label="train"
            ),
            _learner(
                "time/device_wait",
                "waiting for a device that other runs use",
                unit="seconds",
                when="`--release-device`",
            ),
            _learner(
                "time/device_move",
                "moving the learner to its device and back",
                unit="seconds",
                when="`--release-device`",
            ),
            _loop(
                "time/publish",
                "publishing a new version, until workers can pull it (RLinf: `update_rollout_weights`)",
                unit="seconds",
            ),
            _loop(
                "time/checkpoint",
                "writing a checkpoint. This happens after a line is logged, so the time is in the next line",
                unit="seconds",
                when="after a checkpoint",
            ),
            _loop(
                "time/evaluate",
                "waiting for an evaluation at the end of the run",
                unit="seconds",
                when="at the end, with `--eval-every`",
            ),
        ),
    ),
    Namespace(
        "time/env/",
        "Environments on workers, since the previous line, as the mean over workers.",
        (
            _workers(
                "time/env/env_interact_step", "stepping and resetting environments, and recording rows", unit="seconds"
            ),
        ),
    ),
    Namespace(
        "time/rollout/",
        "What workers did besides stepping environments, since the previous line, as the mean over workers.",
        (
            _workers("time/rollout/predict", "inference, and evaluating probes", unit="seconds"),
            _workers("time/rollout/tickets", "waiting for the learner to request rows", unit="seconds"),
            _workers("time/rollout/send", "compressing and sending rollouts", unit="seconds"),
            _workers("time/rollout/weights", "waiting for weights and loading them", unit="seconds"),
        ),
    ),
    Namespace(
        "sync/",
        "How workers follow the learner's policy.",
        (
            _workers(
                "sync/pulls_per_worker",
                "number of pulls since the run was started or resumed (`pulls/total`), divided by `env.num_workers`",
                kind="counter",
                unit="pulls",
                label="pulls per worker",
            ),
            _workers(
                "sync/divergence_mean",
                "[running KL divergence](aaps.md#how-it-is-measured) of a worker's policy from the learner's before "
                "the worker's last chunk; mean over workers",
                unit="nats",
                when=_KL,
                healthy="below the threshold",
            ),
            _workers(
                "sync/divergence_max",
                "largest running KL divergence of a worker's policy from the learner's",
                unit="nats",
                when=_KL,
            ),
        ),
    ),
    Namespace(
        "bytes/",
        "Bytes since the run was started or resumed; the same counters as in `env.stats()`.",
        (
            _workers(
                "bytes/weights_sent",
                "weights that workers loaded. Over a network: the bytes sent; with shared memory: the size of the "
                "weights, once per load",
                kind="counter",
                unit="bytes",
            ),
            _head(
                "bytes/probes_sent",
                "[probes](aaps.md#how-it-is-measured) for measuring divergence; 0 without `--kl-threshold`",
                kind="counter",
                unit="bytes",
            ),
        ),
    ),
    Namespace(
        "workers/",
        "Worker processes; the same counters as in `env.stats()`.",
        (
            _head("workers/alive", "workers that run", unit="workers"),
            _learner(
                "workers/active",
                "number of workers that the scaling rule chose for this update (replay learners: at the time of the "
                "report)",
                unit="workers",
                when="`--scaling`",
            ),
            _head(
                "workers/restarts",
                "restarts after failures",
                kind="counter",
                unit="restarts",
                healthy="0",
            ),
        ),
    ),
    Namespace(
        "dropped/",
        "Chunks and tickets dropped so far, by cause; the same counters as in `env.stats()`. A cause is listed once "
        "its count is above 0. [Failures](failures.md) describes what happens to lost chunks.",
        (
            _head(
                "dropped/stale", "chunks that became too old before they were delivered", kind="counter", unit="chunks"
            ),
            _head(
                "dropped/cancelled",
                "chunks and tickets cancelled by another call, by the end of a stream or by the end of a workflow",
                kind="counter",
                unit="chunks",
            ),
            _head("dropped/worker_lost", "tickets in flight when their worker was lost", kind="counter", unit="chunks"),
            _head(
                "dropped/environment_failed",
                "tickets in flight when an environment raised",
                kind="counter",
                unit="chunks",
            ),
        ),
    ),
)
"""All metrics of `farstep train`, by prefix."""

METRICS = {metric.name: metric for namespace in NAMESPACES for metric in namespace.metrics}
"""The same, by name."""
