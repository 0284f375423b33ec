"""What a run is waiting for: rules over its counters, each with its symptom and remedy.

`diagnose` is a pure function of two snapshots of the counters. A rule is a short function of the window between them;
`RULES` lists them, and docs/waiting.md has the same table. Rules about failures and about learning are independent of
each other. Of the rules about what slows a run down only the first match counts, since causes come before their
consequences: if cores are too few, environments are slow, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from farstep.head.user_warnings import STALE_REMEDY
from farstep.observe.run_window import MIN_WINDOW_S, Window

# ---- thresholds ----

_LIMITS = 0.8
"""Share of time from which something limits a run: without it the run would be up to five times as fast."""
_LIMITS_MUCH = 0.95
"""Share of the learner's time that it waits for rollouts from which this is a problem: workers are 20 times as slow."""
_WASTE = 0.3
"""Share of time from which waiting that another setting avoids is worth a remark."""
UPDATES = 20
"""Updates, versions and chunks over which learning is judged."""
_MEMORY_LEFT, _MEMORY_S, _MIN_GROWTH_BYTES = 0.05, 600.0, 256 * 2**20
"""Share of memory that must be left; seconds for which it must last; smallest growth in a window that counts."""
_RESTARTS = 3
"""Restarts of one worker within ten minutes; `restart_budget`, by default 10, ends the run."""
_FIRED, _REPLACED = 100, 10
"""A trigger should have fired before others fired this often, or the buffer's rows were replaced this often."""
_SERIAL = 0.2
"""Share of time in which both sides of a buffer wait by turns; 0.5 if they never work at the same time."""
_OVERCOMMITTED = 2.0
"""Runnable threads per core: half of the time that they could use they wait for a core."""
_SKIPPED, _ESS, _DIVERGED = 0.5, 0.3, 0.5
"""Skipped optimizer steps, effective sample size (both shares); divergence in nats."""
_CLIPPED, _CLIPPED_FRESH = 0.5, 0.25
"""Share of rows that clipping excludes; the most that fresh rows lose in a run that learns."""
_ALWAYS = 0.95
"""Share of the opportunities to pull that a threshold should leave out at least sometimes."""
_STALE = 0.1
"""Share of chunks dropped as stale."""
_SLOWER = 2.0
"""How much longer a straggler takes than the median of the other workers."""

Group = Literal["failure", "learning", "limit", "time"]
"""What a cause is about. Failures and learning are independent; of the others, which slow a run down, the first counts.
Those of group `time` need to know how workers spend their time."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What limits a run, with the numbers that show it.

    Attributes:
        cause: Name of the cause, such as `"slow environment"` or `"straggler"`; `"healthy"` if nothing stands out,
            `"unknown"` if there is too little data. docs/waiting.md lists them.
        text: The cause in one sentence.
        numbers: The numbers behind it, by name; shares are from 0 to 1.
        remedy: What to do; empty if nothing stands out.
        is_problem: Whether to warn about it. Every run has a bottleneck: that it is the learner, or to some extent the
            environments, is no reason to worry.
    """

    cause: str
    text: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    remedy: str = ""
    is_problem: bool = False

    def __str__(self) -> str:
        return f"{self.text} {self.remedy}".rstrip()


@dataclass(frozen=True)
class Finding:
    """What a rule has found."""

    text: str
    numbers: Mapping[str, float]
    remedy: str = ""
    """Instead of the rule's remedy, if this case has one of its own."""
    is_problem: bool = True


@dataclass(frozen=True)
class Rule:
    """One cause: how it looks, what to do, and the function that recognises it."""

    cause: str
    group: Group
    symptom: str
    remedy: str
    find: Callable[[Window], Finding | None]


def diagnose(window: Window) -> Diagnosis:
    """Name what limits a run.

    Args:
        window: The counters at two moments.

    Returns:
        The most important cause, or that the run is healthy, or that there is too little data.
    """
    return all_diagnoses(window)[0]


def all_diagnoses(window: Window) -> list[Diagnosis]:
    """Return what `diagnose` does, then further causes that are independent of it."""
    return list(_causes(window)) or [_nothing_found(window)]


