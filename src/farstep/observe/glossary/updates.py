"""The metrics of a learner's update: the policy (`train/actor/`) and the critic (`train/critic/`)."""

from __future__ import annotations

from functools import partial

from farstep.observe.glossary.metric import Metric, Namespace

_PPO, ON_POLICY, Q_VALUES = "ppo, async-ppo", "ppo, async-ppo, impala", "dqn, apex, sac"
_loop, _learner = partial(Metric, source="training loop"), partial(Metric, source="learner")

UPDATES = (
    Namespace(
        "train/actor/",
        "The update of the policy. Numbers are means over all minibatches of all epochs of an update; for dqn, apex, "
        "sac and aride, over all updates since the previous line.\n\n"
        "The *behavior policy* is the one that acted. The *proximal policy* is the learner's policy at the start of "
        "the update. The *current policy* is the one that is being optimized. Each of these policies assigns a "
        "probability to the action of a row. The *ratio* of a row is current / proximal probability (with "
        "`--no-decoupled`: current / behavior), and its *weight* is proximal / behavior probability. V-trace calls the "
        "weight *rho*. impala and aride make one optimizer step per batch, so their proximal and current policies are "
        "the same.\n\n"
        "With [critic warm-up](ppo.md#critic-warm-up), the first updates of a run train only the critic's own layers.",
        (
            _learner(
                "train/actor/policy_loss",
                "loss of the policy. ppo, async-ppo: clipped and weighted; impala: mean of `-advantage * "
                "log-probability`; aride: as impala, but weighted by the "
                "clipped rho; sac: mean of `alpha * log-probability - min(Q1, Q2)`",
                when="not dqn, apex",
                healthy="ppo, async-ppo: around 0, since advantages are normalized",
            ),
            _learner(
                "train/actor/total_loss",
                "the minimized loss: policy loss + weighted value loss - weighted entropy. During critic warm-up, only "
                "the value loss has an effect",
                when=f"{ON_POLICY}, aride",
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
                "share of the rows that clipping excludes from the gradient",
                unit="fraction",
                when=_PPO,
                healthy="0.02 to 0.25",
            ),
            _learner(
                "train/actor/dual_clip_fraction",
                "share of the rows whose loss is bounded by the dual clip (`--clip-ratio-c`); always 0 in ppo",
                unit="fraction",
                when=_PPO,
                healthy="near 0",
            ),
            _learner(
                "train/actor/proximal_approx_kl",
                "change of the policy in this update (with `--no-decoupled`: divergence from the policy that acted), "
                "as the mean of -log(ratio); may be negative",
                unit="nats",
                when=_PPO,
                healthy="0.001 to 0.02",
            ),
            _learner(
                "train/actor/proximal_k3",
                "change of the policy in this update (with `--no-decoupled`: divergence from the policy that acted), "
                "as the mean of ratio - 1 - log(ratio): never negative and less noisy than "
                "`train/actor/proximal_approx_kl`. If this number exceeds `--target-kl` in an epoch, the update ends "
                "after this epoch",
                unit="nats",
                when=_PPO,
                healthy="0.001 to 0.02",
            ),
            _learner(
                "train/actor/behav_approx_kl",
                "KL divergence between proximal and behavior policy, as the mean of -log(weight). With "
                "`--behave-weight-mode mask`, this mean leaves out the masked rows, so it does not show outliers",
                unit="nats",
                when=_PPO,
                healthy="below 0.05; ppo: 0 without AAPS",
            ),
            _learner(
                "train/actor/behave_k3",
                "KL divergence between proximal and behavior policy, as the mean of weight - 1 - log(weight) over all "
                "rows: includes outliers, never negative. impala: the weight is rho before clipping",
                unit="nats",
                when=ON_POLICY,
                healthy="below 0.05, with AAPS below its threshold; ppo: 0 without AAPS",
            ),
            _learner(
                "train/actor/behav_clip_fraction",
                "share of the rows whose weight is above `--behave-weight-threshold` or below `--behave-weight-lower`",
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
                when=f"{ON_POLICY}, aride",
                healthy="above 0.8; impala: above 0.9; aride: above 0.5",
            ),
            _learner("train/actor/rho_mean", "mean rho, before clipping", when="impala, aride", healthy="close to 1"),
            _learner(
                "train/actor/rho_clip_fraction",
                "share of the rows with a rho above `--rho-bar`. With a `--rho-bar` of 1, this share is about one half "
                "even if behavior and current policy differ only slightly, so look at `train/actor/ess` instead",
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
                "mean of the versions that chose the actions in the rows of this update. If no row is stale, this mean "
                "is 1 below `train/actor/current_version`, because the update has already published the next version",
                unit="versions",
                when="async-ppo",
            ),
            _learner(
                "train/actor/grad_norm",
                "norm of the gradient of all parameters, before it is scaled down to `--max-grad-norm`. During critic "
                "warm-up: of the critic's own layers only; sac: of the actor only",
                when="not dqn, apex",
                healthy="no upward trend",
            ),
            _learner(
                "train/actor/skipped_steps",
                "share of the optimizer steps that were skipped because the gradient was not finite",
                unit="fraction",
                when="not dqn, apex",
                healthy="0",
            ),
            _learner(
                "train/actor/epochs",
                "epochs of this update; fewer than `--update-epochs` if `--target-kl` ended the update. "
                "impala: always 1",
                unit="epochs",
                when=ON_POLICY,
            ),
            _learner(
                "train/actor/noise_scale",
                "gradient noise scale: the number of rows above which a larger batch hardly improves the gradient. "
                "It is estimated from the policy's gradients in the first epochs of about 10 updates, and missing "
                "while the gradient is too small compared with its noise",
                unit="rows",
                when="ppo, async-ppo with `--scaling noise`",
                healthy="grows while the policy learns",
            ),
            _learner("train/actor/lr", "learning rate of the policy; 0 during critic warm-up", when=ON_POLICY),
            _learner(
                "train/actor/epsilon",
                "probability of a random action; with `--exploration ladder`, that of environment 0",
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
                "share of the sampled steps that change the policy. `--filter-quantile` excludes all steps of some "
                "episodes, and `--gate positive` excludes steps without a positive advantage",
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
        "The update of the critic. As for the policy, numbers are means over minibatches or updates.",
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
                "share of the rows where `--value-clip` changes the loss; 0 without this option, as in impala",
                unit="fraction",
                when=ON_POLICY,
                healthy="below 0.5",
            ),
            _learner(
                "train/critic/explained_variance",
                "share of the variance of the targets that values explain. 1: perfect; 0: no better than a constant; "
                "negative: worse",
                unit="fraction",
                when=ON_POLICY,
                healthy="rises to 0.5 and more",
            ),
            _learner(
                "train/critic/q_mean",
                "mean value of the actions in the sampled rows",
                when=Q_VALUES,
                healthy="at most the largest discounted return (sac: plus `alpha` times the entropy of future "
                "actions); far above it, values are overestimated",
            ),
            _learner("train/critic/target_mean", "mean target of these values", when="dqn, apex"),
            _learner("train/critic/td_error", "mean absolute TD error of sampled rows", when="dqn, apex, aride"),
            _learner(
                "train/critic/grad_norm",
                "norm of the critics' gradient before it is scaled down to `--max-grad-norm`",
                when=Q_VALUES,
                healthy="no upward trend",
            ),
            _learner(
                "train/critic/skipped_steps",
                "share of the critics' optimizer steps that were skipped because the gradient was not finite",
                unit="fraction",
                when=Q_VALUES,
                healthy="0",
            ),
            _learner(
                "train/critic/trajectory_loss",
                "loss of the critic that predicts an episode's outcome from its first observation",
                when="aride with `--filter-quantile`",
                healthy="falls, and stays above 0 where outcomes are random",
            ),
            _learner("train/critic/lr", "learning rate of the critic's own layers", when=ON_POLICY),
            _learner(
                "train/critic/warmup", "1: only the critic's own layers are trained", when="during critic warm-up"
            ),
        ),
    ),
)
