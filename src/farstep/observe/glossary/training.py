"""The metrics of `farstep train`: what every logger receives with each update."""

from __future__ import annotations

from functools import partial

from farstep.observe.glossary.metric import Metric, Namespace

_PPO, _KL, _EVAL = "ppo, async-ppo", "with `--kl-threshold`", "with `--eval-every`"
_ENDED = "once an episode has ended"
_Q_VALUES, _REPLAY, _ON_POLICY = "dqn, apex, sac", "dqn, apex, sac, aride", "ppo, async-ppo, impala"
_loop, _learner = partial(Metric, source="training loop"), partial(Metric, source="learner")
_evaluation, _workers = partial(Metric, source="evaluation"), partial(Metric, source="workers")
_head = partial(Metric, source="head")

NAMESPACES = (
    Namespace(
        "",
        "How far the run is. A resumed run continues these numbers.",
        (
            _loop(
                "step",
                "environment steps so far, the x axis of plots; includes the steps that move staggered environments "
                "to their offsets",
                kind="counter",
                unit="steps",
                label="steps",
            ),
            _loop("update", "updates so far", kind="counter", unit="updates"),
            _loop(
                "seconds",
                "training time so far, including the time before a resume, without the start of workers and the last "
                "evaluation",
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
        "Results of an evaluation. They are in the first line of metrics after the evaluation ended.",
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
                label="speed",
            ),
        ),
    ),
    Namespace(
        "lag/",
        "Staleness of the rows that arrived since the previous line of metrics. The staleness of a row is the "
        "learner's version when the row arrived, minus the version that chose its action.",
        (
            _loop(
                "lag/versions_mean",
                "mean staleness of these rows",
                unit="versions",
                healthy="ppo: 0 without AAPS; async-ppo, impala: up to the staleness bound",
                label="staleness",
            ),
            _loop("lag/versions_max", "staleness of the oldest of these rows", unit="versions", label="oldest row"),
        ),
    ),
    Namespace(
        "train/actor/",
        "The update of the policy. Numbers are means over all minibatches of all epochs of an update; for dqn, apex, "
        "sac and aride, over all updates since the previous line.\n\n"
        "The *behavior policy* is the one that acted. The *proximal policy* is the learner's policy at the start of "
        "the update. The *current policy* is the one that is being optimized. Each of them gives the action of a row a "
        "probability. The *ratio* of a row is the quotient current / proximal of these probabilities (with "
        "`--no-decoupled`: current / behavior). The *weight* is proximal / behavior. V-trace calls the weight *rho*.",
        (
            _learner(
                "train/actor/policy_loss",
                "loss of the policy. ppo, async-ppo: clipped and weighted; impala: mean of `-advantage * "
                "log-probability`; aride: the same, weighted by the "
                "clipped rho; sac: mean of `alpha * log-probability - min(Q1, Q2)`",
                when="not dqn, apex",
                healthy="ppo, async-ppo: around 0, since advantages are normalized",
            ),
            _learner(
                "train/actor/total_loss",
                "the minimized loss: policy loss + weighted value loss - weighted entropy. During critic warm-up, only "
                "the value loss has an effect",
                when=f"{_ON_POLICY}, aride",
            ),
            _learner(
                "train/actor/entropy_loss",
                "entropy of the policy; higher is more random. It is log(n) for n equally likely actions, and may be "
                "negative for continuous actions",
                unit="nats",
                when="not dqn, apex",
                healthy="falls slowly; sac: ends at `--target-entropy`",
            ),
            _learner("train/actor/proximal_ratio", "mean ratio", when=_PPO, healthy="close to 1"),
            _learner(
                "train/actor/clipped_proximal_ratio", "mean ratio after clipping", when=_PPO, healthy="close to 1"
            ),
            _learner(
                "train/actor/clip_fraction",
                "rows that clipping excludes from the gradient",
                unit="fraction",
                when=_PPO,
                healthy="0.02 to 0.25",
            ),
            _learner(
                "train/actor/dual_clip_fraction",
                "rows whose loss the dual clip bounds (`--clip-ratio-c`); always 0 in ppo",
                unit="fraction",
                when=_PPO,
                healthy="near 0",
            ),
            _learner(
                "train/actor/proximal_approx_kl",
                "change of the policy in this update, as the mean of -log(ratio); may be negative",
                unit="nats",
                when=_PPO,
                healthy="0.001 to 0.02",
            ),
            _learner(
                "train/actor/proximal_k3",
                "change of the policy in this update, as the mean of ratio - 1 - log(ratio): never negative, less "
                "noisy; compared with `--target-kl`",
                unit="nats",
                when=_PPO,
                healthy="0.001 to 0.02",
            ),
            _learner(
                "train/actor/behav_approx_kl",
                "KL divergence between proximal and behavior policy, as the mean of -log(weight). With "
                "`--behave-weight-mode mask` it leaves out the masked rows, so it does not show outliers",
                unit="nats",
                when=_PPO,
                healthy="below 0.05; ppo: 0 without AAPS",
            ),
            _learner(
                "train/actor/behave_k3",
                "KL divergence between proximal and behavior policy, as the mean of weight - 1 - log(weight) over all "
                "rows: includes outliers, never negative",
                unit="nats",
                when=_PPO,
                healthy="below 0.05, with AAPS below its threshold; ppo: 0 without AAPS",
            ),
            _learner(
                "train/actor/behav_clip_fraction",
                "rows whose weight is beyond `--behave-weight-threshold` or `--behave-weight-lower`",
                unit="fraction",
                when=_PPO,
                healthy="below 0.05, with AAPS below 0.1",
            ),
            _learner(
                "train/actor/behave_weight_p95",
                "the weight that 5 % of the rows exceed",
                when=_PPO,
                healthy="below `--behave-weight-threshold`",
            ),
            _learner(
                "train/actor/ess",
                "effective sample size of the weighted rows, relative to their number; 1 if all weights are equal",
                unit="fraction",
                when=f"{_ON_POLICY}, aride",
                healthy="above 0.8; impala: above 0.9; aride: above 0.5",
            ),
            _learner("train/actor/rho_mean", "mean rho, before clipping", when="impala, aride", healthy="close to 1"),
            _learner(
                "train/actor/rho_clip_fraction",
                "rows with a rho above `--rho-bar`. With a `--rho-bar` of 1 this is about one half even if the "
                "behavior policy and the current policy differ only slightly, so look at `train/actor/ess` instead",
                unit="fraction",
                when="impala, aride",
            ),
            _loop(
                "train/actor/current_version",
                "newest published version",
                unit="versions",
                label="version",
            ),
            _learner(
                "train/actor/average_version",
                "mean version that chose the actions in the rows of this update. If no row is stale, it is 1 below "
                "`train/actor/current_version`, because the update has already published the next version",
                unit="versions",
                when="async-ppo",
            ),
            _learner(
                "train/actor/grad_norm",
                "norm of the gradient before it is scaled down to `--max-grad-norm`. It covers all parameters; during "
                "critic warm-up, only the critic's own layers; sac: only the actor",
                when="not dqn, apex",
                healthy="no upward trend",
            ),
            _learner(
                "train/actor/skipped_steps",
                "optimizer steps that were skipped because the gradient was not finite",
                unit="fraction",
                when="not dqn, apex",
                healthy="0",
            ),
            _learner(
                "train/actor/epochs",
                "epochs of this update; fewer than `--update-epochs` if `--target-kl` ended the update. "
                "impala: always 1",
                unit="epochs",
                when=_ON_POLICY,
            ),
            _learner(
                "train/actor/noise_scale",
                "gradient noise scale: the number of rows above which a larger batch hardly improves the gradient. "
                "Estimated from the first epochs of about 10 updates; missing while the gradient is too small compared "
                "with its noise",
                unit="rows",
                when="ppo, async-ppo with `--scaling noise`",
                healthy="grows while the policy learns",
            ),
            _learner("train/actor/lr", "learning rate of the policy; 0 during critic warm-up", when=_ON_POLICY),
            _learner(
                "train/actor/epsilon",
                "probability of a random action; with `--exploration ladder`, that of slot 0",
                unit="fraction",
                when="dqn, apex",
            ),
            _learner(
                "train/actor/alpha",
                "temperature: the weight of the entropy",
                when="sac",
                healthy="falls while the policy learns, then is steady",
            ),
            _learner(
                "train/actor/kept_fraction",
                "sampled steps that change the policy. Steps of episodes that do not pass `--filter-quantile` do not; "
                "with `--gate positive`, steps without a positive advantage do not either",
                unit="fraction",
                when="aride",
            ),
            _learner(
                "train/actor/penalty",
                "mean penalty of a step, for invalid and repeated actions (`--invalid-penalty`, `--repeat-penalty`)",
                when="aride",
                healthy="falls to 0",
            ),
        ),
    ),
    Namespace(
        "train/critic/",
        "The update of the critic. As above, numbers are means over minibatches or updates.",
        (
            _learner(
                "train/critic/value_loss",
                "half the squared difference between values and targets (linear beyond `--huber-delta`). It grows with "
                "the scale of (normalized) returns. apex: with importance weights; sac: sum over both critics; aride "
                "with `--mode bce`: cross-entropy",
                healthy="no upward trend over the whole run",
            ),
            _learner(
                "train/critic/value_clip_ratio",
                "rows where `--value-clip` changes the loss; 0 without this option, as in impala",
                unit="fraction",
                when=_ON_POLICY,
                healthy="below 0.5",
            ),
            _learner(
                "train/critic/explained_variance",
                "share of the variance of the targets that values explain. 1: perfect; 0: no better than a constant; "
                "negative: worse",
                unit="fraction",
                when=_ON_POLICY,
                healthy="rises to 0.5 and more",
            ),
            _learner(
                "train/critic/q_mean",
                "mean value of the actions in the sampled rows",
                when=_Q_VALUES,
                healthy="at most the largest discounted return (sac: plus `alpha` times the entropy of future "
                "actions); far above it, values are overestimated",
            ),
            _learner("train/critic/target_mean", "mean target of these values", when="dqn, apex"),
            _learner("train/critic/td_error", "mean absolute TD error of sampled rows", when="dqn, apex, aride"),
            _learner(
                "train/critic/grad_norm",
                "norm of the critics' gradient before it is scaled down to `--max-grad-norm`",
                when=_Q_VALUES,
                healthy="no upward trend",
            ),
            _learner(
                "train/critic/skipped_steps",
                "optimizer steps of the critics that were skipped because the gradient was not finite",
                unit="fraction",
                when=_Q_VALUES,
                healthy="0",
            ),
            _learner(
                "train/critic/trajectory_loss",
                "loss of the critic that predicts an episode's outcome from its first observation",
                when="aride with `--filter-quantile`",
                healthy="falls, and stays above 0 where outcomes are random",
            ),
            _learner("train/critic/lr", "learning rate of the critic's own layers", when=_ON_POLICY),
            _learner(
                "train/critic/warmup", "1: only the critic's own layers are trained", when="during critic warm-up"
            ),
        ),
    ),
    Namespace(
        "replay/",
        "The replay buffer, and the ratio of updates to steps that its limiter keeps.",
        (
            _learner("replay/rows", "rows in the buffer", unit="rows", when=_REPLAY),
            _learner(
                "replay/updates_per_step",
                "updates per environment step since `--learning-starts` rows were in the buffer",
                unit="updates/step",
                when=_Q_VALUES,
                healthy="`--updates-per-step`, from the first thousand updates on",
            ),
            _learner(
                "replay/samples_per_step",
                "rows sampled per environment step since learning began: how often each row is used",
                unit="samples/step",
                when="aride",
                healthy="`--samples-per-step`, within one batch",
            ),
            _learner("replay/episodes", "complete episodes in the buffer", unit="episodes", when="aride"),
        ),
    ),
    Namespace(
        "time/",
        "Time that each phase of the learner took since the previous line. The sum of the phases is at most "
        "`time/step`. Lines of evaluations at the end of a run have no `time/step`. A name after *RLinf* is that of "
        "the same phase in the framework RLinf.",
        (
            _loop("time/step", "time since the previous line", unit="seconds"),
            _loop(
                "time/collect",
                "waiting for the batch of this update (RLinf: `recv_rollout_trajectories`)",
                unit="seconds",
                when=_ON_POLICY,
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
                when=_ON_POLICY,
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
                "how often a worker has pulled weights since the process started, averaged over workers",
                kind="counter",
                unit="pulls",
                label="pulls per worker",
            ),
            _workers(
                "sync/divergence_mean",
                "KL divergence of the workers' policies from the learner's, as each measured it at its last chunk; "
                "mean over workers",
                unit="nats",
                when=_KL,
                healthy="below the threshold",
            ),
            _workers(
                "sync/divergence_max",
                "largest KL divergence of a worker's policy from the learner's",
                unit="nats",
                when=_KL,
            ),
        ),
    ),
    Namespace(
        "bytes/",
        "Bytes since the process started; the same counters as in `env.stats()`.",
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
        "its count is above 0. [What happens then](failures.md).",
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