def _causes(window: Window) -> Iterator[Diagnosis]:
    for rule in RULES:
        slows = rule.group in ("limit", "time")
        if (slows and window.seconds < MIN_WINDOW_S) or (rule.group == "time" and not _knows_times(window)):
            return
        if (found := rule.find(window)) is not None:
            yield Diagnosis(
                cause=rule.cause,
                text=found.text,
                numbers=found.numbers,
                remedy=found.remedy or rule.remedy,
                is_problem=found.is_problem,
            )
            if slows:
                return


def _knows_times(window: Window) -> bool:
    """Whether workers have reported at least half of the window; they report when a chunk is complete."""
    reported = sum(sum(worker.values()) for worker in window.per_worker)
    return reported > 0 and reported >= window.seconds * window.alive / 2


def _nothing_found(window: Window) -> Diagnosis:
    if window.seconds < MIN_WINDOW_S:
        return Diagnosis(
            cause="unknown",
            text=f"Too little data: a diagnosis needs at least {MIN_WINDOW_S:.0f} s of the run.",
            numbers={"seconds": window.seconds},
        )
    if not _knows_times(window):
        return Diagnosis(
            cause="unknown",
            text=f"Too little data: workers have completed few or no chunks in the last {window.seconds:.0f} s.",
            numbers={"seconds": window.seconds},
        )
    return Diagnosis(
        cause="healthy",
        text=(
            f"Nothing stands out: the learner waits {_percent(window.learner['wait'])} of its time for rollouts, and "
            f"workers spend {_percent(window.workers['env'])} of theirs in environments, "
            f"{_percent(window.workers['inference'])} in the policy and {_percent(window.workers['tickets'])} waiting "
            "for the learner."
        ),
        numbers=_times(window),
    )


def _times(window: Window) -> dict[str, float]:
    learner = {f"learner/{part}": share for part, share in window.learner.items()}
    workers = {f"workers/{part}": share for part, share in window.workers.items()}
    return learner | workers | {"moving": window.on_the_way, "cores_wanted": sum(window.cores_wanted.values())}


# ---- failures ----


def _memory(window: Window) -> Finding | None:
    machine = window.after.machine
    if machine is None or not math.isfinite(machine.memory_bytes):
        return None
    left, total, growth = machine.memory_left_bytes, machine.memory_bytes, window.memory_growth
    grown = sum(growth.values()) - _buffer_growth(window)
    rate = grown / window.seconds if window.seconds >= MIN_WINDOW_S and window.before.stats.get("steps") else 0.0
    numbers = {"left_bytes": left, "total_bytes": total, "bytes_per_second": rate}
    if left < _MEMORY_LEFT * total:
        return Finding(f"Memory runs out: {_size(left)} of {_size(total)} are left.", numbers)
    if grown < _MIN_GROWTH_BYTES or rate * _MEMORY_S < left:
        return None
    fastest = max(growth, key=lambda name: growth[name])
    return Finding(
        f"Memory runs out in {_duration(left / rate)}: {_size(left)} are left, and the run takes {_size(rate)} more "
        f"per second, most of it in {fastest}.",
        numbers | {"seconds_left": left / rate},
    )


def _buffer_growth(window: Window) -> float:
    """Bytes by which the rows of a replay buffer have grown; they stop at its capacity."""
    buffer = window.after.stats.get("buffer")
    return buffer["bytes"] * max(0.0, window.grown("buffer", "fill")) / buffer["capacity"] if buffer else 0.0


def _restarts(window: Window) -> Finding | None:
    restarts = window.after.restarts or {}
    worker = max(restarts, key=lambda worker: restarts[worker], default=None)
    if worker is None or restarts[worker] < _RESTARTS:
        return None
    text = f"Worker {worker} was restarted {restarts[worker]} times within ten minutes."
    return Finding(text, {"worker": worker, "restarts": restarts[worker]})


def _silent_trigger(window: Window) -> Finding | None:
    triggers = window.after.stats.get("workflow", {})
    capacity = window.after.stats.get("buffer", {}).get("capacity", math.inf)
    replaced = window.after.stats.get("steps", 0) / capacity
    most = max((counts["fired"] for counts in triggers.values()), default=0)
    for name, counts in triggers.items():
        if counts["fired"] or counts["waits_for"] is None or (most < _FIRED and replaced < _REPLACED):
            continue
        others = f"others fired up to {most:,} times" if most else f"the buffer was filled {replaced:.0f} times"
        text = f"Trigger {name!r}, {counts['waits_for']}, has never fired, while {others}."
        return Finding(text, {"fired": 0, "others_fired": most})
    return None


