"""The entries of `ClusterEnv.stats`, each by its path of keys."""

from __future__ import annotations

from functools import partial

from farstep.observe.glossary.metric import Metric, Namespace
from farstep.observe.glossary.training import METRICS

_head, _workers = partial(Metric, source="head"), partial(Metric, source="workers")
_launcher, _workflow = partial(Metric, source="launcher"), partial(Metric, source="workflow")

_WORKER_PARTS = {
    "env": ("stepping and resetting environments, and recording rows", "time/env/env_interact_step"),
    "inference": ("in `act` or waiting for an acting server, and evaluating [probes](aaps.md)", "time/rollout/predict"),
    "tickets": (
        "waiting for a ticket, because the learner has not requested more rows or has no room for them",
        "time/rollout/tickets",
    ),
    "send": (
        "compressing and sending chunks, and waiting for permission to send (`TransferTrigger.max_senders`)",
        "time/rollout/send",
    ),
    "weights": ("waiting for weights and loading them", "time/rollout/weights"),
}
"""Meaning of each part of a worker's time, and the metric that is computed from the sum over workers."""

STATS_GROUPS = (
    Namespace(
        "",
        "Rows that were delivered, and what became of tickets. At any moment "
        "`rolled = delivered + buffered + in_flight + sum(dropped)`.",
        (
            _head("steps", "environment steps delivered to you", kind="counter", unit="steps"),
            _head(
                "steps_per_second", "environment steps delivered to you, per second over the last 10 s", unit="steps/s"
            ),
            _workers(
                "stagger_steps",
                "steps that only moved environments to their position in the horizon; they are in no batch "
                "([staggered resets](stagger.md))",
                kind="counter",
                unit="steps",
            ),
            _head(
                "chunks",
                "chunks of rows delivered to you, or inserted into the buffer of a workflow",
                kind="counter",
                unit="chunks",
            ),
            _head(
                "rolled",
                "tickets issued, including those of resets. It decreases when a worker returns unused tickets "
                "because it is about to be parked",
                unit="tickets",
            ),
            _head(
                "delivered", "tickets whose rows, or resets, were delivered and not dropped afterwards", unit="tickets"
            ),
            _head("buffered", "tickets whose rows have arrived, but are not delivered yet", unit="tickets"),
            _head("in_flight", "tickets that workers hold", unit="tickets"),
        ),
    ),
    Namespace(
        "dropped/",
        "Chunks and tickets dropped, by cause. A cause is listed once its count is above 0. In a workflow, `stale` "
        "also counts chunks in the buffer that became older than `max_staleness` before their consumer was called; "
        "`cancelled` also counts chunks in the buffer that a consumer had not read when the workflow ended.",
        (
            *(metric for name, metric in METRICS.items() if name.startswith("dropped/")),
            _workflow(
                "dropped/worker_left",
                "chunks that a trigger did not take, because their worker left before it had collected a whole "
                "[window](workflows.md#triggers)",
                kind="counter",
                unit="chunks",
                when="in a workflow, once a node has left",
            ),
        ),
    ),
    Namespace(
        "workers/",
        "Workers by state.",
        (
            METRICS["workers/alive"],
            _head("workers/starting", "workers that connect or construct environments", unit="workers"),
            _head("workers/queued", "workers that wait for a node", unit="workers"),
            _head(
                "workers/parked",
                "parked workers ([elasticity](elasticity.md)), including those whose process was killed",
                unit="workers",
            ),
            _launcher(
                "workers/on_disk", 'parked workers whose memory is on disk (`park_method="criu"`)', unit="workers"
            ),
            _launcher("workers/disk_bytes", "bytes on disk of the workers in `workers/on_disk`", unit="bytes"),
            _head("workers/lost", "lost workers whose processes are being ended", unit="workers"),
            METRICS["workers/restarts"],
            _head(
                "workers/states/<worker>",
                "state of one worker: `alive`, `starting`, `queued`, `parked`, `released` (suspended, because "
                "it has nothing to do), `lost` or `stopped`",
                kind="info",
            ),
            _launcher(
                "workers/hosts/<worker>", "name of the host of one worker; `?` while it has no node", kind="info"
            ),
            _launcher(
                "workers/cores/<worker>",
                "cores that one worker may use, such as `0-3,8`; with `cpu_affinity`, the worker's own cores",
                kind="info",
            ),
            _head(
                "workers/steps_per_second/<worker>",
                "environment steps of one worker that arrived, per second over the last 10 s",
                unit="steps/s",
            ),
        ),
    ),
    Namespace(
        "slots/",
        "Here, a slot is the permission for one worker to run. A worker holds it from the start of its process until "
        "the process ends, is parked, or is [released](releasing.md).",
        (
            _head("slots/held", "slots that are held now", unit="slots"),
            _head(
                "slots/held_seconds",
                "time in which slots were held, summed over slots",
                kind="counter",
                unit="seconds",
            ),
            _workers(
                "slots/used_seconds",
                "time in which workers were busy (not waiting for tickets), summed over workers: `time/workers` "
                "without `tickets`",
                kind="counter",
                unit="seconds",
            ),
            _head(
                "slots/gpu_seconds",
                "`held_seconds` times the GPUs per worker, which is `gpus_per_node` divided by the number of workers "
                "of a node; 0 without GPUs",
                kind="counter",
                unit="seconds",
            ),
            _head(
                "slots/waited_seconds",
                "time in which the run waited for slots of its [coordinator](sharing.md); 0 without a coordinator",
                kind="counter",
                unit="seconds",
            ),
        ),
    ),
    Namespace(
        "coordinator/",
        "Slots of the [coordinator](sharing.md) that several runs share; empty without a coordinator.",
        (
            _head("coordinator/name", "name of the coordinator", kind="info"),
            _head("coordinator/granted", "slots that this run may use; 0 while it has none", unit="slots"),
            _head("coordinator/wanted", "slots that this run could use", unit="slots"),
        ),
    ),
    Namespace(
        "devices/",
        "Devices that this run's learner took with `device_token` ([devices](sharing.md#devices)); 0 if it took none.",
        (
            _head("devices/uses", "number of times that a device was taken", kind="counter", unit="uses"),
            _head("devices/held_seconds", "time in which a device was held", kind="counter", unit="seconds"),
            _head(
                "devices/waited_seconds",
                "time in which the learner waited for a device",
                kind="counter",
                unit="seconds",
            ),
        ),
    ),
    Namespace(
        "nodes/",
        "A list with one entry per node of a cluster; empty if workers run on this machine.",
        (
            _launcher("nodes/<node>/host", "name of the host", kind="info"),
            _launcher("nodes/<node>/pid", "process id of the node daemon", kind="info"),
            _launcher("nodes/<node>/place", "name in the engine, such as a SLURM job", kind="info"),
            _launcher("nodes/<node>/address", "address at which the node reached the head", kind="info"),
            _launcher(
                "nodes/<node>/workers/<position>", "number of a worker or acting server of the node", kind="info"
            ),
        ),
    ),
    Namespace(
        "pulls/",
        "How often workers pulled weights.",
        (
            _workers(
                "pulls/total",
                "how often workers pulled weights, summed over workers; with "
                "[served inference](large_policies.md#versions), summed over acting servers",
                kind="counter",
                unit="pulls",
                logged_as="sync/pulls_per_worker",
            ),
            _workers(
                "pulls/per_worker/<worker>",
                "how often one worker, or its acting server, pulled weights",
                kind="counter",
                unit="pulls",
            ),
        ),
    ),
    Namespace(
        "bytes/",
        "What travelled between head and workers.",
        (
            METRICS["bytes/weights_sent"],
            _head(
                "bytes/base_sent",
                "base weights that were sent: once for all workers of this machine, and to every worker process of "
                "other nodes ([LoRA](lora.md))",
                kind="counter",
                unit="bytes",
            ),
            METRICS["bytes/probes_sent"],
            _head(
                "bytes/rollouts_received",
                "rollouts that arrived; with shared memory, bytes read in place",
                kind="counter",
                unit="bytes",
            ),
        ),
    ),
    Namespace(
        "versions/",
        "Versions of the weights. The *lag* of a row is the newest version when the row is delivered, minus the "
        "version that acted. In a workflow, rows count as delivered when their chunk enters the buffer.",
        (
            _head(
                "versions/current",
                "newest published version",
                unit="versions",
                logged_as="train/actor/current_version",
            ),
            _head(
                "versions/oldest_consumed",
                "oldest version that acted in a delivered row; None before the first row",
                unit="versions",
            ),
            _head(
                "versions/lag_mean", "mean lag of all rows delivered", unit="versions", logged_as="lag/versions_mean"
            ),
            _head(
                "versions/lag_max",
                "largest lag of all rows delivered",
                unit="versions",
                logged_as="lag/versions_max",
            ),
            _head(
                "versions/lag_histogram/<worker>/<lag>",
                "chunks of one worker with this lag; from 16 on, lags are rounded down to powers of two",
                kind="counter",
                unit="chunks",
            ),
        ),
    ),
    Namespace(
        "divergence/",
        "Empty unless the sync rule measures divergence ([AAPS](aaps.md)).",
        (
            _workers(
                "divergence/<worker>",
                "[running KL divergence](aaps.md#how-it-is-measured) of a worker's policy from the learner's before "
                "the worker's last chunk. If the worker pulled before this chunk: the divergence after "
                "the pull, which is above 0 if the weights were rounded or the policy uses more than its parameters; 0 "
                "if it was not measured",
                unit="nats",
                logged_as="sync/divergence_mean",
            ),
        ),
    ),
    Namespace(
        "episodes/",
        "Episodes that ended in delivered rows.",
        (
            _head(
                "episodes/count",
                "episodes that have ended so far",
                kind="counter",
                unit="episodes",
                logged_as="env/episodes",
            ),
            _head(
                "episodes/return_mean",
                "mean return of the last 100 episodes; None before the first episode has ended",
                logged_as="env/return_mean",
            ),
            _head(
                "episodes/length_mean",
                "mean length of the last 100 episodes; None before the first episode has ended",
                unit="steps",
                logged_as="env/length_mean",
            ),
        ),
    ),
    Namespace(
        "inference",
        "How workers act.",
        (
            _workers(
                "inference",
                "`fast: ...` if workers replay a recording of `act`, or why they do not, or how acting servers act; "
                "empty before the first rollout",
                kind="info",
            ),
        ),
    ),
    Namespace(
        "acting/",
        "A list with one entry per acting server ([large policies](large_policies.md)); empty if workers act "
        "themselves. A restarted server counts from 0.",
        (
            _workers("acting/<server>/host", "name of the host", kind="info"),
            _workers("acting/<server>/pid", "process id", kind="info"),
            _workers("acting/<server>/rows", "rows for which the server has acted", kind="counter", unit="rows"),
            _workers("acting/<server>/batches", "calls of `act`", kind="counter", unit="batches"),
            _workers("acting/<server>/batch_size", "mean number of rows per call of `act`", unit="rows"),
            _workers(
                "acting/<server>/wait_ms",
                "mean time, per request, that a worker of this server was idle before it got its actions. Time in "
                "which the worker stepped its other environments does not count. A restarted worker counts from 0",
                unit="ms",
            ),
            _workers(
                "acting/<server>/rows_per_second",
                "rows per second of the server's workers over the last 10 s",
                unit="rows/s",
            ),
            _head(
                "acting/<server>/restarts", "how many times the server was restarted", kind="counter", unit="restarts"
            ),
        ),
    ),
    Namespace(
        "start/",
        "How long the parts of the start took.",
        (
            _head("start/connect", "time until all workers had connected", unit="seconds"),
            _head("start/construct", "time from then until all environments were constructed", unit="seconds"),
            _head("start/agent", "time until all workers had the agent", unit="seconds", when="once an agent was sent"),
        ),
    ),
    Namespace(
        "time/",
        "Where time went; [how it is measured](progress.md#times).",
        (
            *(
                _workers(
                    f"time/workers/{part}",
                    f"{meaning}; all workers",
                    kind="counter",
                    unit="seconds",
                    logged_as=logged_as,
                )
                for part, (meaning, logged_as) in _WORKER_PARTS.items()
            ),
            *(
                _workers(f"time/per_worker/<worker>/{part}", f"{meaning}; one worker", kind="counter", unit="seconds")
                for part, (meaning, _) in _WORKER_PARTS.items()
            ),
            _head(
                "time/learner/wait",
                "in `collect`, `step`, `stream` and the loop of a workflow, until a batch or chunk arrived",
                kind="counter",
                unit="seconds",
            ),
            _head(
                "time/learner/prepare",
                "assembling batches; in a workflow, inserting chunks into the buffer",
                kind="counter",
                unit="seconds",
            ),
            _head(
                "time/learner/update",
                "all other time between two batches, that is, in your code; in a workflow, also in consumers that run "
                "in threads. Consumers in other processes are not measured",
                kind="counter",
                unit="seconds",
            ),
            _head(
                "time/learner/publish",
                "in `publish`, and in the part of `collect` that publishes or sends a new agent",
                kind="counter",
                unit="seconds",
            ),
            _head(
                "time/head/receive",
                "copying chunks of workers without shared memory, in any thread",
                kind="counter",
                unit="seconds",
            ),
            _head(
                "time/head/held",
                "time from a ticket until its chunk arrived, summed over workers without shared memory. To get the "
                "time that messages travelled, subtract these workers' env, inference, send and weights",
                kind="counter",
                unit="seconds",
            ),
        ),
    ),
    Namespace(
        "buffer/",
        "The buffer of the last [workflow](workflows.md).",
        (
            _workflow("buffer/fill", "rows in the buffer", unit="rows"),
            _workflow("buffer/capacity", "rows that fit into the buffer", unit="rows"),
            _workflow("buffer/bytes", "size of the buffer's arrays", unit="bytes"),
            _workflow(
                "buffer/full_s",
                "time for which chunks waited to be inserted, because the buffer was full of rows that at least one "
                "consumer had not read",
                kind="counter",
                unit="seconds",
            ),
        ),
    ),
    Namespace(
        "limiter/",
        "The [limiter](buffer.md#limiters) of that buffer.",
        (
            _workflow("limiter/ratio", "rows sampled per row inserted so far"),
            _workflow(
                "limiter/blocked/insert",
                "time for which chunks that had arrived waited for the limiter",
                kind="counter",
                unit="seconds",
            ),
            _workflow(
                "limiter/blocked/sample",
                "time for which threads in `Buffer.sample` waited for the limiter",
                kind="counter",
                unit="seconds",
            ),
        ),
    ),
    Namespace(
        "workflow/",
        "The triggers of that workflow, by name.",
        (
            _workflow("workflow/<trigger>/fired", "how often the trigger fired", kind="counter", unit="messages"),
            _workflow(
                "workflow/<trigger>/pending_rows",
                "rows that the trigger has not taken yet; None if it is not a `DataKeyTrigger`",
                unit="rows",
            ),
            _workflow(
                "workflow/<trigger>/outstanding",
                "messages that the trigger's consumer has not finished yet",
                unit="messages",
            ),
            _workflow(
                "workflow/<trigger>/lag",
                "age of the oldest row in the last message to the trigger's consumer; None if the trigger takes no "
                "rows",
                unit="versions",
            ),
            _workflow(
                "workflow/<trigger>/waits_for",
                "description of the trigger; `env.diagnose()` shows it if the trigger never fires. None for a "
                "`TimeTrigger`, and for combined triggers with a `TimeTrigger`, because the period may simply be long",
                kind="info",
            ),
        ),
    ),
)
"""All entries of `ClusterEnv.stats`, by their first key."""

STATS = {metric.name: metric for group in STATS_GROUPS for metric in group.metrics}
"""The same, by path."""