def _not_finite(window: Window) -> Finding | None:
    share = _judged(window, "train/actor/skipped_steps")
    if share is None or share <= _SKIPPED:
        return None
    text = f"{_percent(share)} of the optimizer steps were skipped, because their gradients were not finite."
    return Finding(text, {"train/actor/skipped_steps": share})


# ---- learning ----


def _judged(window: Window, name: str) -> float | None:
    """The mean of a metric, if there are enough updates."""
    return window.mean(name) if len(window.after.metrics) >= UPDATES else None


def _clip_range(window: Window) -> Finding | None:
    share = _judged(window, "train/actor/clip_fraction")
    if share is None:
        return None
    lag = window.mean("lag/versions_mean") or 0.0
    numbers = {"train/actor/clip_fraction": share, "lag/versions_mean": lag}
    excluded = f"Clipping excludes {_percent(share)} of the rows from the gradient (train/actor/clip_fraction)"
    clips_around_old = lag >= 1 and not window.mean("train/actor/behave_k3")
    pulls, versions, _ = _pulls(window)
    if clips_around_old and share > (_CLIPPED_FRESH if pulls <= (1 - _ALWAYS) * versions else _CLIPPED):
        return Finding(
            f"{excluded}: workers act with weights that are {lag:.1f} versions old, and the loss clips around those, "
            "so the learner stalls at its clip range.",
            numbers,
            "Use the decoupled loss (--decoupled), or a smaller --kl-threshold, with which workers pull more often.",
        )
    if share > _CLIPPED:
        return Finding(f"{excluded}, so the learner stalls at its clip range.", numbers)
    return None


def _off_policy(window: Window) -> Finding | None:
    ess, divergence = _judged(window, "train/actor/ess"), _judged(window, "train/actor/behave_k3")
    if ess is not None and ess < _ESS:
        text = (
            f"The effective sample size is {_percent(ess)} of the rows (train/actor/ess), because the policy that "
            "acted differs from the learner's."
        )
        return Finding(text, {"train/actor/ess": ess})
    if divergence is not None and divergence > _DIVERGED:
        text = (
            f"The KL divergence between the learner's policy and the policy that acted is {divergence:.2g} nats "
            "(train/actor/behave_k3)."
        )
        return Finding(text, {"train/actor/behave_k3": divergence})
    return None


def _aaps(window: Window) -> Finding | None:
    threshold = window.after.kl_threshold
    if not threshold or window.mean("train/critic/warmup") is not None:
        return None
    pulls, versions, chunks = _pulls(window)
    chances = min(versions, chunks)
    numbers = {"pulls_per_worker": pulls, "versions": versions, "kl_threshold": threshold}
    if chances < UPDATES - 1:  # between as many updates
        return None
    if not pulls:
        if _clip_range(window) is not None:  # the policy cannot change
            return None
        return Finding(
            f"No worker has pulled weights for {versions:.0f} versions: the policy hardly changes, or kl_threshold="
            f"{threshold:g} is too large.",
            numbers,
            "Lower kl_threshold (--kl-threshold); if the return does not change either, raise the learning rate.",
        )
    if pulls >= _ALWAYS * chances:
        return Finding(
            f"Workers pull weights at {_percent(pulls / chances)} of their opportunities, as without kl_threshold="
            f"{threshold:g}, and pay for probes.",
            numbers,
            "Raise kl_threshold (--kl-threshold) above the divergence of one update (sync/divergence_mean), or leave "
            "it out.",
        )
    return None


def _pulls(window: Window) -> tuple[float, float, float]:
    """Pulls per worker, versions, and chunks per worker: between the updates if their metrics are known."""
    metrics = window.after.metrics
    if len(metrics) >= UPDATES and "sync/pulls_per_worker" in metrics[0]:
        pulls = metrics[-1]["sync/pulls_per_worker"] - metrics[0]["sync/pulls_per_worker"]
        return pulls, len(metrics) - 1, len(metrics) - 1
    pulls, chunks = (window.grown(*path) / window.alive for path in (("weight_syncs", "total"), ("chunks",)))
    return pulls, window.grown("versions", "current"), chunks


# ---- what slows a run down ----


def _threads(window: Window) -> Finding | None:
    wanted, cores = window.cores_wanted, _cores(window)
    if sum(wanted.values()) <= _OVERCOMMITTED * cores or sum(_one_thread_each(window)) > _OVERCOMMITTED * cores:
        return None
    most = max(wanted, key=lambda name: wanted[name])
    return Finding(
        f"{sum(wanted.values()):.1f} threads compete for {cores} cores, since processes run several threads each; "
        f"{most} runs {wanted[most]:.1f}.",
        {"threads": sum(wanted.values()), "cores": cores, "most_threads": wanted[most]},
    )


def _cores_short(window: Window) -> Finding | None:
    wanted, cores = _one_thread_each(window), _cores(window)
    if sum(wanted) <= _OVERCOMMITTED * cores:
        return None
    return Finding(
        f"{len(wanted)} processes of this run compete for {cores} core{'s' * (cores > 1)}: on average "
        f"{sum(wanted):.1f} of them want to run.",
        {"processes": len(wanted), "wanted": sum(wanted), "cores": cores},
    )


def _one_thread_each(window: Window) -> list[float]:
    """How many cores the local processes would want if each ran one thread at a time."""
    return [min(1.0, wanted) for wanted in window.cores_wanted.values()]


def _cores(window: Window) -> int:
    return window.after.machine.cores if window.after.machine is not None else 1


def _limiter(window: Window) -> Finding | None:
    insert, sample = (window.grown("limiter", "blocked", side) / window.seconds for side in ("insert", "sample"))
    ratio = window.after.stats.get("limiter", {}).get("ratio", 0.0)
    numbers = {"blocked_insert": insert, "blocked_sample": sample, "ratio": ratio}
    if insert >= max(sample, _LIMITS):
        return Finding(
            f"The buffer's limiter makes workers wait {_percent(insert)} of the time: the learner samples too few rows "
            "per row that is inserted.",
            numbers,
            "Lower samples_per_insert, raise max_diff (error_buffer), or make updates faster.",
        )
    if sample >= _LIMITS:
        return Finding(
            f"The buffer's limiter makes the learner wait {_percent(sample)} of the time: workers insert too few rows "
            "per row that is sampled.",
            numbers,
            "Raise samples_per_insert, lower min_size or min_diff, or add workers.",
        )
    return None


def _small_buffer(window: Window) -> Finding | None:
    full, waits = window.grown("buffer", "full_s") / window.seconds, window.learner["wait"]
    if min(full, waits) < _SERIAL:
        return None
    rows = window.after.stats["buffer"]["capacity"]
    return Finding(
        f"The buffer is too small: chunks wait {_percent(full)} of the time for room among its {rows:,} rows, and the "
        f"learner waits {_percent(waits)} of the time for rows.",
        {"full": full, "learner/wait": waits, "capacity": rows},
    )


def _stale(window: Window) -> Finding | None:
    dropped, delivered = window.grown("dropped", "stale"), window.grown("chunks")
    share = dropped / (dropped + delivered) if dropped else 0.0
    if dropped < UPDATES or share < _STALE:
        return None
    return Finding(
        f"{_percent(share)} of the chunks are dropped as stale: versions are published faster than chunks are rolled.",
        {"stale": dropped, "delivered": delivered},
    )


def _straggler(window: Window) -> Finding | None:
    busy = [sum(worker.values()) - worker["tickets"] for worker in window.per_worker]
    if len(busy) < 2:
        return None
    slowest = max(range(len(busy)), key=lambda worker: busy[worker])
    others = [worker for worker in range(len(busy)) if worker != slowest]
    usual = median(busy[worker] for worker in others)
    idle = _share([window.per_worker[worker] for worker in others], "tickets")
    if window.learner["wait"] < _WASTE or idle < _WASTE or busy[slowest] < _SLOWER * usual:
        return None
    return Finding(
        f"Everything waits for worker {slowest}: it takes {busy[slowest] / usual if usual else math.inf:.1f} times as "
        f"long as the others, which wait {_percent(idle)} of their time.",
        {"worker": slowest, "busy_s": busy[slowest], "others_busy_s": usual, "others_wait": idle},
    )


def _share(workers: list[dict[str, float]], part: str) -> float:
    total = sum(sum(worker.values()) for worker in workers)
    return sum(worker[part] for worker in workers) / total if total else 0.0


def _both_wait(window: Window) -> Finding | None:
    wait, tickets = window.learner["wait"], window.workers["tickets"]
    if wait + tickets < 1 + _WASTE or min(wait, tickets) < _WASTE:
        return None
    return Finding(
        f"Workers and learner wait for each other: workers {_percent(tickets)} and the learner {_percent(wait)} of the "
        "time.",
        {"learner/wait": wait, "workers/tickets": tickets},
    )


def _network(window: Window) -> Finding | None:
    workers = window.workers
    moving, rolling = workers["send"] + workers["weights"] + window.on_the_way, workers["env"] + workers["inference"]
    if window.learner["wait"] < _WASTE or moving < max(_WASTE, rolling):
        return None
    rate = window.grown("bytes", "rollouts_received") / window.seconds
    return Finding(
        f"Moving data takes longer than making it: rollouts and weights travel for {_percent(moving)} of the workers' "
        f"time, at {_size(rate)} of rollouts per second, and rolling takes {_percent(rolling)}.",
        {"moving": moving, "rolling": rolling, "bytes_per_second": rate, "learner/wait": window.learner["wait"]},
    )


def _learner(window: Window) -> Finding | None:
    wait, tickets = window.learner["wait"], window.workers["tickets"]
    if tickets < _LIMITS or wait > 1 - _LIMITS:
        return None
    return Finding(
        f"The learner is the bottleneck: it updates {_percent(window.learner['update'])} of the time, while workers "
        f"wait for it {_percent(tickets)} of theirs.",
        {"learner/wait": wait, "learner/update": window.learner["update"], "workers/tickets": tickets},
        is_problem=False,  # with several epochs per update and cheap environments it always is
    )


def _policy(window: Window) -> Finding | None:
    return _rolling(window, "inference", "in the policy", "env")


def _environment(window: Window) -> Finding | None:
    return _rolling(window, "env", "in environments", "inference")


def _rolling(window: Window, part: str, where: str, other: str) -> Finding | None:
    wait, share = window.learner["wait"], window.workers[part]
    if wait < _LIMITS or share < window.workers[other] or share < 1 - window.workers["tickets"] - _WASTE:
        return None
    return Finding(
        f"The learner waits {_percent(wait)} of the time for rollouts, and workers spend {_percent(share)} of theirs "
        f"{where}.",
        {"learner/wait": wait, f"workers/{part}": share, f"workers/{other}": window.workers[other]},
        is_problem=wait >= _LIMITS_MUCH,
    )


# ---- the table ----

RULES: tuple[Rule, ...] = (
    Rule(
        "memory",
        "failure",
        "Less than 5 % of the memory is left, or it will be used up within ten minutes as the run's processes grow",
        "Find what grows: an environment or agent that keeps what it has seen, or a buffer. Lower envs_per_node, steps "
        "or the buffer's capacity, or give the run more memory.",
        _memory,
    ),
    Rule(
        "restarting worker",
        "failure",
        "One worker was restarted three times or more within ten minutes",
        'Read the tracebacks in env.events(["lost", "stuck", "warned"]) or events.jsonl: an environment crashes again '
        "and again. After restart_budget restarts the run ends.",
        _restarts,
    ),
    Rule(
        "trigger never fires",
        "failure",
        "A trigger of a workflow has not fired once, while others fired 100 times or the buffer's rows were replaced "
        "10 times",
        "Publish the object that it waits for, or lower its n or size; remove the trigger if it is not needed.",
        _silent_trigger,
    ),
    Rule(
        "gradients not finite",
        "learning",
        "More than half of the optimizer steps were skipped (train/actor/skipped_steps)",
        "Lower --learning-rate, or look for infinite rewards and observations.",
        _not_finite,
    ),
    Rule(
        "clip range",
        "learning",
        "Clipping excludes more than half of the rows (train/actor/clip_fraction); a quarter of them if the loss clips "
        "around weights that workers never replace",
        "Lower --learning-rate or --update-epochs, or set --target-kl. If workers act with older weights: --decoupled, "
        "or a smaller --kl-threshold.",
        _clip_range,
    ),
    Rule(
        "off-policy rows",
        "learning",
        "The effective sample size is below 30 % of the rows (train/actor/ess), or the divergence from the policy that "
        "acted is above 0.5 nats (train/actor/behave_k3)",
        "Lower --kl-threshold, the staleness or --learning-rate.",
        _off_policy,
    ),
    Rule(
        "kl_threshold without effect",
        "learning",
        "Workers with kl_threshold have pulled nothing, or every version, for 20 versions",
        "Never: lower kl_threshold (--kl-threshold), or raise the learning rate. Always: raise kl_threshold above the "
        "divergence of one update (sync/divergence_mean), or leave it out.",
        _aaps,
    ),
    Rule(
        "too many threads",
        "limit",
        "Twice as many threads as cores want to run, because processes run several at a time",
        "Set cpus_per_worker=1, limit the threads of the environment's own libraries, and call torch.set_num_threads "
        "in the learner (--threads).",
        _threads,
    ),
    Rule(
        "too few cores",
        "limit",
        "Twice as many processes as cores want to run",
        "Use more cores or more nodes; on these cores, fewer workers (workers_per_node) do the same work.",
        _cores_short,
    ),
    Rule(
        "limiter blocks",
        "limit",
        "The buffer's limiter makes inserting or sampling wait for 80 % of the time (limiter/blocked)",
        "Change samples_per_insert or widen min_diff and max_diff (error_buffer); add workers if sampling waits, make "
        "updates faster if inserting waits.",
        _limiter,
    ),
    Rule(
        "small buffer",
        "limit",
        "Chunks wait for room in a workflow's buffer (buffer/full_s), and the learner waits for rows, both for 20 % of "
        "the time",
        "Raise the buffer's capacity to twice the rows that its triggers take at once, so that workers roll while the "
        "learner updates.",
        _small_buffer,
    ),
    Rule(
        "staleness bound",
        "limit",
        "More than 10 % of the chunks are dropped as stale",
        STALE_REMEDY,
        _stale,
    ),
    Rule(
        "straggler",
        "time",
        "One worker takes twice as long as the others, which wait for 30 % of their time, as the learner does",
        "Give its host fewer environments or look for what else runs there; with num_chunks (stream, --num-chunks) or "
        "a trigger with n below the number of workers, batches do not wait for it.",
        _straggler,
    ),
    Rule(
        "slow network",
        "time",
        "Rollouts and weights travel for at least 30 % of the workers' time and longer than rolling takes, and the "
        "learner waits",
        "Send less and less often: compression, kl_threshold, weights={'half': True}, smaller observations; collect or "
        "stream long rollouts instead of calling step; stream, so that chunks travel while the next ones are rolled.",
        _network,
    ),
    Rule(
        "staleness bound",
        "time",
        "Workers wait for the learner while the learner waits for workers, together for 130 % of the time",
        "Raise max_staleness (--staleness-threshold); with collect, use stream, so that workers roll while the learner "
        "updates.",
        _both_wait,
    ),
    Rule(
        "slow learner",
        "time",
        "Workers wait for the learner for 80 % of their time, and the learner hardly waits",
        "Make updates faster (fewer epochs, larger minibatches, more threads, a GPU), or use fewer workers; stream "
        "instead of collect lets both work at the same time.",
        _learner,
    ),
    Rule(
        "slow policy",
        "time",
        "The learner waits for 80 % of the time, and workers spend most of theirs in act",
        "Make act faster: env.inference tells whether workers use the fast path; use a smaller network, more "
        "environments per worker, or a GPU (gpus_per_node).",
        _policy,
    ),
    Rule(
        "slow environment",
        "time",
        "The learner waits for 80 % of the time, and workers spend most of theirs in environments",
        "Add workers or nodes, or make the environment faster (a vectorised one, fewer or smaller observations).",
        _environment,
    ),
)
CAUSES: tuple[str, ...] = tuple(dict.fromkeys(rule.cause for rule in RULES))
"""The names of all causes."""


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _size(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} s"
